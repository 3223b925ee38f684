// Executor `persistent-v1`: a whole token in one launch. One block a multiprocessor stays for all layers; a barrier over the
// grid stands between the parts of a layer.
//
// What it gains over a launch a part: memory never waits for a barrier. Every warp knows which weights it will read next,
// layers ahead, and keeps a ring of SLOTS pieces of two kilobytes on their way into shared memory. A lane copies exactly the
// 16-byte words that it will use itself (tile.cuh), so the ring needs no barrier: each lane waits for its own copies. Only
// routed experts are not known ahead; their copies start when the router has chosen.
//
// The parts of a layer, with a grid barrier after each:
//   QKV        norm, then a stripe of tiles, each shared out by columns over the block's warps
//   ATTEND     a head and a split of its positions a block
//   PROJECT    tiles of the output projection, residual add, the tile's share of the router
//   PAIRS      every block adds the shares and routes for itself; shared pairs, then routed pairs
//   DOWN       a tile of outputs: the shared expert's, then all routed experts', the combine, residual add
// and after the last layer HEAD. Work is dealt to blocks by index, so that which block computes a tile depends on the card,
// but no bit of the tile does.
#include "persistent/ring.cuh"

template <int EXPERT, int DENSE, int SLOTS> struct Token : Ring<EXPERT, DENSE, SLOTS> {
    using Base = Ring<EXPERT, DENSE, SLOTS>;
    using Base::a;
    using Base::layers;
    using Base::fixed;
    using Base::room;
    using Base::sums;
    using Base::warp;
    using Base::lane;
    using Base::grid;
    using Base::block;
    using Base::routed;
    using Base::first_unit;
    using Base::last_unit;
    using Base::plan;
    using Base::items;
    using Base::down_ranks;
    using Base::start_copies;
    u32 barriers = 0;
    // The best logit of this thread.
    u64 best = 0;

    // Column 0 of the sums of item `index` of a batch.
    HZ_DEVICE void keep(u32 index, const float (&sum)[4]) {
        float *mine = sums + (index * WARPS + warp) * 16;
        if (lane % 4 == 0) mine[lane / 4] = sum[0], mine[lane / 4 + 8] = sum[2];
    }
    HZ_DEVICE float added(u32 index, u32 first, u32 count, u32 row) const {
        const float *from = sums + (index * WARPS + first) * 16 + row;
        float sum = 0;
#pragma unroll 4
        for (u32 w = 0; w < count; w++) sum += from[w * 16];
        return sum;
    }

    // ------------------------------------------------------------------------------------------------ the grid

    // All blocks have come here; what they wrote before is visible. `meanwhile` is what a block does while it waits.
    template <class Meanwhile> HZ_DEVICE void grid_barrier(Meanwhile meanwhile) {
        block_sync();
        barriers++;
        if (thread_id() == 0) add_release(a.counters, 1);
        meanwhile();
        if (thread_id() == 0) {
            while (load_acquire(a.counters) < barriers * grid) {
#ifdef HZ_EMULATED
                pause();
#endif
            }
        }
        block_sync();
    }

    // ------------------------------------------------------------------------------------------------ parts
    //
    // Each product has one place in the code, whatever the part: a multiprocessor holds little of a long program.

    // The end of a tile of a non-routed matrix: sixteen threads, one a row with its sum; `up` is the sum eight rows on.
    HZ_DEVICE void dense_end(u32 of, u32 l, u32 tile, u32 row, u32 i, float y, float up, float *hidden, float *scaled,
                             float *kept_dense) {
        const PersistentLayer &w = layers[l];
        const u32 output = tile * 16 + row;
        switch (of) {
        case SHARED_PAIRS:
            if (row < 8) a.dense_inner[tile * 8 + row] = f32_to_f16(silu(y) * up);
            break;
        case QKV:
            if (output < (a.heads + 2 * a.kv_heads) * a.head_dim) {
                if (w.qkv_bias) y += f16_to_f32(w.qkv_bias[output]);
                a.qkv[output] = y;
            }
            break;
        case PROJECT: {
            float normed = 0, square = 0;
            if (output < a.width) {
                if (w.output_bias) y += f16_to_f32(w.output_bias[output]);
                if (a.attention_tap) a.attention_tap[output] = y;
                const float h = load_shared_f32(hidden + output) + y;
                hidden[output] = h;
                normed = f32_mul(h, f16_to_f32(w.norm[output])), square = f32_mul(h, h);
            }
            scaled[i * 16 + row] = normed, scaled[(BATCH + i) * 16 + row] = square;
            break;
        }
        case SHARED_DOWN: kept_dense[(tile - block) / grid * 16 + row] = y; break;
        case HEAD:
            if (output < a.vocab) {
                a.logits[output] = y;
                const u64 key = order_key(y, output);
                best = key > best ? key : best;
            }
            break;
        }
    }

    // The shares of the router by the tiles of a batch: four threads a product, four rows of the tile each.
    HZ_DEVICE void router_shares(u32 l, u32 base, u32 here, const float *scaled) {
        const PersistentLayer &w = layers[l];
        const u32 count = w.slots ? a.experts + a.gates : 0, wide = count + 1, quarter = thread_id() % 4;
        for (u32 t = 0; t < here; t++) {
            const u32 at = block + (base + t) * grid, rows = min_u32(16, a.width - at * 16);
            const u16 *router = w.router + (u64)at * 16 * count;
#pragma unroll 1
            for (u32 n = thread_id(); n < ceil_div(wide * 4, 32) * 32; n += THREADS) {
                const u32 e = n / 4;
                float v = 0;
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32 row = quarter * 4 + j;
                    const float x = e < count && row < rows ? f16_to_f32(router[row * count + e]) : 0.0f;
                    v = e < count ? f32_fma(scaled[t * 16 + row], x, v) : v + scaled[(BATCH + t) * 16 + row];
                }
                v += shuffle_xor(v, 1);
                v += shuffle_xor(v, 2);
                if (quarter == 0 && e < wide) a.shares[(u64)at * wide + e] = v;
            }
        }
        block_sync();
    }

    // Tiles of a non-routed matrix, BATCH at a time.
    HZ_DEVICE void dense_part(u32 of, u32 l, const u8 *activations, u32 columns, float *hidden, float *scaled) {
        const u32 count = items(of, l);
        const Plan &p = plan(of, l);
#pragma unroll 1
        for (u32 base = 0; base < count; base += BATCH) {
            const u32 here = min_u32(BATCH, count - base);
#pragma unroll 1
            for (u32 i = 0; i < here; i++) {
                float sum[4] = {0, 0, 0, 0};
                Base::template products<DENSE>(p, activations, columns, 32, sum);
                keep(i, sum);
            }
            block_sync();
            const u32 i = thread_id() / 16, row = thread_id() % 16;
            float y = i < here ? added(i, 0, WARPS, row) : 0.0f;
            const float up = shuffle(y, (lane + 8) % 32);
            if (i < here) dense_end(of, l, block + (base + i) * grid, row, i, y, up, hidden, scaled, scaled);
            block_sync();
            if (of == PROJECT) router_shares(l, base, here, scaled);
        }
    }

    // Units of routed experts: pairs BATCH at a time; down one at a time, all of a token's experts at once.
    HZ_DEVICE void routed_part(u32 of, u32 l, const u8 *activations, float *hidden, const float *kept_dense) {
        const PersistentLayer &w = layers[l];
        const bool down = of == ROUTED_DOWN;
        const u32 count = items(of, l), most = down ? 1 : BATCH, columns = down ? a.expert_width : a.width;
        const u32 passes = a.top_k > WARPS ? ceil_div(a.top_k, WARPS) : 1, tiles = a.expert_width / 8;
        const Plan &p = plan(of, l);
        float total = 0;
#pragma unroll 1
        for (u32 base = 0; base < count; base += most) {
            const u32 here = min_u32(most, count - base), pass = passes == 1 ? 0 : base % passes;
            const u32 ranks = down_ranks(pass), shares = WARPS / ranks, rank = warp / shares;
#pragma unroll 1
            for (u32 i = 0; i < here; i++) {
                float sum[4] = {0, 0, 0, 0};
                const bool mine_too = down ? rank < ranks : first_unit + (base + i) * PAIR_UNITS + warp / PAIR_SHARES < last_unit;
                if (mine_too) {
                    const u8 *x = activations + (down ? (pass * WARPS + rank) * activation_stride(columns) : 0);
                    Base::template products<EXPERT>(p, x, columns, a.block, sum);
                }
                keep(i, sum);
            }
            block_sync();
            if (down) {
                if (thread_id() < 16) {
                    if (pass == 0) total = 0;
#pragma unroll 2
                    for (u32 k = 0; k < ranks; k++) {
                        const float *from = sums + k * shares * 16 + thread_id();
                        float y = from[0];
                        for (u32 share = 1; share < shares; share++) y += from[share * 16];
                        total = f32_fma(fixed->weights[pass * WARPS + k], y, total);
                    }
                    const u32 at = passes == 1 ? base : base / passes, output = (block + at * grid) * 16 + thread_id();
                    if (pass + 1 == passes && output < a.width) {
                        if (w.width) total = f32_fma(fixed->gate, kept_dense[at * 16 + thread_id()], total);
                        add_output(hidden, output, total);
                    }
                }
            } else {
                // Sixteen threads a unit, one a row; a gate finds its factor eight lanes on.
#pragma unroll 1
                for (u32 n = thread_id(); n < ceil_div(here * PAIR_UNITS * 16, THREADS) * THREADS; n += THREADS) {
                    const u32 i = n / (PAIR_UNITS * 16), u = n / 16 % PAIR_UNITS, row = n % 16;
                    const u32 unit = first_unit + (base + i) * PAIR_UNITS + u;
                    const bool there = i < here && unit < last_unit;
                    const float y = there ? added(i, u * PAIR_SHARES, PAIR_SHARES, row) : 0.0f;
                    const float up = shuffle(y, (lane + 8) % 32);
                    if (there && row < 8) {
                        a.inner[(u64)(unit / tiles) * a.expert_width + unit % tiles * 8 + row] = f32_to_f16(silu(y) * up);
                    }
                }
            }
            block_sync();
        }
    }

    HZ_DEVICE void add_output(float *hidden, u32 output, float value) {
        if (a.feed_forward_tap) a.feed_forward_tap[output] = value;
        hidden[output] = load_shared_f32(hidden + output) + value;
    }

    HZ_DEVICE void attend(u32 l, const Row *row_of) {
        const PersistentLayer &w = layers[l];
        AttendArgs t;
        t.rows = row_of, t.qkv = a.qkv, t.q_norm = w.q_norm, t.k_norm = w.k_norm, t.rotary = a.rotary, t.cache = w.cache;
        t.partials = a.partials, t.counters = a.counters + 3, t.output = a.attended;
        t.heads = a.heads, t.kv_heads = a.kv_heads, t.head_dim = a.head_dim, t.padded = a.padded, t.context = a.context;
        t.window = w.window, t.norm = a.qk_norm, t.appended = 0, t.eps = a.eps, t.clip = a.clip, t.scale = a.scale;
        for (u32 unit = block; unit < a.heads * MOST_SPLITS; unit += grid) {
            const u32 head = unit % a.heads, split = unit / a.heads;
            if (a.padded <= 128) {
                attend_head<16, WARPS, MOST_SPLITS, LEAST_POSITIONS, ROUNDS>(t, head, split, 0, room);
            } else {
                attend_head<32, WARPS, MOST_SPLITS, LEAST_POSITIONS, ROUNDS>(t, head, split, 0, room);
            }
            block_sync();
        }
    }

    // Every block for itself: sums of the router's shares, softmax, top-k, and the normed row into `room`.
    HZ_DEVICE void route(u32 l, const float *hidden) {
        const PersistentLayer &w = layers[l];
        const u32 products_all = w.slots ? a.experts + a.gates : 0, wide = products_all + 1, tiles = ceil_div(a.width, 16);
        float *parts = (float *)(room + activation_stride(a.width)), *totals = parts + WARPS * wide;
        float *probability = totals + wide;
        // The residual stream and the slots of the layer's experts, while the shares are on their way.
        const u32 words = ceil_div(a.width, 64) * 16;
        u32x4 own = {0, 0, 0, 0};
        u32x2 norm = {0, 0};
        if (thread_id() * 4 < a.width) {
            own = load_shared_x4(hidden + thread_id() * 4), norm = *(const u32x2 *)(w.norm + thread_id() * 4);
        }
        u32 *slots = (u32 *)(probability + a.experts);
        for (u32 e = thread_id(); w.slots && e < a.experts; e += THREADS) slots[e] = load_shared_u32(w.slots + e);
#pragma unroll 1
        for (u32 e = lane; e < wide; e += 96) {
            float part_sums[3] = {0, 0, 0};
#pragma unroll 1
            for (u32 at = warp; at < tiles; at += WARPS * 8) {
                float v[3][8];
#pragma unroll
                for (u32 u = 0; u < 8; u++) {
#pragma unroll
                    for (u32 h = 0; h < 3; h++) {
                        const bool there = at + u * WARPS < tiles && e + h * 32 < wide;
                        v[h][u] = there ? load_shared_f32(a.shares + (at + u * WARPS) * wide + e + h * 32) : 0.0f;
                    }
                }
#pragma unroll
                for (u32 u = 0; u < 8; u++) part_sums[0] += v[0][u], part_sums[1] += v[1][u], part_sums[2] += v[2][u];
            }
#pragma unroll
            for (u32 h = 0; h < 3; h++) {
                if (e + h * 32 < wide) parts[warp * wide + e + h * 32] = part_sums[h];
            }
        }
        block_sync();
        for (u32 e = thread_id(); e < wide; e += THREADS) {
            float sum = 0;
#pragma unroll
            for (u32 p = 0; p < WARPS; p++) sum += parts[p * wide + e];
            totals[e] = sum;
        }
        block_sync();
        const float inverse = inverse_rms(totals[products_all], a.width, a.eps);
        if (thread_id() < words) *(u32x2 *)(room + thread_id() * 8) = normed_x4(own, norm, inverse);
        for (u32 i = thread_id() + THREADS; i < words; i += THREADS) {
            u32x2 out = {0, 0};
            if (i * 4 < a.width) out = normed_x4(load_shared_x4(hidden + i * 4), *(const u32x2 *)(w.norm + i * 4), inverse);
            *(u32x2 *)(room + i * 8) = out;
        }
        if (w.slots) {
            choose(totals, inverse, a.experts, a.top_k, probability, fixed->ids, fixed->weights);
            if (thread_id() < a.top_k) fixed->slots[thread_id()] = slots[fixed->ids[thread_id()]];
            if (thread_id() == 0) {
                if (a.renormalize) {
                    float all = 0;
                    for (u32 k = 0; k < a.top_k; k++) all += fixed->weights[k];
                    for (u32 k = 0; k < a.top_k; k++) fixed->weights[k] = f32_div(fixed->weights[k], all);
                }
                fixed->gate = a.gates ? sigmoid(f32_mul(totals[a.experts], inverse)) : 1.0f;
            }
        }
        block_sync();
        if (a.ids && block == 0 && w.slots) {
            if (thread_id() < a.top_k) a.ids[thread_id()] = fixed->ids[thread_id()], a.weights[thread_id()] = fixed->weights[thread_id()];
            for (u32 e = thread_id(); e < a.experts; e += THREADS) a.router_logits[e] = f32_mul(totals[e], inverse);
        }
    }

    HZ_DEVICE void finish_head() {
        if (best) atomic_max(a.best, best);
        if (last_to_arrive(a.counters + 2, grid, &fixed->word) && thread_id() == 0) {
            const u32 choice = 0xffffffffu - (u32)atomic_max(a.best, 0);
            *a.best = 0;
            *a.chosen = choice;
            store_host(a.host_chosen, choice);
        }
    }

    // Into the second-level cache, ahead of their use: what is read once a layer and is on nobody's ring. A load that
    // misses that cache waits behind everything that the rings have asked for.
    HZ_DEVICE void prefetch_bytes(const void *from, u32 bytes) const {
        for (u32 at = thread_id() * 128; at < bytes; at += THREADS * 128) prefetch_line((const u8 *)from + at);
    }
    // A vector, a line a block.
    HZ_DEVICE void prefetch_vector(const void *from, u32 bytes) const {
        if (from && block * 128 < bytes && thread_id() == 0) prefetch_line((const u8 *)from + block * 128);
    }
    HZ_DEVICE void prefetch_small(u32 l, const Row &row) const {
        const PersistentLayer &w = layers[l];
        const u32 hd = a.head_dim, products_all = a.experts + a.gates, tile = block;
        if (block < a.heads * MOST_SPLITS) {
            const u32 head = block % a.heads, split = block / a.heads, kv_head = head / (a.heads / a.kv_heads);
            const Positions p = split_positions(row.position, w.window, split, MOST_SPLITS, LEAST_POSITIONS);
            const u32 bytes = (p.to - p.from) * a.padded * 2;
            const u64 at = ((u64)row.sequence * a.kv_heads + kv_head) * 2 * a.context + p.from;
            prefetch_bytes(w.cache + at * a.padded, bytes);
            prefetch_bytes(w.cache + (at + a.context) * a.padded, bytes);
        }
        if (w.slots && tile * 16 < a.width) {
            prefetch_bytes(w.router + (u64)tile * 16 * products_all, min_u32(16, a.width - tile * 16) * products_all * 2);
        }
        prefetch_vector(w.norm, a.width * 2);
        prefetch_vector(w.q_norm, (a.qk_norm == NORM_ALL_HEADS ? a.heads : 1) * hd * 2);
        prefetch_vector(w.k_norm, (a.qk_norm == NORM_ALL_HEADS ? a.kv_heads : 1) * hd * 2);
        prefetch_vector(w.slots, a.experts * 4);
        if (l + 1 < a.count) {
            prefetch_vector(layers[l + 1].attention_norm, a.width * 2);
            prefetch_vector(layers[l + 1].qkv_bias, (a.heads + 2 * a.kv_heads) * hd * 2);
        }
    }
    // One of the five parts of a layer, up to its barrier; part 0 of the layer after the last is the head.
    HZ_DEVICE void step(u32 phase, u32 l, float *hidden, const Row *row) {
        const bool head = l == a.count;
        const PersistentLayer &w = layers[head ? 0 : l];
        const u32 inner = w.slots && !head ? a.top_k * activation_stride(a.expert_width) : 0;
        const u8 *activations = room;
        u32 of = QKV, columns = a.width;
        float *scaled = (float *)(room + activation_stride(a.heads * a.head_dim));
        switch (phase) {
        case 0:
            load_normed(room, hidden, head ? a.final_norm : w.attention_norm, a.eps, 0, 1, a.width, sums);
            of = head ? HEAD : QKV;
            break;
        case 1:
            attend(l, row);
            return;
        case 2:
            columns = a.heads * a.head_dim;
            load_activations(room, a.attended, 0, 1, columns);
            of = PROJECT;
            break;
        case 3:
            route(l, hidden);
            routed = l + 1;
            start_copies();
            of = SHARED_PAIRS;
            break;
        case 4:
            if (w.slots) load_activations(room, a.inner, 0, a.top_k, a.expert_width);
            if (w.width) load_activations(room + inner, a.dense_inner, 0, 1, w.width);
            activations = room + inner, columns = w.width;
            // The dense part's sums are kept until the routed part is done.
            scaled = (float *)(room + inner + activation_stride(w.width));
            of = SHARED_DOWN;
            break;
        }
        block_sync();
        dense_part(of, head ? 0 : l, activations, columns, hidden, scaled);
        if (phase < 3) return;
        if (w.slots) {
            routed_part(phase == 3 ? ROUTED_PAIRS : ROUTED_DOWN, l, room, hidden, scaled);
        } else if (phase == 4) {
            const u32 count = items(PROJECT, l);
            for (u32 n = thread_id(); n < count * 16; n += THREADS) {
                const u32 output = (block + n / 16 * grid) * 16 + n % 16;
                if (output < a.width) add_output(hidden, output, scaled[n]);
            }
        }
    }
};

// Grid: one block a multiprocessor, all at once. Shared memory: the rings, the layers, what is fixed, sums, then room.
template <int EXPERT, int DENSE, int SLOTS> HZ_DEVICE void token(const PersistentArgs &a, u8 *shared) {
    const u32 warp = thread_id() / 32;
    PersistentLayer *layers = (PersistentLayer *)(shared + WARPS * SLOTS * SLOT);
    Fixed *fixed = (Fixed *)(layers + a.count);
    float *sums = (float *)(fixed + 1);
    Token<EXPERT, DENSE, SLOTS> t = {{a, layers, fixed, shared + warp * SLOTS * SLOT, (u8 *)(sums + BATCH * WARPS * 16), sums}};
    if (a.count == 0) t.part = HEAD;
    for (u32 i = thread_id(); i < a.count * sizeof(PersistentLayer) / 4; i += THREADS) {
        ((u32 *)layers)[i] = ((const u32 *)a.layers)[i];
    }
    if (thread_id() < 4) fixed->zeros[thread_id()] = 0;
    t.make_plans();
    t.routed_units(t.first_unit, t.last_unit);
    block_sync();
    t.start_copies();
    predecessor_wait();
    float *hidden = a.hidden + (u64)a.row * a.width;
    u32 mark = 0;
    const auto clock = [&] {
        if (a.profile && block_x() == 0 && thread_id() == 0) a.profile[mark++] = clock_now();
    };
    const u32 parts = a.count * 5 + (a.vocab ? 1 : 0);
    u32 l = 0, phase = 0;
#pragma unroll 1
    for (u32 part = 0; part < parts; part++) {
        if (l < a.count) clock();
        t.step(phase, l, hidden, a.rows + a.row);
        if (l == a.count) break;
        clock();
        t.grid_barrier([&] {
            if (phase == 3 && l + 1 < a.count) t.prefetch_small(l + 1, a.rows[a.row]);
        });
        if (++phase == 5) phase = 0, l++;
    }
    if (a.vocab) t.finish_head();
    copy_wait<0>();
    // The last block leaves the counters ready for the next launch.
    if (thread_id() == 0 && add_release(a.counters + 1, 1) + 1 == grid_x()) a.counters[0] = a.counters[1] = 0;
}

// registers: 128
HZ_KERNEL(512, 1) persistent_v1_int4_f16(HZ_ARGS(PersistentArgs, a)) {
    HZ_SHARED(shared);
    token<INT4, F16, 5>(a, shared);
}
// registers: 128
HZ_KERNEL(512, 1) persistent_v1_int4_q8(HZ_ARGS(PersistentArgs, a)) {
    HZ_SHARED(shared);
    token<INT4, Q8, 5>(a, shared);
}
// registers: 128
HZ_KERNEL(512, 1) persistent_v1_f16_f16(HZ_ARGS(PersistentArgs, a)) {
    HZ_SHARED(shared);
    token<F16, F16, 5>(a, shared);
}
// registers: 128
HZ_KERNEL(512, 1) persistent_v1_f16_q8(HZ_ARGS(PersistentArgs, a)) {
    HZ_SHARED(shared);
    token<F16, Q8, 5>(a, shared);
}
