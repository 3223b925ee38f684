// The final norm, the output head, and the most likely token of each row.
//
// A block takes tiles in a stride of the grid and keeps its best logit; the last block to arrive hands the choices to
// the host and to the next step. Grid: any number of blocks, by groups of eight rows that ask for logits.
#include "block.cuh"

static constexpr u32 WARPS = 8;

struct HeadArgs {
    const u8 *weights;
    const float *hidden;   // [rows, columns]
    const u32 *which;      // [wanted]: rows that ask for logits
    const u16 *norm;       // [columns]
    float *logits;         // [wanted, vocab]
    u64 *best;             // [wanted], zero: order-preserving bits of the logit above the inverted token id
    u32 *counters;         // [groups of rows], zero
    u32 *chosen;           // [wanted]: for the next step
    u32 *host_chosen;      // [wanted], host memory
    u32 wanted, columns, vocab;
    float eps;
};

template <int ENC> HZ_DEVICE void head(const HeadArgs &a, u8 *shared) {
    const u32 first = block_y() * TOKENS, tokens = min_u32(TOKENS, a.wanted - first), tiles = ceil_div(a.vocab, 16);
    const u32 stride = activation_stride(a.columns), warp = thread_id() / 32, bytes = tile_bytes<ENC>(a.columns, 32);
    float *sums = (float *)(shared + tokens * stride), *room = sums + WARPS * 128;
    u32 *word = (u32 *)(room + WARPS);
    u32 from, to, tile = block_x();
    share_spans(a.columns, 32, warp, WARPS, from, to);
    TileShare<ENC, Stream> share;
    if (tile < tiles) share.prefetch(a.weights + (u64)tile * bytes, from, to);
    successor_start();
    predecessor_wait();
    for (u32 n = 0; n < tokens; n++) {
        const u32 row = load_shared_u32(a.which + first + n);
        load_normed(shared + n * stride, a.hidden, a.norm, a.eps, row, 1, a.columns, room);
    }
    block_sync();
    const u32 row = thread_id() / TOKENS, token = thread_id() % TOKENS;
    u64 best = 0;
    while (tile < tiles) {
        float sum[4] = {0, 0, 0, 0};
        share.run(shared, stride, tokens, a.columns, 32, sum);
        const u32 next = tile + grid_x();
        if (next < tiles) share.prefetch(a.weights + (u64)next * bytes, from, to);
        keep_sums(sums, sum);
        block_sync();
        if (row < 16 && token < tokens && tile * 16 + row < a.vocab) {
            const float y = add_shares(sums, 0, WARPS, row, token);
            a.logits[(u64)(first + token) * a.vocab + tile * 16 + row] = y;
            const u64 key = order_key(y, tile * 16 + row);
            best = key > best ? key : best;
        }
        block_sync();
        tile = next;
    }
    if (row < 16 && token < tokens && best) atomic_max(a.best + first + token, best);
    if (!last_to_arrive(a.counters + block_y(), grid_x(), word)) return;
    if (thread_id() < tokens) {
        const u32 n = first + thread_id();
        const u64 key = atomic_max(a.best + n, 0);
        const u32 choice = 0xffffffffu - (u32)key;
        a.best[n] = 0;
        a.chosen[n] = choice;
        store_host(a.host_chosen + n, choice);
    }
}

// registers: 128
HZ_KERNEL(256, 2) head_f16(HZ_ARGS(HeadArgs, a)) {
    HZ_SHARED(shared);
    head<F16>(a, shared);
}
// registers: 128
HZ_KERNEL(256, 2) head_q8(HZ_ARGS(HeadArgs, a)) {
    HZ_SHARED(shared);
    head<Q8>(a, shared);
}
