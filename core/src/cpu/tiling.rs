//! The expert record as the fast CPU backend reads it.
//!
//! Each row of codes is padded to whole groups of 128 with zero weights (code 8, which decodes to 0 under any
//! scale), its scales to whole groups with zeros, so that a kernel never has a ragged end. At the sizes of real
//! models rows are whole groups already and the tile is the canonical record.

use std::ops::Range;

use half::f16;

use super::numerics::CODE_GROUP;
use super::simd::kernels::QpackedRows;
use crate::memory::align_up;
use crate::record::{ExpertEncoding, MatrixLayout, RecordLayout, RecordTiling};
use crate::roles::ExpertMatrix;

/// Two codes that decode to zero.
const ZERO_CODES: u8 = 0x88;

/// The tiling of the fast CPU backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuTiling;

/// Byte ranges of a tiled record.
#[derive(Clone, Debug)]
pub struct TiledLayout {
    matrices: [TiledMatrix; 3],
    bytes: usize,
}

#[derive(Clone, Debug)]
struct TiledMatrix {
    rows: usize,
    cols: usize,
    /// Values a scale, or `None` in the control arm.
    block: Option<usize>,
    values: Range<usize>,
    scales: Range<usize>,
}

/// One matrix of a tiled record.
#[derive(Clone, Copy, Debug)]
pub enum TiledRows<'a> {
    /// FP16 values `[rows][cols]`.
    F16(&'a [f16]),
    /// Packed rows.
    Qpacked(QpackedRows<'a>),
}

impl TiledLayout {
    /// The tiled form of `layout`.
    #[must_use]
    pub fn new(layout: &RecordLayout) -> Self {
        let mut at = 0;
        let mut take = |n: usize| {
            let range = at..at + n;
            at = align_up(range.end);
            range
        };
        let matrices = layout.matrices.each_ref().map(|m| {
            let (rows, cols) = (m.rows, m.cols);
            match layout.encoding {
                ExpertEncoding::F16 => TiledMatrix {
                    rows,
                    cols,
                    block: None,
                    values: take(m.values.len()),
                    scales: 0..0,
                },
                ExpertEncoding::Qpacked { block } => {
                    let (block, groups) = (block.get(), cols.div_ceil(CODE_GROUP));
                    TiledMatrix {
                        rows,
                        cols,
                        block: Some(block),
                        values: take(rows * groups * CODE_GROUP / 2),
                        scales: take(rows * QpackedRows::scales_per_row(groups, block) * 2),
                    }
                }
            }
        });
        Self { matrices, bytes: at }
    }

    /// Rows of a matrix.
    #[must_use]
    pub fn rows(&self, matrix: ExpertMatrix) -> usize {
        self.matrices[matrix as usize].rows
    }

    /// A matrix of the tiled record `record`.
    #[must_use]
    pub fn view<'a>(&self, matrix: ExpertMatrix, record: &'a [u8]) -> TiledRows<'a> {
        let m = &self.matrices[matrix as usize];
        let values = &record[m.values.clone()];
        match m.block {
            None => TiledRows::F16(bytemuck::cast_slice(values)),
            Some(block) => TiledRows::Qpacked(QpackedRows {
                codes: values,
                scales: bytemuck::cast_slice(&record[m.scales.clone()]),
                groups: m.cols.div_ceil(CODE_GROUP),
                block,
            }),
        }
    }
}

impl RecordTiling for CpuTiling {
    fn name(&self) -> &'static str {
        "cpu-rows-128"
    }

    fn tiled_bytes(&self, layout: &RecordLayout) -> usize {
        TiledLayout::new(layout).bytes
    }

    fn tile(&self, layout: &RecordLayout, canonical: &[u8], tiled: &mut [u8]) {
        let target = TiledLayout::new(layout);
        if target.bytes == layout.bytes {
            // Nothing to pad: the ranges are the same.
            tiled.copy_from_slice(canonical);
            return;
        }
        tiled.fill(0);
        for (from, to) in layout.matrices.iter().zip(&target.matrices) {
            tile_matrix(from, to, canonical, tiled);
        }
    }
}

fn tile_matrix(from: &MatrixLayout, to: &TiledMatrix, canonical: &[u8], tiled: &mut [u8]) {
    let values = &mut tiled[to.values.clone()];
    let Some(block) = to.block else {
        values.copy_from_slice(&canonical[from.values.clone()]);
        return;
    };
    let source = canonical[from.values.clone()].chunks_exact(from.cols.div_ceil(2));
    for (row, out) in source.zip(values.chunks_exact_mut(to.values.len() / to.rows)) {
        out[..row.len()].copy_from_slice(row);
        out[row.len()..].fill(ZERO_CODES);
    }
    let source = canonical[from.scales.clone()].chunks_exact(from.cols.div_ceil(block) * 2);
    let scales = &mut tiled[to.scales.clone()];
    for (row, out) in source.zip(scales.chunks_exact_mut(to.scales.len() / to.rows)) {
        out[..row.len()].copy_from_slice(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::numerics::{dot_qpacked, dot_qpacked_integers, to_integers};
    use crate::cpu::simd::Isa;
    use crate::cpu::simd::kernels::{
        QpackedGemm, QpackedIntegerGemm, arrange_integers, integer_len, permute, permuted_len,
    };
    use crate::qpacked::BlockSize;

    /// A record of pseudo-random bytes whose scales are finite, a value that stands out in the padding.
    fn record(layout: &RecordLayout) -> Vec<u8> {
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        let mut bytes: Vec<u8> = (0..layout.bytes).map(|_| next().to_le_bytes()[0]).collect();
        for m in &layout.matrices {
            for s in bytes[m.scales.clone()].as_chunks_mut::<2>().0 {
                #[expect(clippy::cast_precision_loss, reason = "sixteen bits")]
                let d = f16::from_f32((next() as f32 - 32768.0) / 65536.0);
                *s = d.to_le_bytes();
            }
        }
        bytes
    }

    #[test]
    fn every_row_of_a_tile_gives_the_bits_of_the_canonical_row() {
        for block in BlockSize::ALL {
            for (hidden, width) in [(256, 352), (128, 8), (64, 200), (512, 128), (1408, 72)] {
                let layout = RecordLayout::of_shape(hidden, width, ExpertEncoding::Qpacked { block });
                let canonical = record(&layout);
                let mut tiled = vec![0xFF; CpuTiling.tiled_bytes(&layout)];
                CpuTiling.tile(&layout, &canonical, &mut tiled);
                for matrix in ExpertMatrix::ALL {
                    compare(&layout, matrix, &canonical, &tiled);
                }
            }
        }
    }

    fn compare(layout: &RecordLayout, matrix: ExpertMatrix, canonical: &[u8], tiled: &[u8]) {
        let ExpertEncoding::Qpacked { block } = layout.encoding else {
            unreachable!("built packed")
        };
        let m = layout.matrix(matrix);
        let TiledRows::Qpacked(rows) = TiledLayout::new(layout).view(matrix, tiled) else {
            unreachable!("built packed")
        };
        for inputs in [1, 2, 4, 7] {
            #[expect(clippy::cast_precision_loss, reason = "small")]
            let x: Vec<Vec<f32>> = (0..inputs)
                .map(|t| {
                    (0..m.cols)
                        .map(|i| ((i * 37 + t * 11) % 101) as f32 / 17.0 - 3.0)
                        .collect()
                })
                .collect();
            let mut permuted = vec![f32::NAN; inputs * permuted_len(m.cols)];
            for (x, out) in x.iter().zip(permuted.chunks_exact_mut(permuted_len(m.cols))) {
                permute(x, out);
            }
            let len = integer_len(m.cols);
            let mut integers = vec![f32::NAN; inputs * len];
            for (x, out) in x.iter().zip(integers.chunks_exact_mut(len)) {
                arrange_integers(x, out);
            }
            for isa in Isa::available() {
                let mut out = vec![f32::NAN; m.rows * inputs];
                isa.run(QpackedGemm {
                    weights: rows,
                    inputs: &permuted,
                    out: &mut out,
                });
                let mut integer_out = vec![f32::NAN; m.rows * inputs];
                isa.run(QpackedIntegerGemm {
                    weights: rows,
                    inputs: &integers,
                    out: &mut integer_out,
                });
                for r in 0..m.rows {
                    let codes = &canonical[m.values.clone()][r * m.cols.div_ceil(2)..][..m.cols.div_ceil(2)];
                    let per_row = m.cols.div_ceil(block.get());
                    let scales: &[f16] = bytemuck::cast_slice(&canonical[m.scales.clone()]);
                    for t in 0..inputs {
                        let want = dot_qpacked(codes, &scales[r * per_row..][..per_row], block, &x[t]);
                        let got = out[r * inputs + t];
                        assert_eq!(
                            got.to_bits(),
                            want.to_bits(),
                            "{isa:?} B={block} {matrix:?} row {r} input {t}"
                        );
                        let (mut v, mut vs) = (vec![0; m.cols], vec![0.0; m.cols.div_ceil(CODE_GROUP)]);
                        to_integers(&x[t], &mut v, &mut vs);
                        let scales = &scales[r * per_row..][..per_row];
                        let want = dot_qpacked_integers(codes, scales, block, &v, &vs);
                        let got = integer_out[r * inputs + t];
                        assert_eq!(
                            got.to_bits(),
                            want.to_bits(),
                            "integers: {isa:?} B={block} {matrix:?} row {r} input {t}"
                        );
                    }
                }
            }
        }
    }
}
