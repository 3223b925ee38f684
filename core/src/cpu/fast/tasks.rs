//! A phase of a step as a list of independent tasks: pieces of matrix products over rows.

use half::f16;
use rayon::prelude::*;

use crate::cpu::simd::Isa;
use crate::cpu::simd::kernels::{Gemm, Q8Gemm, QpackedGemm, QpackedIntegerGemm, QpackedRows};
use crate::cpu::tiling::TiledRows;
use crate::dense::DenseMatrix;

/// Multiply-adds below which a product is not cut further: a task of fewer costs more to hand to another thread than it saves.
const SMALLEST_TASK: usize = 1 << 18;

/// A piece of a product: consecutive rows of one matrix against all inputs.
pub struct Task<'a> {
    weights: Rows<'a>,
    inputs: &'a [f32],
    /// `[rows][inputs]`
    out: &'a mut [f32],
}

enum Rows<'a> {
    Dense(DenseMatrix<'a>),
    Qpacked(QpackedRows<'a>),
    /// Packed rows against rows of integers.
    Integers(QpackedRows<'a>),
}

/// The tasks of one phase.
#[derive(Default)]
pub struct Tasks<'a>(Vec<Task<'a>>);

impl<'a> Tasks<'a> {
    /// Adds `out[row][input] = W·x`, cut into tasks. `inputs` is `[inputs][padded(cols)]`.
    pub fn dense(&mut self, matrix: DenseMatrix<'a>, inputs: &'a [f32], out: &'a mut [f32]) {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let n = out.len() / rows;
        let step = rows_per_task(rows, cols * n);
        for (i, out) in out.chunks_mut(step * n).enumerate() {
            self.0.push(Task {
                weights: Rows::Dense(matrix.range(i * step..i * step + out.len() / n)),
                inputs,
                out,
            });
        }
    }

    /// The same for FP16 rows of `cols` values.
    pub fn f16(&mut self, values: &'a [f16], cols: usize, inputs: &'a [f32], out: &'a mut [f32]) {
        self.dense(DenseMatrix::F16 { values, cols }, inputs, out);
    }

    /// The same for a matrix of an expert; `inputs` is padded in the control arm, else permuted, or arranged as
    /// integers if `integers` says so.
    pub fn expert(
        &mut self,
        integers: bool,
        weights: TiledRows<'a>,
        rows: usize,
        cols: usize,
        inputs: &'a [f32],
        out: &'a mut [f32],
    ) {
        match weights {
            TiledRows::F16(values) => self.f16(values, cols, inputs, out),
            TiledRows::Qpacked(packed) => {
                let n = out.len() / rows;
                let step = rows_per_task(rows, cols * n);
                for (i, out) in out.chunks_mut(step * n).enumerate() {
                    let rows = packed.rows(i * step..i * step + out.len() / n);
                    self.0.push(Task {
                        weights: if integers {
                            Rows::Integers(rows)
                        } else {
                            Rows::Qpacked(rows)
                        },
                        inputs,
                        out,
                    });
                }
            }
        }
    }

    /// Runs all tasks on the threads of the current pool.
    pub fn run(self, isa: Isa) {
        if let [_] = self.0.as_slice() {
            self.0.into_iter().for_each(|t| t.run(isa));
        } else {
            self.0.into_par_iter().with_max_len(1).for_each(|t| t.run(isa));
        }
    }
}

impl Task<'_> {
    fn run(self, isa: Isa) {
        let Self { inputs, out, .. } = self;
        match self.weights {
            Rows::Dense(DenseMatrix::F16 { values, cols }) => isa.run(Gemm {
                weights: values,
                cols,
                inputs,
                out,
            }),
            Rows::Dense(DenseMatrix::Q8(weights)) => isa.run(Q8Gemm { weights, inputs, out }),
            Rows::Integers(weights) => isa.run(QpackedIntegerGemm { weights, inputs, out }),
            Rows::Qpacked(weights) => isa.run(QpackedGemm { weights, inputs, out }),
        }
    }
}

/// Rows of a task, a multiple of the kernels' four; which rows share a task changes no bit.
fn rows_per_task(rows: usize, cost: usize) -> usize {
    (SMALLEST_TASK / cost.max(1))
        .clamp(4, rows.max(4))
        .next_multiple_of(4)
}

/// Turns `[rows][n]` into `[n][rows]`, each output row `stride` apart.
pub fn transpose(from: &[f32], n: usize, to: &mut [f32], stride: usize) {
    let rows = from.len() / n;
    if n == 1 {
        to[..rows].copy_from_slice(from);
        return;
    }
    to.par_chunks_mut(stride)
        .take(n)
        .enumerate()
        .with_min_len(4)
        .for_each(|(t, to)| {
            for (r, to) in to[..rows].iter_mut().enumerate() {
                *to = from[r * n + t];
            }
        });
}
