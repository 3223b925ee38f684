// Prefill: RMS norm, router products in FP32, softmax over all experts, the top k, and the shared expert's gate.
//
// A block takes ROUTER_ROWS rows. Its warps share out the columns of every piece of the residual stream and keep sums of
// 64 experts at a time; the sums are added over the warps in order. Then a warp routes a row.
#include "block.cuh"

struct PrefillRouterArgs {
    const float *hidden;  // [rows, width]
    const u16 *norm;      // [width]
    const u16 *router;    // [width, experts + gates]: transposed; the shared expert's gate last
    float *logits;        // [rows, experts]
    u32 *ids;             // [rows, top_k]
    float *chosen;        // [rows, top_k]: their weights
    float *gate;          // [rows]: of the shared expert
    u16 *normed;          // [rows, width]
    u32 rows, width, experts, gates, top_k, renormalize;
    float eps;
    u32 unused;
};

static constexpr u32 ROUTER_ROWS = 4, ROUTER_WARPS = 16, PIECE = 512, SHARE = PIECE / ROUTER_WARPS;

// Normed values of columns [from, from + PIECE) of the block's rows, [PIECE][ROUTER_ROWS], zero beyond the row; all threads.
HZ_DEVICE void stage_normed(const PrefillRouterArgs &a, u32 first, u32 from, const float *inverse, float *to, bool keep) {
    for (u32 i = thread_id(); i < PIECE / 4 * ROUTER_ROWS; i += ROUTER_WARPS * 32) {
        const u32 n = i / (PIECE / 4), at = i % (PIECE / 4) * 4, column = from + at;
        float y[4] = {0, 0, 0, 0};
        if (column < a.width && first + n < a.rows) {
            const u32x4 v = load_shared_x4(a.hidden + (u64)(first + n) * a.width + column);
            const u32x2 w = *(const u32x2 *)(a.norm + column);
            y[0] = f32_mul(f32_mul(f32_from_bits(v.x), inverse[n]), f16_to_f32((u16)w.x));
            y[1] = f32_mul(f32_mul(f32_from_bits(v.y), inverse[n]), f16_to_f32((u16)(w.x >> 16)));
            y[2] = f32_mul(f32_mul(f32_from_bits(v.z), inverse[n]), f16_to_f32((u16)w.y));
            y[3] = f32_mul(f32_mul(f32_from_bits(v.w), inverse[n]), f16_to_f32((u16)(w.y >> 16)));
            if (keep) {
                *(u32x2 *)(a.normed + (u64)(first + n) * a.width + column) = {f16x2(y[0], y[1]), f16x2(y[2], y[3])};
            }
        }
        for (u32 j = 0; j < 4; j++) to[(at + j) * ROUTER_ROWS + n] = y[j];
    }
}

// Adds this warp's columns of a piece to its sums of experts e and e + 32.
HZ_DEVICE void add_piece(const PrefillRouterArgs &a, u32 from, u32 e, const float *staged,
                         float (&sum)[2][ROUTER_ROWS]) {
    const u32 products = a.experts + a.gates, warp = thread_id() / 32;
    const u32 begin = from + warp * SHARE, end = min_u32(begin + SHARE, a.width);
    const u16 *weights = a.router + e;
    const float *x = staged + warp * SHARE * ROUTER_ROWS;
#pragma unroll 8
    for (u32 c = begin; c < end; c++, x += ROUTER_ROWS) {
        const f32x4 v = *(const f32x4 *)x;
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            const float w = e + j * 32 < products ? f16_to_f32(weights[(u64)c * products + j * 32]) : 0.0f;
            sum[j][0] = f32_fma(v.x, w, sum[j][0]);
            sum[j][1] = f32_fma(v.y, w, sum[j][1]);
            sum[j][2] = f32_fma(v.z, w, sum[j][2]);
            sum[j][3] = f32_fma(v.w, w, sum[j][3]);
        }
    }
}

// Ranks a row's probabilities: a warp. `keys` [experts] are probabilities as ordered integers, 0 when taken.
HZ_DEVICE void choose(const PrefillRouterArgs &a, u32 row, u32 *keys) {
    const u32 lane = thread_id() % 32;
    float all = 0;
    for (u32 k = 0; k < a.top_k; k++) {
        u32 best = 0, id = a.experts;
        for (u32 e = lane; e < a.experts; e += 32) {
            if (keys[e] > best) best = keys[e], id = e;
        }
        for (u32 lanes = 16; lanes > 0; lanes /= 2) {
            const u32 other = shuffle_xor(best, lanes), other_id = shuffle_xor(id, lanes);
            if (other > best || (other == best && other_id < id)) best = other, id = other_id;
        }
        const float p = f32_from_bits(best - 1);
        all = f32_add(all, p);
        if (lane == 0) {
            a.ids[(u64)row * a.top_k + k] = id;
            a.chosen[(u64)row * a.top_k + k] = p;
            keys[id] = 0;
        }
        warp_sync();
    }
    if (a.renormalize && lane == 0) {
        for (u32 k = 0; k < a.top_k; k++) {
            float *weight = a.chosen + (u64)row * a.top_k + k;
            *weight = f32_div(*weight, all);
        }
    }
}

// Softmax and choice of a row, by a warp; `logits` [experts + gates] is overwritten.
HZ_DEVICE void route_row(const PrefillRouterArgs &a, u32 row, float *logits) {
    const u32 lane = thread_id() % 32;
    float most = NEGATIVE_INFINITY, sum = 0;
    for (u32 e = lane; e < a.experts; e += 32) most = f32_max(most, logits[e]);
    for (u32 lanes = 16; lanes > 0; lanes /= 2) most = f32_max(most, shuffle_xor(most, lanes));
    for (u32 e = lane; e < a.experts; e += 32) {
        a.logits[(u64)row * a.experts + e] = logits[e];
        logits[e] = f32_exp(logits[e] - most);
        sum += logits[e];
    }
    sum = warp_sum(sum);
    for (u32 e = lane; e < a.experts; e += 32) {
        const u32 bits = f32_bits(f32_div(logits[e], sum));
        ((u32 *)logits)[e] = bits == 0xffffffffu ? bits : bits + 1;
    }
    if (a.gates && lane == 0) a.gate[row] = sigmoid(logits[a.experts]);
    warp_sync();
    choose(a, row, (u32 *)logits);
}

// Grid: blocks of ROUTER_ROWS rows. Shared memory in floats: a piece [PIECE][ROUTER_ROWS], inverse norms [ROUTER_ROWS],
// sums by warp [ROUTER_WARPS][64][ROUTER_ROWS], logits [ROUTER_ROWS][experts + gates].
// registers: 64
HZ_KERNEL(ROUTER_WARPS * 32, 2) prefill_router(HZ_ARGS(PrefillRouterArgs, a)) {
    HZ_SHARED(shared);
    float *staged = (float *)shared, *inverse = staged + PIECE * ROUTER_ROWS, *sums = inverse + ROUTER_ROWS;
    float *logits = sums + ROUTER_WARPS * 64 * ROUTER_ROWS;
    const u32 first = block_x() * ROUTER_ROWS, warp = thread_id() / 32, lane = thread_id() % 32;
    const u32 products = a.experts + a.gates;
    successor_start();
    predecessor_wait();
    if (warp < ROUTER_ROWS && first + warp < a.rows) {
        const float *row = a.hidden + (u64)(first + warp) * a.width;
        float squares = 0;
#pragma unroll 4
        for (u32 i = lane * 4; i < a.width; i += 128) {
            const u32x4 v = load_shared_x4(row + i);
            const float x = f32_from_bits(v.x), y = f32_from_bits(v.y), z = f32_from_bits(v.z), w = f32_from_bits(v.w);
            squares = f32_fma(x, x, squares), squares = f32_fma(y, y, squares);
            squares = f32_fma(z, z, squares), squares = f32_fma(w, w, squares);
        }
        squares = warp_sum(squares);
        if (lane == 0) inverse[warp] = inverse_rms(squares, a.width, a.eps);
    }
    block_sync();
    for (u32 e = 0; e < products; e += 64) {
        float sum[2][ROUTER_ROWS] = {};
        for (u32 from = 0; from < a.width; from += PIECE) {
            stage_normed(a, first, from, inverse, staged, e == 0);
            block_sync();
            add_piece(a, from, e + lane, staged, sum);
            block_sync();
        }
        for (u32 j = 0; j < 2; j++) {
            *(f32x4 *)(sums + (warp * 64 + j * 32 + lane) * ROUTER_ROWS) = {sum[j][0], sum[j][1], sum[j][2], sum[j][3]};
        }
        block_sync();
        for (u32 i = thread_id(); i < 64 * ROUTER_ROWS; i += ROUTER_WARPS * 32) {
            const u32 expert = e + i / ROUTER_ROWS;
            if (expert < products) {
                float total = 0;
                for (u32 w = 0; w < ROUTER_WARPS; w++) total += sums[w * 64 * ROUTER_ROWS + i];
                logits[i % ROUTER_ROWS * products + expert] = total;
            }
        }
        block_sync();
    }
    if (warp < ROUTER_ROWS && first + warp < a.rows) route_row(a, first + warp, logits + warp * products);
}
