//! Supplies tensors to the loader: checked from an artifact, or narrowed and quantized from a checkpoint.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use half::f16;
use horizon_core::artifact::reader::OpenShards;
use horizon_core::artifact::{Check, Progress};
use horizon_core::dense::{DenseSource, SourceError};
use horizon_core::dtype::NarrowingReport;
use horizon_core::ids::{ExpertId, LayerId};
use horizon_core::image::ExpertSource;
use horizon_core::qpacked::{QpackedLayout, QuantizationError, Quantizer};
use horizon_core::record::{ExpertEncoding, RecordLayout};
use horizon_core::roles::{DenseRole, ExpertMatrix, ExpertRole};
use thiserror::Error;

use super::{ModelSource, PackedNames};
use crate::checkpoint::OpenCheckpoint;
use crate::transform::{ScratchPool, TransformError, le_bytes, le_bytes_mut, narrow_tensor, quantize_tensor};

/// The work is not wanted any more.
#[derive(Debug, Error)]
#[error("loading was stopped")]
struct Stopped;

fn go_on(progress: &dyn Progress) -> Result<(), SourceError> {
    if progress.stopped() {
        Err(boxed(Stopped))
    } else {
        Ok(())
    }
}

fn boxed(e: impl std::error::Error + Send + Sync + 'static) -> SourceError {
    SourceError(Box::new(e))
}

/// Zeroes what lies between the ranges of a canonical record.
fn zero_padding(layout: &RecordLayout, out: &mut [u8]) {
    let mut at = 0;
    for range in layout
        .matrices
        .iter()
        .flat_map(|m| [&m.values, &m.scales])
        .filter(|r| !r.is_empty())
    {
        out[at..range.start].fill(0);
        at = range.end;
    }
    out[at..].fill(0);
}

/// Reads an artifact.
pub(super) struct ArtifactReader<'a> {
    pub source: &'a ModelSource,
    pub shards: OpenShards<'a>,
    pub check: Check,
    pub progress: &'a dyn Progress,
}

impl ArtifactReader<'_> {
    fn fill(&self, name: &str, out: &mut [u8]) -> Result<(), SourceError> {
        go_on(self.progress)?;
        self.shards.read(name, out, self.check).map_err(boxed)?;
        self.progress.advance(out.len() as u64);
        Ok(())
    }
}

impl DenseSource for ArtifactReader<'_> {
    fn read(&self, role: DenseRole, _: &[usize], out: &mut [f16]) -> Result<NarrowingReport, SourceError> {
        self.fill(&self.source.dense_name(role), le_bytes_mut(out))?;
        Ok(NarrowingReport {
            values: out.len() as u64,
            inexact: 0,
        })
    }
}

impl ExpertSource for ArtifactReader<'_> {
    fn read(
        &self,
        layer: LayerId,
        expert: ExpertId,
        layout: &RecordLayout,
        out: &mut [u8],
    ) -> Result<NarrowingReport, SourceError> {
        for matrix in ExpertMatrix::ALL {
            let names = PackedNames::new(&self.source.expert_name(ExpertRole {
                layer,
                expert,
                matrix,
            }));
            let ranges = layout.matrix(matrix);
            self.fill(&names.codes, &mut out[ranges.values.clone()])?;
            self.fill(&names.scales, &mut out[ranges.scales.clone()])?;
        }
        zero_padding(layout, out);
        Ok(NarrowingReport::default())
    }
}

/// Reads a checkpoint; experts are quantized if there is a quantizer.
pub(super) struct CheckpointReader<'a> {
    pub source: &'a ModelSource,
    pub open: &'a OpenCheckpoint<'a>,
    pub quantizer: Option<Quantizer>,
    pub scratch: ScratchPool,
    pub losses: Mutex<Vec<(ExpertRole, QuantizationError)>>,
    pub progress: &'a dyn Progress,
}

impl CheckpointReader<'_> {
    fn narrow(
        &self,
        name: &str,
        shape: &[usize],
        mut put: impl FnMut(usize, &[f16]),
    ) -> Result<NarrowingReport, SourceError> {
        go_on(self.progress)?;
        let tensor = self.open.checkpoint().tensor(name, shape).map_err(boxed)?;
        self.scratch
            .with(|scratch| {
                narrow_tensor(self.open, &tensor, scratch, None, |at, piece| {
                    put(at, piece);
                    self.progress.advance((piece.len() * tensor.dtype.size()) as u64);
                    Ok::<_, TransformError>(())
                })
            })
            .map_err(boxed)
    }

    fn quantize(
        &self,
        role: ExpertRole,
        layout: &QpackedLayout,
        quantizer: Quantizer,
        out: &mut [u8],
        [values, scales]: [&Range<usize>; 2],
    ) -> Result<(), SourceError> {
        go_on(self.progress)?;
        let name = self.source.expert_name(role);
        let tensor = self
            .open
            .checkpoint()
            .tensor(&name, &[layout.rows, layout.cols])
            .map_err(boxed)?;
        let (mut code_at, mut scale_at) = (values.start, scales.start);
        let loss = self
            .scratch
            .with(|scratch| {
                quantize_tensor(
                    self.open,
                    &tensor,
                    layout,
                    quantizer,
                    scratch,
                    None,
                    |codes, scales| {
                        out[code_at..code_at + codes.len()].copy_from_slice(codes);
                        code_at += codes.len();
                        out[scale_at..scale_at + scales.len() * 2].copy_from_slice(le_bytes(scales));
                        scale_at += scales.len() * 2;
                        let rows = codes.len() / layout.row_bytes();
                        self.progress
                            .advance((rows * layout.cols * tensor.dtype.size()) as u64);
                        Ok::<_, TransformError>(())
                    },
                )
            })
            .map_err(boxed)?;
        self.losses
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((role, loss));
        Ok(())
    }
}

impl DenseSource for CheckpointReader<'_> {
    fn read(
        &self,
        role: DenseRole,
        shape: &[usize],
        out: &mut [f16],
    ) -> Result<NarrowingReport, SourceError> {
        self.narrow(&self.source.dense_name(role), shape, |at, piece| {
            out[at..at + piece.len()].copy_from_slice(piece);
        })
    }
}

impl ExpertSource for CheckpointReader<'_> {
    fn read(
        &self,
        layer: LayerId,
        expert: ExpertId,
        layout: &RecordLayout,
        out: &mut [u8],
    ) -> Result<NarrowingReport, SourceError> {
        let mut report = NarrowingReport::default();
        for matrix in ExpertMatrix::ALL {
            let role = ExpertRole {
                layer,
                expert,
                matrix,
            };
            let m = layout.matrix(matrix);
            match (layout.encoding, self.quantizer) {
                (ExpertEncoding::Qpacked { block }, Some(quantizer)) => {
                    let packed = QpackedLayout {
                        rows: m.rows,
                        cols: m.cols,
                        block,
                    };
                    self.quantize(role, &packed, quantizer, out, [&m.values, &m.scales])?;
                }
                _ => {
                    let values = &mut out[m.values.clone()];
                    report +=
                        self.narrow(&self.source.expert_name(role), &[m.rows, m.cols], |at, piece| {
                            values[at * 2..(at + piece.len()) * 2].copy_from_slice(le_bytes(piece));
                        })?;
                }
            }
        }
        zero_padding(layout, out);
        Ok(report)
    }
}
