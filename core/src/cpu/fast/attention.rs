//! The attention block of the fast backend.

use half::f16;
use rayon::prelude::*;

use super::Context;
use super::rows::{narrow_row, norm_in_place, norm_rows};
use super::tasks::{Tasks, transpose};
use super::workspace::Workspace;
use crate::backend::StepRow;
use crate::cpu::kv::{HeadRows, KvCache};
use crate::cpu::numerics::softmax;
use crate::cpu::simd::Isa;
use crate::cpu::simd::kernels::{Element, Gemm, WeightedRows, padded};
use crate::ids::LayerId;
use crate::roles::LayerRole;
use crate::spec::QkNorm;

/// Attention of one layer for all rows; the result, before the residual add, is `ws.block`.
pub fn attention(
    c: &Context,
    kv: &mut KvCache,
    ws: &mut Workspace,
    rows: &[StepRow],
    layer: LayerId,
    window: Option<usize>,
) {
    project(c, ws, rows.len(), layer);
    prepare_rows(c, ws, rows, layer);
    let kv_width = c.spec.attention.kv_heads * c.spec.attention.head_dim;
    let [_, k, v] = &ws.qkv;
    for ((row, k), v) in rows
        .iter()
        .zip(k.chunks_exact(kv_width))
        .zip(v.chunks_exact(kv_width))
    {
        kv.store(layer.index(), row.sequence, row.position, k, v);
    }
    attend_heads(c, kv, ws, rows, layer, window);
    output(c, ws, rows.len(), layer);
}

/// Norm, then queries, keys and values of all rows in one phase.
fn project(c: &Context, ws: &mut Workspace, n: usize, layer: LayerId) {
    let hidden = c.spec.hidden;
    let inputs = &mut ws.inputs[..n * padded(hidden)];
    let norm = c.weights.layer(layer, LayerRole::AttentionNorm);
    norm_rows(c, &ws.hidden[..n * hidden], norm, inputs, c.narrows());
    let matrices = [LayerRole::Query, LayerRole::Key, LayerRole::Value].map(|r| c.weights.matrix(layer, r));
    let mut tasks = Tasks::default();
    let mut rest = ws.raw.as_mut_slice();
    let mut results = Vec::with_capacity(3);
    for w in matrices {
        let (raw, others) = rest.split_at_mut(w.rows() * n);
        results.push(raw.len());
        tasks.dense(w, inputs, raw);
        rest = others;
    }
    tasks.run(c.isa);
    let mut start = 0;
    for (len, out) in results.into_iter().zip(&mut ws.qkv) {
        transpose(&ws.raw[start..start + len], n, out, len / n);
        start += len;
    }
}

/// Bias, norms, clamp and rotation of each row's queries and keys; queries are narrowed.
fn prepare_rows(c: &Context, ws: &mut Workspace, rows: &[StepRow], layer: LayerId) {
    let a = &c.spec.attention;
    let (q_width, kv_width) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
    let bias = |role| c.weights.optional(layer, role).unwrap_or_default();
    let biases = [LayerRole::QueryBias, LayerRole::KeyBias, LayerRole::ValueBias].map(bias);
    let norms = [LayerRole::QueryNorm, LayerRole::KeyNorm].map(bias);
    let [q, k, v] = &mut ws.qkv;
    rows.par_iter()
        .zip(q.par_chunks_exact_mut(q_width))
        .zip(k.par_chunks_exact_mut(kv_width))
        .zip(v.par_chunks_exact_mut(kv_width))
        .with_min_len(4)
        .for_each(|(((row, q), k), v)| {
            for (x, bias) in [&mut *q, k, v].into_iter().zip(biases) {
                for (x, b) in x.iter_mut().zip(bias) {
                    *x += b.to_f32();
                }
            }
            for (x, weight) in [&mut *q, k].into_iter().zip(norms) {
                let width = match a.qk_norm {
                    QkNorm::None => continue,
                    QkNorm::AllHeads => x.len(),
                    QkNorm::PerHead => a.head_dim,
                };
                for part in x.chunks_exact_mut(width) {
                    norm_in_place(c.isa, part, weight, c.spec.rms_norm_eps);
                }
            }
            if let Some(limit) = a.clip_qkv {
                for x in q.iter_mut().chain(k.iter_mut()).chain(v) {
                    *x = x.clamp(-limit, limit);
                }
            }
            for head in q
                .chunks_exact_mut(a.head_dim)
                .chain(k.chunks_exact_mut(a.head_dim))
            {
                c.rotary.rotate(row.position, head);
            }
            if c.narrows() {
                narrow_row(q);
            }
        });
}

fn attend_heads(
    c: &Context,
    kv: &KvCache,
    ws: &mut Workspace,
    rows: &[StepRow],
    layer: LayerId,
    window: Option<usize>,
) {
    let (a, n) = (&c.spec.attention, rows.len());
    let (hd, q) = (a.head_dim, &ws.qkv[0]);
    let heads = ws
        .heads
        .par_chunks_mut(n * hd)
        .zip(ws.scores.par_chunks_exact_mut(c.regime.context));
    heads
        .take(a.heads)
        .enumerate()
        .with_max_len(1)
        .for_each(|(h, (out, scores))| {
            let mut query = vec![0.0; padded(hd)];
            for ((row, q), out) in rows
                .iter()
                .zip(q.chunks_exact(a.heads * hd))
                .zip(out.chunks_exact_mut(hd))
            {
                query[..hd].copy_from_slice(&q[h * hd..(h + 1) * hd]);
                let end = row.position + 1;
                let first = window.map_or(0, |w| end.saturating_sub(w));
                let cached = |value| {
                    kv.rows(
                        layer.index(),
                        row.sequence,
                        h / (a.heads / a.kv_heads),
                        value,
                        end,
                    )
                };
                let scores = &mut scores[..end - first];
                match (cached(false), cached(true)) {
                    (HeadRows::F16(k), HeadRows::F16(v)) => {
                        attend::<f16>(c.isa, &query, &k[first * hd..], &v[first * hd..], scores, out);
                    }
                    (HeadRows::F32(k), HeadRows::F32(v)) => {
                        attend::<f32>(c.isa, &query, &k[first * hd..], &v[first * hd..], scores, out);
                    }
                    _ => unreachable!("keys and values are stored alike"),
                }
            }
        });
}

/// One query head, padded, over cached keys and values `[positions][head_dim]`.
fn attend<E: Element>(isa: Isa, query: &[f32], k: &[E], v: &[E], scores: &mut [f32], out: &mut [f32]) {
    #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
    let scale = 1.0 / (out.len() as f32).sqrt();
    isa.run(Gemm {
        weights: k,
        cols: out.len(),
        inputs: query,
        out: scores,
    });
    for s in scores.iter_mut() {
        *s *= scale;
    }
    softmax(scores);
    out.fill(0.0);
    isa.run(WeightedRows {
        rows: v,
        weights: scores,
        out,
    });
}

/// The output projection of all heads, into `ws.block`.
fn output(c: &Context, ws: &mut Workspace, n: usize, layer: LayerId) {
    let (hd, width) = (
        c.spec.attention.head_dim,
        c.spec.attention.heads * c.spec.attention.head_dim,
    );
    let (hidden, stride) = (c.spec.hidden, padded(width));
    let inputs = &mut ws.inputs[..n * stride];
    inputs
        .par_chunks_exact_mut(stride)
        .enumerate()
        .with_min_len(4)
        .for_each(|(t, x)| {
            for (x, head) in x.chunks_exact_mut(hd).zip(ws.heads.chunks_exact(n * hd)) {
                x.copy_from_slice(&head[t * hd..(t + 1) * hd]);
            }
            x[width..].fill(0.0);
            if c.narrows() {
                narrow_row(&mut x[..width]);
            }
        });
    let raw = &mut ws.raw[..n * hidden];
    let mut tasks = Tasks::default();
    tasks.dense(c.weights.matrix(layer, LayerRole::Output), inputs, raw);
    tasks.run(c.isa);
    transpose(raw, n, &mut ws.block, hidden);
    if let Some(bias) = c.weights.optional(layer, LayerRole::OutputBias) {
        for row in ws.block[..n * hidden].chunks_exact_mut(hidden) {
            for (x, b) in row.iter_mut().zip(bias) {
                *x += b.to_f32();
            }
        }
    }
}
