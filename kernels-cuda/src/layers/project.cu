// The output projection of attention with what hangs on it: bias, residual add, the norm before the feed-forward, and
// the router with softmax and top-k.
//
// A block of eight warps owns sixteen outputs of up to eight rows. Once they are added to the residual stream it forms
// their share of every router product and of the norm's sum of squares; the last block to arrive adds the shares in
// order, routes, and writes the normed rows for the feed-forward. Grid: tiles by groups of eight rows.
#include "router.cuh"

static constexpr u32 WARPS = 8;

struct ProjectArgs {
    const u8 *weights;
    const u16 *input;   // [rows, columns]: attended heads
    const u16 *bias;    // [hidden], or null
    float *hidden;      // [rows, hidden], added to
    float *tap;         // [rows, hidden], or null: what was added
    const u16 *norm;    // [hidden]
    const u16 *router;  // [hidden, experts + gates]: transposed; the shared expert's gate last
    float *shares;      // [rows, tiles, experts + gates + 1]
    u32 *counters;      // [groups of rows], zero
    float *logits;      // [rows, experts]
    u32 *ids;           // [rows, top_k]
    float *chosen;      // [rows, top_k]: their weights
    float *gate;        // [rows]: of the shared expert
    u16 *normed;        // [rows, hidden]
    u32 rows, columns, width, experts, gates, top_k, renormalize;
    float eps;
};

// Routes the rows of a group: all threads of the last block. `room` is experts + gates + 1 floats a warp, then a float
// an expert.
HZ_DEVICE void finish_rows(const ProjectArgs &a, u32 first, u32 tokens, float *room) {
    const u32 products = a.experts + a.gates, wide = products + 1, tiles = ceil_div(a.width, 16);
    const u32 warp = thread_id() / 32, lane = thread_id() % 32;
    float *totals = room + WARPS * wide, *probability = totals + wide;
    for (u32 n = 0; n < tokens; n++) {
        const u32 r = first + n;
        const float *shares = a.shares + (u64)r * tiles * wide;
        // A warp adds the shares of every WARPS-th tile, eight at a time in flight.
        for (u32 e = lane; e < wide; e += 32) {
            float sum = 0;
            for (u32 tile = warp; tile < tiles; tile += WARPS * 8) {
                float v[8];
#pragma unroll
                for (u32 u = 0; u < 8; u++) {
                    const u32 at = tile + u * WARPS;
                    v[u] = at < tiles ? load_shared_f32(shares + (u64)at * wide + e) : 0.0f;
                }
#pragma unroll
                for (u32 u = 0; u < 8; u++) sum += v[u];
            }
            room[warp * wide + e] = sum;
        }
        block_sync();
        for (u32 e = thread_id(); e < wide; e += block_threads()) {
            float sum = 0;
            for (u32 w = 0; w < WARPS; w++) sum += room[w * wide + e];
            totals[e] = sum;
        }
        block_sync();
        const float inverse = inverse_rms(totals[products], a.width, a.eps);
        for (u32 i = thread_id(); i * 4 < a.width; i += block_threads()) {
            *(u32x2 *)(a.normed + (u64)r * a.width + i * 4) = normed_x4(
                load_shared_x4(a.hidden + (u64)r * a.width + i * 4), *(const u32x2 *)(a.norm + i * 4), inverse);
        }
        if (a.experts) {
            for (u32 e = thread_id(); e < a.experts; e += block_threads()) {
                a.logits[(u64)r * a.experts + e] = f32_mul(totals[e], inverse);
            }
            choose(totals, inverse, a.experts, a.top_k, probability, a.ids + (u64)r * a.top_k, a.chosen + (u64)r * a.top_k);
            if (a.renormalize && thread_id() == 0) {
                float all = 0;
                for (u32 k = 0; k < a.top_k; k++) all += a.chosen[(u64)r * a.top_k + k];
                for (u32 k = 0; k < a.top_k; k++) {
                    float *weight = a.chosen + (u64)r * a.top_k + k;
                    *weight = f32_div(*weight, all);
                }
            }
            if (a.gates && thread_id() == 0) a.gate[r] = sigmoid(f32_mul(totals[a.experts], inverse));
        }
        block_sync();
    }
}

// Shared memory: activations and sums, or what finish_rows needs, whichever is more.
template <int ENC> HZ_DEVICE void project(const ProjectArgs &a, u8 *shared) {
    const u32 first = block_y() * TOKENS, tokens = min_u32(TOKENS, a.rows - first), tiles = ceil_div(a.width, 16);
    const u32 stride = activation_stride(a.columns), warp = thread_id() / 32, products = a.experts + a.gates;
    float *sums = (float *)(shared + tokens * stride), *scaled = sums + WARPS * 128, *squares = scaled + 128;
    u32 *word = (u32 *)(squares + 128);
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
    const u32 row = thread_id() / TOKENS, token = thread_id() % TOKENS, output = block_x() * 16 + row;
    if (row < 16) {
        float normed = 0, square = 0;
        if (token < tokens && output < a.width) {
            float y = add_shares(sums, 0, WARPS, row, token);
            if (a.bias) y += f16_to_f32(a.bias[output]);
            const u64 at = (u64)(first + token) * a.width + output;
            if (a.tap) a.tap[at] = y;
            const float h = a.hidden[at] + y;
            a.hidden[at] = h;
            normed = f32_mul(h, f16_to_f32(a.norm[output])), square = f32_mul(h, h);
        }
        scaled[row * TOKENS + token] = normed, squares[row * TOKENS + token] = square;
    }
    block_sync();
    const u32 wide = products + 1, outputs = min_u32(16, a.width - block_x() * 16);
    for (u32 i = thread_id(); i < wide * tokens; i += block_threads()) {
        const u32 e = i % wide, n = i / wide;
        a.shares[((u64)(first + n) * tiles + block_x()) * wide + e] =
            router_share(a.router + (u64)block_x() * 16 * products, outputs, products, e, scaled + n, squares + n, TOKENS);
    }
    if (last_to_arrive(a.counters + block_y(), tiles, word)) finish_rows(a, first, tokens, (float *)shared);
}

// registers: 128
HZ_KERNEL(256, 2) project_f16(HZ_ARGS(ProjectArgs, a)) {
    HZ_SHARED(shared);
    project<F16>(a, shared);
}
// registers: 128
HZ_KERNEL(256, 2) project_q8(HZ_ARGS(ProjectArgs, a)) {
    HZ_SHARED(shared);
    project<Q8>(a, shared);
}
