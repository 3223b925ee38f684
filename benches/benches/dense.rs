//! Non-routed matrices on the CPU as FP16 and as q8, at the shapes of OLMoE's attention and Qwen1.5-MoE's shared
//! expert, on all threads.
//!
//! Each call multiplies one of many matrices, so that weights come from memory as they do in decode.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use half::f16;
use horizon_benches::{Reporter, Threads};
use horizon_core::cpu::numerics::{dot_f16, dot_q8};
use horizon_core::cpu::simd::Isa;
use horizon_core::cpu::simd::kernels::{Gemm, Q8Gemm, padded};
use horizon_core::dense::DenseMatrix;
use horizon_core::dense_q8::{Q8Matrix, scales_per_row};
use rayon::prelude::*;

const SHAPES: [(&str, usize, usize); 3] = [
    ("olmoe-attention", 2048, 2048),
    ("qwen1.5-moe-shared-gate", 5632, 2048),
    ("qwen1.5-moe-shared-down", 2048, 5632),
];
/// FP16 bytes of all matrices of a shape: far more than the caches hold.
const BYTES: usize = 256 << 20;
/// Rows a task, as in decode.
const TASK_ROWS: usize = 128;

fn weights(values: usize, seed: u32) -> Vec<f16> {
    let mut state = seed | 1;
    (0..values)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f16::from_f32((state >> 8) as f32 / 16_777_216.0 - 0.5)
        })
        .collect()
}

fn input(cols: usize) -> Vec<f32> {
    (0..cols).map(|i| ((i * 37) % 101) as f32 / 17.0 - 3.0).collect()
}

/// `out[row][input]` on all threads.
fn product(isa: Isa, matrix: DenseMatrix<'_>, inputs: &[f32], n: usize, out: &mut [f32]) {
    let tasks = out.par_chunks_mut(TASK_ROWS * n).enumerate();
    tasks.for_each(|(i, out)| {
        let first = i * TASK_ROWS;
        match matrix.range(first..first + out.len() / n) {
            DenseMatrix::F16 { values, cols } => isa.run(Gemm {
                weights: values,
                cols,
                inputs,
                out,
            }),
            DenseMatrix::Q8(weights) => isa.run(Q8Gemm { weights, inputs, out }),
        }
    });
}

/// Stops the benchmark unless every row has the bits of the scalar formula.
fn check(isa: Isa, matrix: DenseMatrix<'_>) {
    let x = input(matrix.cols());
    let mut out = vec![f32::NAN; matrix.rows()];
    product(isa, matrix, &x, 1, &mut out);
    for (r, got) in out.iter().enumerate() {
        let want = match matrix.range(r..r + 1) {
            DenseMatrix::F16 { values, .. } => dot_f16(values, &x),
            DenseMatrix::Q8(row) => dot_q8(row.codes, row.scales, &x),
        };
        assert_eq!(got.to_bits(), want.to_bits(), "{isa:?} row {r}");
    }
}

fn dense(criterion: &mut Criterion) {
    let reporter = Reporter::new().expect("the yardstick needs 1 GiB of memory");
    let isa = Isa::best();
    let mut group = reporter.group(criterion, "dense");
    for (name, rows, cols) in SHAPES {
        assert_eq!(cols, padded(cols), "inputs need no padding");
        let seeds = 0..u32::try_from(BYTES / (2 * rows * cols)).expect("few");
        let plain: Vec<Vec<f16>> = seeds.into_par_iter().map(|s| weights(rows * cols, s)).collect();
        let q8: Vec<Q8Matrix> = plain
            .par_iter()
            .map(|w| Q8Matrix::quantize(w, cols).expect("finite"))
            .collect();
        let plain: Vec<DenseMatrix<'_>> = plain
            .iter()
            .map(|values| DenseMatrix::F16 { values, cols })
            .collect();
        let q8: Vec<DenseMatrix<'_>> = q8.iter().map(|m| DenseMatrix::Q8(m.view())).collect();
        let q8_bytes = rows * (cols + 2 * scales_per_row(cols));
        for (form, matrices, bytes) in [("f16", &plain, 2 * rows * cols), ("q8", &q8, q8_bytes)] {
            check(isa, matrices[0]);
            for (kind, n) in [("gemv", 1), ("gemm16", 16)] {
                let inputs = input(cols).repeat(n);
                let mut out = vec![0.0; rows * n];
                let mut next = 0;
                let label = format!("{name}/{kind}/{rows}x{cols}/{form}/{}", isa.name());
                group.time(&label, bytes, Threads::All, || {
                    next = (next + 1) % matrices.len();
                    product(isa, matrices[next], black_box(&inputs), n, &mut out);
                    black_box(&out);
                });
            }
        }
    }
}

criterion_group!(benches, dense);
criterion_main!(benches);
