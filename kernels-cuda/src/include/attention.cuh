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

HZ_DEVICE u16 *cache_row(const AttendArgs &a, u32 sequence, u32 kv_head, u32 value, u32 position) {
    return a.cache + ((((u64)sequence * a.kv_heads + kv_head) * 2 + value) * a.context + position) * a.padded;
}

HZ_DEVICE void unpack8(u32x4 v, float (&x)[8]) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[2 * i] = f16_to_f32((u16)w[i]), x[2 * i + 1] = f16_to_f32((u16)(w[i] >> 16));
}

// The sum of squares of `n` values, this thread's share. n % 4 == 0 takes 16 bytes a load.
HZ_DEVICE float squares_of(const float *from, u32 n) {
    float sum = 0;
    if (n % 4 == 0) {
#pragma unroll 2
        for (u32 i = thread_id() * 4; i < n; i += block_threads() * 4) {
            const u32x4 v = load_shared_x4(from + i);
            sum = f32_fma(f32_from_bits(v.x), f32_from_bits(v.x), sum);
            sum = f32_fma(f32_from_bits(v.y), f32_from_bits(v.y), sum);
            sum = f32_fma(f32_from_bits(v.z), f32_from_bits(v.z), sum);
            sum = f32_fma(f32_from_bits(v.w), f32_from_bits(v.w), sum);
        }
    } else {
        for (u32 i = thread_id(); i < n; i += block_threads()) {
            const float v = load_shared_f32(from + i);
            sum = f32_fma(v, v, sum);
        }
    }
    return sum;
}

// 0: query, 1: key, 2: value, 3: nothing.
HZ_DEVICE u32 kind_of(u32 job, u32 padded) { return (job >= padded) + (job >= 2 * padded) + (job >= 3 * padded); }

// Query, key and value of one head, ready for scores: [query, key, value][padded] as FP32 that holds FP16 values. Keys and
// values only if `fresh`. All operands are on their way before the sums of the norm are known. All threads.
// `room` is two floats a warp. JOBS elements a thread.
template <u32 JOBS>
HZ_DEVICE void prepare_all(const AttendArgs &a, const float *qkv, u32 head, u32 kv_head, u32 position, bool fresh, float *to,
                           float *room) {
    const u32 hd = a.head_dim, half = hd / 2;
    const float *queries = qkv, *keys = qkv + a.heads * hd, *values = keys + a.kv_heads * hd;
    float own[JOBS], pair[JOBS], own_norm[JOBS], pair_norm[JOBS];
    f32x2 turn[JOBS];
#pragma unroll
    for (u32 j = 0; j < JOBS; j++) {
        const u32 job = thread_id() + j * block_threads(), kind = kind_of(job, a.padded), i = job - kind * a.padded;
        own[j] = pair[j] = 0, own_norm[j] = pair_norm[j] = 1, turn[j] = {1, 0};
        if (kind > (fresh ? 2u : 0u) || i >= hd) continue;
        const u32 other = i < half ? i + half : i - half, of = kind ? kv_head : head;
        const float *from = (kind == 0 ? queries : kind == 1 ? keys : values) + of * hd;
        own[j] = load_shared_f32(from + i);
        if (kind == 2) continue;
        pair[j] = load_shared_f32(from + other);
        turn[j] = a.rotary[(u64)position * half + (i < half ? i : other)];
        if (i < half) turn[j].y = -turn[j].y;
        if (a.norm != NORM_NONE) {
            const u16 *norm = (kind ? a.k_norm : a.q_norm) + (a.norm == NORM_ALL_HEADS ? of * hd : 0);
            own_norm[j] = f16_to_f32(norm[i]), pair_norm[j] = f16_to_f32(norm[other]);
        }
    }
    float inverse[2] = {1, 1};
    if (a.norm != NORM_NONE) {
        const bool all = a.norm == NORM_ALL_HEADS;
        const u32 nq = all ? a.heads * hd : hd, nk = all ? a.kv_heads * hd : hd;
        float q = squares_of(all ? queries : queries + head * hd, nq);
        float k = fresh ? squares_of(all ? keys : keys + kv_head * hd, nk) : 0.0f;
        q = warp_sum(q), k = warp_sum(k);
        block_sync();
        if (thread_id() % 32 == 0) room[thread_id() / 32 * 2] = q, room[thread_id() / 32 * 2 + 1] = k;
        block_sync();
        q = k = 0;
        for (u32 w = 0; w < block_threads() / 32; w++) q += room[w * 2], k += room[w * 2 + 1];
        inverse[0] = inverse_rms(q, nq, a.eps), inverse[1] = inverse_rms(k, nk, a.eps);
    }
#pragma unroll
    for (u32 j = 0; j < JOBS; j++) {
        const u32 job = thread_id() + j * block_threads(), kind = kind_of(job, a.padded);
        if (kind > (fresh ? 2u : 0u)) continue;
        float v = own[j], w = pair[j];
        if (kind < 2 && a.norm != NORM_NONE) {
            const float by = kind ? inverse[1] : inverse[0];
            v = f32_mul(f32_mul(v, by), own_norm[j]), w = f32_mul(f32_mul(w, by), pair_norm[j]);
        }
        if (a.clip > 0) v = f32_min(f32_max(v, -a.clip), a.clip), w = f32_min(f32_max(w, -a.clip), a.clip);
        if (kind < 2) v = f32_add(f32_mul(v, turn[j].x), f32_mul(w, turn[j].y));
        to[job] = f16_to_f32(f32_to_f16(v));
    }
    block_sync();
}

// The positions of a split: at most `most` splits of at least `least` positions. Empty beyond the last.
struct Positions {
    u32 from, to, end, splits;
};
HZ_DEVICE Positions split_positions(u32 position, u32 window, u32 split, u32 most, u32 least) {
    Positions p;
    p.end = position + 1;
    const u32 first = window && p.end > window ? p.end - window : 0, seen = p.end - first;
    // Short sequences take one split, and no division.
    u32 chunk = least;
    p.splits = 1;
    if (seen > least) {
        chunk = max_u32(least, ceil_div(ceil_div(seen, most), 32) * 32);
        p.splits = ceil_div(seen, chunk);
    }
    p.from = min_u32(first + split * chunk, p.end), p.to = min_u32(p.from + chunk, p.end);
    return p;
}

// One query head of row `r` over one split of the positions that the row sees: at most SPLITS splits of at least LEAST
// positions. The split depends on that number alone. LANES lanes share a position, eight elements each, and have UNROLL
// positions in flight; the last block of
// a head to arrive merges the splits in order. Nothing to do beyond the last split.
// Shared memory in floats: query, key and value [padded], two floats a warp, four words, then (padded + 2) a warp.
template <u32 LANES, u32 WARPS, u32 SPLITS, u32 LEAST, u32 UNROLL = 4>
HZ_DEVICE void attend_head(const AttendArgs &a, u32 head, u32 split, u32 r, u8 *shared) {
    constexpr u32 GROUPS = WARPS * 32 / LANES, JOBS = (3 * LANES * 8 + WARPS * 32 - 1) / (WARPS * 32);
    float *query = (float *)shared, *key = query + a.padded, *value = key + a.padded, *room = value + a.padded;
    u32 *word = (u32 *)(room + 2 * WARPS);
    float *merged = (float *)(word + 4);
    const u32 kv_head = head / (a.heads / a.kv_heads);
    const Row row = a.rows[r];
    const Positions p = split_positions(row.position, a.window, split, SPLITS, LEAST);
    if (split >= p.splits) return;
    const u32 from = p.from, to = p.to, end = p.end, splits = p.splits;
    const bool fresh = !a.appended && to == end;
    const u32 lane = thread_id() % LANES, group = thread_id() / LANES;
    const bool active = lane * 8 < a.padded;
    const u16 *keys = cache_row(a, row.sequence, kv_head, 0, 0), *values = cache_row(a, row.sequence, kv_head, 1, 0);

    // Positions of a round, from the cache; the new one comes from shared memory later.
    u32x4 k[UNROLL], v[UNROLL];
    const auto load = [&](u32 base) {
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            const u32 position = base + u * GROUPS + group;
            k[u] = v[u] = {0, 0, 0, 0};
            if (active && position < to && !(fresh && position + 1 == end)) {
                k[u] = load_cache_x4(keys + (u64)position * a.padded + lane * 8);
                v[u] = load_cache_x4(values + (u64)position * a.padded + lane * 8);
            }
        }
    };
    load(from);
    const float *qkv = a.qkv + (u64)r * (a.heads + 2 * a.kv_heads) * a.head_dim;
    prepare_all<JOBS>(a, qkv, head, kv_head, row.position, fresh, query, room);
    if (fresh && head % (a.heads / a.kv_heads) == 0) {
        for (u32 i = thread_id(); i < a.padded; i += block_threads()) {
            cache_row(a, row.sequence, kv_head, 0, row.position)[i] = f32_to_f16(key[i]);
            cache_row(a, row.sequence, kv_head, 1, row.position)[i] = f32_to_f16(value[i]);
        }
    }

    float q[8] = {0, 0, 0, 0, 0, 0, 0, 0}, sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (active) {
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = query[lane * 8 + i];
    }
    float most = NEGATIVE_INFINITY, total = 0;
    // All lanes of a warp take the same number of rounds: shuffles are theirs together.
    for (u32 base = from; base < to; base += GROUPS * UNROLL) {
        float score[UNROLL];
        if (base != from) load(base);
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            if (active && fresh && base + u * GROUPS + group + 1 == end) {
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
#pragma unroll
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
    // The groups of a warp, by halves; then the warps, in order.
#pragma unroll
    for (u32 lanes = LANES; lanes < 32; lanes *= 2) {
        const float other = shuffle_xor(most, lanes), peak = f32_max(most, other);
        const float mine = peak > NEGATIVE_INFINITY ? f32_exp(most - peak) : 0.0f;
        const float theirs = peak > NEGATIVE_INFINITY ? f32_exp(other - peak) : 0.0f;
        total = f32_fma(shuffle_xor(total, lanes), theirs, f32_mul(total, mine));
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = f32_fma(shuffle_xor(sum[i], lanes), theirs, f32_mul(sum[i], mine));
        most = peak;
    }
    if (thread_id() % 32 < LANES && active) {
        float *one = merged + thread_id() / 32 * (a.padded + 2);
        if (lane == 0) one[0] = most, one[1] = total;
#pragma unroll
        for (int i = 0; i < 8; i++) one[2 + lane * 8 + i] = sum[i];
    }
    block_sync();

    u16 *output = a.output + (u64)(r * a.heads + head) * a.head_dim;
    float *partial = a.partials + ((u64)(r * a.heads + head) * SPLITS) * (a.padded + 2);
    const bool alone = splits == 1;
    for (u32 i = thread_id(); i < a.padded; i += block_threads()) {
        float peak = NEGATIVE_INFINITY, weight = 0, y = 0;
#pragma unroll 4
        for (u32 w = 0; w < WARPS; w++) peak = f32_max(peak, merged[w * (a.padded + 2)]);
#pragma unroll 4
        for (u32 w = 0; w < WARPS; w++) {
            const float *one = merged + w * (a.padded + 2), factor = f32_exp(one[0] - peak);
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
#pragma unroll 4
    for (u32 s = 0; s < splits; s++) top = f32_max(top, load_shared_f32(partial + s * (a.padded + 2)));
    for (u32 i = thread_id(); i < a.head_dim; i += block_threads()) {
        float weight = 0, y = 0;
#pragma unroll 4
        for (u32 s = 0; s < splits; s++) {
            const float *one = partial + s * (a.padded + 2), factor = f32_exp(load_shared_f32(one) - top);
            weight = f32_fma(load_shared_f32(one + 1), factor, weight);
            y = f32_fma(load_shared_f32(one + 2 + i), factor, y);
        }
        output[i] = f32_to_f16(f32_div(y, weight));
    }
}
