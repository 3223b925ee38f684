//! Quantizing and dequantizing whole matrices: GB/s by path, block size and number of threads.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use half::f16;
use horizon_benches::{Reporter, Threads};
use horizon_core::qpacked::{
    BlockSize, CodecPath, QpackedLayout, Quantizer, dequantize, dequantize_with, quantize_with,
};
use rayon::prelude::*;

/// Columns and block size: OLMoE's gate and up, and Qwen1.5-MoE's down, whose last block of 256 is short.
const CASES: [(usize, BlockSize); 3] = [
    (2048, BlockSize::B256),
    (2048, BlockSize::B32),
    (1408, BlockSize::B256),
];
/// Values of the timed matrix, roughly: 128 MiB of FP32, more than any cache.
const VALUES: usize = 32 << 20;
/// Rows that are checked against the scalar path before anything is timed.
const CHECKED_ROWS: usize = 64;
/// Rows a task when all threads work.
const TASK_ROWS: usize = 64;

/// A matrix with its packed form and room for the result of dequantizing it.
struct Matrix {
    layout: QpackedLayout,
    weights: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<f16>,
    values: Vec<f32>,
}

impl Matrix {
    /// Near-normal weights, rounded to BF16 as a checkpoint's are.
    fn new(rows: usize, cols: usize, block: BlockSize) -> Self {
        let layout = QpackedLayout { rows, cols, block };
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        let mut weight = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let sum = [0, 16, 32, 48]
                .map(|shift| (state >> shift & 0xffff) as f32)
                .iter()
                .sum::<f32>();
            f32::from_bits(((sum - 131_070.0) * 1e-6).to_bits() & 0xffff_0000)
        };
        Self {
            layout,
            weights: (0..rows * cols).map(|_| weight()).collect(),
            codes: vec![0; layout.code_bytes()],
            scales: vec![f16::ZERO; layout.scales()],
            values: vec![0.0; rows * cols],
        }
    }

    /// Large enough to come from memory; smaller when the benchmark is only tried out.
    fn timed(cols: usize, block: BlockSize) -> Self {
        let values = if std::env::args().any(|a| a == "--bench") {
            VALUES
        } else {
            VALUES / 256
        };
        Self::new(values / cols, cols, block)
    }

    fn quantize(&mut self, path: CodecPath, quantizer: Quantizer) {
        let Self {
            layout,
            weights,
            codes,
            scales,
            ..
        } = self;
        let error = quantize_with(
            path,
            "bench",
            black_box(weights),
            layout,
            quantizer,
            codes,
            scales,
        );
        black_box(error.expect("finite weights"));
    }

    fn quantize_on_all_threads(&mut self, path: CodecPath, quantizer: Quantizer) {
        let QpackedLayout { cols, block, .. } = self.layout;
        let weights = self.weights.par_chunks(TASK_ROWS * cols);
        let codes = self.codes.par_chunks_mut(TASK_ROWS * self.layout.row_bytes());
        let scales = self.scales.par_chunks_mut(TASK_ROWS * self.layout.row_blocks());
        weights
            .zip(codes)
            .zip(scales)
            .for_each(|((weights, codes), scales)| {
                let layout = QpackedLayout {
                    rows: weights.len() / cols,
                    cols,
                    block,
                };
                let error = quantize_with(path, "bench", weights, &layout, quantizer, codes, scales);
                black_box(error.expect("finite weights"));
            });
    }

    fn dequantize(&mut self, path: CodecPath) {
        let Self {
            layout,
            codes,
            scales,
            values,
            ..
        } = self;
        dequantize_with(path, layout, black_box(codes), scales, black_box(values));
    }

    fn packed_bytes(&self) -> usize {
        self.layout.code_bytes() + self.layout.scale_bytes()
    }
}

/// Stops the benchmark if `path` and the scalar path disagree.
fn check(path: CodecPath, cols: usize, block: BlockSize, quantizer: Quantizer) {
    let mut reference = Matrix::new(CHECKED_ROWS, cols, block);
    let mut got = Matrix::new(CHECKED_ROWS, cols, block);
    reference.quantize(CodecPath::Scalar, quantizer);
    got.quantize(path, quantizer);
    assert_eq!(got.codes, reference.codes, "{path}, {quantizer}: wrong codes");
    assert_eq!(got.scales, reference.scales, "{path}, {quantizer}: wrong scales");
    dequantize(
        &reference.layout,
        &reference.codes,
        &reference.scales,
        &mut reference.values,
    );
    got.dequantize(path);
    assert_eq!(got.values, reference.values, "{path}: wrong values");
}

fn quantizers(criterion: &mut Criterion) {
    let reporter = Reporter::new().expect("the yardstick needs 1 GiB of memory");
    for quantizer in Quantizer::ALL {
        let mut group = reporter.group(criterion, &format!("quantize/{quantizer}"));
        for (cols, block) in CASES {
            let mut matrix = Matrix::timed(cols, block);
            let bytes = matrix.weights.len() * 4;
            for path in CodecPath::available() {
                check(path, cols, block, quantizer);
                // A second a pass, and nobody's choice.
                if path != CodecPath::Scalar {
                    let name = format!("{path}/{cols}/b{block}");
                    group.time(&name, bytes, Threads::One, || matrix.quantize(path, quantizer));
                }
            }
            let path = CodecPath::fastest();
            let name = format!("{path}/{cols}/b{block}/all-threads");
            group.time(&name, bytes, Threads::All, || {
                matrix.quantize_on_all_threads(path, quantizer);
            });
        }
    }
}

fn dequantizers(criterion: &mut Criterion) {
    let reporter = Reporter::new().expect("the yardstick needs 1 GiB of memory");
    let mut group = reporter.group(criterion, "dequantize");
    for (cols, block) in CASES {
        let mut matrix = Matrix::timed(cols, block);
        matrix.quantize(CodecPath::fastest(), Quantizer::Absmax);
        let bytes = matrix.packed_bytes() + matrix.values.len() * 4;
        for path in CodecPath::available() {
            check(path, cols, block, Quantizer::Absmax);
            let name = format!("{path}/{cols}/b{block}");
            group.time(&name, bytes, Threads::One, || matrix.dequantize(path));
        }
    }
}

criterion_group!(benches, quantizers, dequantizers);
criterion_main!(benches);
