//! Products with packed rows; the bits are tested with the tiling in [`tiling`](crate::cpu::tiling).
#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled inside the function that enables its features"
)]

use std::ops::Range;

use half::f16;

use super::super::{Kernel, Simd};
use super::tiles::{Tiles, product};
use super::{accumulate, split_inputs, store_sums};
use crate::cpu::numerics::{CODE_GROUP, LANES};

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
    pub fn rows(&self, range: Range<usize>) -> QpackedRows<'a> {
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
        let Self { weights, inputs, out } = self;
        if inputs.len() == weights.input_len() {
            product::<_, S, 4, 1>(s, weights, inputs, out);
        } else if S::MANY_REGISTERS {
            product::<_, S, 4, 4>(s, weights, inputs, out);
        } else {
            product::<_, S, 2, 2>(s, weights, inputs, out);
        }
    }
}

impl Tiles for QpackedRows<'_> {
    #[inline(always)]
    fn input_len(&self) -> usize {
        self.groups * CODE_GROUP
    }

    #[inline(always)]
    fn rows(&self, range: Range<usize>) -> Self {
        QpackedRows::rows(self, range)
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const T: usize>(self, s: S, x: &[f32], out: &mut [f32], n: usize) {
        match self.block {
            32 => packed_tile::<S, R, T, 4>(s, self, x, out, n),
            64 => packed_tile::<S, R, T, 2>(s, self, x, out, n),
            _ => packed_tile::<S, R, T, 1>(s, self, x, out, n),
        }
    }
}

/// `PARTS` blocks a group of 128, each with its scale in its lanes; 1 also where a block spans several groups: one
/// scale for all lanes.
#[inline(always)]
fn packed_tile<S: Simd, const R: usize, const T: usize, const PARTS: usize>(
    s: S,
    w: QpackedRows<'_>,
    x: &[f32],
    out: &mut [f32],
    n: usize,
) {
    let rows: [PackedRow<'_>; R] = split_rows(w);
    let x: [&[[f32; LANES]]; T] = split_inputs(x, w.groups * 8);
    let span = (w.block / CODE_GROUP).max(1);
    let mut sums = [[s.splat(0.0); T]; R];
    let mut lanes = [s.splat(0.0); R];
    for g in 0..w.groups {
        let mut words = [s.codes(&rows[0].codes[g]); R];
        // One of the two is used, which the compiler knows.
        let (mut scale, mut scales) = ([s.scale(f16::ZERO); R], [s.splat(0.0); R]);
        for r in 0..R {
            words[r] = s.codes(&rows[r].codes[g]);
            if PARTS == 1 {
                scale[r] = s.scale(rows[r].scales[g / span]);
            } else {
                scales[r] = rows[r].scales_of_parts::<S, PARTS>(s, g);
            }
            rows[r].prefetch::<S, R>(s, w, g);
        }
        for nibble in 0..8 {
            for r in 0..R {
                lanes[r] = if PARTS == 1 {
                    s.next_weights(&mut words[r], scale[r])
                } else {
                    s.mul(scales[r], s.next_integers(&mut words[r]))
                };
            }
            accumulate(s, &mut sums, &lanes, &x, g * 8 + nibble);
        }
    }
    store_sums(s, &sums, out, n);
}

/// One row of a tile.
#[derive(Clone, Copy, Default)]
pub(super) struct PackedRow<'a> {
    /// By group.
    pub codes: &'a [[u8; 4 * LANES]],
    /// By block.
    pub scales: &'a [f16],
}

impl PackedRow<'_> {
    /// Asks for the same place R rows on: short rows end before the hardware has seen a stream.
    #[inline(always)]
    pub fn prefetch<S: Simd, const R: usize>(&self, s: S, w: QpackedRows<'_>, group: usize) {
        s.prefetch(&self.codes[group], R * w.groups * CODE_GROUP / 2);
    }

    /// The scales of a group that holds `PARTS` blocks, each in its lanes.
    #[inline(always)]
    pub fn scales_of_parts<S: Simd, const PARTS: usize>(&self, s: S, group: usize) -> S::V {
        let mut d = [f16::ZERO; LANES];
        for (l, d) in d.iter_mut().enumerate() {
            *d = self.scales[group * PARTS + l / (LANES / PARTS)];
        }
        s.load_f16(&d)
    }
}

#[inline(always)]
pub(super) fn split_rows<const R: usize>(w: QpackedRows<'_>) -> [PackedRow<'_>; R] {
    let per_row = QpackedRows::scales_per_row(w.groups, w.block);
    let codes = w.codes.as_chunks().0;
    let mut rows = [PackedRow::default(); R];
    for (r, row) in rows.iter_mut().enumerate() {
        row.codes = &codes[r * w.groups..(r + 1) * w.groups];
        row.scales = &w.scales[r * per_row..(r + 1) * per_row];
    }
    rows
}
