// Matrix products of a few rows: y = W x + b with x the normed residual stream (queries, keys and values) or plain FP16
// rows; and pairs of rows with the gate between them (the shared expert and dense feed-forwards).
//
// A block of eight warps takes a tile at a time, an eighth of its columns a warp. Grid: tiles by groups of eight rows.
#include "block.cuh"

static constexpr u32 WARPS = 8;

struct NormLinearArgs {
    const u8 *weights;
    const float *hidden;  // [rows, columns]
    const u16 *norm;      // [columns]
    const u16 *bias;      // [outputs], or null
    float *output;        // [rows, outputs]
    u32 rows, columns, outputs;
    float eps;
};

// Shared memory: activations, then 128 floats a warp, then a float a warp.
template <int ENC> HZ_DEVICE void norm_linear(const NormLinearArgs &a, u8 *shared) {
    const u32 first = block_y() * TOKENS, tokens = a.rows - first < TOKENS ? a.rows - first : TOKENS;
    const u32 stride = activation_stride(a.columns), warp = thread_id() / 32;
    float *sums = (float *)(shared + tokens * stride), *room = sums + WARPS * 128;
    u32 from, to;
    share_spans(a.columns, 32, warp, WARPS, from, to);
    TileShare<ENC, Stream> share;
    share.prefetch(a.weights + (u64)block_x() * tile_bytes<ENC>(a.columns, 32), from, to);
    successor_start();
    predecessor_wait();
    load_normed(shared, a.hidden, a.norm, a.eps, first, tokens, a.columns, room);
    block_sync();
    float sum[4] = {0, 0, 0, 0};
    share.run(shared, stride, tokens, a.columns, 32, sum);
    keep_sums(sums, sum);
    block_sync();
    const u32 row = thread_id() / TOKENS, token = thread_id() % TOKENS, output = block_x() * 16 + row;
    if (row < 16 && token < tokens && output < a.outputs) {
        float y = add_shares(sums, 0, WARPS, row, token);
        if (a.bias) y += f16_to_f32(a.bias[output]);
        a.output[(u64)(first + token) * a.outputs + output] = y;
    }
}

// registers: 128
HZ_KERNEL(256, 2) norm_linear_f16(HZ_ARGS(NormLinearArgs, a)) {
    HZ_SHARED(shared);
    norm_linear<F16>(a, shared);
}
// registers: 128
HZ_KERNEL(256, 2) norm_linear_q8(HZ_ARGS(NormLinearArgs, a)) {
    HZ_SHARED(shared);
    norm_linear<Q8>(a, shared);
}

struct LinearArgs {
    const u8 *weights;
    const u16 *input;  // [rows, columns]
    void *output;      // f32 [rows, outputs]; of pairs, f16 [rows, outputs]
    u32 rows, columns, outputs;
    u32 unused;
};

template <int ENC, bool PAIRS> HZ_DEVICE void linear(const LinearArgs &a, u8 *shared) {
    const u32 first = block_y() * TOKENS, tokens = a.rows - first < TOKENS ? a.rows - first : TOKENS;
    const u32 stride = activation_stride(a.columns), warp = thread_id() / 32;
    float *sums = (float *)(shared + tokens * stride);
    u32 from, to;
    share_spans(a.columns, 32, warp, WARPS, from, to);
    TileShare<ENC, Stream> share;
    share.prefetch(a.weights + (u64)block_x() * tile_bytes<ENC>(a.columns, 32), from, to);
    successor_start();
    predecessor_wait();
    load_activations(shared, a.input, first, tokens, a.columns);
    block_sync();
    float sum[4] = {0, 0, 0, 0};
    share.run(shared, stride, tokens, a.columns, 32, sum);
    keep_sums(sums, sum);
    block_sync();
    const u32 row = thread_id() / TOKENS, token = thread_id() % TOKENS;
    if (token >= tokens) return;
    if (PAIRS) {
        if (row < 8) {
            const float gate = add_shares(sums, 0, WARPS, row, token), up = add_shares(sums, 0, WARPS, row + 8, token);
            ((u16 *)a.output)[(u64)(first + token) * a.outputs + block_x() * 8 + row] = f32_to_f16(silu(gate) * up);
        }
    } else if (row < 16 && block_x() * 16 + row < a.outputs) {
        ((float *)a.output)[(u64)(first + token) * a.outputs + block_x() * 16 + row] =
            add_shares(sums, 0, WARPS, row, token);
    }
}

// registers: 128
HZ_KERNEL(256, 2) linear_f16(HZ_ARGS(LinearArgs, a)) {
    HZ_SHARED(shared);
    linear<F16, false>(a, shared);
}
// registers: 128
HZ_KERNEL(256, 2) linear_q8(HZ_ARGS(LinearArgs, a)) {
    HZ_SHARED(shared);
    linear<Q8, false>(a, shared);
}
// registers: 128
HZ_KERNEL(256, 2) pair_linear_f16(HZ_ARGS(LinearArgs, a)) {
    HZ_SHARED(shared);
    linear<F16, true>(a, shared);
}
// registers: 128
HZ_KERNEL(256, 2) pair_linear_q8(HZ_ARGS(LinearArgs, a)) {
    HZ_SHARED(shared);
    linear<Q8, true>(a, shared);
}
