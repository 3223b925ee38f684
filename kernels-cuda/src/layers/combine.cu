// The end of a feed-forward: expert outputs by ranking order, the shared expert last, into the residual stream.
#include "block.cuh"

struct CombineArgs {
    const float *outputs;  // [rows, top_k, hidden], or null: no routed experts
    const float *weights;  // [rows, top_k]
    const float *shared;   // [rows, hidden], or null
    const float *gate;     // [rows], or null: 1
    float *hidden;         // [rows, hidden], added to
    float *tap;            // [rows, hidden], or null: what was added
    u32 width, top_k;
};

// Grid: parts of a row, rows.
// registers: 64
HZ_KERNEL(256, 4) combine(HZ_ARGS(CombineArgs, a)) {
    const u32 i = block_x() * 256 + thread_id(), r = block_y();
    successor_start();
    predecessor_wait();
    if (i >= a.width) return;
    float sum = 0;
    if (a.outputs) {
        for (u32 k = 0; k < a.top_k; k++) {
            sum = f32_fma(a.weights[(u64)r * a.top_k + k], a.outputs[((u64)r * a.top_k + k) * a.width + i], sum);
        }
    }
    const u64 at = (u64)r * a.width + i;
    if (a.shared) sum = a.outputs || a.gate ? f32_fma(a.gate ? a.gate[r] : 1.0f, a.shared[at], sum) : a.shared[at];
    if (a.tap) a.tap[at] = sum;
    a.hidden[at] += sum;
}
