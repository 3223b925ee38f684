//! One expert's bytes: the canonical record, and a backend's tiling of it.
//!
//! The *canonical* record is what the artifact stores and what identity is taken of. For each of gate, up and
//! down: the codes, then the scales (or, in the control arm, the FP16 values), each at a multiple of
//! [`ALIGNMENT`](crate::memory::ALIGNMENT). A *tiled* record is the same expert as one backend's executors
//! read it, made once when the host image is prepared.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::memory::align_up;
use crate::qpacked::{BlockSize, QpackedLayout};
use crate::roles::ExpertMatrix;
use crate::spec::ModelSpec;

/// How routed experts are held and executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertEncoding {
    /// INT4 codes with FP16 scales, executed from the packed form.
    Qpacked {
        /// Values a scale.
        block: BlockSize,
    },
    /// FP16 values: the unquantized control arm.
    F16,
}

/// Where one matrix lies in a canonical record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixLayout {
    /// Rows (`out`).
    pub rows: usize,
    /// Columns (`in`).
    pub cols: usize,
    /// Codes, or FP16 values in the control arm.
    pub values: Range<usize>,
    /// FP16 scales; empty in the control arm.
    pub scales: Range<usize>,
}

/// The canonical record of every expert of a model (they all have one shape).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordLayout {
    /// Encoding of the three matrices.
    pub encoding: ExpertEncoding,
    /// Gate, up, down.
    pub matrices: [MatrixLayout; 3],
    /// Bytes of the record, a multiple of the alignment.
    pub bytes: usize,
}

impl RecordLayout {
    /// The record of the experts of `spec`, or `None` if it has no routed experts.
    #[must_use]
    pub fn new(spec: &ModelSpec, encoding: ExpertEncoding) -> Option<Self> {
        spec.moe().map(|m| Self::of_shape(spec.hidden, m.width, encoding))
    }

    /// The record of an expert with gate and up `[width, hidden]` and down `[hidden, width]`.
    #[must_use]
    pub fn of_shape(hidden: usize, width: usize, encoding: ExpertEncoding) -> Self {
        let mut at = 0;
        let mut take = |n: usize| {
            let range = at..at + n;
            at = align_up(range.end);
            range
        };
        let matrices =
            [(width, hidden), (width, hidden), (hidden, width)].map(|(rows, cols)| match encoding {
                ExpertEncoding::Qpacked { block } => {
                    let q = QpackedLayout { rows, cols, block };
                    MatrixLayout {
                        rows,
                        cols,
                        values: take(q.code_bytes()),
                        scales: take(q.scale_bytes()),
                    }
                }
                ExpertEncoding::F16 => MatrixLayout {
                    rows,
                    cols,
                    values: take(rows * cols * 2),
                    scales: 0..0,
                },
            });
        Self {
            encoding,
            matrices,
            bytes: at,
        }
    }

    /// The layout of one matrix.
    #[must_use]
    pub fn matrix(&self, matrix: ExpertMatrix) -> &MatrixLayout {
        &self.matrices[matrix as usize]
    }

    /// Bytes that carry information: codes and scales without the padding between them.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        self.matrices
            .iter()
            .map(|m| m.values.len() + m.scales.len())
            .sum()
    }
}

/// A backend's own arrangement of a record. One a backend: all its executors read the same bytes.
pub trait RecordTiling: Send + Sync {
    /// Name, recorded beside the digest of the tiled store.
    fn name(&self) -> &'static str;
    /// Bytes of a tiled record, a multiple of the alignment.
    fn tiled_bytes(&self, layout: &RecordLayout) -> usize;
    /// Writes the tiled form of `canonical` to `tiled`, every byte of it.
    fn tile(&self, layout: &RecordLayout, canonical: &[u8], tiled: &mut [u8]);
}

/// The tiling of the scalar reference: the canonical record itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Canonical;

impl RecordTiling for Canonical {
    fn name(&self) -> &'static str {
        "canonical"
    }

    fn tiled_bytes(&self, layout: &RecordLayout) -> usize {
        layout.bytes
    }

    fn tile(&self, _: &RecordLayout, canonical: &[u8], tiled: &mut [u8]) {
        tiled.copy_from_slice(canonical);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::ALIGNMENT;

    #[test]
    fn ranges_are_aligned_disjoint_and_complete() {
        for encoding in [
            ExpertEncoding::F16,
            ExpertEncoding::Qpacked {
                block: BlockSize::B32,
            },
            ExpertEncoding::Qpacked {
                block: BlockSize::B256,
            },
        ] {
            let r = RecordLayout::of_shape(256, 352, encoding);
            let mut end = 0;
            for range in r
                .matrices
                .iter()
                .flat_map(|m| [&m.values, &m.scales])
                .filter(|r| !r.is_empty())
            {
                assert!(range.start >= end && range.start.is_multiple_of(ALIGNMENT));
                end = range.end;
            }
            assert_eq!(r.bytes, align_up(end));
        }
    }

    #[test]
    fn olmoe_records_have_the_size_that_the_byte_floor_counts() {
        let r = RecordLayout::of_shape(
            2048,
            1024,
            ExpertEncoding::Qpacked {
                block: BlockSize::B256,
            },
        );
        assert_eq!(r.payload_bytes(), 3 * (2048 * 1024 / 2 + 2048 * 1024 / 256 * 2));
    }
}
