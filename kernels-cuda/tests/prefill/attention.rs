//! Attention of many rows: head widths, groups of query heads, windows, several sequences, chunks.

use bytemuck::Zeroable;
use half::f16;
use horizon_kernels_cuda::args::{PrefillAttentionArgs, Row};
use horizon_kernels_cuda::driver::DevicePtr;
use horizon_kernels_cuda::prefill;

use crate::common::{Bench, Random, bits, close};

#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    context: usize,
    sequences: usize,
    window: usize,
}

impl Shape {
    fn padded(&self) -> usize {
        self.dim.next_multiple_of(8)
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    /// Where keys (0) or values (1) of a position start in the cache.
    fn place(&self, sequence: usize, kv_head: usize, value: usize, position: usize) -> usize {
        (((sequence * self.kv_heads + kv_head) * 2 + value) * self.context + position) * self.padded()
    }
}

/// A cache filled up to each sequence's length, NaN beyond it, padding zero.
fn cache(random: &mut Random, s: &Shape, lengths: &[usize]) -> Vec<f16> {
    let mut out = vec![f16::NAN; s.sequences * s.kv_heads * 2 * s.context * s.padded()];
    for (sequence, length) in lengths.iter().enumerate() {
        for kv_head in 0..s.kv_heads {
            for value in 0..2 {
                for position in 0..*length {
                    let at = s.place(sequence, kv_head, value, position);
                    out[at..at + s.padded()].fill(f16::ZERO);
                    out[at..at + s.dim].copy_from_slice(&random.halves(s.dim, 2.0));
                }
            }
        }
    }
    out
}

fn queries(random: &mut Random, s: &Shape, rows: usize) -> Vec<f16> {
    let mut out = vec![f16::ZERO; rows * s.heads * s.padded()];
    for head in out.chunks_exact_mut(s.padded()) {
        head[..s.dim].copy_from_slice(&random.halves(s.dim, 2.0));
    }
    out
}

fn run(bench: &Bench, s: &Shape, rows: &[Row], queries: &[f16], cache: DevicePtr) -> Vec<f32> {
    let count = rows.len() * s.heads * s.dim;
    let output = bench.poisoned(count * 2);
    let args = PrefillAttentionArgs {
        rows: bench.upload(rows),
        queries: bench.upload(queries),
        cache,
        output,
        tokens: rows.len() as u32,
        heads: s.heads as u32,
        kv_heads: s.kv_heads as u32,
        head_dim: s.dim as u32,
        padded: s.padded() as u32,
        context: s.context as u32,
        window: s.window as u32,
        scale: s.scale(),
    };
    bench.launch(&prefill::attention(rows.len(), s.heads, s.padded()), &args);
    bench.read_f16(output, count)
}

/// One head of one row: the output, and what FP32 arithmetic may miss it by.
fn attended(s: &Shape, row: &Row, head: usize, q: &[f16], cache: &[f16]) -> Vec<(f64, f64)> {
    let (end, kv_head) = (row.position as usize + 1, head / (s.heads / s.kv_heads));
    let first = if s.window > 0 {
        end.saturating_sub(s.window)
    } else {
        0
    };
    let cached =
        |value, position| &cache[s.place(row.sequence as usize, kv_head, value, position)..][..s.dim];
    let (mut scores, mut size) = (Vec::new(), 0.0f64);
    for position in first..end {
        let products = cached(0, position)
            .iter()
            .zip(q)
            .map(|(k, q)| k.to_f64() * q.to_f64());
        let (sum, magnitude) = products.fold((0.0, 0.0), |(a, b), p| (a + p, b + p.abs()));
        scores.push(sum * f64::from(s.scale()));
        size = size.max(magnitude * f64::from(s.scale()));
    }
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let all: f64 = scores.iter().map(|v| (v - most).exp()).sum();
    // An error of a score is one of its probability, relatively; sums of FP32 do not lose more than a few roundings.
    let relative = (size * (s.dim as f64).sqrt() + 64.0) * 2f64.powi(-23);
    (0..s.dim)
        .map(|d| {
            let parts = scores
                .iter()
                .zip(first..)
                .map(|(v, p)| (v - most).exp() / all * cached(1, p)[d].to_f64());
            let (sum, size) = parts.fold((0.0, 0.0), |(a, b), p| (a + p, b + p.abs()));
            (sum, sum.abs() * 2f64.powi(-11) + 2f64.powi(-25) + size * relative)
        })
        .collect()
}

fn check(s: &Shape, rows: &[Row], queries: &[f16], cache: &[f16], got: &[f32]) {
    for (r, row) in rows.iter().enumerate() {
        for head in 0..s.heads {
            let q = &queries[(r * s.heads + head) * s.padded()..][..s.dim];
            let own = &got[(r * s.heads + head) * s.dim..][..s.dim];
            for (d, (want, error)) in attended(s, row, head, q, cache).into_iter().enumerate() {
                close(
                    &format!("{s:?}, {row:?}, head {head}, element {d}"),
                    own[d],
                    want,
                    error,
                );
            }
        }
    }
}

fn row(sequence: usize, position: usize) -> Row {
    Row {
        sequence: sequence as u32,
        position: position as u32,
        ..Row::zeroed()
    }
}

const SHAPES: [Shape; 6] = [
    Shape {
        heads: 2,
        kv_heads: 1,
        dim: 10,
        context: 150,
        sequences: 1,
        window: 0,
    },
    Shape {
        heads: 2,
        kv_heads: 2,
        dim: 32,
        context: 150,
        sequences: 1,
        window: 30,
    },
    Shape {
        heads: 3,
        kv_heads: 1,
        dim: 48,
        context: 150,
        sequences: 1,
        window: 0,
    },
    Shape {
        heads: 1,
        kv_heads: 1,
        dim: 128,
        context: 150,
        sequences: 1,
        window: 70,
    },
    Shape {
        heads: 1,
        kv_heads: 1,
        dim: 90,
        context: 150,
        sequences: 1,
        window: 1,
    },
    Shape {
        heads: 1,
        kv_heads: 1,
        dim: 256,
        context: 90,
        sequences: 1,
        window: 0,
    },
];

/// One prompt, at once and in chunks, which have the same bits.
fn prompts(bench: &Bench) {
    let mut random = Random::new(31);
    for s in SHAPES {
        let length = s.context - 12;
        let rows: Vec<Row> = (0..length).map(|p| row(0, p)).collect();
        let (q, c) = (
            queries(&mut random, &s, length),
            cache(&mut random, &s, &[length]),
        );
        let on_device = bench.upload(&c);
        let got = run(bench, &s, &rows, &q, on_device);
        check(&s, &rows, &q, &c, &got);
        let (wide_q, wide) = (s.heads * s.padded(), s.heads * s.dim);
        for chunk in [1, 47] {
            let from = length - chunk - 5;
            let own = run(
                bench,
                &s,
                &rows[from..][..chunk],
                &q[from * wide_q..][..chunk * wide_q],
                on_device,
            );
            assert_eq!(
                bits(&own),
                bits(&got[from * wide..][..chunk * wide]),
                "{s:?}, chunk of {chunk}"
            );
        }
    }
}

/// Rows of several sequences in one step, in any order between them.
fn sequences(bench: &Bench) {
    let mut random = Random::new(32);
    let s = Shape {
        heads: 2,
        kv_heads: 1,
        dim: 24,
        context: 140,
        sequences: 4,
        window: 0,
    };
    let lengths = [5, 133, 64, 70];
    let mut rows: Vec<Row> = (0..5).map(|p| row(0, p)).collect();
    rows.extend((100..133).map(|p| row(1, p)));
    rows.push(row(2, 63));
    rows.extend((40..70).map(|p| row(3, p)));
    rows.push(row(2, 10));
    rows.swap(36, 38 + 20);
    let (q, c) = (
        queries(&mut random, &s, rows.len()),
        cache(&mut random, &s, &lengths),
    );
    let on_device = bench.upload(&c);
    let got = run(bench, &s, &rows, &q, on_device);
    check(&s, &rows, &q, &c, &got);
    let (wide_q, wide) = (s.heads * s.padded(), s.heads * s.dim);
    for r in [0, 36, 58, rows.len() - 1] {
        let own = run(bench, &s, &rows[r..=r], &q[r * wide_q..][..wide_q], on_device);
        assert_eq!(bits(&own), bits(&got[r * wide..][..wide]), "row {r}");
    }
}

/// Two values that cancel: what is left shows whether probabilities were more than FP16.
fn cancelling(bench: &Bench) {
    let s = Shape {
        heads: 1,
        kv_heads: 1,
        dim: 8,
        context: 2,
        sequences: 1,
        window: 0,
    };
    for step in 0..40 {
        let mut c = vec![f16::ZERO; 2 * 2 * 8];
        let k = f16::from_f32(0.05 * step as f32 + 0.013);
        c[s.place(0, 0, 0, 0)] = k;
        c[s.place(0, 0, 1, 0)] = f16::ONE;
        // The second key has the score 0; its value undoes the first's.
        c[s.place(0, 0, 1, 1)] = f16::from_f64(-(k.to_f64() * f64::from(s.scale())).exp());
        let mut q = vec![f16::ZERO; 8];
        q[0] = f16::ONE;
        let on_device = bench.upload(&c);
        let got = run(bench, &s, &[row(0, 1)], &q, on_device);
        let (want, _) = attended(&s, &row(0, 1), 0, &q, &c)[0];
        close(&format!("step {step}"), got[0], want, 3e-6);
    }
}

mod tests {
    crate::on_devices! {
        prompts, gpu_prompts;
        sequences, gpu_sequences;
        cancelling, gpu_cancelling;
    }
}
