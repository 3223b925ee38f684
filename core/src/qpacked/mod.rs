//! `qpacked` v1: INT4 blocks with one FP16 scale.
//!
//! A matrix `[rows, cols]`, row-major, is cut along each row into blocks of B consecutive values; the last block
//! of a row is short when B does not divide `cols`. A block has one FP16 scale `d` and codes `q` in −8..=7; the
//! value is `f32(d) * q`, exact in FP32. Codes are stored as `q + 8`, two to a byte, the even column in the low
//! nibble; each row starts at a byte, and an odd row's last high nibble is 8 (`q` = 0).

mod dequantize;
mod dispatch;
mod fast;
mod path;
mod quantize;
mod reference;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use dequantize::{dequantize, dequantize_with};
pub use path::CodecPath;
pub use quantize::{QuantizationError, QuantizeError, QuantizeErrorKind, Quantizer, quantize, quantize_with};

/// Version of the format, recorded in every artifact.
pub const FORMAT_VERSION: u32 = 1;

/// Values that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
#[expect(missing_docs, reason = "the names are the numbers")]
pub enum BlockSize {
    B32,
    B64,
    B128,
    B256,
}

impl BlockSize {
    /// All sizes.
    pub const ALL: [Self; 4] = [Self::B32, Self::B64, Self::B128, Self::B256];

    /// The number.
    #[must_use]
    pub const fn get(self) -> usize {
        match self {
            Self::B32 => 32,
            Self::B64 => 64,
            Self::B128 => 128,
            Self::B256 => 256,
        }
    }
}

impl TryFrom<u32> for BlockSize {
    type Error = String;

    fn try_from(n: u32) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|b| b.get() == n as usize)
            .ok_or_else(|| format!("block size {n}: must be 32, 64, 128 or 256"))
    }
}

impl From<BlockSize> for u32 {
    fn from(b: BlockSize) -> Self {
        match b {
            BlockSize::B32 => 32,
            BlockSize::B64 => 64,
            BlockSize::B128 => 128,
            BlockSize::B256 => 256,
        }
    }
}

impl FromStr for BlockSize {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        s.parse::<u32>()
            .map_err(|_| format!("block size {s:?}: must be 32, 64, 128 or 256"))?
            .try_into()
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

/// Sizes of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpackedLayout {
    /// `out`.
    pub rows: usize,
    /// `in`.
    pub cols: usize,
    /// Values a scale.
    pub block: BlockSize,
}

impl QpackedLayout {
    /// Bytes of one row of codes.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.cols.div_ceil(2)
    }

    /// Scales of one row.
    #[must_use]
    pub fn row_blocks(&self) -> usize {
        self.cols.div_ceil(self.block.get())
    }

    /// Bytes of all codes.
    #[must_use]
    pub fn code_bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// Number of scales.
    #[must_use]
    pub fn scales(&self) -> usize {
        self.rows * self.row_blocks()
    }

    /// Bytes of all scales.
    #[must_use]
    pub fn scale_bytes(&self) -> usize {
        self.scales() * 2
    }
}
