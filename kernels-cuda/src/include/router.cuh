// The router: shares of its products by tiles of the residual stream, and the choice of experts.
#pragma once
#include "block.cuh"

// A tile's share of product `e`, or, beyond the products, of the sum of squares. Row j of the tile is `scaled[j * step]`
// (times the norm's weight) and `squares[j * step]`; `router` is [outputs, products].
HZ_DEVICE float router_share(const u16 *router, u32 outputs, u32 products, u32 e, const float *scaled, const float *squares,
                             u32 step) {
    float v = 0;
    if (e < products) {
        u16 w[16];
#pragma unroll
        for (u32 j = 0; j < 16; j++) w[j] = j < outputs ? router[(u64)j * products + e] : (u16)0;
#pragma unroll
        for (u32 j = 0; j < 16; j++) {
            if (j < outputs) v = f32_fma(scaled[j * step], f16_to_f32(w[j]), v);
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < 16; j++) {
            if (j < outputs) v += squares[j * step];
        }
    }
    return v;
}

// Softmax over all experts and the `top_k` largest by falling probability, ties to the lowest id. Logits are
// `totals * inverse`; `probability` is [experts] of shared memory. All threads; the choice is complete after the barrier
// that it ends with.
HZ_DEVICE void choose(const float *totals, float inverse, u32 experts, u32 top_k, float *probability, u32 *ids, float *weights) {
    if (thread_id() < 32) {
        const u32 lane = thread_id();
        float most = NEGATIVE_INFINITY, sum = 0;
        for (u32 e = lane; e < experts; e += 32) most = f32_max(most, f32_mul(totals[e], inverse));
        for (u32 lanes = 16; lanes > 0; lanes /= 2) most = f32_max(most, shuffle_xor(most, lanes));
        for (u32 e = lane; e < experts; e += 32) {
            const float p = f32_exp(f32_mul(totals[e], inverse) - most);
            probability[e] = p;
            sum += p;
        }
        sum = warp_sum(sum);
        for (u32 e = lane; e < experts; e += 32) probability[e] = f32_div(probability[e], sum);
    }
    block_sync();
    // Eight lanes an expert: its rank is the number of experts before it, larger or as large with a lower id.
    const u32 rounds = ceil_div(experts * 8, block_threads());
    for (u32 round = 0; round < rounds; round++) {
        const u32 at = round * block_threads() + thread_id(), e = at / 8;
        const float p = e < experts ? probability[e] : 0.0f;
        u32 rank = 0;
        if (e < experts) {
#pragma unroll 8
            for (u32 other = at % 8; other < experts; other += 8) {
                const float q = probability[other];
                rank += q > p || (q == p && other < e);
            }
        }
        rank += shuffle_xor(rank, 1), rank += shuffle_xor(rank, 2), rank += shuffle_xor(rank, 4);
        if (at % 8 == 0 && e < experts && rank < top_k) ids[rank] = e, weights[rank] = p;
    }
    block_sync();
}
