// The rows of a step: what the host says about them, and their start in the residual stream, a row of the embedding
// table in host memory.
#include "block.cuh"

struct EmbedArgs {
    const Row *host_rows;  // [rows], host memory
    Row *rows;             // [rows]
    const u32 *chosen;     // [rows]
    const u16 *table;      // [vocab, hidden] FP16, host memory
    float *hidden;         // [rows, hidden]
    const u32 *host_which; // [rows], host memory: rows that ask for logits; what follows them is never used
    u32 *which;            // [rows]
    u32 width;
    u32 unused;
};

// Grid: rows.
// registers: 64
HZ_KERNEL(256, 4) embed(HZ_ARGS(EmbedArgs, a)) {
    HZ_SHARED(shared);
    Row *row = (Row *)shared;
    predecessor_wait();
    if (thread_id() == 0) {
        // Both loads cross the bus; they are under way together.
        const u32x4 v = load_host_x4(a.host_rows + block_x());
        const u32 which = load_host(a.host_which + block_x());
        row->token = v.x, row->position = v.y, row->sequence = v.z, row->flags = v.w;
        a.which[block_x()] = which;
        if (row->token == CHOSEN_TOKEN) row->token = a.chosen[block_x()];
        a.rows[block_x()] = *row;
    }
    block_sync();
    const u16 *from = a.table + (u64)row->token * a.width;
    float *to = a.hidden + (u64)block_x() * a.width;
    for (u32 i = thread_id(); i * 8 < a.width; i += block_threads()) {
        const u32x4 v = *(const u32x4 *)(from + i * 8);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
        for (u32 w = 0; w < 4; w++) {
            *(f32x2 *)(to + i * 8 + w * 2) = {f16_to_f32((u16)words[w]), f16_to_f32((u16)(words[w] >> 16))};
        }
    }
    successor_start();
}
