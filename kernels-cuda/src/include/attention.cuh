// Attention of single rows: norm, clip and rotation of queries and keys, scores, softmax and the weighted sum of values.
#pragma once
#include "block.cuh"

enum QkNorm { NORM_NONE = 0, NORM_ALL_HEADS = 1, NORM_PER_HEAD = 2 };

struct AttendArgs {
    const Row *rows;
    const float *qkv;         // [rows, (heads + 2 kv_heads) * head_dim]
    const u16 *q_norm;        // [heads * head_dim] or [head_dim], or null
    const u16 *k_norm;        // [kv_heads * head_dim] or [head_dim], or null
    const f32x2 *rotary;      // [context, head_dim / 2] (cosine, sine)
    u16 *cache;               // this layer's: [sequences, kv_heads, keys then values, context, padded]
    float *partials;          // [rows, heads, splits, padded + 2]
    u32 *counters;            // [rows, heads], zero
    u16 *output;              // [rows, heads * head_dim]
    u32 heads, kv_heads, head_dim, padded, context, window;  // window 0: all
    u32 norm;                 // QkNorm
    u32 appended;             // keys and values of the step's rows are in the cache
    float eps, clip, scale;   // clip 0: none
    u32 unused;
};

// One head of queries or keys, ready for scores, into `to` [padded] as FP32 that holds FP16 values. All threads.
HZ_DEVICE void prepare_head(const AttendArgs &a, const float *all, u32 heads, u32 head, const u16 *norm, u32 position,
                            float *to, float *room) {
    const u32 hd = a.head_dim, half = hd / 2;
    const float *own = all + head * hd;
    float inverse = 1;
    if (a.norm != NORM_NONE) {
        const float *from = a.norm == NORM_ALL_HEADS ? all : own;
        const u32 n = a.norm == NORM_ALL_HEADS ? heads * hd : hd;
        float squares = 0;
        for (u32 i = thread_id(); i < n; i += block_threads()) {
            const float v = load_shared_f32(from + i);
            squares = f32_fma(v, v, squares);
        }
        inverse = inverse_rms(block_sum(squares, room), n, a.eps);
    }
    for (u32 i = thread_id(); i < a.padded; i += block_threads()) {
        float v[2] = {0, 0};
        if (i < hd) {
            const u32 pair[2] = {i, i < half ? i + half : i - half};
            for (u32 j = 0; j < 2; j++) {
                v[j] = load_shared_f32(own + pair[j]);
                if (a.norm != NORM_NONE) {
                    const u32 at = a.norm == NORM_ALL_HEADS ? head * hd + pair[j] : pair[j];
                    v[j] = f32_mul(f32_mul(v[j], inverse), f16_to_f32(norm[at]));
                }
                if (a.clip > 0) v[j] = f32_min(f32_max(v[j], -a.clip), a.clip);
            }
            const f32x2 turn = a.rotary[(u64)position * half + (i < half ? i : i - half)];
            const float sine = i < half ? -turn.y : turn.y;
            v[0] = f32_add(f32_mul(v[0], turn.x), f32_mul(v[1], sine));
        }
        to[i] = f16_to_f32(f32_to_f16(v[0]));
    }
}

HZ_DEVICE u16 *cache_row(const AttendArgs &a, u32 sequence, u32 kv_head, u32 value, u32 position) {
    return a.cache + ((((u64)sequence * a.kv_heads + kv_head) * 2 + value) * a.context + position) * a.padded;
}

// The new value of a head, clipped and narrowed.
HZ_DEVICE float new_value(const AttendArgs &a, const float *values, u32 kv_head, u32 i) {
    if (i >= a.head_dim) return 0;
    float v = load_shared_f32(values + kv_head * a.head_dim + i);
    if (a.clip > 0) v = f32_min(f32_max(v, -a.clip), a.clip);
    return f16_to_f32(f32_to_f16(v));
}

HZ_DEVICE void unpack8(u32x4 v, float (&x)[8]) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[2 * i] = f16_to_f32((u16)w[i]), x[2 * i + 1] = f16_to_f32((u16)(w[i] >> 16));
}

// One query head of row `r` over one split of the positions that the row sees: at most SPLITS splits of at least LEAST
// positions. The split depends on that number alone. LANES lanes share a position, eight elements each; the last block of
// a head to arrive merges the splits in order. Nothing to do beyond the last split.
// Shared memory in floats: query, key and value [padded], a float a warp, four words, then (padded + 2) for each of the
// WARPS * 32 / LANES groups.
template <u32 LANES, u32 WARPS, u32 SPLITS, u32 LEAST>
HZ_DEVICE void attend_head(const AttendArgs &a, u32 head, u32 split, u32 r, u8 *shared) {
    constexpr u32 GROUPS = WARPS * 32 / LANES, UNROLL = 4;
    float *query = (float *)shared, *key = query + a.padded, *value = key + a.padded, *room = value + a.padded;
    u32 *word = (u32 *)(room + WARPS);
    float *groups = (float *)(word + 4);
    const u32 kv_head = head / (a.heads / a.kv_heads);
    const Row row = a.rows[r];
    const u32 end = row.position + 1, first = a.window && end > a.window ? end - a.window : 0, seen = end - first;
    const u32 chunk = max_u32(LEAST, ceil_div(ceil_div(seen, SPLITS), 32) * 32);
    const u32 splits = ceil_div(seen, chunk);
    if (split >= splits) return;
    const u32 from = first + split * chunk, to = from + chunk < end ? from + chunk : end;

    const float *qkv = a.qkv + (u64)r * (a.heads + 2 * a.kv_heads) * a.head_dim;
    prepare_head(a, qkv, a.heads, head, a.q_norm, row.position, query, room);
    const bool fresh = !a.appended && to == end;
    if (fresh) {
        const float *keys = qkv + a.heads * a.head_dim, *values = keys + a.kv_heads * a.head_dim;
        prepare_head(a, keys, a.kv_heads, kv_head, a.k_norm, row.position, key, room);
        for (u32 i = thread_id(); i < a.padded; i += block_threads()) value[i] = new_value(a, values, kv_head, i);
        block_sync();
        if (head % (a.heads / a.kv_heads) == 0) {
            for (u32 i = thread_id(); i < a.padded; i += block_threads()) {
                cache_row(a, row.sequence, kv_head, 0, row.position)[i] = f32_to_f16(key[i]);
                cache_row(a, row.sequence, kv_head, 1, row.position)[i] = f32_to_f16(value[i]);
            }
        }
    }
    block_sync();

    const u32 lane = thread_id() % LANES, group = thread_id() / LANES;
    const bool active = lane * 8 < a.padded;
    float q[8] = {0, 0, 0, 0, 0, 0, 0, 0}, sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (active) {
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = query[lane * 8 + i];
    }
    const u16 *keys = cache_row(a, row.sequence, kv_head, 0, 0), *values = cache_row(a, row.sequence, kv_head, 1, 0);
    float most = NEGATIVE_INFINITY, total = 0;
    // All lanes of a warp take the same number of rounds: shuffles are theirs together.
    for (u32 base = from; base < to; base += GROUPS * UNROLL) {
        u32x4 k[UNROLL], v[UNROLL];
        float score[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            const u32 position = base + u * GROUPS + group;
            k[u] = v[u] = {0, 0, 0, 0};
            if (active && position < to && !(fresh && position + 1 == end)) {
                k[u] = *(const u32x4 *)(keys + (u64)position * a.padded + lane * 8);
                v[u] = *(const u32x4 *)(values + (u64)position * a.padded + lane * 8);
            } else if (active && position < to) {
                const float *nk = key + lane * 8, *nv = value + lane * 8;
                k[u] = {f16x2(nk[0], nk[1]), f16x2(nk[2], nk[3]), f16x2(nk[4], nk[5]), f16x2(nk[6], nk[7])};
                v[u] = {f16x2(nv[0], nv[1]), f16x2(nv[2], nv[3]), f16x2(nv[4], nv[5]), f16x2(nv[6], nv[7])};
            }
        }
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            float x[8], s = 0;
            unpack8(k[u], x);
#pragma unroll
            for (int i = 0; i < 8; i++) s = f32_fma(q[i], x[i], s);
            for (u32 lanes = LANES / 2; lanes > 0; lanes /= 2) s += shuffle_xor(s, lanes);
            score[u] = base + u * GROUPS + group < to ? f32_mul(s, a.scale) : NEGATIVE_INFINITY;
        }
        float next = most;
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) next = f32_max(next, score[u]);
        // A group that has no position yet keeps its empty sums.
        if (next > NEGATIVE_INFINITY) {
            const float keep = f32_exp(most - next);
            total = f32_mul(total, keep);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] = f32_mul(sum[i], keep);
#pragma unroll
            for (u32 u = 0; u < UNROLL; u++) {
                const float p = f32_exp(score[u] - next);
                float x[8];
                unpack8(v[u], x);
                total += p;
#pragma unroll
                for (int i = 0; i < 8; i++) sum[i] = f32_fma(p, x[i], sum[i]);
            }
            most = next;
        }
    }
    float *mine = groups + group * (a.padded + 2);
    if (active) {
        if (lane == 0) mine[0] = most, mine[1] = total;
#pragma unroll
        for (int i = 0; i < 8; i++) mine[2 + lane * 8 + i] = sum[i];
    }
    block_sync();

    u16 *output = a.output + (u64)(r * a.heads + head) * a.head_dim;
    float *partial = a.partials + ((u64)(r * a.heads + head) * SPLITS) * (a.padded + 2);
    const bool alone = splits == 1;
    float peak = NEGATIVE_INFINITY;
    for (u32 g = 0; g < GROUPS; g++) peak = f32_max(peak, groups[g * (a.padded + 2)]);
    for (u32 i = thread_id(); i < a.padded; i += block_threads()) {
        float weight = 0, y = 0;
        for (u32 g = 0; g < GROUPS; g++) {
            const float *one = groups + g * (a.padded + 2), factor = f32_exp(one[0] - peak);
            weight = f32_fma(one[1], factor, weight);
            y = f32_fma(one[2 + i], factor, y);
        }
        if (alone) {
            if (i < a.head_dim) output[i] = f32_to_f16(f32_div(y, weight));
        } else {
            float *to_split = partial + split * (a.padded + 2);
            if (i == 0) to_split[0] = peak, to_split[1] = weight;
            to_split[2 + i] = y;
        }
    }
    if (alone || !last_to_arrive(a.counters + r * a.heads + head, splits, word)) return;
    float top = NEGATIVE_INFINITY;
    for (u32 s = 0; s < splits; s++) top = f32_max(top, load_shared_f32(partial + s * (a.padded + 2)));
    for (u32 i = thread_id(); i < a.head_dim; i += block_threads()) {
        float weight = 0, y = 0;
        for (u32 s = 0; s < splits; s++) {
            const float *one = partial + s * (a.padded + 2), factor = f32_exp(load_shared_f32(one) - top);
            weight = f32_fma(load_shared_f32(one + 1), factor, weight);
            y = f32_fma(load_shared_f32(one + 2 + i), factor, y);
        }
        output[i] = f32_to_f16(f32_div(y, weight));
    }
}

