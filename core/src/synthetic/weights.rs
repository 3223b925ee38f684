//! Weights of any [`ModelSpec`](crate::spec::ModelSpec) drawn from a seed: small models for tests, without a file.

use half::f16;

use crate::dense::{DenseSource, SourceError};
use crate::dtype::NarrowingReport;
use crate::ids::{ExpertId, LayerId};
use crate::image::ExpertSource;
use crate::qpacked::{QpackedLayout, Quantizer, quantize};
use crate::record::{ExpertEncoding, RecordLayout};
use crate::roles::DenseRole;

/// Every weight is a function of the seed, the tensor and its place: near-normal, scaled by the fan-in, so that no
/// layer saturates and tokens choose different experts.
#[derive(Clone, Copy, Debug)]
pub struct RandomWeights(pub u64);

impl RandomWeights {
    fn value(&self, key: u64, i: usize) -> f32 {
        let mut z = (self.0 ^ key.wrapping_mul(0x9E37_79B9_7F4A_7C15))
            .wrapping_add((i as u64).wrapping_mul(0xD134_2543_DE82_EF95));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        let sum = (z & 0xFFFF) + ((z >> 16) & 0xFFFF) + ((z >> 32) & 0xFFFF) + (z >> 48);
        // The sum of four uniform values, less its mean, over its standard deviation.
        (sum as f32 - 131_070.0) / 37_837.0
    }

    fn matrix(&self, key: u64, rows: usize, cols: usize) -> Vec<f32> {
        let scale = 1.0 / (cols as f32).sqrt();
        (0..rows * cols).map(|i| self.value(key, i) * scale).collect()
    }
}

impl DenseSource for RandomWeights {
    fn read(
        &self,
        role: DenseRole,
        shape: &[usize],
        out: &mut [f16],
    ) -> Result<NarrowingReport, SourceError> {
        let key = format!("{role:?}")
            .bytes()
            .fold(7u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3));
        let fan_in = shape.last().copied().unwrap_or(1) as f32;
        for (i, o) in out.iter_mut().enumerate() {
            let v = self.value(key, i) / fan_in.sqrt();
            // Norms near one; router rows, of which there are few, wide apart.
            *o = f16::from_f32(match shape {
                [_] => 1.0 + v,
                [rows, _] if *rows < 64 => 4.0 * v,
                _ => v,
            });
        }
        Ok(NarrowingReport::default())
    }
}

impl ExpertSource for RandomWeights {
    fn read(
        &self,
        layer: LayerId,
        expert: ExpertId,
        layout: &RecordLayout,
        out: &mut [u8],
    ) -> Result<NarrowingReport, SourceError> {
        out.fill(0);
        for (m, matrix) in (0u64..).zip(&layout.matrices) {
            let key = (u64::from(layer.0) << 32) + (u64::from(expert.0) << 2) + m;
            let weights = self.matrix(key, matrix.rows, matrix.cols);
            match layout.encoding {
                ExpertEncoding::F16 => {
                    let bytes: Vec<u8> = weights
                        .iter()
                        .flat_map(|w| f16::from_f32(*w).to_le_bytes())
                        .collect();
                    out[matrix.values.clone()].copy_from_slice(&bytes);
                }
                ExpertEncoding::Qpacked { block } => {
                    let q = QpackedLayout {
                        rows: matrix.rows,
                        cols: matrix.cols,
                        block,
                    };
                    let mut scales = vec![f16::ZERO; q.scales()];
                    let codes = &mut out[matrix.values.clone()];
                    quantize("random", &weights, &q, Quantizer::Absmax, codes, &mut scales)
                        .map_err(|e| SourceError(Box::new(e)))?;
                    let bytes: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
                    out[matrix.scales.clone()].copy_from_slice(&bytes);
                }
            }
        }
        Ok(NarrowingReport::default())
    }
}
