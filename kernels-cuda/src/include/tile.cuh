// Matrices as the kernels read them: tiles of 16 rows, each contiguous, its columns padded to spans of 64.
//
// Within a tile a lane of a warp (g = lane / 4, t = lane % 4) owns rows g and g + 8 and, of every 32 columns, the eight
// from 8t on; so 16 bytes a lane load a piece of the tile in one coalesced access, and the pieces are the A fragments of
// four m16n8k16 products a span: product j covers, for lane t, the columns 64s + 32(j / 2) + 8t + 4(j % 2) + {0, 1, 2, 3}.
// The order of columns inside a product is free as long as the other operand follows it (activation_fragment).
//
//   F16   span: [j 0..4][lane][16 B: a0 a1 a2 a3]                                                        2048 B
//   Q8    span: [half 0..2][lane][16 B: row g 8 codes, row g + 8 8 codes; code + 128]                    1024 B
//   INT4  span: [lane][word j: nibbles 0 4 | 1 5 | 2 6 | 3 7 = a0 | a1 | a2 | a3; code + 8]               512 B
//
// Scales follow the spans of a tile: [block of columns][g][rows g, g + 8 as two FP16]; a Q8 block is 32 columns.
// Padding has code 0 (value 0) and scale 0. In a pair tile rows 0..8 are gate rows and 8..16 the up rows of the same
// outputs, so that one lane holds both factors of an output.
#pragma once
#include "device.cuh"

enum Encoding { F16 = 0, Q8 = 1, INT4 = 2 };

// Bytes of a span, and 16-byte loads a lane takes for it.
template <int ENC> struct Span;
template <> struct Span<F16> {
    static constexpr u32 bytes = 2048, loads = 4;
};
template <> struct Span<Q8> {
    static constexpr u32 bytes = 1024, loads = 2;
};
template <> struct Span<INT4> {
    static constexpr u32 bytes = 512, loads = 1;
};

HZ_DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
HZ_DEVICE u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }
HZ_DEVICE u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }

// Columns that share a scale; a power of two from 32 on. F16 has none.
template <int ENC> HZ_DEVICE u32 scale_block(u32 block) { return ENC == Q8 ? 32u : block; }

template <int ENC> HZ_DEVICE u32 tile_bytes(u32 columns, u32 block) {
    const u32 codes = ceil_div(columns, 64) * Span<ENC>::bytes;
    return ENC == F16 ? codes : codes + ceil_div(columns, scale_block<ENC>(block)) * 32;
}

// The A fragment of product `j` from the loads of its span.
template <int ENC> HZ_DEVICE void weight_fragment(const u32x4 *raw, int j, u32 (&a)[4]) {
    if constexpr (ENC == F16) {
        a[0] = raw[j].x, a[1] = raw[j].y, a[2] = raw[j].z, a[3] = raw[j].w;
    } else if constexpr (ENC == Q8) {
        const u32x4 v = raw[j / 2];
        const u32 low = j % 2 ? v.y : v.x, high = j % 2 ? v.w : v.z;
        // 0x64cc is 1024 + cc in FP16; the code is cc - 128: exact.
        a[0] = f16x2_add(byte_permute(low, 0x64646464u, 0x4140), 0xe480e480u);
        a[1] = f16x2_add(byte_permute(high, 0x64646464u, 0x4140), 0xe480e480u);
        a[2] = f16x2_add(byte_permute(low, 0x64646464u, 0x4342), 0xe480e480u);
        a[3] = f16x2_add(byte_permute(high, 0x64646464u, 0x4342), 0xe480e480u);
    } else {
        const u32 v = j == 0 ? raw->x : j == 1 ? raw->y : j == 2 ? raw->z : raw->w;
        // 0x640n is 1024 + n; 0x64n0 is 1024 + 16 n. Subtracting first keeps n - 8 exact.
        a[0] = f16x2_add(and_or(v, 0x000f000fu, 0x64006400u), 0xe408e408u);
        a[1] = f16x2_fma(and_or(v, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u);
        a[2] = f16x2_add(and_or(v >> 8, 0x000f000fu, 0x64006400u), 0xe408e408u);
        a[3] = f16x2_fma(and_or(v >> 8, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u);
    }
}

// The scales of rows g and g + 8 for block `index` of a tile whose scales start at `scales`.
struct RowScales {
    float low, high;
};
HZ_DEVICE RowScales row_scales(u32 pair) { return {f16_to_f32((u16)pair), f16_to_f32((u16)(pair >> 16))}; }

// Loads of weights: dense weights never change while a kernel runs, slots may have been written by a copy.
struct Stream {
    static HZ_DEVICE u32x4 load(const u8 *p) { return load_stream(p); }
    static HZ_DEVICE u32 load_u32(const u8 *p) { return load_stream_u32(p); }
};
struct Slot {
    static HZ_DEVICE u32x4 load(const u8 *p) { return load_slot(p); }
    static HZ_DEVICE u32 load_u32(const u8 *p) { return load_slot_u32(p); }
};

// Activations of up to eight tokens in shared memory, FP16: token n at n * stride bytes, columns in order, zero from
// `columns` up to the next multiple of 64. stride % 128 == 64 keeps the eight tokens on different banks.
HZ_DEVICE u32 activation_stride(u32 columns) { return ceil_div(columns, 64) * 128 + 64; }

// Eight columns of token g for 32 columns from `column` on: b0, b1 of two products.
HZ_DEVICE u32x4 activation_fragment(const u8 *activations, u32 stride, u32 column, u32 lane, u32 tokens) {
    const u32 g = lane / 4, t = lane % 4;
    if (g >= tokens) return {0, 0, 0, 0};
    return *(const u32x4 *)(activations + g * stride + column * 2 + t * 16);
}

// One warp's share of a tile times the activations of up to eight tokens: spans [first, last) of it, which begin and end
// at scale blocks. `sum` is rows g and g + 8 by tokens 2t and 2t + 1. Weights are read in batches so that a lane has
// several loads in flight; `prefetch` may run before the activations exist.
template <int ENC, class From> struct TileShare {
    // 16-byte loads a lane has in flight.
    static constexpr int BATCH = 8;
    static constexpr int SPANS = BATCH / Span<ENC>::loads;

    u32x4 raw[BATCH];
    const u8 *tile;
    u32 first, last, lane;

    HZ_DEVICE void load(u32 span) {
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            if (span + s < last) {
#pragma unroll
                for (u32 i = 0; i < Span<ENC>::loads; i++)
                    raw[s * Span<ENC>::loads + i] =
                        From::load(tile + (u64)(span + s) * Span<ENC>::bytes + i * 512 + lane * 16);
            }
        }
    }

    // Starts the first batch.
    HZ_DEVICE void prefetch(const u8 *of, u32 from, u32 to) {
        tile = of, first = from, last = to, lane = thread_id() % 32;
        load(first);
    }

    // `columns` and `block` are the matrix's.
    HZ_DEVICE void run(const u8 *activations, u32 stride, u32 tokens, u32 columns, u32 block, float (&sum)[4]) {
        const u8 *scales = tile + (u64)ceil_div(columns, 64) * Span<ENC>::bytes + lane / 4 * 4;
        const u32 width = ENC == F16 ? 64 : scale_block<ENC>(block), shift = log2_of(width), mask = width / 64 - 1;
        float part[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (u32 span = first; span < last; span += SPANS) {
            if (span != first) load(span);
#pragma unroll
            for (int s = 0; s < SPANS; s++) {
                const u32 at = span + s;
                if (at >= last) break;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32x4 x = activation_fragment(activations, stride, at * 64 + half * 32, lane, tokens);
                    u32 a[4];
                    weight_fragment<ENC>(raw + s * Span<ENC>::loads, half * 2, a);
                    if constexpr (ENC == F16) {
                        mma_16x8x16(sum, a, x.x, x.y);
                    } else {
                        mma_16x8x16(part, a, x.x, x.y);
                    }
                    weight_fragment<ENC>(raw + s * Span<ENC>::loads, half * 2 + 1, a);
                    if constexpr (ENC == F16) {
                        mma_16x8x16(sum, a, x.z, x.w);
                    } else {
                        mma_16x8x16(part, a, x.z, x.w);
                        // The end of a scale block, or of the row.
                        if (width == 32 || (half == 1 && ((at & mask) == mask || at + 1 == last))) {
                            const u32 index = (at * 64 + half * 32) >> shift;
                            if (index << shift < columns) {
                                const RowScales d = row_scales(From::load_u32(scales + index * 32));
                                sum[0] = f32_fma(d.low, part[0], sum[0]);
                                sum[1] = f32_fma(d.low, part[1], sum[1]);
                                sum[2] = f32_fma(d.high, part[2], sum[2]);
                                sum[3] = f32_fma(d.high, part[3], sum[3]);
                            }
                            part[0] = part[1] = part[2] = part[3] = 0;
                        }
                    }
                }
            }
        }
    }
};

// Spans of share `index` of `shares` equal shares, whole scale blocks each.
HZ_DEVICE void share_spans(u32 columns, u32 block, u32 index, u32 shares, u32 &first, u32 &last) {
    const u32 spans = ceil_div(columns, 64), unit = block > 64 ? block / 64 : 1, units = ceil_div(spans, unit);
    first = units * index / shares * unit;
    last = units * (index + 1) / shares * unit;
    if (last > spans) last = spans;
}
