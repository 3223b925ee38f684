//! The scalar reference: one token after another, one formula after another.
//!
//! It reads canonical expert records and uses no thread, no SIMD and no workspace. Its results are the meaning
//! of a model; the fast backend gives the same bits.

use std::sync::Arc;

use half::f16;

use crate::backend::{
    Activations, Backend, BackendError, CompiledModel, ExecutorId, Plan, Regime, StepBatch, StepError,
    StepOutput, StepReport, Ticket,
};
use crate::cpu::kv::{HeadRows, KvCache};
use crate::cpu::numerics::{
    RotaryTable, Routing, argmax, dot_f16, dot_f32, dot_q8, dot_qpacked, narrow, rms_norm, route, sigmoid,
    silu, softmax,
};
use crate::cpu::step::{Finished, Weights, check_batch, for_each_wave, group_by_expert, routing_taps};
use crate::dense::{DenseMatrix, DenseStore};
use crate::dense_q8::scales_per_row;
use crate::ids::LayerId;
use crate::provider::{ExpertProvider, Hold, SlotMemory};
use crate::record::{Canonical, ExpertEncoding, RecordLayout, RecordTiling};
use crate::roles::{DenseRole, ExpertMatrix, LayerRole};
use crate::spec::{FeedForward, ModelSpec, MoeSpec, QkNorm};
use crate::stage::{Stage, Tap, TapData};
use crate::transport::Completion;

const NAME: &str = "cpu-reference";

/// The reference backend.
pub struct ReferenceCpu {
    slots: Arc<dyn SlotMemory>,
    encoding: ExpertEncoding,
}

impl ReferenceCpu {
    /// A backend that executes experts of `encoding` from `slots`.
    #[must_use]
    pub fn new(slots: Arc<dyn SlotMemory>, encoding: ExpertEncoding) -> Self {
        Self { slots, encoding }
    }

    /// The arrangement that records must be loaded in: canonical.
    #[must_use]
    pub fn tiling() -> &'static dyn RecordTiling {
        &Canonical
    }
}

impl Backend for ReferenceCpu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, spec: &ModelSpec, regime: &Regime) -> Result<Plan, BackendError> {
        Ok(Plan {
            ledger: vec![
                ("KV cache", KvCache::bytes(spec, regime) as u64),
                (
                    "rotary table",
                    RotaryTable::bytes(regime.context, spec.attention.head_dim) as u64,
                ),
            ],
            regime: *regime,
        })
    }

    fn open(
        &self,
        spec: &Arc<ModelSpec>,
        plan: &Plan,
        dense: &Arc<DenseStore>,
    ) -> Result<Box<dyn CompiledModel>, BackendError> {
        let regime = plan.regime;
        Ok(Box::new(ReferenceModel {
            spec: spec.clone(),
            regime,
            record: RecordLayout::new(spec, self.encoding),
            weights: Weights::new(NAME, spec, dense)?,
            slots: self.slots.clone(),
            kv: KvCache::new(NAME, spec, &regime)?,
            rotary: RotaryTable::new(regime.context, spec.attention.head_dim, spec.attention.rope_theta),
            filled: vec![0; regime.sequences],
            finished: Finished::default(),
        }))
    }
}

struct ReferenceModel {
    spec: Arc<ModelSpec>,
    regime: Regime,
    record: Option<RecordLayout>,
    weights: Weights,
    slots: Arc<dyn SlotMemory>,
    kv: KvCache,
    rotary: RotaryTable,
    filled: Vec<usize>,
    finished: Finished,
}

/// `[rows][width]`.
type Rows = Vec<Vec<f32>>;

impl CompiledModel for ReferenceModel {
    fn executor(&self) -> ExecutorId {
        ExecutorId("cpu-reference")
    }

    fn enqueue(&mut self, batch: &StepBatch, experts: &Arc<dyn ExpertProvider>) -> Result<Ticket, StepError> {
        check_batch(&self.spec, &self.regime, &mut self.filled, batch)?;
        let output = self.step(batch, experts.as_ref())?;
        Ok(self.finished.put(output))
    }

    fn finish(&mut self, ticket: Ticket) -> Result<StepOutput, StepError> {
        self.finished.take(&ticket)
    }
}

impl ReferenceModel {
    fn step(&mut self, batch: &StepBatch, experts: &dyn ExpertProvider) -> Result<StepOutput, StepError> {
        let mut out = StepOutput::default();
        let mut hold = experts.capture();
        let mut hidden: Rows = batch
            .rows
            .iter()
            .map(|row| {
                let mut h = vec![0.0; self.spec.hidden];
                self.weights.embed(row.token, &mut h);
                h
            })
            .collect();
        let spec = self.spec.clone();
        for (layer, l) in (0u32..).map(LayerId).zip(&spec.layers) {
            let attended = self.attention(batch, layer, l.window, &hidden);
            add(&mut hidden, &attended);
            let normed: Rows = hidden
                .iter()
                .map(|h| self.norm(h, layer, LayerRole::FeedForwardNorm))
                .collect();
            let fed = match &l.feed_forward {
                FeedForward::Dense { .. } => normed.iter().map(|x| self.dense_mlp(layer, x)).collect(),
                FeedForward::Moe(moe) => {
                    let routed = self.route(layer, moe, &normed, batch.taps.then_some(&mut out.taps));
                    self.experts(layer, moe, &normed, &routed, experts, &mut hold, &mut out.report)?
                }
            };
            add(&mut hidden, &fed);
            if batch.taps {
                out.taps.push(tap(Stage::AttentionOutput(layer), &attended));
                out.taps.push(tap(Stage::FeedForwardOutput(layer), &fed));
                out.taps.push(tap(Stage::Hidden(layer), &hidden));
            }
        }
        experts.release(hold, Completion::DONE);
        for (_, h) in batch.rows.iter().zip(&hidden).filter(|(row, _)| row.logits) {
            let mut x = vec![0.0; h.len()];
            rms_norm(
                h,
                self.weights.get(DenseRole::FinalNorm),
                self.spec.rms_norm_eps,
                &mut x,
            );
            let logits = self.project(self.weights.head(), None, &x);
            out.tokens.push(argmax(&logits));
            out.logits.extend(logits);
        }
        Ok(out)
    }

    fn norm(&self, x: &[f32], layer: LayerId, role: LayerRole) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        rms_norm(
            x,
            self.weights.layer(layer, role),
            self.spec.rms_norm_eps,
            &mut out,
        );
        out
    }

    /// What a matrix product reads: narrowed once under FP16 activations.
    fn activations(&self, x: &[f32]) -> Vec<f32> {
        let mut x = x.to_vec();
        if self.regime.activations == Activations::F16 {
            narrow(&mut x);
        }
        x
    }

    /// `W·x + b`.
    fn project(&self, matrix: DenseMatrix<'_>, bias: Option<&[f16]>, x: &[f32]) -> Vec<f32> {
        let x = self.activations(x);
        let mut y: Vec<f32> = match matrix {
            DenseMatrix::F16 { values, cols } => {
                values.chunks_exact(cols).map(|row| dot_f16(row, &x)).collect()
            }
            DenseMatrix::Q8(w) => w
                .codes
                .chunks_exact(w.cols)
                .zip(w.scales.chunks_exact(scales_per_row(w.cols)))
                .map(|(codes, scales)| dot_q8(codes, scales, &x))
                .collect(),
        };
        for (y, b) in y.iter_mut().zip(bias.unwrap_or_default()) {
            *y += b.to_f32();
        }
        y
    }

    fn attention(&mut self, batch: &StepBatch, layer: LayerId, window: Option<usize>, hidden: &Rows) -> Rows {
        let spec = self.spec.clone();
        let (a, hd) = (&spec.attention, spec.attention.head_dim);
        let mut out = Rows::new();
        for (row, h) in batch.rows.iter().zip(hidden) {
            let x = self.norm(h, layer, LayerRole::AttentionNorm);
            let [mut q, mut k, mut v] = [
                (LayerRole::Query, LayerRole::QueryBias),
                (LayerRole::Key, LayerRole::KeyBias),
                (LayerRole::Value, LayerRole::ValueBias),
            ]
            .map(|(w, b)| self.project(self.weights.matrix(layer, w), self.weights.optional(layer, b), &x));
            for (x, role) in [(&mut q, LayerRole::QueryNorm), (&mut k, LayerRole::KeyNorm)] {
                *x = match a.qk_norm {
                    QkNorm::None => continue,
                    QkNorm::AllHeads => self.norm(x, layer, role),
                    QkNorm::PerHead => x
                        .chunks_exact(hd)
                        .flat_map(|head| self.norm(head, layer, role))
                        .collect(),
                };
            }
            if let Some(c) = a.clip_qkv {
                for v in q.iter_mut().chain(&mut k).chain(&mut v) {
                    *v = v.clamp(-c, c);
                }
            }
            for head in q.chunks_exact_mut(hd).chain(k.chunks_exact_mut(hd)) {
                self.rotary.rotate(row.position, head);
            }
            self.kv.store(layer.index(), row.sequence, row.position, &k, &v);
            let q = self.activations(&q);
            let first = window.map_or(0, |w| (row.position + 1).saturating_sub(w));
            let heads: Vec<f32> = (0..a.heads)
                .flat_map(|h| {
                    let cached = |value| {
                        let kv_head = h / (a.heads / a.kv_heads);
                        self.kv
                            .rows(layer.index(), row.sequence, kv_head, value, row.position + 1)
                    };
                    attend(&q[h * hd..(h + 1) * hd], cached(false), cached(true), first)
                })
                .collect();
            let bias = self.weights.optional(layer, LayerRole::OutputBias);
            out.push(self.project(self.weights.matrix(layer, LayerRole::Output), bias, &heads));
        }
        out
    }

    fn dense_mlp(&self, layer: LayerId, x: &[f32]) -> Vec<f32> {
        self.gated_mlp(
            layer,
            [LayerRole::DenseGate, LayerRole::DenseUp, LayerRole::DenseDown],
            x,
        )
    }

    fn gated_mlp(&self, layer: LayerId, roles: [LayerRole; 3], x: &[f32]) -> Vec<f32> {
        let [gate, up, down] = roles.map(|role| self.weights.matrix(layer, role));
        let act = swiglu(&self.project(gate, None, x), &self.project(up, None, x));
        self.project(down, None, &act)
    }

    fn route(&self, layer: LayerId, moe: &MoeSpec, x: &Rows, taps: Option<&mut Vec<Tap>>) -> Vec<Routing> {
        // Router logits are FP32 throughout: the input is not narrowed.
        let router = self.weights.layer(layer, LayerRole::Router);
        let logits: Rows = x
            .iter()
            .map(|x| router.chunks_exact(x.len()).map(|row| dot_f16(row, x)).collect())
            .collect();
        let routing: Vec<Routing> = logits
            .iter()
            .map(|l| route(l, moe.top_k, moe.renormalize))
            .collect();
        if let Some(taps) = taps {
            taps.push(tap(Stage::RouterLogits(layer), &logits));
            taps.extend(routing_taps(layer, moe.top_k, &routing));
        }
        routing
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one call site; the arguments are the step's own variables"
    )]
    fn experts(
        &self,
        layer: LayerId,
        moe: &MoeSpec,
        x: &Rows,
        routing: &[Routing],
        provider: &dyn ExpertProvider,
        hold: &mut Hold,
        report: &mut StepReport,
    ) -> Result<Rows, StepError> {
        let layout = self
            .record
            .as_ref()
            .expect("a layer with experts has a record layout");
        let groups = group_by_expert(moe.experts, routing);
        // y[row][rank]: kept apart so that the sum below runs in ranking order.
        let mut y = vec![vec![Vec::new(); moe.top_k]; x.len()];
        for_each_wave(provider, hold, layer, &groups, |wave, addresses| {
            for (group, address) in wave.iter().zip(addresses) {
                let record = self.slots.record(*address);
                for (row, rank) in &group.uses {
                    y[*row][*rank] = self.expert(layout, &record, &x[*row]);
                    report.routed += 1;
                }
                report.records += 1;
            }
        })?;
        let combined = routing.iter().zip(&y).zip(x).map(|((r, y), x)| {
            let mut sum = vec![0.0f32; x.len()];
            for (w, y) in r.weights.iter().zip(y) {
                for (s, y) in sum.iter_mut().zip(y) {
                    *s = w.mul_add(*y, *s);
                }
            }
            if let Some(shared) = &moe.shared {
                let roles = [LayerRole::SharedGate, LayerRole::SharedUp, LayerRole::SharedDown];
                let y = self.gated_mlp(layer, roles, x);
                let gate = if shared.gated {
                    sigmoid(dot_f16(self.weights.layer(layer, LayerRole::SharedExpertGate), x))
                } else {
                    1.0
                };
                for (s, y) in sum.iter_mut().zip(y) {
                    *s = gate.mul_add(y, *s);
                }
            }
            sum
        });
        Ok(combined.collect())
    }

    fn expert(&self, layout: &RecordLayout, record: &[u8], x: &[f32]) -> Vec<f32> {
        let x = self.activations(x);
        let [gate, up] =
            [ExpertMatrix::Gate, ExpertMatrix::Up].map(|m| expert_product(layout, record, m, &x));
        let act = self.activations(&swiglu(&gate, &up));
        expert_product(layout, record, ExpertMatrix::Down, &act)
    }
}

/// `W·x` of one of an expert's matrices, from its canonical record.
fn expert_product(layout: &RecordLayout, record: &[u8], matrix: ExpertMatrix, x: &[f32]) -> Vec<f32> {
    let m = layout.matrix(matrix);
    match layout.encoding {
        ExpertEncoding::F16 => {
            let w: &[f16] = bytemuck::cast_slice(&record[m.values.clone()]);
            w.chunks_exact(m.cols).map(|row| dot_f16(row, x)).collect()
        }
        ExpertEncoding::Qpacked { block } => {
            let codes = record[m.values.clone()].chunks_exact(m.cols.div_ceil(2));
            let scales: &[f16] = bytemuck::cast_slice(&record[m.scales.clone()]);
            codes
                .zip(scales.chunks_exact(m.cols.div_ceil(block.get())))
                .map(|(codes, scales)| dot_qpacked(codes, scales, block, x))
                .collect()
        }
    }
}

/// One query head over the cached positions `first..`.
fn attend(q: &[f32], keys: HeadRows<'_>, values: HeadRows<'_>, first: usize) -> Vec<f32> {
    #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
    let scale = 1.0 / (q.len() as f32).sqrt();
    let mut scores: Vec<f32> = match keys {
        HeadRows::F32(k) => k
            .chunks_exact(q.len())
            .skip(first)
            .map(|k| dot_f32(k, q) * scale)
            .collect(),
        HeadRows::F16(k) => k
            .chunks_exact(q.len())
            .skip(first)
            .map(|k| dot_f16(k, q) * scale)
            .collect(),
    };
    softmax(&mut scores);
    let mut out = vec![0.0f32; q.len()];
    for (i, p) in scores.iter().enumerate() {
        for (d, o) in out.iter_mut().enumerate() {
            let at = (first + i) * q.len() + d;
            let v = match values {
                HeadRows::F32(v) => v[at],
                HeadRows::F16(v) => v[at].to_f32(),
            };
            *o = p.mul_add(v, *o);
        }
    }
    out
}

fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter().zip(up).map(|(g, u)| silu(*g) * u).collect()
}

fn add(hidden: &mut Rows, x: &Rows) {
    for (h, x) in hidden.iter_mut().flatten().zip(x.iter().flatten()) {
        *h += x;
    }
}

fn tap(stage: Stage, rows: &Rows) -> Tap {
    Tap {
        stage,
        width: rows[0].len(),
        data: TapData::F32(rows.concat()),
    }
}
