// Executor `scalar`: one routed expert after another, FP32 fused multiply-adds from the packed codes. The simplest kernels
// that are correct, and the yardstick for the others. Two launches a rank, then the combine of layers/combine.cu.
#include "experts.cuh"

static constexpr u32 WARPS = 4;

struct ScalarArgs {
    Experts experts;
    float *outputs;  // [rows, top_k, hidden]
    u32 rank;
    u32 unused;
};

// One warp's share of a tile times one row of activations: rows g and g + 8, summed over the columns of the share.
template <int ENC>
HZ_DEVICE void scalar_share(const u8 *tile, const u8 *activations, u32 first, u32 last, u32 columns, u32 block,
                            float (&sum)[2]) {
    const u32 lane = thread_id() % 32, g = lane / 4, t = lane % 4;
    const u8 *scales = tile + (u64)ceil_div(columns, 64) * Span<ENC>::bytes + g * 4;
    sum[0] = sum[1] = 0;
    for (u32 span = first; span < last; span++) {
        for (u32 j = 0; j < 4; j++) {
            const u32 column = span * 64 + j / 2 * 32 + t * 8 + j % 2 * 4;
            float x[4], low[4], high[4];
            for (u32 i = 0; i < 4; i++) x[i] = f16_to_f32(*(const u16 *)(activations + (column + i) * 2));
            if constexpr (ENC == INT4) {
                const u32 v = load_slot_u32(tile + (u64)span * 512 + lane * 16 + j * 4);
                for (u32 i = 0; i < 4; i++) {
                    const u32 nibble = i / 2 * 2 + i % 2 * 4;
                    low[i] = (float)(i32)((v >> (4 * nibble)) & 15) - 8.0f;
                    high[i] = (float)(i32)((v >> (4 * nibble + 4)) & 15) - 8.0f;
                }
                float d[2] = {0, 0};
                if (column < columns) {
                    const RowScales s = row_scales(load_slot_u32(scales + column / block * 32));
                    d[0] = s.low, d[1] = s.high;
                }
                for (u32 i = 0; i < 4; i++) low[i] *= d[0], high[i] *= d[1];
            } else {
                const u32x4 v = load_slot(tile + (u64)span * 2048 + j * 512 + lane * 16);
                low[0] = f16_to_f32((u16)v.x), low[1] = f16_to_f32((u16)(v.x >> 16));
                high[0] = f16_to_f32((u16)v.y), high[1] = f16_to_f32((u16)(v.y >> 16));
                low[2] = f16_to_f32((u16)v.z), low[3] = f16_to_f32((u16)(v.z >> 16));
                high[2] = f16_to_f32((u16)v.w), high[3] = f16_to_f32((u16)(v.w >> 16));
            }
            for (u32 i = 0; i < 4; i++) sum[0] = f32_fma(low[i], x[i], sum[0]), sum[1] = f32_fma(high[i], x[i], sum[1]);
        }
    }
    for (u32 lanes = 1; lanes < 4; lanes *= 2) {
        sum[0] += shuffle_xor(sum[0], lanes);
        sum[1] += shuffle_xor(sum[1], lanes);
    }
}

// The sums of a tile's 16 rows over the block's warps, in `room` [WARPS][16].
template <int ENC>
HZ_DEVICE void scalar_tile(const u8 *tile, const u8 *activations, u32 columns, u32 block, float *room) {
    const u32 warp = thread_id() / 32, lane = thread_id() % 32;
    u32 first, last;
    share_spans(columns, ENC == INT4 ? block : 64, warp, WARPS, first, last);
    float sum[2];
    scalar_share<ENC>(tile, activations, first, last, columns, block, sum);
    if (lane % 4 == 0) room[warp * 16 + lane / 4] = sum[0], room[warp * 16 + lane / 4 + 8] = sum[1];
    block_sync();
}

HZ_DEVICE float add_warps(const float *room, u32 row) {
    float sum = 0;
    for (u32 w = 0; w < WARPS; w++) sum += room[w * 16 + row];
    return sum;
}

// Grid: pair tiles, rows. Shared memory: activations of one row, then 16 floats a warp.
template <int ENC> HZ_DEVICE void scalar_gate_up(const ScalarArgs &a, u8 *shared) {
    const Experts &e = a.experts;
    const u32 r = block_y();
    float *room = (float *)(shared + activation_stride(e.hidden));
    successor_start();
    predecessor_wait();
    load_activations(shared, e.input, r, 1, e.hidden);
    block_sync();
    const u8 *tile = expert_record(e, r, a.rank) + (u64)block_x() * tile_bytes<ENC>(e.hidden, e.block);
    scalar_tile<ENC>(tile, shared, e.hidden, e.block, room);
    if (thread_id() < 8) {
        const float gate = add_warps(room, thread_id()), up = add_warps(room, thread_id() + 8);
        e.inner[((u64)r * e.top_k + a.rank) * e.width + block_x() * 8 + thread_id()] = f32_to_f16(silu(gate) * up);
    }
}

// Grid: down tiles, rows. Shared memory: activations of one row, then 16 floats a warp.
template <int ENC> HZ_DEVICE void scalar_down(const ScalarArgs &a, u8 *shared) {
    const Experts &e = a.experts;
    const u32 r = block_y(), output = block_x() * 16 + thread_id();
    float *room = (float *)(shared + activation_stride(e.width));
    successor_start();
    predecessor_wait();
    load_activations(shared, e.inner, r * e.top_k + a.rank, 1, e.width);
    block_sync();
    const u8 *tile = expert_record(e, r, a.rank) + e.down + (u64)block_x() * tile_bytes<ENC>(e.width, e.block);
    scalar_tile<ENC>(tile, shared, e.width, e.block, room);
    if (thread_id() < 16 && output < e.hidden) {
        a.outputs[((u64)r * e.top_k + a.rank) * e.hidden + output] = add_warps(room, thread_id());
    }
}

// registers: 64
HZ_KERNEL(128, 8) scalar_gate_up_int4(HZ_ARGS(ScalarArgs, a)) {
    HZ_SHARED(shared);
    scalar_gate_up<INT4>(a, shared);
}
// registers: 64
HZ_KERNEL(128, 8) scalar_gate_up_f16(HZ_ARGS(ScalarArgs, a)) {
    HZ_SHARED(shared);
    scalar_gate_up<F16>(a, shared);
}
// registers: 64
HZ_KERNEL(128, 8) scalar_down_int4(HZ_ARGS(ScalarArgs, a)) {
    HZ_SHARED(shared);
    scalar_down<INT4>(a, shared);
}
// registers: 64
HZ_KERNEL(128, 8) scalar_down_f16(HZ_ARGS(ScalarArgs, a)) {
    HZ_SHARED(shared);
    scalar_down<F16>(a, shared);
}
