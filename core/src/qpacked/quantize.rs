//! Weights to codes and scales.
//!
//! [`quantize_with`] checks the slices, walks the blocks in row-major order and names the first bad one; what
//! happens inside a block is in `reference.rs` (the rules as written) and `fast.rs` (the same bits, sooner).

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};
use std::str::FromStr;

use half::f16;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{CodecPath, QpackedLayout, dispatch};

/// How a block's scale is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantizer {
    /// The value of largest magnitude, divided by −8: it lands exactly on code −8, whatever its sign.
    Absmax,
    /// The least squared error among 66 scales around the one of `Absmax`; never worse than it on any block.
    Mse,
}

impl Quantizer {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Absmax, Self::Mse];

    /// The name, as on the command line and in the manifest.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Absmax => "absmax",
            Self::Mse => "mse",
        }
    }
}

impl fmt::Display for Quantizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Quantizer {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|q| q.name() == s)
            .ok_or_else(|| format!("quantizer {s:?}: must be absmax or mse"))
    }
}

/// What makes a block impossible to quantize. Clamping instead would destroy the block in silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum QuantizeErrorKind {
    /// A weight is NaN or infinite.
    #[error("a weight is NaN or infinite; INT4 blocks hold finite weights only")]
    NonFinite,
    /// The largest magnitude, divided by 8, rounds to infinity in FP16.
    #[error(
        "a weight has a magnitude of 524160 or more, so that the block's FP16 scale (an eighth of it) would \
         be infinite"
    )]
    ScaleOverflow,
}

/// The first block, in row-major order, that cannot be quantized.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("tensor {tensor}, row {row}, block {block} of the row: {kind}")]
pub struct QuantizeError {
    /// Why.
    pub kind: QuantizeErrorKind,
    /// Name of the tensor, as the caller gave it.
    pub tensor: String,
    /// Row (`out`), from 0.
    pub row: usize,
    /// Block of the row, from 0.
    pub block: usize,
}

/// What quantization cost: sums over all weights of a matrix, or of as many matrices as were added up.
///
/// The sums are part of a reproducible manifest, so their order is fixed: row after row, the terms of column `j`
/// go to partial sum `j % 16`; at the end of the matrix the sixteen sums are folded in halves (8, 4, 2, 1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QuantizationError {
    /// Σ (w − d·q)².
    pub squared_error: f64,
    /// Σ w².
    pub squared_norm: f64,
}

impl QuantizationError {
    /// Root of the error's energy over the weights' energy: 0.1 means 10 %. 0 when all weights are 0.
    #[must_use]
    pub fn relative_rms(&self) -> f64 {
        if self.squared_norm == 0.0 {
            0.0
        } else {
            (self.squared_error / self.squared_norm).sqrt()
        }
    }
}

impl Add for QuantizationError {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            squared_error: self.squared_error + other.squared_error,
            squared_norm: self.squared_norm + other.squared_norm,
        }
    }
}

impl AddAssign for QuantizationError {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for QuantizationError {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), Add::add)
    }
}

/// Partial sums that a [`QuantizationError`] is made of.
pub(super) const PARTIAL_SUMS: usize = 16;

/// A [`QuantizationError`] in the making.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ErrorSums {
    /// (w − d·q)², column `j` in sum `j % 16`.
    pub squared_error: [f64; PARTIAL_SUMS],
    /// w², likewise.
    pub squared_norm: [f64; PARTIAL_SUMS],
}

impl ErrorSums {
    fn finish(self) -> QuantizationError {
        let fold = |mut sums: [f64; PARTIAL_SUMS]| {
            for half in [8, 4, 2, 1] {
                for i in 0..half {
                    sums[i] += sums[i + half];
                }
            }
            sums[0]
        };
        QuantizationError {
            squared_error: fold(self.squared_error),
            squared_norm: fold(self.squared_norm),
        }
    }
}

/// A block that cannot be quantized, before the tensor's name is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct BadBlock {
    pub kind: QuantizeErrorKind,
    pub row: usize,
    pub block: usize,
}

/// Quantizes `weights` (`[rows, cols]`, row-major) by the fastest path of this CPU: see [`quantize_with`].
///
/// # Errors
/// The first bad block in row-major order.
///
/// # Panics
/// When a slice is not exactly as long as `layout` asks for.
pub fn quantize(
    tensor: &str,
    weights: &[f32],
    layout: &QpackedLayout,
    quantizer: Quantizer,
    codes: &mut [u8],
    scales: &mut [f16],
) -> Result<QuantizationError, QuantizeError> {
    quantize_with(
        CodecPath::fastest(),
        tensor,
        weights,
        layout,
        quantizer,
        codes,
        scales,
    )
}

/// Quantizes `weights` (`[rows, cols]`, row-major) by a path of choice; every path gives the same bits.
///
/// `codes` receives [`QpackedLayout::code_bytes`] bytes and `scales` [`QpackedLayout::scales`] values, every
/// one of them; `tensor` only names the matrix in an error. Any `rows` and `cols` will do, 0 included.
///
/// # Errors
/// The first bad block in row-major order. `codes` and `scales` then hold no result.
///
/// # Panics
/// When a slice is not exactly as long as `layout` asks for, or this CPU lacks the path's instructions.
pub fn quantize_with(
    path: CodecPath,
    tensor: &str,
    weights: &[f32],
    layout: &QpackedLayout,
    quantizer: Quantizer,
    codes: &mut [u8],
    scales: &mut [f16],
) -> Result<QuantizationError, QuantizeError> {
    assert_eq!(
        weights.len(),
        layout.rows * layout.cols,
        "weights of {tensor} do not fill the layout"
    );
    assert_eq!(
        codes.len(),
        layout.code_bytes(),
        "codes of {tensor} do not fill the layout"
    );
    assert_eq!(
        scales.len(),
        layout.scales(),
        "scales of {tensor} do not fill the layout"
    );
    dispatch::quantize(path, weights, layout, quantizer, codes, scales).map_err(|bad| QuantizeError {
        kind: bad.kind,
        tensor: tensor.to_owned(),
        row: bad.row,
        block: bad.block,
    })
}

/// What happens inside a block.
pub(super) trait BlockQuantizer {
    /// Quantizes one block of at least one weight: writes the bytes of its codes, all of them, and its scale, and
    /// adds to the sums. A block starts at a column that is a multiple of [`PARTIAL_SUMS`].
    fn quantize(
        &self,
        weights: &[f32],
        codes: &mut [u8],
        scale: &mut f16,
        sums: &mut ErrorSums,
    ) -> Result<(), QuantizeErrorKind>;
}

/// Quantizes the blocks of a matrix in row-major order and adds up their errors.
#[inline(always)]
pub(super) fn quantize_blocks(
    block_quantizer: &impl BlockQuantizer,
    weights: &[f32],
    layout: &QpackedLayout,
    codes: &mut [u8],
    scales: &mut [f16],
) -> Result<QuantizationError, BadBlock> {
    let mut sums = ErrorSums::default();
    if layout.cols == 0 {
        return Ok(sums.finish());
    }
    let block = layout.block.get();
    let rows = weights.chunks_exact(layout.cols);
    let codes = codes.chunks_exact_mut(layout.row_bytes());
    let scales = scales.chunks_exact_mut(layout.row_blocks());
    for (row, ((weights, codes), scales)) in rows.zip(codes).zip(scales).enumerate() {
        let blocks = weights.chunks(block).zip(codes.chunks_mut(block / 2)).zip(scales);
        for (block, ((weights, codes), scale)) in blocks.enumerate() {
            if let Err(kind) = block_quantizer.quantize(weights, codes, scale, &mut sums) {
                return Err(BadBlock { kind, row, block });
            }
        }
    }
    Ok(sums.finish())
}
