//! Norms, what stands between the QKV product and attention, and the router.

use bytemuck::Zeroable;
use half::f16;
use horizon_kernels_cuda::args::{PrefillNormArgs, PrefillQkvArgs, PrefillRouterArgs, Row};
use horizon_kernels_cuda::driver::DevicePtr;
use horizon_kernels_cuda::prefill;

use crate::common::{Bench, Random, bits, close, sum_error};

const NULL: DevicePtr = DevicePtr(0);
const EPS: f32 = 1e-5;

fn inverse_rms(x: &[f32]) -> f64 {
    let squares: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum();
    1.0 / (squares / x.len() as f64 + f64::from(EPS)).sqrt()
}

/// Half a step of FP16 at `v`, and what FP32 loses before: a mean square of `n`, four roundings.
fn narrowed(n: usize, v: f64) -> f64 {
    v.abs() * (2f64.powi(-11) + (n as f64 + 16.0) * 2f64.powi(-24)) + 2f64.powi(-25)
}

fn norms(bench: &Bench) {
    let mut random = Random::new(21);
    for (rows, columns) in [(1, 8), (5, 72), (9, 264)] {
        let hidden = random.reals((rows + 2) * columns, 3.0);
        let weights = random.halves(columns, 2.0);
        let which: Vec<u32> = (0..rows).map(|_| random.below(rows + 2) as u32).collect();
        for chosen in [false, true] {
            let output = bench.poisoned(rows * columns * 2);
            let args = PrefillNormArgs {
                hidden: bench.upload(&hidden),
                which: if chosen { bench.upload(&which) } else { NULL },
                norm: bench.upload(&weights),
                output,
                rows: rows as u32,
                columns: columns as u32,
                eps: EPS,
                unused: 0,
            };
            bench.launch(&prefill::norm(rows), &args);
            for (i, y) in bench.read_f16(output, rows * columns).iter().enumerate() {
                let row = if chosen {
                    which[i / columns] as usize
                } else {
                    i / columns
                };
                let x = &hidden[row * columns..][..columns];
                let want = f64::from(x[i % columns]) * inverse_rms(x) * weights[i % columns].to_f64();
                close(
                    &format!("row {row}, column {}", i % columns),
                    *y,
                    want,
                    narrowed(columns, want),
                );
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Heads {
    dim: usize,
    /// As `QkNorm` of the kernel.
    norm: u32,
    clip: f32,
}

/// What the kernel should make of head `head` of `heads` whose values are `all`.
fn prepared(s: Heads, all: &[f32], head: usize, norm: &[f16], turns: Option<&[[f32; 2]]>) -> Vec<f64> {
    let own = &all[head * s.dim..][..s.dim];
    let (inverse, offset) = match s.norm {
        1 => (inverse_rms(all), head * s.dim),
        _ => (inverse_rms(own), 0),
    };
    let value = |i: usize| {
        let mut v = f64::from(own[i]);
        if s.norm != 0 && turns.is_some() {
            v *= inverse * norm[offset + i].to_f64();
        }
        let clip = f64::from(s.clip);
        if s.clip > 0.0 { v.clamp(-clip, clip) } else { v }
    };
    let half = s.dim / 2;
    (0..s.dim)
        .map(|i| match turns {
            None => value(i),
            Some(turns) => {
                let [cos, sin] = turns[i % half].map(f64::from);
                if i < half {
                    value(i) * cos - value(i + half) * sin
                } else {
                    value(i) * cos + value(i - half) * sin
                }
            }
        })
        .collect()
}

fn qkv(bench: &Bench) {
    let mut random = Random::new(22);
    let (context, sequences) = (6, 3);
    for (heads, kv_heads, dim) in [(3, 1, 10), (4, 2, 16), (10, 5, 72)] {
        for (norm, clip) in [(0, 0.0), (1, 0.0), (2, 0.8), (1, 0.5)] {
            let s = Heads { dim, norm, clip };
            let padded = dim.next_multiple_of(8);
            let rows: Vec<Row> = [(2, 5), (0, 0), (1, 3), (1, 4)]
                .map(|(sequence, position)| Row {
                    position,
                    sequence,
                    ..Row::zeroed()
                })
                .to_vec();
            let wide = (heads + 2 * kv_heads) * dim;
            let values = random.reals(rows.len() * wide, 2.0);
            let norms = [heads, kv_heads].map(|n| random.halves(if norm == 1 { n * dim } else { dim }, 2.0));
            let turns: Vec<[f32; 2]> = (0..context * dim / 2)
                .map(|_| {
                    let (sin, cos) = random.real(3.0).sin_cos();
                    [cos, sin]
                })
                .collect();
            let cache_len = sequences * kv_heads * 2 * context * padded;
            let cache = bench.poisoned(cache_len * 2);
            let queries = bench.poisoned(rows.len() * heads * padded * 2);
            let args = PrefillQkvArgs {
                rows: bench.upload(&rows),
                qkv: bench.upload(&values),
                q_norm: bench.upload(&norms[0]),
                k_norm: bench.upload(&norms[1]),
                rotary: bench.upload(&turns),
                cache,
                queries,
                heads: heads as u32,
                kv_heads: kv_heads as u32,
                head_dim: dim as u32,
                padded: padded as u32,
                context: context as u32,
                norm,
                eps: EPS,
                clip,
            };
            bench.launch(&prefill::qkv(rows.len()), &args);
            let got_q = bench.read_f16(queries, rows.len() * heads * padded);
            let got_kv = bench.read_f16(cache, cache_len);
            let mut written = vec![false; cache_len];
            for (r, row) in rows.iter().enumerate() {
                let all = &values[r * wide..][..wide];
                let turned = &turns[row.position as usize * dim / 2..][..dim / 2];
                let (q, kv) = all.split_at(heads * dim);
                let (k, v) = kv.split_at(kv_heads * dim);
                let check = |what: &str, got: &[f32], want: Vec<f64>| {
                    for (i, y) in got.iter().enumerate() {
                        let want = want.get(i).copied().unwrap_or(0.0);
                        // A rotation adds two products of up to four in size.
                        let error = narrowed(heads * dim, want) + 24.0 * f64::from(f32::EPSILON);
                        close(&format!("{s:?}, row {r}, {what} {i}"), *y, want, error);
                    }
                };
                for h in 0..heads {
                    let got = &got_q[(r * heads + h) * padded..][..padded];
                    check("query", got, prepared(s, q, h, &norms[0], Some(turned)));
                }
                for h in 0..kv_heads {
                    let place = |value: usize| {
                        (((row.sequence as usize * kv_heads + h) * 2 + value) * context
                            + row.position as usize)
                            * padded
                    };
                    check(
                        "key",
                        &got_kv[place(0)..][..padded],
                        prepared(s, k, h, &norms[1], Some(turned)),
                    );
                    check(
                        "value",
                        &got_kv[place(1)..][..padded],
                        prepared(s, v, h, &norms[1], None),
                    );
                    for value in 0..2 {
                        written[place(value)..][..padded].fill(true);
                    }
                }
            }
            assert!(
                written.iter().zip(&got_kv).all(|(w, v)| *w || v.is_nan()),
                "{s:?}: other positions of the cache were written"
            );
        }
    }
}

struct Routed {
    logits: Vec<f32>,
    ids: Vec<u32>,
    chosen: Vec<f32>,
    gate: Vec<f32>,
    normed: Vec<f32>,
}

struct Router {
    width: usize,
    experts: usize,
    gates: usize,
    top_k: usize,
    renormalize: bool,
}

fn route(bench: &Bench, s: &Router, hidden: &[f32], norm: &[f16], router: &[f16]) -> Routed {
    let rows = hidden.len() / s.width;
    let logits = bench.poisoned(rows * s.experts * 4);
    let (ids, chosen) = (
        bench.poisoned(rows * s.top_k * 4),
        bench.poisoned(rows * s.top_k * 4),
    );
    let (gate, normed) = (bench.poisoned(rows * 4), bench.poisoned(rows * s.width * 2));
    let args = PrefillRouterArgs {
        hidden: bench.upload(hidden),
        norm: bench.upload(norm),
        router: bench.upload(router),
        logits,
        ids,
        chosen,
        gate,
        normed,
        rows: rows as u32,
        width: s.width as u32,
        experts: s.experts as u32,
        gates: s.gates as u32,
        top_k: s.top_k as u32,
        renormalize: u32::from(s.renormalize),
        eps: EPS,
        unused: 0,
    };
    bench.launch(&prefill::router(rows, s.experts, s.gates), &args);
    Routed {
        logits: bench.read(logits, rows * s.experts),
        ids: bench.read(ids, rows * s.top_k),
        chosen: bench.read(chosen, rows * s.top_k),
        gate: bench.read(gate, rows),
        normed: bench.read_f16(normed, rows * s.width),
    }
}

fn routes(bench: &Bench) {
    let mut random = Random::new(23);
    for (rows, width, experts, gates, top_k, renormalize) in [
        (1, 72, 4, 0, 2, false),
        (6, 520, 60, 1, 4, false),
        (5, 1032, 64, 0, 8, true),
        (3, 40, 150, 1, 150, true),
    ] {
        let s = Router {
            width,
            experts,
            gates,
            top_k,
            renormalize,
        };
        let products = experts + gates;
        let hidden = random.reals(rows * width, 2.0);
        let norm = random.halves(width, 1.5);
        let mut router = random.halves(width * products, 0.2);
        // Some experts are the same, next to one another and a warp apart: ties in every row.
        for row in router.chunks_exact_mut(products) {
            row[3] = row[1];
            if experts > 40 {
                row[40] = row[8];
            }
        }
        let got = route(bench, &s, &hidden, &norm, &router);
        for r in 0..rows {
            let x = &hidden[r * width..][..width];
            let inverse = inverse_rms(x);
            let normed: Vec<f64> = x
                .iter()
                .zip(&norm)
                .map(|(x, w)| f64::from(*x) * inverse * w.to_f64())
                .collect();
            let logit = |e: usize| {
                let products = (0..width).map(|c| normed[c] * router[c * products + e].to_f64());
                products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
            };
            for (c, want) in normed.iter().enumerate() {
                let what = format!("row {r}, normed {c}");
                close(&what, got.normed[r * width + c], *want, narrowed(width, *want));
            }
            let own = &got.logits[r * experts..][..experts];
            for (e, y) in own.iter().enumerate() {
                let (want, size) = logit(e);
                close(
                    &format!("row {r}, logit {e}"),
                    *y,
                    want,
                    sum_error(2 * width, size),
                );
            }
            if gates == 1 {
                let (want, size) = logit(experts);
                let want = 1.0 / (1.0 + (-want).exp());
                close(
                    &format!("row {r}, gate"),
                    got.gate[r],
                    want,
                    sum_error(2 * width, size) + 1e-6,
                );
            }
            check_choice(
                &s,
                r,
                own,
                &got.ids[r * top_k..][..top_k],
                &got.chosen[r * top_k..][..top_k],
            );
        }
        // A row by itself has the same bits.
        let last = route(bench, &s, &hidden[(rows - 1) * width..], &norm, &router);
        assert_eq!(bits(&last.logits), bits(&got.logits[(rows - 1) * experts..]));
        assert_eq!(bits(&last.chosen), bits(&got.chosen[(rows - 1) * top_k..]));
        assert_eq!(last.ids, got.ids[(rows - 1) * top_k..]);
        assert_eq!(bits(&last.normed), bits(&got.normed[(rows - 1) * width..]));
    }
}

/// The choice that follows from the logits.
fn check_choice(s: &Router, row: usize, logits: &[f32], ids: &[u32], weights: &[f32]) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f64> = logits.iter().map(|l| f64::from(l - most).exp()).collect();
    let all: f64 = exps.iter().sum();
    let mut seen = vec![false; s.experts];
    for (rank, id) in ids.iter().enumerate() {
        let id = *id as usize;
        assert!(!seen[id], "row {row}: expert {id} twice");
        seen[id] = true;
        for (e, _) in seen.iter().enumerate().filter(|(_, taken)| !**taken) {
            assert!(
                logits[e] - logits[id] <= 1e-5,
                "row {row}, rank {rank}: {e} comes before {id}"
            );
            assert!(
                logits[e] != logits[id] || e > id,
                "row {row}: a tie goes to the lowest id, not {id}"
            );
        }
        let chosen: f64 = ids.iter().map(|e| exps[*e as usize]).sum();
        let want = exps[id] / if s.renormalize { chosen } else { all };
        close(
            &format!("row {row}, weight {rank}"),
            weights[rank],
            want,
            want * 1e-5,
        );
    }
}

mod tests {
    crate::on_devices! {
        norms, gpu_norms;
        qkv, gpu_qkv;
        routes, gpu_routes;
    }
}
