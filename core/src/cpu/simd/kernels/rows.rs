//! Operations on one row.
#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled inside the function that enables its features"
)]

use half::f16;

use super::super::{Kernel, Simd};
use crate::cpu::numerics::LANES;

/// `Σ x²` in the order of [`dot_f32`](crate::cpu::numerics::dot_f32).
pub struct SumOfSquares<'a>(pub &'a [f32]);

impl Kernel for SumOfSquares<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        let mut sum = s.splat(0.0);
        for c in chunks {
            let x = s.load(c);
            sum = s.fma(x, x, sum);
        }
        if !rest.is_empty() {
            let mut tail = [0.0; LANES];
            tail[..rest.len()].copy_from_slice(rest);
            let x = s.load(&tail);
            sum = s.fma(x, x, sum);
        }
        s.fold(sum)
    }
}

/// `x = x · factor · weight`, in that order: the second half of an RMS norm.
pub struct ScaleRow<'a> {
    /// Scaled in place.
    pub x: &'a mut [f32],
    /// One factor for all.
    pub factor: f32,
    /// One a column.
    pub weight: &'a [f16],
}

impl Kernel for ScaleRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = s.splat(self.factor);
        let (chunks, rest) = self.x.as_chunks_mut::<LANES>();
        let (weights, weights_rest) = self.weight.as_chunks::<LANES>();
        for (x, w) in chunks.iter_mut().zip(weights) {
            let scaled = s.mul(s.mul(s.load(x), factor), s.load_f16(w));
            s.store(scaled, x);
        }
        for (x, w) in rest.iter_mut().zip(weights_rest) {
            *x = *x * self.factor * w.to_f32();
        }
    }
}

/// `out = weight·x + out`, rounded once an element.
pub struct AddScaled<'a> {
    /// Multiplies every element of `x`.
    pub weight: f32,
    /// As long as `out`.
    pub x: &'a [f32],
    /// Sum so far.
    pub out: &'a mut [f32],
}

impl Kernel for AddScaled<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let w = s.splat(self.weight);
        let (chunks, rest) = self.x.as_chunks::<LANES>();
        let (out, out_rest) = self.out.as_chunks_mut::<LANES>();
        for (x, out) in chunks.iter().zip(out) {
            let sum = s.fma(w, s.load(x), s.load(out));
            s.store(sum, out);
        }
        for (x, out) in rest.iter().zip(out_rest) {
            *out = self.weight.mul_add(*x, *out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::value;
    use super::*;
    use crate::cpu::numerics::dot_f32;
    use crate::cpu::simd::Isa;

    #[test]
    fn sums_have_the_reference_order() {
        for isa in Isa::available() {
            for n in [1, 15, 16, 40, 77] {
                let x: Vec<f32> = (0..n).map(value).collect();
                assert_eq!(isa.run(SumOfSquares(&x)).to_bits(), dot_f32(&x, &x).to_bits());
                let mut out = vec![0.5; n];
                isa.run(AddScaled {
                    weight: 0.3,
                    x: &x,
                    out: &mut out,
                });
                for (o, x) in out.iter().zip(&x) {
                    assert_eq!(o.to_bits(), 0.3f32.mul_add(*x, 0.5).to_bits());
                }
            }
        }
    }
}
