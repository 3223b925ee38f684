//! Products with q8 rows.
#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled inside the function that enables its features"
)]

use std::ops::Range;

use half::f16;

use super::super::{Kernel, Simd};
use super::tiles::{Tiles, product};
use super::{accumulate, padded, split_inputs, store_sums};
use crate::cpu::numerics::LANES;
use crate::dense_q8::{BLOCK, Q8Rows, scales_per_row};

/// Registers of lanes a block.
const PARTS: usize = BLOCK / LANES;

/// `out[row][input] = Σ w[row]·x[input]` for q8 weights: [`dot_q8`](crate::cpu::numerics::dot_q8).
pub struct Q8Gemm<'a> {
    /// Weights.
    pub weights: Q8Rows<'a>,
    /// `[inputs][padded(cols)]`, zero beyond `cols`.
    pub inputs: &'a [f32],
    /// `[rows][inputs]`
    pub out: &'a mut [f32],
}

impl Kernel for Q8Gemm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { weights, inputs, out } = self;
        if inputs.len() == padded(weights.cols) {
            product::<_, S, 4, 1>(s, weights, inputs, out);
        } else if S::MANY_REGISTERS {
            product::<_, S, 4, 4>(s, weights, inputs, out);
        } else {
            product::<_, S, 2, 2>(s, weights, inputs, out);
        }
    }
}

impl Tiles for Q8Rows<'_> {
    #[inline(always)]
    fn input_len(&self) -> usize {
        padded(self.cols)
    }

    #[inline(always)]
    fn rows(&self, range: Range<usize>) -> Self {
        self.range(range)
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const T: usize>(self, s: S, x: &[f32], out: &mut [f32], n: usize) {
        let (cols, per_row) = (self.cols, scales_per_row(self.cols));
        let blocks = cols / BLOCK;
        let mut codes: [&[[i8; LANES]]; R] = [&[]; R];
        let mut scales: [&[f16]; R] = [&[]; R];
        for r in 0..R {
            codes[r] = &self.codes[r * cols..(r + 1) * cols].as_chunks().0[..blocks * PARTS];
            scales[r] = &self.scales[r * per_row..(r + 1) * per_row];
        }
        let x: [&[[f32; LANES]]; T] = split_inputs(x, padded(cols) / LANES);
        let mut sums = [[s.splat(0.0); T]; R];
        let mut lanes = [s.splat(0.0); R];
        let mut scale = [s.splat(0.0); R];
        for b in 0..blocks {
            for r in 0..R {
                scale[r] = s.splat_f16(scales[r][b]);
                // The same place of the next rows: short rows end before the hardware has seen a stream.
                s.prefetch(&codes[r][b * PARTS], R * cols);
            }
            for part in 0..PARTS {
                for r in 0..R {
                    lanes[r] = s.mul(scale[r], s.load_i8(&codes[r][b * PARTS + part]));
                }
                accumulate(s, &mut sums, &lanes, &x, b * PARTS + part);
            }
        }
        // The short block that ends a row, sixteen at a time.
        for first in (blocks * BLOCK..cols).step_by(LANES) {
            for r in 0..R {
                let mut tail = [0i8; LANES];
                let left = &self.codes[r * cols + first..(r + 1) * cols];
                let used = left.len().min(LANES);
                tail[..used].copy_from_slice(&left[..used]);
                lanes[r] = s.mul(s.splat_f16(scales[r][blocks]), s.load_i8(&tail));
            }
            accumulate(s, &mut sums, &lanes, &x, first / LANES);
        }
        store_sums(s, &sums, out, n);
    }
}

#[cfg(test)]
mod tests {
    use super::super::value;
    use super::*;
    use crate::cpu::numerics::dot_q8;
    use crate::cpu::simd::Isa;
    use crate::dense_q8::Q8Matrix;

    #[test]
    fn gemm_gives_the_bits_of_the_dot_product_on_every_instruction_set() {
        for isa in Isa::available() {
            for (rows, cols, inputs) in [
                (1, 8, 1),
                (7, 32, 1),
                (5, 24, 3),
                (8, 96, 4),
                (6, 1408, 9),
                (9, 1000, 5),
                (5, 56, 1),
                (2, 49, 2),
            ] {
                let w: Vec<f16> = (0..rows * cols).map(|i| f16::from_f32(value(i))).collect();
                let w = Q8Matrix::quantize(&w, cols).expect("finite");
                let x: Vec<f32> = (0..inputs * cols).map(|i| value(i + 7)).collect();
                let mut padded_x = vec![0.0; inputs * padded(cols)];
                for (x, p) in x.chunks(cols).zip(padded_x.chunks_mut(padded(cols))) {
                    p[..cols].copy_from_slice(x);
                }
                let mut out = vec![f32::NAN; rows * inputs];
                isa.run(Q8Gemm {
                    weights: w.view(),
                    inputs: &padded_x,
                    out: &mut out,
                });
                for r in 0..rows {
                    let row = w.view().range(r..r + 1);
                    for t in 0..inputs {
                        let want = dot_q8(row.codes, row.scales, &x[t * cols..(t + 1) * cols]);
                        let got = out[r * inputs + t];
                        assert_eq!(got.to_bits(), want.to_bits(), "{isa:?} {rows}x{cols} {r} {t}");
                    }
                }
            }
        }
    }
}
