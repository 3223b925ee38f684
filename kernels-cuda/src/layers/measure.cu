// The read bandwidth of the card: what every figure is held against.
#include "device.cuh"

struct ReadArgs {
    const u8 *from;
    u32 *sum;   // [blocks]
    u64 words;  // of 16 bytes
};

// Adds up all words, eight loads in flight a thread. Grid: any number of blocks.
// registers: 64
HZ_KERNEL(512, 2) read_all(HZ_ARGS(ReadArgs, a)) {
    HZ_SHARED(shared);
    u32 sum = 0;
    const u64 step = (u64)grid_x() * block_threads();
    const u64 start = (u64)block_x() * block_threads() + thread_id();
    for (u64 i = start; i < a.words; i += step * 8) {
        u32x4 v[8];
#pragma unroll
        for (u32 u = 0; u < 8; u++) {
            const u64 at = i + u * step;
            v[u] = at < a.words ? load_stream(a.from + at * 16) : u32x4{0, 0, 0, 0};
        }
#pragma unroll
        for (u32 u = 0; u < 8; u++) sum += v[u].x + v[u].y + v[u].z + v[u].w;
    }
    u32 *word = (u32 *)shared;
    if (thread_id() == 0) *word = 0;
    block_sync();
    atomic_add(word, sum);
    block_sync();
    if (thread_id() == 0) a.sum[block_x()] = *word;
}
