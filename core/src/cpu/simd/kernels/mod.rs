//! The kernels, each the same formula as its namesake in [`numerics`](crate::cpu::numerics), over many rows and
//! many inputs at once.
//!
//! In a tile, R rows are computed together: independent sums that hide the latency of the fused multiply-add. With
//! T inputs a weight is widened once for all of them. R·T sums have to stay in registers. How rows and inputs are
//! tiled never changes a bit of a result.

mod dense;
mod integer;
mod packed;
mod q8;
mod rows;
mod tiles;

pub use dense::{Element, Gemm, WeightedRows, padded};
pub use integer::{QpackedIntegerGemm, arrange_integers, integer_len};
pub use packed::{QpackedGemm, QpackedRows, permute, permuted_len};
pub use q8::Q8Gemm;
pub use rows::{AddScaled, ScaleRow, SumOfSquares};

use super::Simd;
use crate::cpu::numerics::LANES;

/// Sixteen products of each row with each input: `w` are the rows' lanes, `x[t][at]` the inputs'.
///
/// Kernels use plain loops, never closures: a closure that the optimiser does not inline is compiled without the
/// features of its kernel.
#[expect(clippy::inline_always, reason = "part of a kernel")]
#[inline(always)]
fn accumulate<S: Simd, const R: usize, const T: usize>(
    s: S,
    sums: &mut [[S::V; T]; R],
    w: &[S::V; R],
    x: &[&[[f32; LANES]]; T],
    at: usize,
) {
    for t in 0..T {
        let x = s.load(&x[t][at]);
        for r in 0..R {
            sums[r][t] = s.fma(w[r], x, sums[r][t]);
        }
    }
}

/// The T inputs of a tile, each `len` groups of sixteen.
#[expect(clippy::inline_always, reason = "part of a kernel")]
#[inline(always)]
fn split_inputs<const T: usize>(x: &[f32], len: usize) -> [&[[f32; LANES]]; T] {
    let mut out: [&[[f32; LANES]]; T] = [&[]; T];
    let x = x.as_chunks().0;
    for (t, out) in out.iter_mut().enumerate() {
        *out = &x[t * len..(t + 1) * len];
    }
    out
}

#[expect(clippy::inline_always, reason = "part of a kernel")]
#[inline(always)]
fn store_sums<S: Simd, const R: usize, const T: usize>(
    s: S,
    sums: &[[S::V; T]; R],
    out: &mut [f32],
    n: usize,
) {
    for r in 0..R {
        for t in 0..T {
            out[r * n + t] = s.fold(sums[r][t]);
        }
    }
}

/// Test inputs: distinct values between −2 and 2.
#[cfg(test)]
#[expect(clippy::cast_precision_loss, reason = "small numbers")]
fn value(i: usize) -> f32 {
    ((i * 2_654_435_761) % 1009) as f32 / 251.0 - 2.0
}
