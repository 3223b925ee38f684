//! How a product is cut into tiles, the same for every form of weights.
#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled inside the function that enables its features"
)]

use std::ops::Range;

use super::super::Simd;

/// Rows of weights of one form.
pub(super) trait Tiles: Copy {
    /// Floats of an input row as a tile reads it.
    fn input_len(&self) -> usize;

    /// Rows `range` only.
    fn rows(&self, range: Range<usize>) -> Self;

    /// `out[r * n + t] = Σ w[r]·x[t]` for the R rows of `self` and the T inputs of `x`.
    fn tile<S: Simd, const R: usize, const T: usize>(self, s: S, x: &[f32], out: &mut [f32], n: usize);
}

/// `out[row][input] = Σ w[row]·x[input]`, R rows by T inputs at a time, what is left over one at a time.
#[inline(always)]
pub(super) fn product<W: Tiles, S: Simd, const R: usize, const T: usize>(
    s: S,
    weights: W,
    inputs: &[f32],
    out: &mut [f32],
) {
    let n = inputs.len() / weights.input_len();
    let rows = out.len() / n;
    for first in (0..rows).step_by(R) {
        let out = &mut out[first * n..];
        if first + R <= rows {
            each_input::<W, S, R, T>(s, weights.rows(first..first + R), inputs, out, n);
        } else {
            for r in first..rows {
                let out = &mut out[(r - first) * n..];
                each_input::<W, S, 1, T>(s, weights.rows(r..r + 1), inputs, out, n);
            }
        }
    }
}

#[inline(always)]
fn each_input<W: Tiles, S: Simd, const R: usize, const T: usize>(
    s: S,
    weights: W,
    inputs: &[f32],
    out: &mut [f32],
    n: usize,
) {
    let stride = weights.input_len();
    let mut done = 0;
    for x in inputs.chunks(T * stride) {
        if x.len() == T * stride {
            weights.tile::<S, R, T>(s, x, &mut out[done..], n);
            done += T;
        } else {
            for x in x.chunks_exact(stride) {
                weights.tile::<S, R, 1>(s, x, &mut out[done..], n);
                done += 1;
            }
        }
    }
}
