//! Routed experts on the CPU from their packed form, at the shapes of OLMoE and Qwen1.5-MoE, on all threads.
//!
//! Each call runs one matrix of the k experts of a token (`gemv`) or of sixteen tokens that chose the same k
//! (`gemm16`); the next call takes the next k, so that weights come from memory as they do in decode. `i16` is the
//! executor with 16-bit integer activations.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use half::f16;
use horizon_benches::{Reporter, Threads};
use horizon_core::cpu::numerics::{CODE_GROUP, dot_qpacked, dot_qpacked_integers, to_integers};
use horizon_core::cpu::simd::Isa;
use horizon_core::cpu::simd::kernels::{
    QpackedGemm, QpackedIntegerGemm, QpackedRows, arrange_integers, integer_len, permute, permuted_len,
};
use horizon_core::cpu::tiling::{CpuTiling, TiledLayout, TiledRows};
use horizon_core::memory::AnonymousMemory;
use horizon_core::qpacked::BlockSize;
use horizon_core::record::{ExpertEncoding, RecordLayout, RecordTiling};
use horizon_core::roles::ExpertMatrix;
use rayon::prelude::*;

struct Shape {
    name: &'static str,
    hidden: usize,
    width: usize,
    experts: usize,
    top_k: usize,
}

const SHAPES: [Shape; 2] = [
    Shape {
        name: "olmoe",
        hidden: 2048,
        width: 1024,
        experts: 64,
        top_k: 8,
    },
    Shape {
        name: "qwen1.5-moe",
        hidden: 2048,
        width: 1408,
        experts: 60,
        top_k: 4,
    },
];
const BLOCKS: [BlockSize; 2] = [BlockSize::B256, BlockSize::B32];
/// Rows a task, as in decode.
const TASK_ROWS: usize = 32;

/// The experts of one layer, tiled, with pseudo-random codes and scales.
struct Layer {
    record: RecordLayout,
    tiled: TiledLayout,
    canonical: Vec<Vec<u8>>,
    /// All tiled records in one range, as the product holds them.
    records: AnonymousMemory,
    record_bytes: usize,
}

impl Layer {
    fn new(shape: &Shape, block: BlockSize) -> Self {
        let record = RecordLayout::of_shape(shape.hidden, shape.width, ExpertEncoding::Qpacked { block });
        let canonical: Vec<Vec<u8>> = (0..shape.experts as u64)
            .into_par_iter()
            .map(|e| bytes(&record, e))
            .collect();
        let record_bytes = CpuTiling.tiled_bytes(&record);
        let mut records =
            AnonymousMemory::zeroed(record_bytes * shape.experts).expect("memory for one layer");
        let tiles = records.bytes_mut().par_chunks_mut(record_bytes);
        tiles
            .zip(&canonical)
            .for_each(|(out, c)| CpuTiling.tile(&record, c, out));
        Self {
            tiled: TiledLayout::new(&record),
            record,
            canonical,
            records,
            record_bytes,
        }
    }

    fn rows(&self, expert: usize, matrix: ExpertMatrix) -> QpackedRows<'_> {
        match self.tiled.view(
            matrix,
            &self.records.bytes()[expert * self.record_bytes..][..self.record_bytes],
        ) {
            TiledRows::Qpacked(rows) => rows,
            TiledRows::F16(_) => unreachable!("built packed"),
        }
    }

    /// `out[expert][row][input]` of `experts`, on all threads.
    fn run(
        &self,
        (isa, integers): (Isa, bool),
        matrix: ExpertMatrix,
        experts: &[usize],
        inputs: &[f32],
        n: usize,
        out: &mut [f32],
    ) {
        let rows = self.tiled.rows(matrix);
        let pieces = out
            .par_chunks_mut(rows * n)
            .zip(experts)
            .flat_map_iter(|(out, e)| {
                let weights = self.rows(*e, matrix);
                out.chunks_mut(TASK_ROWS * n)
                    .enumerate()
                    .map(move |(i, out)| (weights, i * TASK_ROWS, out))
            });
        pieces.for_each(|(weights, first, out)| {
            let weights = weights.rows(first..first + out.len() / n);
            if integers {
                isa.run(QpackedIntegerGemm { weights, inputs, out });
            } else {
                isa.run(QpackedGemm { weights, inputs, out });
            }
        });
    }

    /// Stops the benchmark unless every row of `experts` has the bits of the scalar formula.
    fn check(&self, isa: Isa, block: BlockSize, matrix: ExpertMatrix, experts: &[usize]) {
        let m = self.record.matrix(matrix);
        let x = input(m.cols);
        let (mut integers, mut x_scales) = (vec![0; m.cols], vec![0.0; m.cols.div_ceil(CODE_GROUP)]);
        to_integers(&x, &mut integers, &mut x_scales);
        for form in [false, true] {
            let mut out = vec![f32::NAN; experts.len() * m.rows];
            self.run(
                (isa, form),
                matrix,
                experts,
                &arranged(form, m.cols, 1),
                1,
                &mut out,
            );
            for (out, e) in out.chunks(m.rows).zip(experts) {
                let record = &self.canonical[*e];
                let codes = record[m.values.clone()].chunks(m.cols.div_ceil(2));
                let scales = record[m.scales.clone()].as_chunks().0.iter();
                let scales: Vec<f16> = scales.map(|b| f16::from_le_bytes(*b)).collect();
                let per_row = m.cols.div_ceil(block.get());
                for ((got, codes), scales) in out.iter().zip(codes).zip(scales.chunks(per_row)) {
                    let want = if form {
                        dot_qpacked_integers(codes, scales, block, &integers, &x_scales)
                    } else {
                        dot_qpacked(codes, scales, block, &x)
                    };
                    assert_eq!(
                        got.to_bits(),
                        want.to_bits(),
                        "{isa:?} {matrix:?} of expert {e}, integers: {form}"
                    );
                }
            }
        }
    }
}

/// `n` equal inputs as a kernel reads them.
fn arranged(integers: bool, cols: usize, n: usize) -> Vec<f32> {
    let len = if integers {
        integer_len(cols)
    } else {
        permuted_len(cols)
    };
    let mut out = vec![0.0; len * n];
    for out in out.chunks_mut(len) {
        if integers {
            arrange_integers(&input(cols), out);
        } else {
            permute(&input(cols), out);
        }
    }
    out
}

fn bytes(record: &RecordLayout, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut out: Vec<u8> = (0..record.bytes).map(|_| next().to_le_bytes()[3]).collect();
    for m in &record.matrices {
        for d in out[m.scales.clone()].as_chunks_mut::<2>().0 {
            *d = f16::from_f32((next() >> 40) as f32 / 16_777_216.0 - 0.5).to_le_bytes();
        }
    }
    out
}

fn input(cols: usize) -> Vec<f32> {
    (0..cols).map(|i| ((i * 37) % 101) as f32 / 17.0 - 3.0).collect()
}

fn experts(criterion: &mut Criterion) {
    let reporter = Reporter::new().expect("the yardstick needs 1 GiB of memory");
    let isa = Isa::best();
    let mut group = reporter.group(criterion, "experts");
    for shape in &SHAPES {
        for block in BLOCKS {
            let layer = Layer::new(shape, block);
            for matrix in [ExpertMatrix::Gate, ExpertMatrix::Down] {
                let m = layer.record.matrix(matrix);
                let first: Vec<usize> = (0..shape.top_k).collect();
                layer.check(isa, block, matrix, &first);
                for (kind, n, integers) in [
                    ("gemv", 1, false),
                    ("gemv-i16", 1, true),
                    ("gemm16", 16, false),
                    ("gemm16-i16", 16, true),
                ] {
                    let inputs = arranged(integers, m.cols, n);
                    let mut out = vec![0.0; shape.top_k * m.rows * n];
                    let mut next = 0;
                    let bytes = shape.top_k * (m.values.len() + m.scales.len());
                    let name = format!(
                        "{}/{kind}/{}x{}/b{block}/{}",
                        shape.name,
                        m.rows,
                        m.cols,
                        isa.name()
                    );
                    group.time(&name, bytes, Threads::All, || {
                        let chosen: Vec<usize> = (next..next + shape.top_k)
                            .map(|e| e * 7 % shape.experts)
                            .collect();
                        next = (next + shape.top_k) % shape.experts;
                        layer.run((isa, integers), matrix, &chosen, black_box(&inputs), n, &mut out);
                        black_box(&out);
                    });
                }
            }
        }
    }
}

criterion_group!(benches, experts);
criterion_main!(benches);
