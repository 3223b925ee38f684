// Executor `top4-fused-v1`: all routed experts of a token, gate and up, down, the combine, and the shared expert beside
// them, in one launch. Made for few experts a token; right for any number.
//
// The work of a launch is a list of units, claimed in order by an atomic ticket. Units that need others' results come
// after them in the list, so a block waits only on units that running blocks have claimed:
//
//   for each row: routed pair units (one expert, four pair tiles), shared pair units (one pair tile)
//   for each row: shared down units (one tile), routed down units (one tile, all the token's experts)
//
// A down unit starts its first loads of weights before it waits. Products are those of tile.cuh; a row is computed by
// itself, so its bits depend on nothing else. The two down units of a tile add up in a fixed order: routed, then shared.
#include "experts.cuh"

static constexpr u32 WARPS = 8, PAIR_TILES = 4, PAIR_SHARES = 2;

struct FusedArgs {
    Experts experts;
    const u8 *shared_pairs;  // pair tiles of the shared expert, or null
    const u8 *shared_down;
    const float *gate;       // [rows], or null: 1
    u16 *shared_inner;       // [rows, shared_width]
    float *routed;           // [rows, hidden], with a shared expert: what meets at the end
    float *shared_output;    // [rows, hidden]
    float *hidden;           // [rows, hidden], added to
    float *tap;              // [rows, hidden], or null: what was added
    u32 *counters;           // zero: ticket, finished blocks, then a row: routed pairs done, shared pairs done, tiles met
    u32 shared_width;
    u32 unused;
};

struct Units {
    u32 routed_pairs, shared_pairs, pairs, downs, down_tiles, all;
};

HZ_DEVICE Units count_units(const FusedArgs &a) {
    const Experts &e = a.experts;
    Units u;
    u.routed_pairs = e.top_k * ceil_div(e.width / 8, PAIR_TILES);
    u.shared_pairs = a.shared_width / 8;
    u.pairs = u.routed_pairs + u.shared_pairs;
    u.down_tiles = ceil_div(e.hidden, 16);
    u.downs = u.down_tiles * (a.shared_width ? 2 : 1);
    u.all = e.rows * (u.pairs + u.downs);
    return u;
}

// Words of counters of a row.
HZ_DEVICE u32 *row_counters(const FusedArgs &a, u32 row) {
    return a.counters + 2 + (u64)row * (2 + ceil_div(a.experts.hidden, 16));
}

// The block has finished a unit: what it wrote is visible to whoever sees the count.
HZ_DEVICE void post(u32 *counter) {
    block_sync();
    if (thread_id() == 0) add_release(counter, 1);
}

HZ_DEVICE void wait_for(const u32 *counter, u32 count) {
    if (thread_id() == 0) {
        while (load_acquire(counter) < count) pause();
    }
    block_sync();
}

// Column 0 of a warp's sums, [warp][16].
HZ_DEVICE void keep_column(float *sums, const float (&sum)[4]) {
    const u32 warp = thread_id() / 32, lane = thread_id() % 32;
    if (lane % 4 == 0) sums[warp * 16 + lane / 4] = sum[0], sums[warp * 16 + lane / 4 + 8] = sum[2];
}

HZ_DEVICE float add_column(const float *sums, u32 first, u32 count, u32 row) {
    float sum = 0;
    for (u32 w = first; w < first + count; w++) sum += sums[w * 16 + row];
    return sum;
}

template <int ENC> HZ_DEVICE void routed_pair(const FusedArgs &a, u32 row, u32 unit, u8 *activations, float *sums) {
    const Experts &e = a.experts;
    const u32 groups = ceil_div(e.width / 8, PAIR_TILES), rank = unit / groups, base = unit % groups * PAIR_TILES;
    const u32 warp = thread_id() / 32, tile = base + warp / PAIR_SHARES;
    u32 first = 0, last = 0;
    if (tile < e.width / 8) share_spans(e.hidden, ENC == F16 ? 64 : e.block, warp % PAIR_SHARES, PAIR_SHARES, first, last);
    TileShare<ENC, Slot> share;
    share.prefetch(expert_record(e, row, rank) + (u64)tile * tile_bytes<ENC>(e.hidden, e.block), first, last);
    load_activations(activations, e.input, row, 1, e.hidden);
    block_sync();
    float sum[4] = {0, 0, 0, 0};
    share.run(activations, activation_stride(e.hidden), 1, e.hidden, e.block, sum);
    keep_column(sums, sum);
    block_sync();
    const u32 i = thread_id() / 8, g = thread_id() % 8;
    if (i < PAIR_TILES && base + i < e.width / 8) {
        const float gate = add_column(sums, i * PAIR_SHARES, PAIR_SHARES, g);
        const float up = add_column(sums, i * PAIR_SHARES, PAIR_SHARES, g + 8);
        e.inner[((u64)row * e.top_k + rank) * e.width + (base + i) * 8 + g] = f32_to_f16(silu(gate) * up);
    }
    post(row_counters(a, row));
}

template <int ENC> HZ_DEVICE void shared_pair(const FusedArgs &a, u32 row, u32 tile, u8 *activations, float *sums) {
    const Experts &e = a.experts;
    u32 first, last;
    share_spans(e.hidden, 32, thread_id() / 32, WARPS, first, last);
    TileShare<ENC, Stream> share;
    share.prefetch(a.shared_pairs + (u64)tile * tile_bytes<ENC>(e.hidden, 32), first, last);
    load_activations(activations, e.input, row, 1, e.hidden);
    block_sync();
    float sum[4] = {0, 0, 0, 0};
    share.run(activations, activation_stride(e.hidden), 1, e.hidden, 32, sum);
    keep_column(sums, sum);
    block_sync();
    const u32 g = thread_id();
    if (g < 8) {
        const float gate = add_column(sums, 0, WARPS, g), up = add_column(sums, 0, WARPS, g + 8);
        a.shared_inner[(u64)row * a.shared_width + tile * 8 + g] = f32_to_f16(silu(gate) * up);
    }
    post(row_counters(a, row) + 1);
}

// One of the two parts of a tile of outputs is done; whoever comes second adds both to the residual stream. Threads
// below 16 hold an output each.
HZ_DEVICE void meet(const FusedArgs &a, u32 row, u32 tile, float part, bool routed, u32 *word) {
    const Experts &e = a.experts;
    const u32 output = tile * 16 + thread_id();
    const bool mine = thread_id() < 16 && output < e.hidden;
    const u64 at = (u64)row * e.hidden + output;
    if (a.shared_width) {
        if (mine) (routed ? a.routed : a.shared_output)[at] = part;
        if (!last_to_arrive(row_counters(a, row) + 2 + tile, 2, word)) return;
        if (mine) {
            const float gate = a.gate ? load_shared_f32(a.gate + row) : 1.0f;
            part = f32_fma(gate, load_shared_f32(a.shared_output + at), load_shared_f32(a.routed + at));
        }
    }
    if (mine) {
        if (a.tap) a.tap[at] = part;
        a.hidden[at] += part;
    }
}

template <int ENC> HZ_DEVICE void shared_down(const FusedArgs &a, u32 row, u32 tile, u8 *room, float *sums, u32 *word) {
    u32 first, last;
    share_spans(a.shared_width, 32, thread_id() / 32, WARPS, first, last);
    TileShare<ENC, Stream> share;
    share.prefetch(a.shared_down + (u64)tile * tile_bytes<ENC>(a.shared_width, 32), first, last);
    wait_for(row_counters(a, row) + 1, count_units(a).shared_pairs);
    load_activations(room, a.shared_inner, row, 1, a.shared_width);
    block_sync();
    float sum[4] = {0, 0, 0, 0};
    share.run(room, activation_stride(a.shared_width), 1, a.shared_width, 32, sum);
    keep_column(sums, sum);
    block_sync();
    meet(a, row, tile, thread_id() < 16 ? add_column(sums, 0, WARPS, thread_id()) : 0.0f, false, word);
}

template <int ENC> HZ_DEVICE void routed_down(const FusedArgs &a, u32 row, u32 tile, u8 *room, float *sums, u32 *word) {
    const Experts &e = a.experts;
    const u32 warp = thread_id() / 32, stride = activation_stride(e.width), bytes = tile_bytes<ENC>(e.width, e.block);
    float total = 0;
    // As many experts at a time as there are warps, each with an equal share of them.
    for (u32 base = 0; base < e.top_k; base += WARPS) {
        const u32 ranks = min_u32(WARPS, e.top_k - base), shares = WARPS / ranks, rank = base + warp / shares;
        u32 first = 0, last = 0;
        if (warp / shares < ranks) share_spans(e.width, ENC == F16 ? 64 : e.block, warp % shares, shares, first, last);
        TileShare<ENC, Slot> share;
        share.prefetch(expert_record(e, row, first < last ? rank : base) + e.down + (u64)tile * bytes, first, last);
        if (base == 0) wait_for(row_counters(a, row), count_units(a).routed_pairs);
        load_activations(room, e.inner, row * e.top_k + base, ranks, e.width);
        block_sync();
        float sum[4] = {0, 0, 0, 0};
        share.run(room + (first < last ? warp / shares : 0) * stride, stride, 1, e.width, e.block, sum);
        keep_column(sums, sum);
        block_sync();
        if (thread_id() < 16) {
            for (u32 k = 0; k < ranks; k++) {
                const float weight = load_shared_f32(e.weights + (u64)row * e.top_k + base + k);
                total = f32_fma(weight, add_column(sums, k * shares, shares, thread_id()), total);
            }
        }
        block_sync();
    }
    meet(a, row, tile, total, true, word);
}

// Grid: one block a unit. Shared memory: the normed row or room for inner rows (WARPS routed ones, or the shared
// expert's), whichever is more; sums; a word.
template <int ENC, int DENSE> HZ_DEVICE void fused(const FusedArgs &a, u8 *shared) {
    const Experts &e = a.experts;
    const u32 routed_room = min_u32(WARPS, e.top_k) * activation_stride(e.width);
    const u32 shared_room = a.shared_width ? activation_stride(a.shared_width) : 0;
    float *sums = (float *)(shared + max_u32(activation_stride(e.hidden), max_u32(routed_room, shared_room)));
    u32 *word = (u32 *)(sums + WARPS * 16);
    const Units units = count_units(a);
    if (thread_id() == 0) *word = atomic_add(a.counters, 1);
    block_sync();
    const u32 ticket = *word;
    block_sync();
    successor_start();
    predecessor_wait();
    if (ticket < e.rows * units.pairs) {
        const u32 row = ticket / units.pairs, unit = ticket % units.pairs;
        if (unit < units.routed_pairs) {
            routed_pair<ENC>(a, row, unit, shared, sums);
        } else {
            shared_pair<DENSE>(a, row, unit - units.routed_pairs, shared, sums);
        }
    } else {
        const u32 at = ticket - e.rows * units.pairs, row = at / units.downs, unit = at % units.downs;
        if (unit < units.downs - units.down_tiles) {
            shared_down<DENSE>(a, row, unit, shared, sums, word);
        } else {
            routed_down<ENC>(a, row, unit - (units.downs - units.down_tiles), shared, sums, word);
        }
    }
    // The last block leaves the counters ready for the next launch.
    if (thread_id() == 0) {
        if (add_release(a.counters + 1, 1) + 1 == grid_x()) {
            for (u32 r = 0; r < e.rows; r++) row_counters(a, r)[0] = row_counters(a, r)[1] = 0;
            a.counters[1] = 0;
            a.counters[0] = 0;
        }
    }
}

// registers: 128
HZ_KERNEL(256, 2) top4_fused_v1_int4_f16(HZ_ARGS(FusedArgs, a)) {
    HZ_SHARED(shared);
    fused<INT4, F16>(a, shared);
}
// registers: 128
HZ_KERNEL(256, 2) top4_fused_v1_int4_q8(HZ_ARGS(FusedArgs, a)) {
    HZ_SHARED(shared);
    fused<INT4, Q8>(a, shared);
}
// registers: 128
HZ_KERNEL(256, 2) top4_fused_v1_f16_f16(HZ_ARGS(FusedArgs, a)) {
    HZ_SHARED(shared);
    fused<F16, F16>(a, shared);
}
// registers: 128
HZ_KERNEL(256, 2) top4_fused_v1_f16_q8(HZ_ARGS(FusedArgs, a)) {
    HZ_SHARED(shared);
    fused<F16, Q8>(a, shared);
}
