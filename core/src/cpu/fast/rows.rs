//! Row-wise operations: norms, narrowing, arranging inputs.

use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::Context;
use crate::cpu::simd::Isa;
use crate::cpu::simd::kernels::{ScaleRow, SumOfSquares, padded};

/// Rows below which a row-wise operation stays on one thread.
const MIN_ROWS: usize = 4;

/// RMS norm of one row in place: the bits of [`rms_norm`](crate::cpu::numerics::rms_norm).
pub fn norm_in_place(isa: Isa, x: &mut [f32], weight: &[f16], eps: f32) {
    #[expect(clippy::cast_precision_loss, reason = "widths are below 2^24")]
    let mean = isa.run(SumOfSquares(x)) / x.len() as f32;
    isa.run(ScaleRow {
        x,
        factor: 1.0 / (mean + eps).sqrt(),
        weight,
    });
}

/// Norms rows of `weight.len()` into rows padded with zeros, narrowing them if asked.
pub fn norm_rows(c: &Context, x: &[f32], weight: &[f16], out: &mut [f32], narrow: bool) {
    let (width, stride) = (weight.len(), padded(weight.len()));
    let rows = x.par_chunks_exact(width).zip(out.par_chunks_exact_mut(stride));
    rows.with_min_len(MIN_ROWS).for_each(|(x, out)| {
        let (row, padding) = out.split_at_mut(width);
        row.copy_from_slice(x);
        padding.fill(0.0);
        norm_in_place(c.isa, row, weight, c.spec.rms_norm_eps);
        if narrow {
            narrow_row(row);
        }
    });
}

/// [`narrow`](crate::cpu::numerics::narrow), several at a time.
pub fn narrow_row(x: &mut [f32]) {
    let mut buffer = [f16::ZERO; 256];
    for part in x.chunks_mut(buffer.len()) {
        let buffer = &mut buffer[..part.len()];
        buffer.convert_from_f32_slice(part);
        buffer.convert_to_f32_slice(part);
    }
}

/// Applies `f` to each pair of rows, on all threads when there are enough.
pub fn each_row<F>(x: &[f32], x_stride: usize, out: &mut [f32], out_stride: usize, f: F)
where
    F: Fn(&[f32], &mut [f32]) + Sync,
{
    let rows = x
        .par_chunks_exact(x_stride)
        .zip(out.par_chunks_exact_mut(out_stride));
    rows.with_min_len(MIN_ROWS).for_each(|(x, out)| f(x, out));
}
