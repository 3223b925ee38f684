//! Filled in next.
use half::f16;

/// A way of dequantizing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DequantizePath {
    /// The reference.
    Scalar,
}

/// Dequantizes.
pub fn dequantize(_layout: &super::QpackedLayout, _codes: &[u8], _scales: &[f16], _out: &mut [f32]) {}

/// Dequantizes by a given path.
pub fn dequantize_with(
    _path: DequantizePath,
    _layout: &super::QpackedLayout,
    _codes: &[u8],
    _scales: &[f16],
    _out: &mut [f32],
) {
}
