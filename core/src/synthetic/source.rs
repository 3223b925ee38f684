//! The weights of a synthetic checkpoint as sources: what loading its files would give, without the files.

use half::f16;

use super::Shape;
use super::shape::{dense_rule, expert_rule};
use crate::dense::{DenseSource, SourceError};
use crate::dtype::NarrowingReport;
use crate::ids::{ExpertId, LayerId};
use crate::image::ExpertSource;
use crate::qpacked::{QpackedLayout, Quantizer, quantize};
use crate::record::{ExpertEncoding, RecordLayout};
use crate::roles::{DenseRole, ExpertMatrix, ExpertRole};

/// A synthetic checkpoint of `shape`, its experts packed with `quantizer`.
#[derive(Clone, Debug)]
pub struct SyntheticSource {
    /// Shape of the model.
    pub shape: Shape,
    /// Seed of the weights.
    pub seed: u64,
    /// How scales are chosen.
    pub quantizer: Quantizer,
}

/// A BF16 value as FP32.
fn widen(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

impl DenseSource for SyntheticSource {
    fn read(
        &self,
        role: DenseRole,
        shape: &[usize],
        out: &mut [f16],
    ) -> Result<NarrowingReport, SourceError> {
        let rule = dense_rule(&self.shape, role, shape.to_vec());
        let mut start = 0;
        let mut bf16 = [0u8; 8192];
        for part in out.chunks_mut(bf16.len() / 2) {
            let bytes = &mut bf16[..part.len() * 2];
            rule.fill(self.seed, start, bytes);
            for (o, b) in part.iter_mut().zip(bytes.as_chunks().0) {
                *o = f16::from_f32(widen(*b));
            }
            start += part.len();
        }
        Ok(NarrowingReport::default())
    }
}

impl ExpertSource for SyntheticSource {
    fn read(
        &self,
        layer: LayerId,
        expert: ExpertId,
        layout: &RecordLayout,
        out: &mut [u8],
    ) -> Result<NarrowingReport, SourceError> {
        out.fill(0);
        for (matrix, at) in ExpertMatrix::ALL.into_iter().zip(&layout.matrices) {
            let rule = expert_rule(
                &self.shape,
                ExpertRole {
                    layer,
                    expert,
                    matrix,
                },
            );
            let mut bf16 = vec![0u8; rule.bytes()];
            rule.fill(self.seed, 0, &mut bf16);
            let values: Vec<f32> = bf16.as_chunks().0.iter().map(|b| widen(*b)).collect();
            match layout.encoding {
                ExpertEncoding::F16 => {
                    for (o, v) in out[at.values.clone()].as_chunks_mut().0.iter_mut().zip(&values) {
                        *o = f16::from_f32(*v).to_le_bytes();
                    }
                }
                ExpertEncoding::Qpacked { block } => {
                    let q = QpackedLayout {
                        rows: at.rows,
                        cols: at.cols,
                        block,
                    };
                    let mut scales = vec![f16::ZERO; q.scales()];
                    let codes = &mut out[at.values.clone()];
                    quantize(&rule.name, &values, &q, self.quantizer, codes, &mut scales)
                        .map_err(|e| SourceError(Box::new(e)))?;
                    out[at.scales.clone()].copy_from_slice(bytemuck::cast_slice(&scales));
                }
            }
        }
        Ok(NarrowingReport::default())
    }
}
