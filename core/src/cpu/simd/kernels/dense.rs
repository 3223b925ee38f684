//! Products with stored FP16 and FP32 rows.
#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled inside the function that enables its features"
)]

use std::ops::Range;

use half::f16;

use super::super::{Kernel, Simd};
use super::tiles::{Tiles, product};
use super::{accumulate, split_inputs, store_sums};
use crate::cpu::numerics::LANES;

/// A stored weight that widens to FP32.
pub trait Element: Copy + Send + Sync + 'static {
    /// Zero, for padding.
    const ZERO: Self;
    /// Sixteen of them as lanes.
    fn lanes<S: Simd>(s: S, x: &[Self; LANES]) -> S::V;
}

impl Element for f16 {
    const ZERO: Self = f16::ZERO;
    #[inline(always)]
    fn lanes<S: Simd>(s: S, x: &[Self; LANES]) -> S::V {
        s.load_f16(x)
    }
}

impl Element for f32 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn lanes<S: Simd>(s: S, x: &[Self; LANES]) -> S::V {
        s.load(x)
    }
}

/// Length that an input row of a [`Gemm`] is padded to with zeros.
#[must_use]
pub fn padded(cols: usize) -> usize {
    cols.next_multiple_of(LANES)
}

/// `out[row][input] = Σ w[row]·x[input]` for FP16 or FP32 weights: [`dot_f16`](crate::cpu::numerics::dot_f16).
pub struct Gemm<'a, E> {
    /// `[rows][cols]`
    pub weights: &'a [E],
    /// Row length of the weights.
    pub cols: usize,
    /// `[inputs][padded(cols)]`, zero beyond `cols`.
    pub inputs: &'a [f32],
    /// `[rows][inputs]`
    pub out: &'a mut [f32],
}

impl<E: Element> Kernel for Gemm<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let weights = DenseRows {
            values: self.weights,
            cols: self.cols,
        };
        if self.inputs.len() == weights.input_len() {
            // One row at a time: memory is the limit, and it is fastest read in one stream.
            product::<_, S, 1, 1>(s, weights, self.inputs, self.out);
        } else if S::MANY_REGISTERS {
            product::<_, S, 4, 4>(s, weights, self.inputs, self.out);
        } else {
            product::<_, S, 2, 2>(s, weights, self.inputs, self.out);
        }
    }
}

/// Stored rows.
#[derive(Clone, Copy)]
struct DenseRows<'a, E> {
    values: &'a [E],
    cols: usize,
}

impl<E: Element> Tiles for DenseRows<'_, E> {
    #[inline(always)]
    fn input_len(&self) -> usize {
        padded(self.cols)
    }

    #[inline(always)]
    fn rows(&self, range: Range<usize>) -> Self {
        Self {
            values: &self.values[range.start * self.cols..range.end * self.cols],
            cols: self.cols,
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const T: usize>(self, s: S, x: &[f32], out: &mut [f32], n: usize) {
        let Self { values: w, cols } = self;
        let full = cols / LANES;
        let mut rows: [&[[E; LANES]]; R] = [&[]; R];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = &w[r * cols..(r + 1) * cols].as_chunks().0[..full];
        }
        let x: [&[[f32; LANES]]; T] = split_inputs(x, padded(cols) / LANES);
        let mut sums = [[s.splat(0.0); T]; R];
        let mut lanes = [s.splat(0.0); R];
        for c in 0..full {
            for r in 0..R {
                lanes[r] = E::lanes(s, &rows[r][c]);
            }
            accumulate(s, &mut sums, &lanes, &x, c);
            if T > 1 {
                for row in &rows {
                    // The same place of the next rows: the tile's inputs are read again and again meanwhile.
                    s.prefetch(&row[c], R * cols * size_of::<E>());
                }
            }
        }
        if !cols.is_multiple_of(LANES) {
            for r in 0..R {
                let mut tail = [E::ZERO; LANES];
                tail[..cols % LANES].copy_from_slice(&w[r * cols + full * LANES..(r + 1) * cols]);
                lanes[r] = E::lanes(s, &tail);
            }
            accumulate(s, &mut sums, &lanes, &x, full);
        }
        store_sums(s, &sums, out, n);
    }
}

/// `out += Σ weight·row` over rows in order: the values of attention.
pub struct WeightedRows<'a, E> {
    /// `[weights.len()][out.len()]`
    pub rows: &'a [E],
    /// One a row.
    pub weights: &'a [f32],
    /// One a column.
    pub out: &'a mut [f32],
}

impl<E: Element> Kernel for WeightedRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.out.len();
        let mut first = 0;
        while first + 4 * LANES <= width {
            weighted_columns::<S, E, 4>(s, self.rows, width, first, self.weights, self.out);
            first += 4 * LANES;
        }
        while first < width {
            weighted_columns::<S, E, 1>(s, self.rows, width, first, self.weights, self.out);
            first += LANES;
        }
    }
}

/// Columns `first..first + 16·N`, or up to `width` if that is less (then `N` is 1).
#[inline(always)]
fn weighted_columns<S: Simd, E: Element, const N: usize>(
    s: S,
    rows: &[E],
    width: usize,
    first: usize,
    weights: &[f32],
    out: &mut [f32],
) {
    let used = (width - first).min(N * LANES);
    let mut sums = [s.splat(0.0); N];
    let mut buffer = [[0.0f32; LANES]; N];
    buffer.as_flattened_mut()[..used].copy_from_slice(&out[first..first + used]);
    for (sum, b) in sums.iter_mut().zip(&buffer) {
        *sum = s.load(b);
    }
    for (row, p) in rows.chunks_exact(width).zip(weights) {
        let p = s.splat(*p);
        let columns = &row[first..first + used];
        if used == N * LANES {
            for (sum, x) in sums.iter_mut().zip(columns.as_chunks().0) {
                *sum = s.fma(p, E::lanes(s, x), *sum);
            }
        } else {
            let mut tail = [E::ZERO; LANES];
            tail[..used].copy_from_slice(columns);
            sums[0] = s.fma(p, E::lanes(s, &tail), sums[0]);
        }
    }
    for (sum, b) in sums.iter().zip(&mut buffer) {
        s.store(*sum, b);
    }
    out[first..first + used].copy_from_slice(&buffer.as_flattened()[..used]);
}

#[cfg(test)]
mod tests {
    use super::super::value;
    use super::*;
    use crate::cpu::numerics::{dot_f16, dot_f32};
    use crate::cpu::simd::Isa;

    #[test]
    fn gemm_gives_the_bits_of_the_dot_product_on_every_instruction_set() {
        for isa in Isa::available() {
            for (rows, cols, inputs) in [(1, 8, 1), (5, 24, 3), (8, 96, 4), (6, 128, 9), (3, 1000, 5)] {
                let w: Vec<f16> = (0..rows * cols).map(|i| f16::from_f32(value(i))).collect();
                let w32: Vec<f32> = w.iter().map(|w| w.to_f32()).collect();
                let x: Vec<f32> = (0..inputs * cols).map(|i| value(i + 7)).collect();
                let mut padded_x = vec![0.0; inputs * padded(cols)];
                for (x, p) in x.chunks(cols).zip(padded_x.chunks_mut(padded(cols))) {
                    p[..cols].copy_from_slice(x);
                }
                let (mut a, mut b) = (vec![f32::NAN; rows * inputs], vec![f32::NAN; rows * inputs]);
                isa.run(Gemm {
                    weights: &w,
                    cols,
                    inputs: &padded_x,
                    out: &mut a,
                });
                isa.run(Gemm {
                    weights: &w32,
                    cols,
                    inputs: &padded_x,
                    out: &mut b,
                });
                for r in 0..rows {
                    for t in 0..inputs {
                        let x = &x[t * cols..(t + 1) * cols];
                        let want = dot_f16(&w[r * cols..(r + 1) * cols], x);
                        assert_eq!(
                            a[r * inputs + t].to_bits(),
                            want.to_bits(),
                            "{isa:?} {rows}x{cols} {r} {t}"
                        );
                        let want = dot_f32(&w32[r * cols..(r + 1) * cols], x);
                        assert_eq!(
                            b[r * inputs + t].to_bits(),
                            want.to_bits(),
                            "{isa:?} {rows}x{cols} {r} {t}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn weighted_rows_add_in_order_on_every_instruction_set() {
        for isa in Isa::available() {
            for width in [8, 16, 24, 64, 96, 128, 136] {
                let n = 9;
                let rows: Vec<f16> = (0..n * width).map(|i| f16::from_f32(value(i))).collect();
                let p: Vec<f32> = (0..n).map(|i| value(i + 3)).collect();
                let mut out = vec![0.0; width];
                isa.run(WeightedRows {
                    rows: &rows,
                    weights: &p,
                    out: &mut out,
                });
                for d in 0..width {
                    let mut want = 0.0f32;
                    for j in 0..n {
                        want = p[j].mul_add(rows[j * width + d].to_f32(), want);
                    }
                    assert_eq!(
                        out[d].to_bits(),
                        want.to_bits(),
                        "{isa:?} width {width} column {d}"
                    );
                }
            }
        }
    }
}
