//! Filled in next.
use half::f16;
use thiserror::Error;
use serde::{Deserialize, Serialize};

/// How a block's scale is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantizer {
    /// Signed extreme / −8.
    Absmax,
    /// Least squared error around `Absmax`.
    Mse,
}

/// What cannot be quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizeErrorKind {
    /// NaN or infinity.
    NonFinite,
    /// The scale overflows FP16.
    ScaleOverflow,
}

/// A block that cannot be quantized.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("tensor {tensor}, row {row}, block {block}: {kind:?}")]
pub struct QuantizeError {
    /// Why.
    pub kind: QuantizeErrorKind,
    /// Tensor.
    pub tensor: String,
    /// Row.
    pub row: usize,
    /// Block of the row.
    pub block: usize,
}

/// Quantizes `weights`; see the module.
///
/// # Errors
/// First bad block.
pub fn quantize(
    _tensor: &str,
    _weights: &[f32],
    _layout: &super::QpackedLayout,
    _quantizer: Quantizer,
    _codes: &mut [u8],
    _scales: &mut [f16],
) -> Result<(), QuantizeError> {
    Ok(())
}
