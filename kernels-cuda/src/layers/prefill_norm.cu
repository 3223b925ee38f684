// Prefill: the RMS norm before a product, and what stands between the QKV product and attention.
#include "block.cuh"

struct PrefillNormArgs {
    const float *hidden;  // [.., columns]
    const u32 *which;     // [rows]: row of `hidden` of each, or null: its own
    const u16 *norm;      // [columns]
    u16 *output;          // [rows, columns]
    u32 rows, columns;
    float eps;
    u32 unused;
};

static constexpr u32 NORM_WARPS = 4;

// The sum of squares of a row, by a warp; the same on every lane. n % 4 == 0.
HZ_DEVICE float row_squares(const float *row, u32 n) {
    const u32 lane = thread_id() % 32;
    float s[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (u32 i = lane * 4; i < n; i += 128) {
        const u32x4 v = load_shared_x4(row + i);
        const float x = f32_from_bits(v.x), y = f32_from_bits(v.y), z = f32_from_bits(v.z), w = f32_from_bits(v.w);
        s[0] = f32_fma(x, x, s[0]), s[1] = f32_fma(y, y, s[1]);
        s[2] = f32_fma(z, z, s[2]), s[3] = f32_fma(w, w, s[3]);
    }
    return warp_sum((s[0] + s[2]) + (s[1] + s[3]));
}

// A warp a row. Grid: blocks of NORM_WARPS rows.
// registers: 64
HZ_KERNEL(NORM_WARPS * 32, 8) prefill_norm(HZ_ARGS(PrefillNormArgs, a)) {
    const u32 r = block_x() * NORM_WARPS + thread_id() / 32, lane = thread_id() % 32;
    successor_start();
    predecessor_wait();
    if (r >= a.rows) return;
    const float *row = a.hidden + (u64)(a.which ? a.which[r] : r) * a.columns;
    const float inverse = inverse_rms(row_squares(row, a.columns), a.columns, a.eps);
#pragma unroll 4
    for (u32 i = lane * 4; i < a.columns; i += 128) {
        const u32x4 v = load_shared_x4(row + i);
        const u32x2 w = *(const u32x2 *)(a.norm + i);
        u32x2 out;
        out.x = f16x2(f32_mul(f32_mul(f32_from_bits(v.x), inverse), f16_to_f32((u16)w.x)),
                      f32_mul(f32_mul(f32_from_bits(v.y), inverse), f16_to_f32((u16)(w.x >> 16))));
        out.y = f16x2(f32_mul(f32_mul(f32_from_bits(v.z), inverse), f16_to_f32((u16)w.y)),
                      f32_mul(f32_mul(f32_from_bits(v.w), inverse), f16_to_f32((u16)(w.y >> 16))));
        *(u32x2 *)(a.output + (u64)r * a.columns + i) = out;
    }
}

struct PrefillQkvArgs {
    const Row *rows;
    const float *qkv;     // [rows, (heads + 2 kv_heads) * head_dim]
    const u16 *q_norm;    // [heads * head_dim] or [head_dim], or null
    const u16 *k_norm;    // [kv_heads * head_dim] or [head_dim], or null
    const f32x2 *rotary;  // [context, head_dim / 2] (cosine, sine)
    u16 *cache;           // this layer's: [sequences, kv_heads, keys then values, context, padded]
    u16 *queries;         // [rows, heads, padded]
    u32 heads, kv_heads, head_dim, padded, context;
    u32 norm;             // QkNorm of attend.cu: 0 none, 1 all heads together, 2 each head
    float eps, clip;      // clip 0: none
};

static constexpr u32 QKV_WARPS = 8;

HZ_DEVICE float head_squares(const float *from, u32 n, u32 first, u32 step) {
    float squares = 0;
    for (u32 i = first; i < n; i += step) {
        const float v = load_shared_f32(from + i);
        squares = f32_fma(v, v, squares);
    }
    return squares;
}

HZ_DEVICE float clipped(float v, float clip) { return clip > 0 ? f32_min(f32_max(v, -clip), clip) : v; }

// Norm, clip, rotation and narrowing of queries and keys, the latter with the values into the cache. A warp takes a head
// at a time. Grid: rows. Shared memory: a float a warp.
// registers: 64
HZ_KERNEL(QKV_WARPS * 32, 4) prefill_qkv(HZ_ARGS(PrefillQkvArgs, a)) {
    HZ_SHARED(shared);
    float *room = (float *)shared;
    const u32 warp = thread_id() / 32, lane = thread_id() % 32, hd = a.head_dim, half = hd / 2;
    successor_start();
    predecessor_wait();
    const Row row = a.rows[block_x()];
    const float *qkv = a.qkv + (u64)block_x() * (a.heads + 2 * a.kv_heads) * hd;
    float inverse_q = 1, inverse_k = 1;
    if (a.norm == 1) {
        const u32 nq = a.heads * hd, nk = a.kv_heads * hd;
        inverse_q = inverse_rms(block_sum(head_squares(qkv, nq, thread_id(), QKV_WARPS * 32), room), nq, a.eps);
        inverse_k = inverse_rms(block_sum(head_squares(qkv + nq, nk, thread_id(), QKV_WARPS * 32), room), nk, a.eps);
    }
    for (u32 head = warp; head < a.heads + 2 * a.kv_heads; head += QKV_WARPS) {
        const float *from = qkv + head * hd;
        const bool query = head < a.heads, value = head >= a.heads + a.kv_heads;
        const u32 own = query ? head : value ? head - a.heads - a.kv_heads : head - a.heads;
        u16 *to = query ? a.queries + ((u64)block_x() * a.heads + own) * a.padded
                        : a.cache + ((((u64)row.sequence * a.kv_heads + own) * 2 + value) * a.context + row.position) * a.padded;
        float inverse = query ? inverse_q : inverse_k;
        if (a.norm == 2 && !value) inverse = inverse_rms(warp_sum(head_squares(from, hd, lane, 32)), hd, a.eps);
        const u16 *norm = query ? a.q_norm : a.k_norm;
        for (u32 i = lane; i < half; i += 32) {
            float x = load_shared_f32(from + i), y = load_shared_f32(from + half + i);
            if (a.norm && !value) {
                const u32 at = a.norm == 1 ? own * hd + i : i;
                x = f32_mul(f32_mul(x, inverse), f16_to_f32(norm[at]));
                y = f32_mul(f32_mul(y, inverse), f16_to_f32(norm[at + half]));
            }
            x = clipped(x, a.clip), y = clipped(y, a.clip);
            if (!value) {
                const f32x2 turn = a.rotary[(u64)row.position * half + i];
                const float turned = f32_add(f32_mul(x, turn.x), -f32_mul(y, turn.y));
                y = f32_add(f32_mul(y, turn.x), f32_mul(x, turn.y));
                x = turned;
            }
            to[i] = f32_to_f16(x), to[i + half] = f32_to_f16(y);
        }
        for (u32 i = hd + lane; i < a.padded; i += 32) to[i] = 0;
    }
}
