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
    return f32_div(1.0f, f32_sqrt(f32_add(f32_div(squares, (float)columns), eps)));
}

HZ_DEVICE float silu(float v) { return f32_div(v, 1.0f + f32_exp(-v)); }
HZ_DEVICE float sigmoid(float v) { return f32_div(1.0f, 1.0f + f32_exp(-v)); }

// Rows [first, first + tokens) of a row-major FP16 matrix into shared memory, for activation_fragment. columns % 8 == 0.
HZ_DEVICE void load_activations(u8 *to, const u16 *from, u32 first, u32 tokens, u32 columns) {
    const u32 stride = activation_stride(columns), words = ceil_div(columns, 64) * 8;
    for (u32 n = 0; n < tokens; n++) {
        for (u32 i = thread_id(); i < words; i += block_threads()) {
            u32x4 v = {0, 0, 0, 0};
            if (i * 8 < columns) v = load_shared_x4(from + (u64)(first + n) * columns + i * 8);
            *(u32x4 *)(to + n * stride + i * 16) = v;
        }
    }
}

// The same rows of the FP32 residual stream, RMS-normed and narrowed once. `room` is one float a warp.
HZ_DEVICE void load_normed(u8 *to, const float *hidden, const u16 *norm, float eps, u32 first, u32 tokens, u32 columns,
                           float *room) {
    const u32 stride = activation_stride(columns), words = ceil_div(columns, 64) * 16;
    for (u32 n = 0; n < tokens; n++) {
        const float *row = hidden + (u64)(first + n) * columns;
        float squares = 0;
        for (u32 i = thread_id(); i * 4 < columns; i += block_threads()) {
            const u32x4 v = load_shared_x4(row + i * 4);
            const float x = f32_from_bits(v.x), y = f32_from_bits(v.y), z = f32_from_bits(v.z), w = f32_from_bits(v.w);
            squares = f32_fma(x, x, squares), squares = f32_fma(y, y, squares);
            squares = f32_fma(z, z, squares), squares = f32_fma(w, w, squares);
        }
        const float inverse = inverse_rms(block_sum(squares, room), columns, eps);
        for (u32 i = thread_id(); i < words; i += block_threads()) {
            u32x2 out = {0, 0};
            if (i * 4 < columns) {
                const u32x4 v = load_shared_x4(row + i * 4);
                const u32x2 w = *(const u32x2 *)(norm + i * 4);
                out.x = f16x2(f32_mul(f32_mul(f32_from_bits(v.x), inverse), f16_to_f32((u16)w.x)),
                              f32_mul(f32_mul(f32_from_bits(v.y), inverse), f16_to_f32((u16)(w.x >> 16))));
                out.y = f16x2(f32_mul(f32_mul(f32_from_bits(v.z), inverse), f16_to_f32((u16)w.y)),
                              f32_mul(f32_mul(f32_from_bits(v.w), inverse), f16_to_f32((u16)(w.y >> 16))));
            }
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

