//! Codes and scales to values.

use half::f16;

use super::{CodecPath, QpackedLayout, dispatch};

/// Dequantizes a matrix by the reference: value = `f32(d) * q`, an FP32 product that is exact for every finite
/// scale. A zero keeps the sign that IEEE 754 gives it: q = 0 under a negative scale is −0.
///
/// `out` is `[rows, cols]`, row-major. Any shape will do, 0 included. Codes say nothing about soundness: every
/// byte is valid. A NaN or infinite scale spreads to its block.
///
/// # Panics
/// When a slice is not exactly as long as `layout` asks for.
pub fn dequantize(layout: &QpackedLayout, codes: &[u8], scales: &[f16], out: &mut [f32]) {
    dequantize_with(CodecPath::Scalar, layout, codes, scales, out);
}

/// Dequantizes a matrix by a path of choice; for finite scales every path gives the bits of [`dequantize`].
///
/// # Panics
/// When a slice is not exactly as long as `layout` asks for, or this CPU lacks the path's instructions.
pub fn dequantize_with(
    path: CodecPath,
    layout: &QpackedLayout,
    codes: &[u8],
    scales: &[f16],
    out: &mut [f32],
) {
    assert_eq!(
        out.len(),
        layout.rows * layout.cols,
        "output does not fill the layout"
    );
    assert_eq!(codes.len(), layout.code_bytes(), "codes do not fill the layout");
    assert_eq!(scales.len(), layout.scales(), "scales do not fill the layout");
    dispatch::dequantize(path, layout, codes, scales, out);
}

/// What happens inside a block.
pub(super) trait BlockDequantizer {
    /// Dequantizes one block.
    fn dequantize(&self, codes: &[u8], scale: f16, out: &mut [f32]);
}

/// Dequantizes the blocks of a matrix in row-major order.
#[inline(always)]
pub(super) fn dequantize_blocks(
    block_dequantizer: &impl BlockDequantizer,
    layout: &QpackedLayout,
    codes: &[u8],
    scales: &[f16],
    out: &mut [f32],
) {
    if layout.cols == 0 {
        return;
    }
    let block = layout.block.get();
    let rows = out.chunks_exact_mut(layout.cols);
    let codes = codes.chunks_exact(layout.row_bytes());
    let scales = scales.chunks_exact(layout.row_blocks());
    for ((out, codes), scales) in rows.zip(codes).zip(scales) {
        let blocks = out.chunks_mut(block).zip(codes.chunks(block / 2)).zip(scales);
        for ((out, codes), scale) in blocks {
            block_dequantizer.dequantize(codes, *scale, out);
        }
    }
}
