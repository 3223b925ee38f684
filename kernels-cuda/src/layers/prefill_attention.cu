// Attention of many rows: tiles of 64 rows by tiles of keys, scores and sums of values on tensor cores.
//
// A block takes 64 consecutive rows of the step and one query head; where they belong to several sequences it takes one
// sequence after another. Key tiles lie at absolute multiples of their length, so which keys meet in a tile depends on
// their positions alone; a tile of which a row sees nothing changes none of its bits (the maximum stays, the sums are
// multiplied by one and get zeros). So a row's bits depend neither on the chunk nor on its neighbours.
//
// Scores are FP16 products with FP32 sums. Probabilities stay FP32: a product takes each as two FP16 halves, the rounded
// value and what was lost, of 2^15 times the probability so that the lost part is not subnormal (22 bits in all).
#include "block.cuh"

struct PrefillAttentionArgs {
    const Row *rows;     // [tokens], rows of one sequence by ascending position
    const u16 *queries;  // [tokens, heads, padded]
    const u16 *cache;    // this layer's: [sequences, kv_heads, keys then values, context, padded]
    u16 *output;         // [tokens, heads * head_dim]
    u32 tokens, heads, kv_heads, head_dim, padded, context;
    u32 window;          // 0: all
    float scale;
};

static constexpr u32 WARPS = 4, ROWS = 64, NOBODY = 0xffffffffu;
static constexpr float ONE = 32768.0f;

// Heads of at most GROUPS * 32 elements.
template <u32 GROUPS> struct Flash {
    static constexpr u32 KEYS = GROUPS == 8 ? 16 : 64;
    static constexpr u32 ROW_BYTES = GROUPS * 64, CHUNKS = GROUPS * 4, TILE = KEYS * ROW_BYTES;
    static constexpr u32 QUERIES = ROWS * ROW_BYTES, SHARED = QUERIES + 4 * TILE + ROWS * 8;

    // 16-byte piece `chunk` of a row of queries or keys, and of values: neighbours in a quarter warp on different banks.
    static HZ_DEVICE u32 key_at(u32 row, u32 chunk) {
        return row * ROW_BYTES + (GROUPS > 1 ? chunk ^ ((row & 1) << 2) : chunk) * 16;
    }
    static HZ_DEVICE u32 value_at(u32 row, u32 chunk) {
        return row * ROW_BYTES + (chunk ^ (((row >> 1) & (GROUPS > 1 ? 3 : 1)) << 1)) * 16;
    }

    const PrefillAttentionArgs &a;
    u8 *shared;
    float sum[GROUPS * 4][4];        // [group of 32 elements, element of a lane's four]
    float most[2], total[2];         // of rows g and g + 8

    HZ_DEVICE Flash(const PrefillAttentionArgs &args, u8 *memory) : a(args), shared(memory) {}

    // [ROWS] of the block's rows.
    HZ_DEVICE u32 *position() const { return (u32 *)(shared + QUERIES + 4 * TILE); }
    HZ_DEVICE u32 *sequence() const { return position() + ROWS; }

    // Queries, positions and sequences of the block's rows into shared memory; everything else there zero.
    HZ_DEVICE void stage_rows(u32 first, u32 rows) {
        if (a.padded != GROUPS * 32 || rows < ROWS) {
            for (u32 i = thread_id(); i < (QUERIES + 4 * TILE) / 16; i += WARPS * 32) {
                *(u32x4 *)(shared + i * 16) = {0, 0, 0, 0};
            }
            block_sync();
        }
        const u32 chunks = a.padded / 8;
        for (u32 i = thread_id(); i < rows * chunks; i += WARPS * 32) {
            const u32 r = i / chunks, c = i % chunks;
            const u16 *from = a.queries + ((u64)(first + r) * a.heads + block_y()) * a.padded + c * 8;
            *(u32x4 *)(shared + key_at(r, c)) = load_shared_x4(from);
        }
        for (u32 r = thread_id(); r < ROWS; r += WARPS * 32) {
            position()[r] = r < rows ? a.rows[first + r].position : 0;
            sequence()[r] = r < rows ? a.rows[first + r].sequence : NOBODY;
        }
        block_sync();
    }

    HZ_DEVICE u32 first_seen(u32 at) const { return a.window && at + 1 > a.window ? at + 1 - a.window : 0; }

    // Starts the copies of key tile `tile`; positions above `last` are zero: 0 times what is there might be NaN.
    HZ_DEVICE void fetch(const u16 *keys, u32 tile, u32 last) const {
        u8 *to = shared + QUERIES + tile % 2 * 2 * TILE;
        const u16 *values = keys + (u64)a.context * a.padded;
        const u32 chunks = a.padded / 8;
        const u32 c = thread_id() % CHUNKS;
        if (c >= chunks) return;
#pragma unroll(GROUPS == 8 ? 1 : 4)
        for (u32 n = thread_id() / CHUNKS; n < KEYS; n += WARPS * 32 / CHUNKS) {
            const u32 at = tile * KEYS + n;
            u8 *key = to + key_at(n, c), *value = to + TILE + value_at(n, c);
            if (at <= last) {
                copy_async16(key, keys + (u64)at * a.padded + c * 8);
                copy_async16(value, values + (u64)at * a.padded + c * 8);
            } else {
                *(u32x4 *)key = {0, 0, 0, 0};
                *(u32x4 *)value = {0, 0, 0, 0};
            }
        }
    }

    // Scores of this warp's sixteen rows with the keys of the tile.
    HZ_DEVICE void scores(const u8 *keys, float (&s)[KEYS / 8][4]) const {
        const u32 lane = thread_id() % 32, g = lane / 4, t = lane % 4, row = thread_id() / 32 * 16 + g;
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
        // The widest heads leave no registers for more than one group of queries and keys.
#pragma unroll(GROUPS == 8 ? 1 : GROUPS)
        for (u32 group = 0; group < GROUPS; group++) {
            const u32x4 low = *(const u32x4 *)(shared + key_at(row, group * 4 + t));
            const u32x4 high = *(const u32x4 *)(shared + key_at(row + 8, group * 4 + t));
            const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
            // Two products of one sum stand COLUMNS products of others apart.
            constexpr u32 COLUMNS = GROUPS == 8 ? 2 : KEYS / 8;
#pragma unroll
            for (u32 from = 0; from < KEYS / 8; from += COLUMNS) {
                u32x4 k[COLUMNS];
#pragma unroll
                for (u32 n = 0; n < COLUMNS; n++) {
                    k[n] = *(const u32x4 *)(keys + key_at((from + n) * 8 + g, group * 4 + t));
                    mma_16x8x16(s[from + n], first, k[n].x, k[n].y);
                }
#pragma unroll
                for (u32 n = 0; n < COLUMNS; n++) mma_16x8x16(s[from + n], second, k[n].z, k[n].w);
            }
        }
    }

    // Scores to 2^15 times exp(score - maximum so far), and what was summed so far to the same maximum.
    HZ_DEVICE void weigh(float (&s)[KEYS / 8][4], u32 first_key, const u32 (&low)[2], const u32 (&high)[2]) {
        const u32 t = thread_id() % 4;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float top = most[r];
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u32 key = first_key + n * 8 + 2 * t + i;
                    float &v = s[n][r * 2 + i];
                    v = key >= low[r] && key < high[r] ? f32_mul(v, a.scale) : NEGATIVE_INFINITY;
                    top = f32_max(top, v);
                }
            }
            top = f32_max(top, shuffle_xor(top, 1));
            top = f32_max(top, shuffle_xor(top, 2));
            // A row that has seen nothing yet: any finite reference gives zeros.
            const float from = top == NEGATIVE_INFINITY ? 0.0f : top;
            const float fade = f32_exp(most[r] - from);
            most[r] = top;
            total[r] = f32_mul(total[r], fade);
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    float &v = s[n][r * 2 + i];
                    v = f32_mul(f32_exp(v - from), ONE);
                    total[r] = f32_add(total[r], v);
                }
            }
#pragma unroll
            for (u32 n = 0; n < GROUPS * 4; n++) {
                sum[n][r * 2] = f32_mul(sum[n][r * 2], fade);
                sum[n][r * 2 + 1] = f32_mul(sum[n][r * 2 + 1], fade);
            }
        }
    }

    // Adds the weighted values of the tile. Lane (g, t) reads elements 4g to 4g + 3 of every 32, of keys 2t, 2t + 1, + 8.
    HZ_DEVICE void add_values(const u8 *values, const float (&s)[KEYS / 8][4]) {
        const u32 lane = thread_id() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (u32 k = 0; k < KEYS / 16; k++) {
            u32 near[4], rest[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const float *p = s[k * 2 + i / 2] + i % 2 * 2;
                near[i] = f16x2(p[0], p[1]);
                rest[i] = f16x2(p[0] - f16_to_f32((u16)near[i]), p[1] - f16_to_f32((u16)(near[i] >> 16)));
            }
            const u32 key = k * 16 + 2 * t;
#pragma unroll
            for (u32 group = 0; group < GROUPS; group++) {
                const u32 chunk = group * 4 + g / 2, within = g % 2 * 8;
                const u32x2 v0 = *(const u32x2 *)(values + value_at(key, chunk) + within);
                const u32x2 v1 = *(const u32x2 *)(values + value_at(key + 1, chunk) + within);
                const u32x2 v2 = *(const u32x2 *)(values + value_at(key + 8, chunk) + within);
                const u32x2 v3 = *(const u32x2 *)(values + value_at(key + 9, chunk) + within);
                const u32 b[4][2] = {{byte_permute(v0.x, v1.x, 0x5410), byte_permute(v2.x, v3.x, 0x5410)},
                                     {byte_permute(v0.x, v1.x, 0x7632), byte_permute(v2.x, v3.x, 0x7632)},
                                     {byte_permute(v0.y, v1.y, 0x5410), byte_permute(v2.y, v3.y, 0x5410)},
                                     {byte_permute(v0.y, v1.y, 0x7632), byte_permute(v2.y, v3.y, 0x7632)}};
#pragma unroll
                for (u32 e = 0; e < 4; e++) mma_16x8x16(sum[group * 4 + e], near, b[e][0], b[e][1]);
#pragma unroll
                for (u32 e = 0; e < 4; e++) mma_16x8x16(sum[group * 4 + e], rest, b[e][0], b[e][1]);
            }
        }
    }

    // All keys that rows of `of` see.
    HZ_DEVICE void attend(u32 of) {
        u32 from = NOBODY, last = 0;
        for (u32 r = thread_id() % 32; r < ROWS; r += 32) {
            if (sequence()[r] == of) from = min_u32(from, first_seen(position()[r])), last = max_u32(last, position()[r]);
        }
        for (u32 lanes = 16; lanes > 0; lanes /= 2) {
            from = min_u32(from, shuffle_xor(from, lanes)), last = max_u32(last, shuffle_xor(last, lanes));
        }
        // What rows g and g + 8 of this lane see, and what any row of the warp sees.
        const u32 row = thread_id() / 32 * 16 + thread_id() % 32 / 4;
        u32 low[2], high[2];
        bool some = false;
        for (u32 r = 0; r < 2; r++) {
            const bool mine = sequence()[row + r * 8] == of;
            low[r] = mine ? first_seen(position()[row + r * 8]) : 1, high[r] = mine ? position()[row + r * 8] + 1 : 0;
        }
        const u32 kv_head = block_y() / (a.heads / a.kv_heads);
        const u16 *keys = a.cache + ((u64)of * a.kv_heads + kv_head) * 2 * a.context * a.padded;
        const u32 end = last / KEYS;
        fetch(keys, from / KEYS, last);
        copy_commit();
        for (u32 tile = from / KEYS; tile <= end; tile++) {
            if (tile < end) fetch(keys, tile + 1, last);
            copy_commit();
            copy_wait<1>();
            block_sync();
            const u32 first = tile * KEYS;
            some = false;
            for (u32 r = 0; r < 2; r++) some = some || (low[r] < high[r] && low[r] < first + KEYS && high[r] > first);
            if (ballot(some)) {
                const u8 *staged = shared + QUERIES + tile % 2 * 2 * TILE;
                float s[KEYS / 8][4];
                scores(staged, s);
                weigh(s, first, low, high);
                add_values(staged + TILE, s);
            }
            block_sync();
        }
    }

    HZ_DEVICE void run() {
        // The last rows of a prompt see the most keys: they start first.
        const u32 first = (grid_x() - 1 - block_x()) * ROWS, rows = min_u32(ROWS, a.tokens - first);
        stage_rows(first, rows);
#pragma unroll
        for (u32 n = 0; n < GROUPS * 4; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0;
        most[0] = most[1] = NEGATIVE_INFINITY;
        total[0] = total[1] = 0;
        // One sequence after another: rows that are left, as bits.
        const u32 lane = thread_id() % 32;
        u32 near = ballot(sequence()[lane] != NOBODY), far = ballot(sequence()[lane + 32] != NOBODY);
#pragma unroll 1
        for (u32 r = 0; near | far; r++) {
            if (!((r < 32 ? near : far) >> r % 32 & 1)) continue;
            const u32 of = sequence()[r];
            attend(of);
            near &= ~ballot(sequence()[lane] == of), far &= ~ballot(sequence()[lane + 32] == of);
        }
        store(first, rows);
    }

    // Lane (g, t) holds elements 8t to 8t + 7 of every 32, of rows g and g + 8.
    HZ_DEVICE void store(u32 first, u32 rows) {
        const u32 lane = thread_id() % 32, t = lane % 4, hd = a.head_dim;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float all = total[r];
            all = f32_add(all, shuffle_xor(all, 1));
            all = f32_add(all, shuffle_xor(all, 2));
            const u32 row = thread_id() / 32 * 16 + lane / 4 + r * 8;
            if (row >= rows) continue;
            u16 *to = a.output + ((u64)(first + row) * a.heads + block_y()) * hd;
#pragma unroll
            for (u32 group = 0; group < GROUPS; group++) {
                u16 out[8];
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    // Plus zero: the sign of a zero may depend on how many tiles were seen.
                    out[i] = f32_to_f16(f32_add(f32_div(sum[group * 4 + i % 4][r * 2 + i / 4], all), 0.0f));
                }
                const u32 at = group * 32 + t * 8;
                if (hd % 8 == 0 && at < hd) {
                    u32x4 v = {out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16, out[4] | (u32)out[5] << 16,
                               out[6] | (u32)out[7] << 16};
                    *(u32x4 *)(to + at) = v;
                } else {
#pragma unroll
                    for (u32 i = 0; i < 8; i++) {
                        if (at + i < hd) to[at + i] = out[i];
                    }
                }
            }
        }
    }
};

// Grid: blocks of ROWS rows, heads. Shared memory: Flash::SHARED.
template <u32 GROUPS> HZ_DEVICE void prefill_attention(const PrefillAttentionArgs &a, u8 *shared) {
    successor_start();
    predecessor_wait();
    Flash<GROUPS> flash(a, shared);
    flash.run();
}

// registers: 168
HZ_KERNEL(128, 3) prefill_attention_32(HZ_ARGS(PrefillAttentionArgs, a)) {
    HZ_SHARED(shared);
    prefill_attention<1>(a, shared);
}
// registers: 168
HZ_KERNEL(128, 3) prefill_attention_64(HZ_ARGS(PrefillAttentionArgs, a)) {
    HZ_SHARED(shared);
    prefill_attention<2>(a, shared);
}
// registers: 255
HZ_KERNEL(128, 2) prefill_attention_128(HZ_ARGS(PrefillAttentionArgs, a)) {
    HZ_SHARED(shared);
    prefill_attention<4>(a, shared);
}
// registers: 255
HZ_KERNEL(128, 2) prefill_attention_256(HZ_ARGS(PrefillAttentionArgs, a)) {
    HZ_SHARED(shared);
    prefill_attention<8>(a, shared);
}
