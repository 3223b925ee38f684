// Executor `persistent-v1`: its arguments, and what a block keeps in shared memory for the whole launch.
#pragma once
#include "attention.cuh"
#include "router.cuh"

static constexpr u32 WARPS = 16, THREADS = WARPS * 32;
// Bytes of a slot: codes, then scales.
static constexpr u32 CODES = 2048, SLOT = CODES + 256;
static constexpr u32 MOST_SPLITS = 8, LEAST_POSITIONS = 256;
// Positions that a group of lanes has in flight: what registers allow.
static constexpr u32 ROUNDS = HZ_CAPABILITY >= 900 ? 4 : 2;
// Warps that share a routed pair tile; pair tiles of a block at once.
static constexpr u32 PAIR_SHARES = 2, PAIR_UNITS = WARPS / PAIR_SHARES;
// Tiles of a block whose sums are added at once.
static constexpr u32 BATCH = 8;

struct PersistentLayer {
    const u8 *qkv, *output, *pairs, *down;  // tiles; pairs and down of the shared expert or the dense feed-forward
    const u16 *attention_norm, *qkv_bias, *q_norm, *k_norm, *output_bias, *norm, *router;
    const u32 *slots;  // [experts]; null: no routed experts
    u16 *cache;
    u32 width;         // of the shared expert or the dense feed-forward; 0: none
    u32 window;
};

struct PersistentArgs {
    const PersistentLayer *layers;  // [count]
    const Row *rows;
    const u8 *arena;
    u64 record_bytes, down;
    float *hidden;        // [rows, hidden]
    float *qkv;           // [qkv]
    float *partials;      // [heads, MOST_SPLITS, padded + 2]
    u32 *counters;        // zero: barrier, finished blocks, head's arrivals, then [heads]
    u16 *attended;        // [heads * head_dim]
    float *shares;        // [tiles, products + 1]
    u16 *inner;           // [top_k, expert_width]
    u16 *dense_inner;     // [dense width]
    const f32x2 *rotary;
    const u8 *head;       // tiles
    const u16 *final_norm;
    float *logits;        // [vocab]; not wanted when vocab is 0
    u64 *best;            // zero
    u32 *chosen, *host_chosen;
    // For taps, or null: what attention and the feed-forward added [hidden], router logits [experts], choices [top_k].
    float *attention_tap, *feed_forward_tap, *router_logits;
    u32 *ids;
    float *weights;
    u64 *profile;         // [layers, 5, 2], or null: clocks of block 0 before and after each part
    u32 count, row, width, heads, kv_heads, head_dim, padded, context;
    u32 experts, gates, top_k, expert_width, block, renormalize, vocab, qk_norm;
    float eps, clip, scale;
    u32 shared_width;     // of shared experts; 0: none
    u32 other_width;      // of dense feed-forwards
    u32 unused;
};

enum Part { QKV, PROJECT, SHARED_PAIRS, ROUTED_PAIRS, SHARED_DOWN, ROUTED_DOWN, HEAD, NOTHING };
// Plans: one a part, and two more for layers whose dense feed-forward is of another width than the shared expert.
static constexpr u32 OTHER_PAIRS = 7, OTHER_DOWN = 8, PLANS = 9;

// What a warp reads of each of its tiles in a part: offsets in a tile, the same for all.
struct Plan {
    u32 items;        // tiles of this block, or units of this warp
    u32 tile_bytes;
    u32 codes, bytes; // its share
    u32 scales, all_scales;
    u32 scale_bytes;  // of a full slot
    u32 column;       // first of its share
};

// What is copied next.
struct Piece {
    const u8 *codes, *scales;
    u32 bytes;         // of codes, a multiple of 512
    u32 scale_bytes;   // of scales a full slot; 0: none
    u32 all_scales;    // bytes of scales left
};

// Shared memory that stays for the whole launch.
struct Fixed {
    u32 ids[64], slots[64];
    float weights[64];
    float gate;
    u32 word, spare[2];
    u32 zeros[4];
    Plan plans[WARPS][PLANS];
};

template <int ENC> HZ_DEVICE constexpr u32 slot_columns() { return CODES / Span<ENC>::bytes * 64; }
