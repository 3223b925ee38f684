// Where a routed expert's record lies, and its parts.
#pragma once
#include "block.cuh"

struct Experts {
    const u8 *arena;
    const u32 *slots;  // [experts] of the layer: slot of each expert
    u64 record_bytes;
    u64 down;          // offset of the down tiles in a record
    const u32 *ids;    // [rows, top_k]
    const float *weights;  // [rows, top_k]
    const u16 *input;  // [rows, hidden]: normed rows
    u16 *inner;        // [rows, top_k, width]: silu(gate) * up
    u32 rows, hidden, width, top_k;
    u32 block;         // columns a scale
    u32 unused;
};

// The record of the expert that `row` ranked at `rank`.
HZ_DEVICE const u8 *expert_record(const Experts &e, u32 row, u32 rank) {
    const u32 id = load_shared_u32(e.ids + (u64)row * e.top_k + rank);
    return e.arena + load_shared_u32(e.slots + id) * e.record_bytes;
}
