// Products of many rows: a block's tile of y = W x, rows of W by tokens, for prefill and for grouped experts.
//
// Rows of W are the 16 of m16n8k16, tokens its 8. Each warp owns TILES tiles of W and takes all tokens of the block, so a
// weight is decoded once a block; weights go from global memory to registers, AHEAD spans before their use. Rows of
// activations are gathered by index into a ring of STAGES pieces of shared memory, SPANS spans each, asynchronously.
//
// An element's arithmetic is one sequence of products along its row, a scale block at a time: nothing in it depends on
// the shape of the block, on the number of tokens, or on a token's place among them. So launches may choose any shape.
#pragma once
#include "block.cuh"

// Columns of sums that are skipped together: two products of one sum are this many products of others apart.
static constexpr u32 SKIPPED = 2;

template <int ENC, class From, u32 WARPS_, u32 TILES_, u32 BLOCKS_, u32 SPANS_, u32 STAGES_, u32 AHEAD_> struct Product {
    static constexpr u32 WARPS = WARPS_, TILES = TILES_, BLOCKS = BLOCKS_, SPANS = SPANS_, STAGES = STAGES_;
    static constexpr u32 AHEAD = AHEAD_, LOADS = Span<ENC>::loads;
    static constexpr u32 THREADS = WARPS * 32, ROWS = WARPS * TILES * 16, TOKENS = BLOCKS * 8;
    // Columns of sums are taken by groups.
    static constexpr u32 GROUP = BLOCKS < SKIPPED ? BLOCKS : SKIPPED;
    // A token of a stage, a stage, and all of them, in bytes.
    static constexpr u32 TOKEN_BYTES = SPANS * 128, STAGE = TOKENS * TOKEN_BYTES, SHARED = STAGES * STAGE;
    // 16-byte pieces of a token, and of the stage by threads.
    static constexpr u32 PIECES = SPANS * 8, COPIES = (TOKENS * PIECES + THREADS - 1) / THREADS;
    static_assert(SPANS % AHEAD == 0 && BLOCKS % GROUP == 0, "the rings are unrolled");

    float sum[TILES][BLOCKS][4];

    u32x4 raw[AHEAD][TILES][LOADS];
    u32 scale[AHEAD][TILES][2];
    const u8 *tile[TILES];  // this lane's part
    const u16 *source[COPIES];
    u32 columns, spans, width, mask, blocks;
    u32 lane;
    bool active;

    // The tiles of this warp in block `row_block` of a matrix of `tiles` tiles. May run before the activations exist.
    HZ_DEVICE void weights(const u8 *matrix, u32 row_block, u32 tiles, u32 of_columns, u32 block) {
        columns = of_columns, spans = ceil_div(columns, 64), width = scale_block<ENC>(block), mask = width / 64 - 1;
        lane = thread_id() % 32;
        const u32 first = (row_block * WARPS + thread_id() / 32) * TILES;
        active = first < tiles;
#pragma unroll
        for (u32 i = 0; i < TILES; i++) {
            // Beyond the matrix: its last tile once more, and nobody stores the sums.
            const u32 index = first + i < tiles ? first + i : tiles - 1;
            tile[i] = matrix + (u64)index * tile_bytes<ENC>(columns, block);
        }
        if (!active) return;
#pragma unroll
        for (u32 s = 0; s < AHEAD; s++) {
            if (s < spans) {
                for (u32 i = 0; i < LOADS; i++) load(s, s, i);
                load_scales(s, s);
            }
        }
    }

    // Piece `i` of span `span`, into place `at` of the ring.
    HZ_DEVICE void load(u32 at, u32 span, u32 i) {
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
            raw[at][n][i] = From::load(tile[n] + (u64)span * Span<ENC>::bytes + i * 512 + lane * 16);
        }
    }

    // The scales of blocks that end in span `span`.
    HZ_DEVICE void load_scales(u32 at, u32 span) {
        if constexpr (ENC != F16) {
            const u64 from = (u64)spans * Span<ENC>::bytes + lane / 4 * 4;
            if (ENC == Q8 || width == 32) {
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    const u32 index = span * 2 + half;
                    const bool some = index * 32 < columns;
#pragma unroll
                    for (u32 n = 0; n < TILES; n++) {
                        scale[at][n][half] = some ? From::load_u32(tile[n] + from + index * 32) : 0;
                    }
                }
            } else if (ends_block(span)) {
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
                    scale[at][n][1] = From::load_u32(tile[n] + from + span * 64 / width * 32);
                }
            }
        }
    }

    HZ_DEVICE bool ends_block(u32 span) const { return (span & mask) == mask || span + 1 == spans; }

    // Sums of the `tokens` rows of `rows` [.., columns] that `index(n)` names. All threads of the block; `ring` is SHARED
    // bytes, which nobody uses any more.
    template <class Index> HZ_DEVICE void run(const u16 *rows, u32 tokens, u8 *ring, Index index) {
        blocks = ceil_div(tokens, 8);
        const u32 staged = ceil_div(blocks, GROUP) * GROUP * 8;
#pragma unroll
        for (u32 c = 0; c < COPIES; c++) {
            const u32 n = (c * THREADS + thread_id()) / PIECES;
            // Columns of sums that nobody stores take the last token's.
            source[c] = n < staged ? rows + (u64)index(n < tokens ? n : tokens - 1) * columns : nullptr;
        }
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
#pragma unroll
            for (u32 b = 0; b < BLOCKS; b++) sum[n][b][0] = sum[n][b][1] = sum[n][b][2] = sum[n][b][3] = 0;
        }
        float part[TILES][ENC == INT4 ? BLOCKS : 1][4] = {};
        const u32 stages = ceil_div(spans, SPANS);
#pragma unroll
        for (u32 s = 0; s + 1 < STAGES; s++) {
            if (s < stages) fetch(ring, s);
            copy_commit();
        }
#pragma unroll 1
        for (u32 stage = 0; stage < stages; stage++) {
            copy_wait<(int)STAGES - 2>();
            block_sync();
            if (stage + STAGES - 1 < stages) fetch(ring, stage + STAGES - 1);
            copy_commit();
            if (!active) continue;
            const u8 *staged_at = ring + stage % STAGES * STAGE;
#pragma unroll
            for (u32 s = 0; s < SPANS; s++) {
                const u32 span = stage * SPANS + s;
                if (span < spans) take(s, span, staged_at + s * 128, part);
            }
        }
    }

    // Starts the copies of stage `stage`.
    HZ_DEVICE void fetch(u8 *ring, u32 stage) const {
        u8 *to = ring + stage % STAGES * STAGE;
#pragma unroll
        for (u32 c = 0; c < COPIES; c++) {
            const u32 i = c * THREADS + thread_id(), n = i / PIECES, piece = i % PIECES;
            if (!source[c]) continue;
            u8 *at = to + n * TOKEN_BYTES + (piece ^ ((n & 1) << 2)) * 16;
            const u32 column = stage * SPANS * 64 + piece * 8;
            if (column < columns) {
                copy_async16(at, source[c] + column);
            } else {
                *(u32x4 *)at = {0, 0, 0, 0};
            }
        }
    }

    // Activations of columns of sums [first, first + GROUP) for half `half` of a span.
    HZ_DEVICE void stage_in(u32x4 (&v)[GROUP], const u8 *mine, u32 half, u32 first) const {
        // Odd tokens have the halves of a span exchanged.
        const u8 *x = mine + ((half ^ (lane / 4 & 1)) << 6);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) v[i] = *(const u32x4 *)(x + (first + i) * 8 * TOKEN_BYTES);
    }

    // One span: four products by every active column of sums. Activations are read one step ahead of their products; a
    // step ahead may be one that is left out, and what it reads is not used.
    template <u32 PARTS> HZ_DEVICE void take(u32 s, u32 span, const u8 *staged, float (&part)[TILES][PARTS][4]) {
        constexpr u32 STEPS = BLOCKS / GROUP;
        const u32 at = s % AHEAD;
        const u8 *mine = staged + lane / 4 * TOKEN_BYTES + lane % 4 * 16;
        u32x4 v[2][GROUP];
        stage_in(v[0], mine, 0, 0);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 a[TILES][2][4];
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
                weight_fragment<ENC>(raw[at][n], (int)half * 2, a[n][0]);
                weight_fragment<ENC>(raw[at][n], (int)half * 2 + 1, a[n][1]);
            }
            if (ENC == Q8) refill(at, span, half);
            if (ENC == INT4 && half == 1) refill(at, span, 0);
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                const u32 now = (half * STEPS + step) % 2;
                if (step * GROUP < blocks) {
                    if (step + 1 < STEPS) stage_in(v[1 - now], mine, half, (step + 1) * GROUP);
                    multiply(at, half, step * GROUP, a, v[now], part);
                }
                if (half == 0 && step + 1 == STEPS) stage_in(v[1 - now], mine, 1, 0);
            }
            if (ENC == F16) refill(at, span, half * 2), refill(at, span, half * 2 + 1);
            if constexpr (ENC == INT4) {
                if (width == 32 || (half == 1 && ends_block(span))) {
#pragma unroll
                    for (u32 n = 0; n < TILES; n++) {
                        const u32 pair = scale[at][n][half];
#pragma unroll
                        for (u32 b = 0; b < BLOCKS; b++) {
                            add_scaled(pair, part[n][b], sum[n][b]);
                            part[n][b][0] = part[n][b][1] = part[n][b][2] = part[n][b][3] = 0;
                        }
                    }
                }
            }
        }
        if (span + AHEAD < spans) load_scales(at, span + AHEAD);
    }

    // Two products of every tile with columns of sums [first, first + GROUP). A Q8 scale block ends with them.
    template <u32 PARTS>
    HZ_DEVICE void multiply(u32 at, u32 half, u32 first, const u32 (&a)[TILES][2][4], const u32x4 (&v)[GROUP],
                            float (&part)[TILES][PARTS][4]) {
        float own[TILES][GROUP][4] = {};
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) {
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
                    float(&d)[4] = ENC == F16 ? sum[n][first + i]
                                   : ENC == Q8 ? own[n][i]
                                               : part[n][ENC == INT4 ? first + i : 0];
                    mma_16x8x16(d, a[n][j], j ? v[i].z : v[i].x, j ? v[i].w : v[i].y);
                }
            }
        }
        if constexpr (ENC == Q8) {
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < GROUP; i++) add_scaled(scale[at][n][half], own[n][i], sum[n][first + i]);
            }
        }
    }

    HZ_DEVICE void refill(u32 at, u32 span, u32 i) {
        if (span + AHEAD < spans) load(at, span + AHEAD, i);
    }

    static HZ_DEVICE void add_scaled(u32 pair, const float (&part)[4], float (&sum)[4]) {
        const RowScales d = row_scales(pair);
        sum[0] = f32_fma(d.low, part[0], sum[0]);
        sum[1] = f32_fma(d.low, part[1], sum[1]);
        sum[2] = f32_fma(d.high, part[2], sum[2]);
        sum[3] = f32_fma(d.high, part[3], sum[3]);
    }

    // Calls store(row of the matrix, token, value) for this lane's sums of rows below `rows`.
    template <class Store> HZ_DEVICE void each(u32 row_block, u32 rows, u32 tokens, Store store) const {
        const u32 g = lane / 4, t = lane % 4, first = (row_block * WARPS + thread_id() / 32) * TILES * 16 + g;
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
#pragma unroll
            for (u32 b = 0; b < BLOCKS; b++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 row = first + n * 16 + i / 2 * 8, token = b * 8 + 2 * t + i % 2;
                    if (row < rows && token < tokens) store(row, token, sum[n][b][i]);
                }
            }
        }
    }

    // The same for pair tiles: store(output, token, silu(gate) * up) for outputs below `outputs`.
    template <class Store> HZ_DEVICE void each_pair(u32 row_block, u32 outputs, u32 tokens, Store store) const {
        const u32 g = lane / 4, t = lane % 4, first = (row_block * WARPS + thread_id() / 32) * TILES * 8 + g;
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
#pragma unroll
            for (u32 b = 0; b < BLOCKS; b++) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u32 output = first + n * 8, token = b * 8 + 2 * t + i;
                    if (output < outputs && token < tokens) {
                        store(output, token, f32_mul(silu(sum[n][b][i]), sum[n][b][i + 2]));
                    }
                }
            }
        }
    }
};
