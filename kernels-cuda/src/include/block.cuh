// What the kernels of a decode step share: rows, sums over a block in a fixed order, activations in shared memory.
#pragma once
#include "tile.cuh"

// A token of a step, as the host describes it.
struct Row {
    u32 token, position, sequence, flags;
};
// Instead of a token: what the row with this index chose in the step before.
static constexpr u32 CHOSEN_TOKEN = 0xffffffffu;

#define NEGATIVE_INFINITY f32_from_bits(0xff800000u)

// Tokens that one product takes.
static constexpr u32 TOKENS = 8;

HZ_DEVICE float warp_sum(float v) {
    for (u32 lanes = 16; lanes > 0; lanes /= 2) v += shuffle_xor(v, lanes);
    return v;
}

// The sum of `v` over the block, on every thread: warps by halves, then warps in order. `room` is one float a warp.
HZ_DEVICE float block_sum(float v, float *room) {
    v = warp_sum(v);
    block_sync();
    if (thread_id() % 32 == 0) room[thread_id() / 32] = v;
    block_sync();
    float sum = 0;
    for (u32 w = 0; w < block_threads() / 32; w++) sum += room[w];
    return sum;
}

HZ_DEVICE float inverse_rms(float squares, u32 columns, float eps) {
    return f32_inverse_sqrt(f32_add(f32_div(squares, (float)columns), eps));
}

HZ_DEVICE float silu(float v) { return f32_div(v, 1.0f + f32_exp(-v)); }
HZ_DEVICE float sigmoid(float v) { return f32_div(1.0f, 1.0f + f32_exp(-v)); }

// Rows [first, first + tokens) of a row-major FP16 matrix into shared memory, for activation_fragment. columns % 8 == 0.
HZ_DEVICE void load_activations(u8 *to, const u16 *from, u32 first, u32 tokens, u32 columns) {
    const u32 stride = activation_stride(columns), words = ceil_div(columns, 64) * 8;
#pragma unroll 4
    for (u32 at = thread_id(); at < tokens * words; at += block_threads()) {
        const u32 n = tokens == 1 ? 0 : at / words, i = at - n * words;
        u32x4 v = {0, 0, 0, 0};
        if (i * 8 < columns) v = load_shared_x4(from + (u64)(first + n) * columns + i * 8);
        *(u32x4 *)(to + n * stride + i * 16) = v;
    }
}

// Four neighbours of the residual stream, normed and narrowed.
HZ_DEVICE u32x2 normed_x4(u32x4 v, u32x2 w, float inverse) {
    return {f16x2(f32_mul(f32_mul(f32_from_bits(v.x), inverse), f16_to_f32((u16)w.x)),
                  f32_mul(f32_mul(f32_from_bits(v.y), inverse), f16_to_f32((u16)(w.x >> 16)))),
            f16x2(f32_mul(f32_mul(f32_from_bits(v.z), inverse), f16_to_f32((u16)w.y)),
                  f32_mul(f32_mul(f32_from_bits(v.w), inverse), f16_to_f32((u16)(w.y >> 16))))};
}

HZ_DEVICE float squares_x4(u32x4 v, float sum) {
    sum = f32_fma(f32_from_bits(v.x), f32_from_bits(v.x), sum);
    sum = f32_fma(f32_from_bits(v.y), f32_from_bits(v.y), sum);
    sum = f32_fma(f32_from_bits(v.z), f32_from_bits(v.z), sum);
    return f32_fma(f32_from_bits(v.w), f32_from_bits(v.w), sum);
}

// Rows of the FP32 residual stream into shared memory, RMS-normed and narrowed once. `room` is one float a warp.
// What a thread reads of a row stays in its registers between the two passes, where it is little.
HZ_DEVICE void load_normed(u8 *to, const float *hidden, const u16 *norm, float eps, u32 first, u32 tokens, u32 columns,
                           float *room) {
    constexpr u32 KEPT = 2;
    const u32 stride = activation_stride(columns), words = ceil_div(columns, 64) * 16, step = block_threads();
    for (u32 n = 0; n < tokens; n++) {
        const float *row = hidden + (u64)(first + n) * columns;
        u32x4 kept[KEPT];
        u32x2 weights[KEPT];
        float squares = 0;
#pragma unroll
        for (u32 k = 0; k < KEPT; k++) {
            const u32 i = thread_id() + k * step;
            kept[k] = {0, 0, 0, 0}, weights[k] = {0, 0};
            if (i * 4 < columns) kept[k] = load_shared_x4(row + i * 4), weights[k] = *(const u32x2 *)(norm + i * 4);
        }
#pragma unroll
        for (u32 k = 0; k < KEPT; k++) squares = squares_x4(kept[k], squares);
        for (u32 i = thread_id() + KEPT * step; i * 4 < columns; i += step) {
            squares = squares_x4(load_shared_x4(row + i * 4), squares);
        }
        const float inverse = inverse_rms(block_sum(squares, room), columns, eps);
#pragma unroll
        for (u32 k = 0; k < KEPT; k++) {
            const u32 i = thread_id() + k * step;
            if (i < words) *(u32x2 *)(to + n * stride + i * 8) = normed_x4(kept[k], weights[k], inverse);
        }
        for (u32 i = thread_id() + KEPT * step; i < words; i += step) {
            u32x2 out = {0, 0};
            if (i * 4 < columns) out = normed_x4(load_shared_x4(row + i * 4), *(const u32x2 *)(norm + i * 4), inverse);
            *(u32x2 *)(to + n * stride + i * 8) = out;
        }
    }
}

// A warp's sums of a tile, where its block can add them: [warp][row of the tile][token].
HZ_DEVICE void keep_sums(float *room, const float (&sum)[4]) {
    const u32 warp = thread_id() / 32, lane = thread_id() % 32, g = lane / 4, t = lane % 4;
    float *mine = room + warp * 128;
    *(f32x2 *)(mine + g * 8 + 2 * t) = {sum[0], sum[1]};
    *(f32x2 *)(mine + (g + 8) * 8 + 2 * t) = {sum[2], sum[3]};
}

// The sum of one element over warps [first, first + count), in order.
HZ_DEVICE float add_shares(const float *room, u32 first, u32 count, u32 row, u32 token) {
    float sum = 0;
    for (u32 w = first; w < first + count; w++) sum += room[w * 128 + row * 8 + token];
    return sum;
}

// Whether this block is the last of `blocks` to arrive; then everything that the others wrote before is visible to it,
// and the counter is ready for the next use. All threads of the block call it; `room` is one word of shared memory.
HZ_DEVICE bool last_to_arrive(u32 *counter, u32 blocks, u32 *room) {
    // The barrier orders the block's writes before the release, and the others' before the reads that follow it.
    block_sync();
    if (thread_id() == 0) {
        const bool last = add_release(counter, 1) + 1 == blocks;
        if (last) store_release(counter, 0);
        *room = last;
    }
    block_sync();
    const bool last = *room != 0;
    // The word may be used for something else from here on.
    block_sync();
    return last;
}

// What orders logits, ties to the lowest token.
// A choice of 0xffffffff: some logit is NaN or +infinity.
HZ_DEVICE u64 order_key(float logit, u32 token) {
    // What no sampler may pass, above everything else: the choice is then NOTHING. -0 is 0.
    if (!(logit < f32_from_bits(0x7f800000u))) return 0xffffffff00000000ull;
    const u32 bits = f32_bits(logit == 0 ? 0.0f : logit);
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return ((u64)ordered << 32) | (0xffffffffu - token);
}

