//! Products of packed rows with rows of 16-bit integers; tested with the tiling, as the FP32 products are.
#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled inside the function that enables its features"
)]

use std::ops::Range;

use super::super::{Kernel, Simd};
use super::packed::{PackedRow, split_rows};
use super::tiles::{Tiles, product};
use super::{QpackedRows, store_sums};
use crate::cpu::numerics::{CODE_GROUP, LANES, to_integers};

/// 16-bit halves of a register: each holds four codes.
const HALVES: usize = 2 * LANES;

/// Floats that an arranged integer row of `cols` values takes: two integers a float, then a scale a group.
#[must_use]
pub fn integer_len(cols: usize) -> usize {
    let groups = cols.div_ceil(CODE_GROUP);
    groups * CODE_GROUP / 2 + groups.next_multiple_of(LANES)
}

/// Rounds a row with [`to_integers`] and arranges it for packed weights: in each group of 128, element
/// `4·half + nibble` goes to `32·nibble + half`; what is beyond the row is zero.
///
/// # Panics
/// When `out` is not [`integer_len`] long.
pub fn arrange_integers(x: &[f32], out: &mut [f32]) {
    assert_eq!(
        out.len(),
        integer_len(x.len()),
        "length of an arranged integer row"
    );
    out.fill(0.0);
    let groups = x.len().div_ceil(CODE_GROUP);
    let (values, scales) = out.split_at_mut(groups * CODE_GROUP / 2);
    let values: &mut [i16] = bytemuck::cast_slice_mut(values);
    let mut buffer = [0i16; CODE_GROUP];
    let chunks = x
        .chunks(CODE_GROUP)
        .zip(values.chunks_exact_mut(CODE_GROUP))
        .zip(scales);
    for ((x, values), scale) in chunks {
        to_integers(x, &mut buffer[..x.len()], std::slice::from_mut(scale));
        for (i, v) in buffer[..x.len()].iter().enumerate() {
            values[i % 4 * HALVES + i / 4] = *v;
        }
    }
}

/// `out[row][input] = Σ w[row]·x[input]`:
/// [`dot_qpacked_integers`](crate::cpu::numerics::dot_qpacked_integers).
pub struct QpackedIntegerGemm<'a> {
    /// Weights.
    pub weights: QpackedRows<'a>,
    /// `[inputs][integer_len]`, each of [`arrange_integers`].
    pub inputs: &'a [f32],
    /// `[rows][inputs]`
    pub out: &'a mut [f32],
}

impl Kernel for QpackedIntegerGemm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { weights, inputs, out } = self;
        let weights = IntegerRows(weights);
        match (inputs.len() == weights.input_len(), S::MANY_REGISTERS) {
            // One row at a time: memory is the limit, and it is fastest read in one stream.
            (true, _) => product::<_, S, 1, 1>(s, weights, inputs, out),
            (false, true) => product::<_, S, 2, 4>(s, weights, inputs, out),
            (false, false) => product::<_, S, 1, 2>(s, weights, inputs, out),
        }
    }
}

/// Packed rows that are multiplied with rows of integers.
#[derive(Clone, Copy)]
struct IntegerRows<'a>(QpackedRows<'a>);

impl Tiles for IntegerRows<'_> {
    #[inline(always)]
    fn input_len(&self) -> usize {
        integer_len(self.0.groups * CODE_GROUP)
    }

    #[inline(always)]
    fn rows(&self, range: Range<usize>) -> Self {
        Self(self.0.rows(range))
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const T: usize>(self, s: S, x: &[f32], out: &mut [f32], n: usize) {
        match self.0.block {
            32 => integer_tile::<S, R, T, 4>(s, self.0, x, out, n),
            64 => integer_tile::<S, R, T, 2>(s, self.0, x, out, n),
            _ => integer_tile::<S, R, T, 1>(s, self.0, x, out, n),
        }
    }
}

/// `PARTS` blocks a group of 128; 1 also where a block spans several groups.
#[inline(always)]
fn integer_tile<S: Simd, const R: usize, const T: usize, const PARTS: usize>(
    s: S,
    w: QpackedRows<'_>,
    x: &[f32],
    out: &mut [f32],
    n: usize,
) {
    let rows: [PackedRow<'_>; R] = split_rows(w);
    let stride = integer_len(w.groups * CODE_GROUP);
    let mut values: [&[[i16; HALVES]]; T] = [&[]; T];
    let mut scales: [&[f32]; T] = [&[]; T];
    for t in 0..T {
        let (v, s) = x[t * stride..(t + 1) * stride].split_at(w.groups * CODE_GROUP / 2);
        values[t] = &bytemuck::cast_slice::<f32, i16>(v).as_chunks().0[..4 * w.groups];
        scales[t] = &s[..w.groups];
    }
    let span = (w.block / CODE_GROUP).max(1);
    let mut sums = [[s.splat(0.0); T]; R];
    for g in 0..w.groups {
        let mut words = [s.codes(&rows[0].codes[g]); R];
        for r in 0..R {
            words[r] = s.codes(&rows[r].codes[g]);
            if T > 1 {
                rows[r].prefetch::<S, R>(s, w, g);
            }
        }
        let mut products = [[s.no_sums(); T]; R];
        for nibble in 0..4 {
            for r in 0..R {
                let start = words[r];
                for t in 0..T {
                    let pairs = s.load_pairs(&values[t][4 * g + nibble]);
                    words[r] = start;
                    products[r][t] = s.add_products(&mut words[r], pairs, products[r][t]);
                }
            }
        }
        for r in 0..R {
            let scale = if PARTS == 1 {
                s.splat_f16(rows[r].scales[g / span])
            } else {
                rows[r].scales_of_parts::<S, PARTS>(s, g)
            };
            for t in 0..T {
                let factor = s.mul(scale, s.splat(scales[t][g]));
                sums[r][t] = s.fma(factor, s.widen_sums(products[r][t]), sums[r][t]);
            }
        }
    }
    store_sums(s, &sums, out, n);
}
