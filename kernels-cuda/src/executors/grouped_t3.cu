// Executor `grouped-t3`: tokens grouped by expert, three launches: index, gate + up, down + combine.
//
// The index gives each expert's (row, rank) pairs one range of `order`, and cuts the ranges into work tiles of at most
// `most` columns of eight pairs, large ones first. A block of the other two takes one work tile by one block of rows of
// the expert's matrices, and gathers the pairs' activations itself. Products are those of product.cuh: one arithmetic,
// whatever the shape of the launch, so a row's bits depend on the row alone.
//
// Shapes: `wide` for groups of many tokens, `middle` for a few, `single` for steps of at most eight rows, where the
// weights' bytes are what counts. Experts whose slot is ABSENT are left out: a group larger than the cache runs as several
// pairs of launches, each with the slots of its wave, and the sum over ranks follows the last of them.
#include "experts.cuh"
#include "product.cuh"

// In place of a slot: not in this launch.
static constexpr u32 ABSENT = 0xffffffffu;
// Most columns of a work tile, of all shapes.
static constexpr u32 MOST_COLUMNS = 8;

struct GroupedIndexArgs {
    const u32 *ids;  // [rows, top_k]
    u32 *order;      // [rows * top_k]: pairs by expert
    u32x4 *work;     // [at most pairs]: expert, its first place in `order`, pairs, 0
    u32 *count;      // work tiles
    u32 rows, top_k, experts;
    u32 most;        // columns of eight pairs that a work tile may have
};

// The sum of `v` over the threads before this one. `room` is 33 words.
HZ_DEVICE u32 sum_before(u32 v, u32 *room) {
    const u32 lane = thread_id() % 32, warp = thread_id() / 32;
    u32 sum = v;
    for (u32 d = 1; d < 32; d *= 2) {
        const u32 before = shuffle(sum, lane < d ? lane : lane - d);
        if (lane >= d) sum += before;
    }
    if (lane == 31) room[warp] = sum;
    block_sync();
    u32 before = 0;
    for (u32 w = 0; w < warp; w++) before += room[w];
    return before + sum - v;
}

// One block. Shared memory: [experts] counts, [experts] places, 33 words, [MOST_COLUMNS + 1] work tiles of each size.
// registers: 64
HZ_KERNEL(1024, 1) grouped_t3_index(HZ_ARGS(GroupedIndexArgs, a)) {
    HZ_SHARED(shared);
    u32 *counts = (u32 *)shared, *places = counts + a.experts, *room = places + a.experts, *sizes = room + 33;
    const u32 threads = block_threads(), pairs = a.rows * a.top_k;
    const u32 share = ceil_div(a.experts, threads), first = thread_id() * share;
    const u32 end = min_u32(first + share, a.experts);
    successor_start();
    predecessor_wait();
    for (u32 e = thread_id(); e < a.experts; e += threads) counts[e] = 0;
    for (u32 i = thread_id(); i <= MOST_COLUMNS; i += threads) sizes[i] = 0;
    block_sync();
    for (u32 p = thread_id(); p < pairs; p += threads) {
        const u32 id = load_shared_u32(a.ids + p);
        if (id < a.experts) atomic_add(counts + id, 1);
    }
    block_sync();
    // Where each expert's pairs begin, and how many work tiles of each size there are.
    u32 own = 0;
    for (u32 e = first; e < end; e++) own += counts[e];
    u32 at = sum_before(own, room);
    for (u32 e = first; e < end; e++) {
        places[e] = at;
        at += counts[e];
        const u32 columns = ceil_div(counts[e], 8), tiles = ceil_div(columns, a.most);
        for (u32 i = 0; i < tiles; i++) atomic_add(sizes + (columns * (i + 1) / tiles - columns * i / tiles), 1);
    }
    block_sync();
    if (thread_id() == 0) {
        u32 before = 0;
        for (u32 size = MOST_COLUMNS; size > 0; size--) {
            const u32 these = sizes[size];
            sizes[size] = before;
            before += these;
        }
        *a.count = before;
    }
    block_sync();
    for (u32 e = first; e < end; e++) {
        const u32 columns = ceil_div(counts[e], 8), tiles = ceil_div(columns, a.most);
        for (u32 i = 0; i < tiles; i++) {
            const u32 from = columns * i / tiles, to = columns * (i + 1) / tiles;
            const u32 n = min_u32(counts[e], to * 8) - from * 8;
            a.work[atomic_add(sizes + (to - from), 1)] = {e, places[e] + from * 8, n, 0};
        }
    }
    block_sync();
    for (u32 p = thread_id(); p < pairs; p += threads) {
        const u32 id = load_shared_u32(a.ids + p);
        if (id < a.experts) a.order[atomic_add(places + id, 1)] = p;
    }
}

struct GroupedArgs {
    Experts experts;
    const u32 *order;
    const u32x4 *work;
    const u32 *count;
    float *outputs;       // [rows, top_k, hidden]
    const float *shared;  // [rows, hidden], or null: the shared expert
    const float *gate;    // [rows], or null: 1
    float *hidden;        // [rows, hidden], added to
    float *tap;           // [rows, hidden], or null: what was added
    u32 *counters;        // [rows, blocks of rows of down], zero: ranks that are done
};

template <int ENC> using Wide = Product<ENC, Slot, 4, 2, 8, 2, 3, ENC == F16 ? 1 : 2>;
template <int ENC> using Middle = Product<ENC, Slot, 4, 2, 2, 4, 4, ENC == F16 ? 1 : 4>;
template <int ENC> using Single = Product<ENC, Slot, 8, 1, 1, 8, 3, ENC == F16 ? 2 : 8>;

// The work tile of this block; false when there is none.
HZ_DEVICE bool work_tile(const GroupedArgs &a, u32 &first, u32 &pairs, const u8 *&record) {
    if (block_y() >= load_shared_u32(a.count)) return false;
    const u32x4 work = load_shared_x4(a.work + block_y());
    first = work.y, pairs = work.z;
    const u32 slot = load_shared_u32(a.experts.slots + work.x);
    record = a.experts.arena + slot * a.experts.record_bytes;
    return slot != ABSENT;
}

// Grid: blocks of pair tiles, most work tiles that there can be. Shared memory: the ring, then a word a token.
template <class P> HZ_DEVICE void grouped_gate_up(const GroupedArgs &a, u8 *shared) {
    const Experts &e = a.experts;
    u32 *pair = (u32 *)(shared + P::SHARED);
    u32 first, pairs;
    const u8 *record;
    successor_start();
    predecessor_wait();
    if (!work_tile(a, first, pairs, record)) return;
    P p;
    p.weights(record, block_x(), e.width / 8, e.hidden, e.block);
    for (u32 i = thread_id(); i < pairs; i += P::THREADS) pair[i] = load_shared_u32(a.order + first + i);
    block_sync();
    p.run(e.input, pairs, shared, [&](u32 n) { return pair[n] / e.top_k; });
    p.each_pair(block_x(), e.width, pairs,
                [&](u32 output, u32 n, float y) { e.inner[(u64)pair[n] * e.width + output] = f32_to_f16(y); });
}

// A row's block of outputs whose last rank is done: the sum over ranks in ranking order, the shared expert last.
HZ_DEVICE void combine_four(const GroupedArgs &a, u32 row, u32 column) {
    const Experts &e = a.experts;
    const float *weights = e.weights + (u64)row * e.top_k;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (u32 k = 0; k < e.top_k; k++) {
        const float w = load_shared_f32(weights + k);
        const u32x4 y = load_shared_x4(a.outputs + ((u64)row * e.top_k + k) * e.hidden + column);
        sum[0] = f32_fma(w, f32_from_bits(y.x), sum[0]);
        sum[1] = f32_fma(w, f32_from_bits(y.y), sum[1]);
        sum[2] = f32_fma(w, f32_from_bits(y.z), sum[2]);
        sum[3] = f32_fma(w, f32_from_bits(y.w), sum[3]);
    }
    const u64 at = (u64)row * e.hidden + column;
    if (a.shared) {
        const float gate = a.gate ? load_shared_f32(a.gate + row) : 1.0f;
        const u32x4 y = load_shared_x4(a.shared + at);
        sum[0] = f32_fma(gate, f32_from_bits(y.x), sum[0]);
        sum[1] = f32_fma(gate, f32_from_bits(y.y), sum[1]);
        sum[2] = f32_fma(gate, f32_from_bits(y.z), sum[2]);
        sum[3] = f32_fma(gate, f32_from_bits(y.w), sum[3]);
    }
    if (a.tap) *(f32x4 *)(a.tap + at) = {sum[0], sum[1], sum[2], sum[3]};
    f32x4 *hidden = (f32x4 *)(a.hidden + at);
    const f32x4 h = *hidden;
    *hidden = {h.x + sum[0], h.y + sum[1], h.z + sum[2], h.w + sum[3]};
}

// Grid: blocks of tiles, most work tiles that there can be. Shared memory: the ring, then a word a token, and one more.
template <class P> HZ_DEVICE void grouped_down(const GroupedArgs &a, u8 *shared) {
    const Experts &e = a.experts;
    u32 *pair = (u32 *)(shared + P::SHARED), *ready = pair + P::TOKENS;
    u32 first, pairs;
    const u8 *record;
    successor_start();
    predecessor_wait();
    if (!work_tile(a, first, pairs, record)) return;
    {
        P p;
        p.weights(record + e.down, block_x(), ceil_div(e.hidden, 16), e.width, e.block);
        for (u32 i = thread_id(); i < pairs; i += P::THREADS) pair[i] = load_shared_u32(a.order + first + i);
        if (thread_id() == 0) *ready = 0;
        block_sync();
        p.run(e.inner, pairs, shared, [&](u32 n) { return pair[n]; });
        p.each(block_x(), e.hidden, pairs,
               [&](u32 output, u32 n, float y) { a.outputs[(u64)pair[n] * e.hidden + output] = y; });
    }
    // Whoever finishes the last rank of a row combines this block's outputs of the row.
    fence_device();
    block_sync();
    u32 row = ABSENT;
    if (thread_id() < pairs) {
        row = pair[thread_id()] / e.top_k;
        u32 *counter = a.counters + (u64)row * grid_x() + block_x();
        if (add_release(counter, 1) + 1 == e.top_k) {
            store_release(counter, 0);
        } else {
            row = ABSENT;
        }
    }
    block_sync();
    if (row != ABSENT) pair[atomic_add(ready, 1)] = row;
    block_sync();
    fence_device();
    const u32 from = block_x() * P::ROWS, fours = (min_u32(from + P::ROWS, e.hidden) - from) / 4, all = *ready * fours;
    for (u32 i = thread_id(); i < all; i += P::THREADS) combine_four(a, pair[i / fours], from + i % fours * 4);
}

// registers: 255
HZ_KERNEL(Wide<INT4>::THREADS, 2) grouped_t3_gate_up_int4_wide(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_gate_up<Wide<INT4>>(a, shared);
}
// registers: 255
HZ_KERNEL(Wide<INT4>::THREADS, 2) grouped_t3_down_int4_wide(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_down<Wide<INT4>>(a, shared);
}
// registers: 168
HZ_KERNEL(Middle<INT4>::THREADS, 3) grouped_t3_gate_up_int4_middle(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_gate_up<Middle<INT4>>(a, shared);
}
// registers: 168
HZ_KERNEL(Middle<INT4>::THREADS, 3) grouped_t3_down_int4_middle(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_down<Middle<INT4>>(a, shared);
}
// registers: 128
HZ_KERNEL(Single<INT4>::THREADS, 2) grouped_t3_gate_up_int4_single(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_gate_up<Single<INT4>>(a, shared);
}
// registers: 128
HZ_KERNEL(Single<INT4>::THREADS, 2) grouped_t3_down_int4_single(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_down<Single<INT4>>(a, shared);
}
// registers: 255
HZ_KERNEL(Wide<F16>::THREADS, 2) grouped_t3_gate_up_f16_wide(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_gate_up<Wide<F16>>(a, shared);
}
// registers: 255
HZ_KERNEL(Wide<F16>::THREADS, 2) grouped_t3_down_f16_wide(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_down<Wide<F16>>(a, shared);
}
// registers: 168
HZ_KERNEL(Middle<F16>::THREADS, 3) grouped_t3_gate_up_f16_middle(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_gate_up<Middle<F16>>(a, shared);
}
// registers: 168
HZ_KERNEL(Middle<F16>::THREADS, 3) grouped_t3_down_f16_middle(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_down<Middle<F16>>(a, shared);
}
// registers: 128
HZ_KERNEL(Single<F16>::THREADS, 2) grouped_t3_gate_up_f16_single(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_gate_up<Single<F16>>(a, shared);
}
// registers: 128
HZ_KERNEL(Single<F16>::THREADS, 2) grouped_t3_down_f16_single(HZ_ARGS(GroupedArgs, a)) {
    HZ_SHARED(shared);
    grouped_down<Single<F16>>(a, shared);
}
