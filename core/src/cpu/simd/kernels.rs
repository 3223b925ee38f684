//! The kernels, each the same formula as its namesake in [`numerics`](crate::cpu::numerics), over many rows and
//! many inputs at once. How rows and inputs are tiled never changes a bit of a result.
#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled inside the function that enables its features"
)]

use half::f16;

use super::{Kernel, Simd};
use crate::cpu::numerics::{CODE_GROUP, LANES};

/// Rows computed together: independent sums that hide the latency of the fused multiply-add.
const ROWS: usize = 4;
/// Inputs computed together: a weight is widened once for all of them.
const INPUTS: usize = 4;

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

/// Length that an input row of a [`QpackedGemm`] has after [`permute`].
#[must_use]
pub fn permuted_len(cols: usize) -> usize {
    cols.next_multiple_of(CODE_GROUP)
}

/// Arranges an input for packed weights: in each group of 128, element `8·lane + nibble` goes to
/// `16·nibble + lane`; the rest of the last group is zero.
///
/// # Panics
/// When `out` is not [`permuted_len`] long.
pub fn permute(x: &[f32], out: &mut [f32]) {
    assert_eq!(out.len(), permuted_len(x.len()), "length of a permuted input");
    for (group, out) in x.chunks(CODE_GROUP).zip(out.chunks_exact_mut(CODE_GROUP)) {
        if group.len() < CODE_GROUP {
            out.fill(0.0);
        }
        for (i, x) in group.iter().enumerate() {
            out[i % 8 * LANES + i / 8] = *x;
        }
    }
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
        let n = self.inputs.len() / padded(self.cols);
        let rows = self
            .weights
            .chunks(ROWS * self.cols)
            .zip(self.out.chunks_mut(ROWS * n));
        for (w, out) in rows {
            if w.len() == ROWS * self.cols {
                dense_inputs::<S, E, ROWS>(s, w, self.cols, self.inputs, out);
            } else {
                for (w, out) in w.chunks_exact(self.cols).zip(out.chunks_exact_mut(n)) {
                    dense_inputs::<S, E, 1>(s, w, self.cols, self.inputs, out);
                }
            }
        }
    }
}

#[inline(always)]
fn dense_inputs<S: Simd, E: Element, const R: usize>(s: S, w: &[E], cols: usize, x: &[f32], out: &mut [f32]) {
    let stride = padded(cols);
    let n = x.len() / stride;
    let mut done = 0;
    for x in x.chunks(INPUTS * stride) {
        if x.len() == INPUTS * stride {
            dense_tile::<S, E, R, INPUTS>(s, w, cols, x, &mut out[done..], n);
            done += INPUTS;
        } else {
            for x in x.chunks_exact(stride) {
                dense_tile::<S, E, R, 1>(s, w, cols, x, &mut out[done..], n);
                done += 1;
            }
        }
    }
}

#[inline(always)]
fn dense_tile<S: Simd, E: Element, const R: usize, const T: usize>(
    s: S,
    w: &[E],
    cols: usize,
    x: &[f32],
    out: &mut [f32],
    out_stride: usize,
) {
    let full = cols / LANES;
    let w: [&[E]; R] = std::array::from_fn(|r| &w[r * cols..(r + 1) * cols]);
    let chunks: [&[[E; LANES]]; R] = std::array::from_fn(|r| &w[r].as_chunks().0[..full]);
    let x: [&[[f32; LANES]]; T] = std::array::from_fn(|t| {
        &x[t * padded(cols)..(t + 1) * padded(cols)].as_chunks().0[..padded(cols) / LANES]
    });
    let mut sums = [[s.splat(0.0); T]; R];
    for c in 0..full {
        let lanes: [S::V; R] = std::array::from_fn(|r| E::lanes(s, &chunks[r][c]));
        accumulate(s, &mut sums, lanes, std::array::from_fn(|t| s.load(&x[t][c])));
    }
    if !cols.is_multiple_of(LANES) {
        let lanes: [S::V; R] = std::array::from_fn(|r| {
            let mut tail = [E::ZERO; LANES];
            tail[..cols % LANES].copy_from_slice(&w[r][full * LANES..]);
            E::lanes(s, &tail)
        });
        accumulate(s, &mut sums, lanes, std::array::from_fn(|t| s.load(&x[t][full])));
    }
    for r in 0..R {
        for t in 0..T {
            out[r * out_stride + t] = s.fold(sums[r][t]);
        }
    }
}

#[inline(always)]
fn accumulate<S: Simd, const R: usize, const T: usize>(
    s: S,
    sums: &mut [[S::V; T]; R],
    w: [S::V; R],
    x: [S::V; T],
) {
    for r in 0..R {
        for t in 0..T {
            sums[r][t] = s.fma(w[r], x[t], sums[r][t]);
        }
    }
}

/// Packed rows as the CPU's tiling lays them out: each row's codes padded to whole groups of 128 with zero
/// weights, its scales to whole groups.
#[derive(Clone, Copy, Debug)]
pub struct QpackedRows<'a> {
    /// `[rows][groups][64]`
    pub codes: &'a [u8],
    /// `[rows][scales_per_row]`
    pub scales: &'a [f16],
    /// Groups of 128 a row.
    pub groups: usize,
    /// Values a scale: 32, 64, 128 or 256.
    pub block: usize,
}

impl<'a> QpackedRows<'a> {
    /// Scales of a row: one a block, at least those of every group.
    #[must_use]
    pub fn scales_per_row(groups: usize, block: usize) -> usize {
        (groups * CODE_GROUP).div_ceil(block)
    }

    /// Rows `range` only.
    #[must_use]
    pub fn rows(&self, range: std::ops::Range<usize>) -> QpackedRows<'a> {
        let (c, s) = (
            self.groups * CODE_GROUP / 2,
            Self::scales_per_row(self.groups, self.block),
        );
        QpackedRows {
            codes: &self.codes[range.start * c..range.end * c],
            scales: &self.scales[range.start * s..range.end * s],
            ..*self
        }
    }
}

/// `out[row][input] = Σ w[row]·x[input]` for packed weights: [`dot_qpacked`](crate::cpu::numerics::dot_qpacked).
pub struct QpackedGemm<'a> {
    /// Weights.
    pub weights: QpackedRows<'a>,
    /// `[inputs][groups * 128]`, each [`permute`]d.
    pub inputs: &'a [f32],
    /// `[rows][inputs]`
    pub out: &'a mut [f32],
}

impl Kernel for QpackedGemm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let stride = self.weights.groups * CODE_GROUP;
        let n = self.inputs.len() / stride;
        let rows = self.out.len() / n;
        for first in (0..rows).step_by(ROWS) {
            let out = &mut self.out[first * n..];
            if first + ROWS <= rows {
                packed_inputs::<S, ROWS>(s, self.weights.rows(first..first + ROWS), self.inputs, out);
            } else {
                for r in first..rows {
                    let out = &mut out[(r - first) * n..];
                    packed_inputs::<S, 1>(s, self.weights.rows(r..r + 1), self.inputs, out);
                }
            }
        }
    }
}

#[inline(always)]
fn packed_inputs<S: Simd, const R: usize>(s: S, w: QpackedRows<'_>, x: &[f32], out: &mut [f32]) {
    let stride = w.groups * CODE_GROUP;
    let n = x.len() / stride;
    let mut done = 0;
    for x in x.chunks(INPUTS * stride) {
        if x.len() == INPUTS * stride {
            packed_block::<S, R, INPUTS>(s, w, x, &mut out[done..], n);
            done += INPUTS;
        } else {
            for x in x.chunks_exact(stride) {
                packed_block::<S, R, 1>(s, w, x, &mut out[done..], n);
                done += 1;
            }
        }
    }
}

#[inline(always)]
fn packed_block<S: Simd, const R: usize, const T: usize>(
    s: S,
    w: QpackedRows<'_>,
    x: &[f32],
    out: &mut [f32],
    n: usize,
) {
    match w.block {
        32 => packed_tile_fine::<S, R, T, 4>(s, w, x, out, n),
        64 => packed_tile_fine::<S, R, T, 2>(s, w, x, out, n),
        block => packed_tile::<S, R, T>(s, w, block / CODE_GROUP, x, out, n),
    }
}

/// Blocks of whole groups (`span` of them): one scale for all lanes.
#[inline(always)]
fn packed_tile<S: Simd, const R: usize, const T: usize>(
    s: S,
    w: QpackedRows<'_>,
    span: usize,
    x: &[f32],
    out: &mut [f32],
    n: usize,
) {
    let (codes, scales, x) = tile_views::<R, T>(w, x);
    let mut sums = [[s.splat(0.0); T]; R];
    for g in 0..w.groups {
        let mut words: [S::Codes; R] = std::array::from_fn(|r| s.codes(&codes[r][g]));
        let scale: [S::Scale; R] = std::array::from_fn(|r| s.scale(scales[r][g / span]));
        for nibble in 0..8 {
            let lanes: [S::V; R] = std::array::from_fn(|r| s.next_weights(&mut words[r], scale[r]));
            accumulate(
                s,
                &mut sums,
                lanes,
                std::array::from_fn(|t| s.load(&x[t][g * 8 + nibble])),
            );
        }
    }
    store_sums(s, &sums, out, n);
}

/// Blocks of a fraction of a group (`PARTS` of them a group): the scale differs between lanes.
#[inline(always)]
fn packed_tile_fine<S: Simd, const R: usize, const T: usize, const PARTS: usize>(
    s: S,
    w: QpackedRows<'_>,
    x: &[f32],
    out: &mut [f32],
    n: usize,
) {
    let (codes, scales, x) = tile_views::<R, T>(w, x);
    let mut sums = [[s.splat(0.0); T]; R];
    for g in 0..w.groups {
        let mut words: [S::Codes; R] = std::array::from_fn(|r| s.codes(&codes[r][g]));
        let scale: [S::V; R] = std::array::from_fn(|r| {
            let d: [f16; LANES] = std::array::from_fn(|l| scales[r][g * PARTS + l / (LANES / PARTS)]);
            s.load_f16(&d)
        });
        for nibble in 0..8 {
            let lanes: [S::V; R] = std::array::from_fn(|r| s.mul(scale[r], s.next_integers(&mut words[r])));
            accumulate(
                s,
                &mut sums,
                lanes,
                std::array::from_fn(|t| s.load(&x[t][g * 8 + nibble])),
            );
        }
    }
    store_sums(s, &sums, out, n);
}

#[expect(
    clippy::type_complexity,
    reason = "three views of one tile, named where they are taken apart"
)]
#[inline(always)]
fn tile_views<'a, const R: usize, const T: usize>(
    w: QpackedRows<'a>,
    x: &'a [f32],
) -> (
    [&'a [[u8; 4 * LANES]]; R],
    [&'a [f16]; R],
    [&'a [[f32; LANES]]; T],
) {
    let per_row = QpackedRows::scales_per_row(w.groups, w.block);
    let (codes, x) = (w.codes.as_chunks().0, x.as_chunks().0);
    (
        std::array::from_fn(|r| &codes[r * w.groups..][..w.groups]),
        std::array::from_fn(|r| &w.scales[r * per_row..][..per_row]),
        std::array::from_fn(|t| &x[t * w.groups * 8..][..w.groups * 8]),
    )
}

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
    use super::*;
    use crate::cpu::numerics::{dot_f16, dot_f32};
    use crate::cpu::simd::Isa;

    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    fn value(i: usize) -> f32 {
        ((i * 2_654_435_761) % 1009) as f32 / 251.0 - 2.0
    }

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
