//! q8: non-routed matrices as 8-bit integers, made from their FP16 values when a model is loaded (`--dense q8`).
//!
//! A row of `W[out, in]` is cut along `in` into blocks of [`BLOCK`] consecutive values; the last block of a row is
//! short when the width is no multiple. A block has one FP16 scale `d` and codes `q` from −127 to 127;
//! `value = f32(d) · q`, exact in FP32. With `m` the largest magnitude of the block:
//!
//! - `d` is `m / 127`, the quotient in FP32, then rounded to FP16 (nearest, ties to even);
//! - `q` is `f32(w) / f32(d)`, the quotient in FP32, rounded to an integer (nearest, ties to even) and clamped to
//!   ±127. The clamp acts only where `d` is so small that its own rounding lost much of it;
//! - where `d` is 0, for a block of zeros or one whose scale is below FP16, every code is 0.

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use rayon::prelude::*;
use thiserror::Error;

/// Values that share a scale.
pub const BLOCK: usize = 32;

/// Values that one thread quantizes at a time.
const TASK: usize = 1 << 18;

/// Rows of a q8 matrix, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Q8Rows<'a> {
    /// `[rows][cols]`
    pub codes: &'a [i8],
    /// `[rows][scales_per_row(cols)]`
    pub scales: &'a [f16],
    /// Values a row.
    pub cols: usize,
}

/// A q8 matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Q8Matrix {
    /// `[rows][cols]`
    pub codes: Vec<i8>,
    /// `[rows][scales_per_row(cols)]`
    pub scales: Vec<f16>,
    /// Values a row.
    pub cols: usize,
}

/// A value that has no q8 form: NaN or an infinity.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[error("row {row}, column {column}: {value} is not a finite number")]
pub struct NotFinite {
    /// Row.
    pub row: usize,
    /// Column.
    pub column: usize,
    /// The value.
    pub value: f32,
}

/// Scales of a row of `cols` values.
#[must_use]
pub fn scales_per_row(cols: usize) -> usize {
    cols.div_ceil(BLOCK)
}

impl<'a> Q8Rows<'a> {
    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.codes.len() / self.cols
    }

    /// Rows `range` only.
    ///
    /// # Panics
    /// When there are fewer.
    #[must_use]
    pub fn range(&self, range: std::ops::Range<usize>) -> Q8Rows<'a> {
        let per_row = scales_per_row(self.cols);
        Q8Rows {
            codes: &self.codes[range.start * self.cols..range.end * self.cols],
            scales: &self.scales[range.start * per_row..range.end * per_row],
            cols: self.cols,
        }
    }

    /// Writes the values, `f32(d) · q`, to `out`, `[rows][cols]`.
    ///
    /// # Panics
    /// When `out` has another length.
    pub fn dequantize(&self, out: &mut [f32]) {
        assert_eq!(out.len(), self.codes.len(), "as many values as codes");
        let rows = self
            .codes
            .chunks_exact(self.cols)
            .zip(out.chunks_exact_mut(self.cols));
        for ((codes, out), scales) in rows.zip(self.scales.chunks_exact(scales_per_row(self.cols))) {
            for ((codes, out), d) in codes.chunks(BLOCK).zip(out.chunks_mut(BLOCK)).zip(scales) {
                for (q, out) in codes.iter().zip(out) {
                    *out = d.to_f32() * f32::from(*q);
                }
            }
        }
    }
}

impl Q8Matrix {
    /// The q8 form of `values`, `[rows][cols]`.
    ///
    /// # Errors
    /// As [`quantize`].
    ///
    /// # Panics
    /// As [`quantize`].
    pub fn quantize(values: &[f16], cols: usize) -> Result<Self, NotFinite> {
        let mut matrix = Self {
            codes: vec![0; values.len()],
            scales: vec![f16::ZERO; values.len() / cols * scales_per_row(cols)],
            cols,
        };
        quantize(values, cols, &mut matrix.codes, &mut matrix.scales)?;
        Ok(matrix)
    }

    /// All rows.
    #[must_use]
    pub fn view(&self) -> Q8Rows<'_> {
        Q8Rows {
            codes: &self.codes,
            scales: &self.scales,
            cols: self.cols,
        }
    }
}

/// Writes the q8 form of `values`, `[rows][cols]`.
///
/// # Errors
/// A value that is not finite; what was written until then is of no use.
///
/// # Panics
/// When `values` is not whole rows, or `codes` or `scales` do not belong to them.
pub fn quantize(values: &[f16], cols: usize, codes: &mut [i8], scales: &mut [f16]) -> Result<(), NotFinite> {
    check(values, cols, codes, scales);
    let rows = values.chunks_exact(cols).zip(codes.chunks_exact_mut(cols));
    for (row, ((values, codes), scales)) in rows
        .zip(scales.chunks_exact_mut(scales_per_row(cols)))
        .enumerate()
    {
        quantize_row(values, codes, scales).map_err(|column| NotFinite {
            row,
            column,
            value: values[column].to_f32(),
        })?;
    }
    Ok(())
}

/// [`quantize`] on the threads of the current pool.
///
/// # Errors
/// As [`quantize`].
///
/// # Panics
/// As [`quantize`].
pub fn quantize_on_all_threads(
    values: &[f16],
    cols: usize,
    codes: &mut [i8],
    scales: &mut [f16],
) -> Result<(), NotFinite> {
    check(values, cols, codes, scales);
    let step = (TASK / cols).max(1);
    values
        .par_chunks(step * cols)
        .zip(codes.par_chunks_mut(step * cols))
        .zip(scales.par_chunks_mut(step * scales_per_row(cols)))
        .enumerate()
        .try_for_each(|(task, ((values, codes), scales))| {
            quantize(values, cols, codes, scales).map_err(|e| NotFinite {
                row: task * step + e.row,
                ..e
            })
        })
}

fn check(values: &[f16], cols: usize, codes: &[i8], scales: &[f16]) {
    assert!(cols > 0 && values.len().is_multiple_of(cols), "whole rows");
    let rows = values.len() / cols;
    assert!(
        codes.len() == values.len() && scales.len() == rows * scales_per_row(cols),
        "codes and scales of these rows"
    );
}

/// One row; the error is the column of a value that is not finite.
fn quantize_row(values: &[f16], codes: &mut [i8], scales: &mut [f16]) -> Result<(), usize> {
    let mut buffer = [0.0f32; BLOCK];
    let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales);
    for (block, ((values, codes), scale)) in blocks.enumerate() {
        let wide = &mut buffer[..values.len()];
        values.convert_to_f32_slice(wide);
        let (mut largest, mut finite) = (0.0f32, true);
        for w in &*wide {
            finite &= w.is_finite();
            largest = largest.max(w.abs());
        }
        if !finite {
            let at = wide.iter().position(|w| !w.is_finite()).unwrap_or_default();
            return Err(block * BLOCK + at);
        }
        *scale = f16::from_f32(largest / 127.0);
        let d = scale.to_f32();
        if d == 0.0 {
            codes.fill(0);
            continue;
        }
        for (q, w) in codes.iter_mut().zip(&*wide) {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "clamped to the range of the codes"
            )]
            let code = round_small(*w / d).clamp(-127.0, 127.0) as i8;
            *q = code;
        }
    }
    Ok(())
}

/// [`f32::round_ties_even`] of magnitudes below 2²², which is a call into a library where the target has no
/// instruction for it.
fn round_small(x: f32) -> f32 {
    /// Its neighbours are 1 apart: adding it rounds to an integer, as every sum is rounded, ties to even.
    const INTEGERS: f32 = 12_582_912.0;
    (x + INTEGERS) - INTEGERS
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn halves(values: &[f32]) -> Vec<f16> {
        values.iter().map(|v| f16::from_f32(*v)).collect()
    }

    /// By hand: the largest magnitude 127 gives d = 1, so codes are the values rounded, ties to even.
    #[test]
    fn codes_of_a_unit_scale_are_the_rounded_values() {
        let values = [127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 63.25, 0.0, -0.25];
        let m = Q8Matrix::quantize(&halves(&values), values.len()).expect("finite");
        assert_eq!(m.scales, [f16::ONE]);
        assert_eq!(m.codes, [127, -127, 0, 2, 2, 0, -2, 63, 0, 0]);
    }

    /// By hand: 1 / 127 = 0.007874016 in FP32; FP16 has steps of 2^-17 there, and 0.007874016 · 2^17 = 1032.06, so
    /// d = 1032 · 2^-17 = 0.00787353515625. 1 / d = 127.0078 → 127; 0.5 / d = 63.504 → 64 (from the exact quotient
    /// 0.5 · 127 = 63.5 it would be 64 too, a tie); 0.1 (FP16 0.0999755859375) / d = 12.698 → 13;
    /// −0.3 (FP16 −0.300048828125) / d = −38.109 → −38.
    #[test]
    fn a_scale_is_rounded_before_it_divides() {
        let m = Q8Matrix::quantize(&halves(&[1.0, 0.5, 0.1, -0.3]), 4).expect("finite");
        assert_eq!(m.scales, [f16::from_bits(0x2008)]);
        assert_eq!(m.scales[0].to_f32(), 1032.0 / 131_072.0);
        assert_eq!(m.codes, [127, 64, 13, -38]);
        let mut back = [0.0; 4];
        m.view().dequantize(&mut back);
        assert_eq!(
            back.map(|v| v * 131_072.0),
            [131_064.0, 66_048.0, 13_416.0, -39_216.0]
        );
    }

    /// Largest 511/256 = 1.99609375: / 127 = 0.0157172736, · 2^16 = 1030.05 → d = 1030 · 2^-16; a value of exactly
    /// 20.5 steps, 21115 · 2^-16, is not an FP16 value, but 1030 · 1.5 = 1545 · 2^-16 is: 1.5 rounds to 2, −2.5 to −2.
    #[test]
    fn ties_go_to_the_even_code() {
        let step = 2f32.powi(-16);
        let values = [511.0 / 256.0, 1545.0 * step, -2575.0 * step, 515.0 * step];
        let halves = halves(&values);
        // 2575 takes twelve bits: FP16 rounds it to 2576, which is beyond the tie.
        assert_eq!(halves[2].to_f32(), -2576.0 * step);
        let m = Q8Matrix::quantize(&halves, 4).expect("finite");
        assert_eq!(m.scales[0].to_f32(), 1030.0 * step);
        assert_eq!(m.codes, [127, 2, -3, 0]);
    }

    #[test]
    fn blocks_are_cut_within_a_row_and_the_last_is_short() {
        let cols = 2 * BLOCK + 3;
        let mut values = vec![0.0; 2 * cols];
        values[BLOCK - 1] = 127.0;
        values[BLOCK] = 254.0;
        values[cols - 1] = -127.0 / 2.0;
        values[cols] = 127.0 * 4.0;
        let m = Q8Matrix::quantize(&halves(&values), cols).expect("finite");
        let d: Vec<f32> = m.scales.iter().map(|d| d.to_f32()).collect();
        assert_eq!(d, [1.0, 2.0, 0.5, 4.0, 0.0, 0.0]);
        let set: Vec<(usize, i8)> = m
            .codes
            .iter()
            .copied()
            .enumerate()
            .filter(|(_, q)| *q != 0)
            .collect();
        assert_eq!(
            set,
            [(BLOCK - 1, 127), (BLOCK, 127), (cols - 1, -127), (cols, 127)]
        );
        let second = m.view().range(1..2);
        assert_eq!(
            (second.rows(), second.codes[0], second.scales[0]),
            (1, 127, f16::from_f32(4.0))
        );
    }

    #[test]
    fn the_extremes_of_fp16_have_a_form() {
        // 65504 / 127 = 515.78, FP16 steps of 0.5: 516. The smallest scale: 2^-24 rounds 1.9 · 2^-24 up to 2 · 2^-24.
        let m = Q8Matrix::quantize(&[f16::MAX, f16::MIN, f16::ONE], 3).expect("finite");
        assert_eq!((m.scales[0].to_f32(), m.codes), (516.0, vec![127, -127, 0]));
        // 63 steps of 2^-24 / 127 rounds to 0; 64 / 127 to 1, a quotient of 64; 190 / 127 = 1.496 to 1: clamped.
        let tiny = |n: u16| Q8Matrix::quantize(&[f16::from_bits(n)], 1).expect("finite");
        assert_eq!((tiny(63).scales[0].to_bits(), tiny(63).codes[0]), (0, 0));
        assert_eq!((tiny(64).scales[0].to_bits(), tiny(64).codes[0]), (1, 64));
        assert_eq!((tiny(190).scales[0].to_bits(), tiny(190).codes[0]), (1, 127));
    }

    #[test]
    fn what_is_not_finite_is_named() {
        let mut values = vec![f16::ONE; 3 * 70];
        values[70 + 65] = f16::NEG_INFINITY;
        let e = Q8Matrix::quantize(&values, 70).expect_err("an infinity");
        assert_eq!((e.row, e.column, e.value), (1, 65, f32::NEG_INFINITY));
        values[70 + 65] = f16::NAN;
        assert!(
            Q8Matrix::quantize(&values, 70)
                .expect_err("a NaN")
                .to_string()
                .contains("row 1, column 65")
        );
    }

    #[test]
    fn threads_share_out_rows_and_nothing_else() {
        // Two tasks and a part of a third.
        let (rows, cols) = (2 * TASK / 40 + 7, 40);
        let mut values: Vec<f16> = (0..rows * cols)
            .map(|i| f16::from_bits((i * 7919 % 0x7bff) as u16))
            .collect();
        let want = Q8Matrix::quantize(&values, cols).expect("finite");
        let (mut codes, mut scales) = (vec![0; want.codes.len()], vec![f16::ZERO; want.scales.len()]);
        quantize_on_all_threads(&values, cols, &mut codes, &mut scales).expect("finite");
        assert!(codes == want.codes && scales == want.scales);
        values[(rows - 1) * cols + 3] = f16::NAN;
        let e = quantize_on_all_threads(&values, cols, &mut codes, &mut scales).expect_err("a NaN");
        assert_eq!((e.row, e.column), (rows - 1, 3));
    }

    #[test]
    fn rounding_is_that_of_the_standard_library() {
        for i in -2000..=2000i16 {
            let x = f32::from(i) / 8.0;
            assert_eq!(round_small(x), x.round_ties_even(), "{x}");
        }
        for x in [0.499_999_97, 126.5, 127.499_99, -127.5, 188.9] {
            assert_eq!(round_small(x), x.round_ties_even(), "{x}");
        }
    }

    proptest! {
        /// Against the definition in FP64, for any finite FP16 values and widths.
        #[test]
        fn every_block_follows_the_definition(
            bits in prop::collection::vec(any::<u16>(), 1..200),
            cols in 1usize..90,
        ) {
            let values: Vec<f16> = bits.into_iter().map(|b| f16::from_bits(b & !0x4000)).collect();
            let values = &values[..values.len() / cols * cols];
            let m = Q8Matrix::quantize(values, cols).expect("below 2: finite");
            let mut back = vec![0.0; values.len()];
            m.view().dequantize(&mut back);
            for (row, values) in values.chunks_exact(cols).enumerate() {
                for (b, block) in values.chunks(BLOCK).enumerate() {
                    let largest = block.iter().map(|w| w.to_f32().abs()).fold(0.0, f32::max);
                    let d = m.scales[row * scales_per_row(cols) + b];
                    prop_assert_eq!(d, f16::from_f32(largest / 127.0));
                    for (i, w) in block.iter().enumerate() {
                        let at = row * cols + b * BLOCK + i;
                        let q = m.codes[at];
                        prop_assert!(q != -128);
                        if d == f16::ZERO {
                            prop_assert_eq!(q, 0);
                            continue;
                        }
                        let want = (w.to_f32() / d.to_f32()).round_ties_even().clamp(-127.0, 127.0);
                        prop_assert_eq!(f32::from(q), want);
                        prop_assert_eq!(back[at], d.to_f32() * f32::from(q));
                        // Half a step, but for the clamp, which a scale of few bits brings into play.
                        if d >= f16::MIN_POSITIVE {
                            let error = f64::from(w.to_f32()) - f64::from(back[at]);
                            prop_assert!(error.abs() <= f64::from(d.to_f32()) * 0.5001, "{w} {d} {q}");
                        }
                    }
                }
            }
        }
    }
}
