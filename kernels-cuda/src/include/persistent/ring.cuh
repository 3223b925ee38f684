// Executor `persistent-v1`: which weights a warp will read, layers ahead, and the ring in which they arrive.
#pragma once
#include "persistent/args.cuh"

// A warp's ring of weights on their way, and its products with them.
template <int EXPERT, int DENSE, int SLOTS> struct Ring {
    const PersistentArgs &a;
    const PersistentLayer *layers;  // in shared memory
    Fixed *fixed;
    u8 *ring;      // this warp's
    u8 *room;      // activations and whatever a part needs
    float *sums;   // [BATCH][WARPS][16]
    u32 warp = thread_id() / 32, lane = thread_id() % 32, grid = grid_x(), block = block_x();
    // What is copied next; `routed` layers have known experts.
    u32 part = QKV, layer = 0, item = 0, routed = 0;
    Piece next = {nullptr, nullptr, 0, 0, 0};
    const u8 *tile = nullptr;
    u64 tile_step = 0;
    u32 left = 0, shared_offset = 0, share_bytes = 0, scale_offset = 0, share_scales = 0;
    // Slots: the next to fill, the next to read, and how many hold something.
    u32 fill = 0, take = 0, filled = 0;
    // Routed pair units of this block.
    u32 first_unit = 0, last_unit = 0;

    // ------------------------------------------------------------------------------------------------ plans

    template <int ENC> HZ_DEVICE Plan plan_of(u32 items, u32 columns, u32 block_columns, u32 index, u32 shares) const {
        u32 first, last;
        const u32 unit = scale_block<ENC>(block_columns);
        share_spans(columns, ENC == F16 ? 64 : max_u32(unit, 64), index, shares, first, last);
        Plan p;
        p.items = items;
        p.tile_bytes = tile_bytes<ENC>(columns, block_columns);
        p.codes = first * Span<ENC>::bytes;
        p.bytes = last > first ? (last - first) * Span<ENC>::bytes : 0;
        p.scales = p.all_scales = p.scale_bytes = 0;
        p.column = first * 64;
        if (ENC != F16) {
            const u32 begin = first * 64 / unit, end = min_u32(ceil_div(last * 64, unit), ceil_div(columns, unit));
            p.scales = ceil_div(columns, 64) * Span<ENC>::bytes + begin * 32;
            p.scale_bytes = max_u32(slot_columns<ENC>() / unit, 1) * 32;
            p.all_scales = end > begin ? (end - begin) * 32 : 0;
        }
        return p;
    }

    // Of `tiles` tiles dealt to blocks in turn, those of this block.
    HZ_DEVICE u32 mine(u32 tiles) const { return block < tiles ? (tiles - block - 1) / grid + 1 : 0; }

    // Routed pair units of this block: [first, last) of top_k * tiles, dealt evenly.
    HZ_DEVICE void routed_units(u32 &first, u32 &last) const {
        const u32 all = a.top_k * (a.expert_width / 8);
        first = (u32)((u64)all * block / grid), last = (u32)((u64)all * (block + 1) / grid);
    }

    // Every plan of this warp, one a lane.
    HZ_DEVICE void make_plans() {
        const u32 tiles_h = ceil_div(a.width, 16);
        Plan p = {0, 0, 0, 0, 0, 0, 0, 0};
        switch (lane) {
        case QKV:
            p = plan_of<DENSE>(mine(ceil_div((a.heads + 2 * a.kv_heads) * a.head_dim, 16)), a.width, 32, warp, WARPS);
            break;
        case PROJECT: p = plan_of<DENSE>(mine(tiles_h), a.heads * a.head_dim, 32, warp, WARPS); break;
        case SHARED_PAIRS:
        case OTHER_PAIRS: {
            const u32 width = lane == SHARED_PAIRS ? a.shared_width : a.other_width;
            p = plan_of<DENSE>(mine(width / 8), a.width, 32, warp, WARPS);
            break;
        }
        case SHARED_DOWN:
        case OTHER_DOWN: {
            const u32 width = lane == SHARED_DOWN ? a.shared_width : a.other_width;
            p = plan_of<DENSE>(width ? mine(tiles_h) : 0, width, 32, warp, WARPS);
            break;
        }
        case HEAD: p = plan_of<DENSE>(a.vocab ? mine(ceil_div(a.vocab, 16)) : 0, a.width, 32, warp, WARPS); break;
        case ROUTED_PAIRS: {
            u32 first, last;
            routed_units(first, last);
            p = plan_of<EXPERT>(ceil_div(last - first, PAIR_UNITS), a.width, a.block, warp % PAIR_SHARES, PAIR_SHARES);
            break;
        }
        case ROUTED_DOWN: {
            const u32 ranks = down_ranks(0), shares = ranks ? WARPS / ranks : 1;
            p = plan_of<EXPERT>(mine(tiles_h) * ceil_div(a.top_k, WARPS), a.expert_width, a.block, warp % shares, shares);
            break;
        }
        }
        if (lane < PLANS) fixed->plans[warp][lane] = p;
        warp_sync();
    }

    HZ_DEVICE u32 plan_index(u32 of, u32 l) const {
        if ((of == SHARED_PAIRS || of == SHARED_DOWN) && layers[l].width != a.shared_width) {
            return of == SHARED_PAIRS ? OTHER_PAIRS : OTHER_DOWN;
        }
        return of;
    }
    HZ_DEVICE const Plan &plan(u32 of, u32 l) const { return fixed->plans[warp][plan_index(of, l)]; }

    // Items of a part in a layer, the same for all warps of the block.
    HZ_DEVICE u32 items(u32 of, u32 l) const {
        if (of == SHARED_PAIRS || of == SHARED_DOWN) {
            if (!layers[l].width) return 0;
        } else if (of == ROUTED_PAIRS || of == ROUTED_DOWN) {
            if (!layers[l].slots) return 0;
        }
        return plan(of, l).items;
    }

    // Experts at once in a down item.
    HZ_DEVICE u32 down_ranks(u32 pass) const { return min_u32(WARPS, a.top_k - pass * WARPS); }

    // Where the tile of an item begins; null where this warp has no share of it.
    HZ_DEVICE const u8 *tile_of(u32 of, u32 l, u32 index, const Plan &p) const {
        const PersistentLayer &w = layers[l];
        const u64 tile = (u64)(block + index * grid) * p.tile_bytes;
        switch (of) {
        case QKV: return w.qkv + tile;
        case PROJECT: return w.output + tile;
        case SHARED_PAIRS: return w.pairs + tile;
        case SHARED_DOWN: return w.down + tile;
        case HEAD: return a.head + tile;
        case ROUTED_PAIRS: {
            const u32 unit = first_unit + index * PAIR_UNITS + warp / PAIR_SHARES, tiles = a.expert_width / 8;
            if (unit >= last_unit) return nullptr;
            return a.arena + fixed->slots[unit / tiles] * a.record_bytes + (u64)(unit % tiles) * p.tile_bytes;
        }
        case ROUTED_DOWN: {
            const u32 passes = a.top_k > WARPS ? ceil_div(a.top_k, WARPS) : 1;
            const u32 pass = passes == 1 ? 0 : index % passes, at = passes == 1 ? index : index / passes;
            const u32 ranks = down_ranks(pass), rank = warp / (WARPS / ranks);
            if (rank >= ranks) return nullptr;
            return a.arena + fixed->slots[pass * WARPS + rank] * a.record_bytes + a.down + (u64)(block + at * grid) * p.tile_bytes;
        }
        }
        return nullptr;
    }

    // ------------------------------------------------------------------------------------------------ the ring

    // The piece that is copied next, if it is known. Tiles of a part that are dealt to blocks in turn follow one another at
    // the same distance, so only the first of them is looked up.
    HZ_DEVICE bool find_next() {
        for (;;) {
            if (left > 0) {
                left--;
                next.codes = tile + shared_offset, next.bytes = share_bytes;
                next.scales = tile + scale_offset, next.all_scales = share_scales;
                tile += tile_step;
                if (next.bytes) return true;
                left = 0;
                continue;
            }
            if (part == NOTHING || (part == ROUTED_PAIRS && routed <= layer)) return false;
            const u32 count = items(part, layer);
            if (item < count) {
                const Plan &p = plan(part, layer);
                tile = tile_of(part, layer, item, p);
                shared_offset = p.codes, share_bytes = p.bytes, scale_offset = p.scales, share_scales = p.all_scales;
                next.scale_bytes = p.scale_bytes;
                const bool one = part == ROUTED_PAIRS || (part == ROUTED_DOWN && a.top_k > WARPS);
                tile_step = (u64)grid * p.tile_bytes;
                left = tile ? (one ? 1 : count - item) : 0;
                item = one ? item + 1 : tile ? count : (part == ROUTED_DOWN ? count : item + 1);
                continue;
            }
            item = 0;
            if (part == ROUTED_DOWN) {
                part = ++layer < a.count ? QKV : HEAD;
                if (part == HEAD) layer = 0;
            } else {
                part++;
            }
        }
    }

    // Starts the copy of one slot, or of nothing: one group either way.
    HZ_DEVICE void start_copy() {
        if (next.bytes || find_next()) {
            u8 *slot = ring + fill * SLOT;
            const u32 bytes = min_u32(next.bytes, CODES);
            for (u32 i = 0; i < 4; i++) {
                if (i * 512 < bytes) copy_async16(slot + i * 512 + lane * 16, next.codes + i * 512 + lane * 16);
            }
            const u32 scales = min_u32(next.scale_bytes, next.all_scales);
            if (lane * 16 < scales) copy_async16(slot + CODES + lane * 16, next.scales + lane * 16);
            next.codes += bytes, next.bytes -= bytes;
            next.scales += scales, next.all_scales -= scales;
            fill = fill + 1 == SLOTS ? 0 : fill + 1;
            filled++;
        }
        copy_commit();
    }

    // Fills the ring as far as the next pieces are known.
    HZ_DEVICE void start_copies() {
        const u32 room_left = SLOTS - filled;
        for (u32 i = 0; i < room_left; i++) start_copy();
    }

    // Activations of 32 columns from `column` on: token 0 for the lanes that have it, zeros for the others.
    HZ_DEVICE u32x4 fragment(const u8 *activations, u32 column) const {
        const u8 *from = lane < 4 ? activations + lane * 16 + column * 2 : (const u8 *)fixed->zeros;
        return *(const u32x4 *)from;
    }

    // Two products of 32 columns.
    template <int ENC> HZ_DEVICE void two_products(const u32x4 *raw, int half, u32x4 x, float (&sum)[4]) {
        u32 f[4];
        weight_fragment<ENC>(raw, half * 2, f);
        mma_16x8x16(sum, f, x.x, x.y);
        weight_fragment<ENC>(raw, half * 2 + 1, f);
        mma_16x8x16(sum, f, x.z, x.w);
    }

    HZ_DEVICE void scale_sum(const u8 *scales, const float (&part_sum)[4], float (&sum)[4]) {
        const RowScales d = row_scales(*(const u32 *)scales);
        sum[0] = f32_fma(d.low, part_sum[0], sum[0]);
        sum[2] = f32_fma(d.high, part_sum[2], sum[2]);
    }

    // One slot times the activations: products in the order of the columns, into sum. `shift`: log2 of a scale block.
    template <int ENC>
    HZ_DEVICE void slot_products(const u8 *activations, u32 column, u32 bytes, u32 columns, u32 shift, float (&sum)[4]) {
        copy_wait<SLOTS - 1>();
        if (ENC != F16) warp_sync();
        const u8 *slot = ring + take * SLOT, *scales = slot + CODES + lane / 4 * 4;
        constexpr int SPANS = CODES / Span<ENC>::bytes;
        constexpr u32 LOADS = Span<ENC>::loads;
        if (bytes == CODES && (ENC == F16 || (ENC == INT4 && shift == 8))) {
            // A full slot with at most one scale.
            u32x4 raw[4];
#pragma unroll
            for (int i = 0; i < 4; i++) raw[i] = *(const u32x4 *)(slot + i * 512 + lane * 16);
            // Two chains of products: one would wait for itself.
            float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < SPANS * 2; i++) {
                const u32x4 x = fragment(activations, column + i * 32);
                two_products<ENC>(raw + i / 2 * LOADS, i % 2, x, ENC == F16 ? sum : i % 2 ? odd : even);
            }
            if (ENC == INT4) {
                for (int i = 0; i < 4; i++) even[i] += odd[i];
                scale_sum(scales, even, sum);
            }
        } else {
            const u32 mask = (1u << shift) - 1;
            float part_sum[4] = {0, 0, 0, 0};
#pragma unroll 1
            for (u32 s = 0; s * Span<ENC>::bytes < bytes; s++) {
                u32x4 raw[LOADS];
#pragma unroll
                for (u32 i = 0; i < LOADS; i++) {
                    raw[i] = *(const u32x4 *)(slot + s * Span<ENC>::bytes + i * 512 + lane * 16);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 at = column + s * 64 + half * 32;
                    two_products<ENC>(raw, half, fragment(activations, at), ENC == F16 ? sum : part_sum);
                    const bool last = half == 1 && (s + 1) * Span<ENC>::bytes >= bytes;
                    if (ENC == Q8 || (ENC == INT4 && (last || ((at + 32) & mask) == 0))) {
                        if ((at & ~mask) < columns) scale_sum(scales, part_sum, sum);
                        scales += 32;
                        part_sum[0] = part_sum[1] = part_sum[2] = part_sum[3] = 0;
                    }
                }
            }
        }
        // Everybody has read the scales before the slot is filled again.
        if (ENC != F16) warp_sync();
        take = take + 1 == SLOTS ? 0 : take + 1;
        filled--;
        start_copy();
    }

    // This warp's share of an item times the activations.
    template <int ENC>
    HZ_DEVICE void products(const Plan &p, const u8 *activations, u32 columns, u32 block_columns, float (&sum)[4]) {
        const u32 bytes = p.bytes, column = p.column, shift = ENC == F16 ? 6 : log2_of(scale_block<ENC>(block_columns));
#pragma unroll 1
        for (u32 done = 0; done < bytes; done += CODES) {
            slot_products<ENC>(activations, column + done / Span<ENC>::bytes * 64, min_u32(bytes - done, CODES), columns,
                               shift, sum);
        }
    }
};
