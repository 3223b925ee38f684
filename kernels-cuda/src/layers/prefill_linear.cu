// Matrix products of many rows: y = W x + b into FP32, or added to the residual stream; and pairs of rows with the gate
// between them (the shared expert and dense feed-forwards), into FP16.
//
// Three shapes of one arithmetic (product.cuh): `wide` for many blocks of rows and tokens, `middle`, and `narrow` for few
// tokens, where the weights' bytes are what counts. Grid: blocks of rows, blocks of tokens. Shared memory: the ring.
#include "product.cuh"

struct PrefillLinearArgs {
    const u8 *weights;
    const u16 *input;  // [.., columns]
    const u32 *which;  // [tokens]: row of `input` of each token, or null: its own
    const u16 *bias;   // [outputs], or null
    void *output;      // f32 [tokens, outputs], or null; of pairs, f16 [tokens, outputs]
    float *hidden;     // [tokens, outputs], added to, or null
    u32 tokens, columns, outputs;
    u32 unused;
};

template <int ENC> using Wide = Product<ENC, Stream, 4, 2, 16, 2, 3, 1>;
template <int ENC> using Middle = Product<ENC, Stream, 4, 2, 8, 2, 3, 1>;
template <int ENC> using Narrow = Product<ENC, Stream, 2, 1, 4, 4, 3, ENC == F16 ? 2 : 4>;

template <class P, int PAIRS> HZ_DEVICE void prefill_linear(const PrefillLinearArgs &a, u8 *shared) {
    P p;
    const u32 first = block_y() * P::TOKENS, tokens = min_u32(P::TOKENS, a.tokens - first);
    p.weights(a.weights, block_x(), PAIRS ? a.outputs / 8 : ceil_div(a.outputs, 16), a.columns, 32);
    successor_start();
    predecessor_wait();
    p.run(a.input, tokens, shared, [&](u32 n) { return a.which ? a.which[first + n] : first + n; });
    if constexpr (PAIRS) {
        p.each_pair(block_x(), a.outputs, tokens, [&](u32 output, u32 n, float y) {
            ((u16 *)a.output)[(u64)(first + n) * a.outputs + output] = f32_to_f16(y);
        });
    } else {
        p.each(block_x(), a.outputs, tokens, [&](u32 output, u32 n, float y) {
            const u64 at = (u64)(first + n) * a.outputs + output;
            if (a.bias) y += f16_to_f32(a.bias[output]);
            if (a.output) ((float *)a.output)[at] = y;
            if (a.hidden) a.hidden[at] += y;
        });
    }
}

#define PREFILL_LINEAR(SHAPE, ENC, PAIRS)                          \
    HZ_SHARED(shared);                                             \
    prefill_linear<SHAPE<ENC>, PAIRS>(a, shared);

// registers: 255
HZ_KERNEL(Wide<F16>::THREADS, 2) prefill_linear_f16_wide(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Wide, F16, false)
}
// registers: 168
HZ_KERNEL(Middle<F16>::THREADS, 3) prefill_linear_f16_middle(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Middle, F16, false)
}
// registers: 255
HZ_KERNEL(Narrow<F16>::THREADS, 4) prefill_linear_f16_narrow(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Narrow, F16, false)
}
// registers: 255
HZ_KERNEL(Wide<Q8>::THREADS, 2) prefill_linear_q8_wide(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Wide, Q8, false)
}
// registers: 168
HZ_KERNEL(Middle<Q8>::THREADS, 3) prefill_linear_q8_middle(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Middle, Q8, false)
}
// registers: 255
HZ_KERNEL(Narrow<Q8>::THREADS, 4) prefill_linear_q8_narrow(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Narrow, Q8, false)
}
// registers: 255
HZ_KERNEL(Wide<F16>::THREADS, 2) prefill_pairs_f16_wide(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Wide, F16, true)
}
// registers: 168
HZ_KERNEL(Middle<F16>::THREADS, 3) prefill_pairs_f16_middle(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Middle, F16, true)
}
// registers: 255
HZ_KERNEL(Narrow<F16>::THREADS, 4) prefill_pairs_f16_narrow(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Narrow, F16, true)
}
// registers: 255
HZ_KERNEL(Wide<Q8>::THREADS, 2) prefill_pairs_q8_wide(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Wide, Q8, true)
}
// registers: 168
HZ_KERNEL(Middle<Q8>::THREADS, 3) prefill_pairs_q8_middle(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Middle, Q8, true)
}
// registers: 255
HZ_KERNEL(Narrow<Q8>::THREADS, 4) prefill_pairs_q8_narrow(HZ_ARGS(PrefillLinearArgs, a)) {
    PREFILL_LINEAR(Narrow, Q8, true)
}
