//! Steps of many rows: tensor cores throughout, executor `grouped-t3`.

use horizon_core::spec::FeedForward;

use super::functions::groups;
use super::{Builder, NamedLaunch, StepShape, one};
use crate::args::ExpertsArgs;
use crate::args::{
    GroupedArgs, GroupedIndexArgs, PrefillAttentionArgs, PrefillLinearArgs, PrefillNormArgs, PrefillQkvArgs,
    PrefillRouterArgs,
};
use crate::driver::DevicePtr;
use crate::prefill::{self, Form};
use crate::shape::{norm_code, u32_of};
use crate::weights::LayerWeights;

/// Where a product goes.
#[derive(Clone, Copy, Default)]
struct Target {
    /// FP32 `[tokens, outputs]`, or null; of pairs FP16.
    output: DevicePtr,
    /// Added to, or null.
    hidden: DevicePtr,
}

impl Builder<'_> {
    fn many<A: bytemuck::Pod>(&self, form: &Form, args: &A) -> NamedLaunch {
        one(
            self.functions.of(form),
            form.grid,
            form.threads,
            form.shared as usize,
            args,
        )
    }

    fn norm_many(&self, step: &StepShape, norm: DevicePtr) -> NamedLaunch {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let args = PrefillNormArgs {
            hidden: b.hidden,
            which: DevicePtr(0),
            norm,
            output: b.normed,
            rows: u32_of(step.rows),
            columns: u32_of(p.shape.hidden),
            eps: p.spec.rms_norm_eps,
            unused: 0,
        };
        self.many(&prefill::norm(step.rows), &args)
    }

    /// `(weights, bias)` of a matrix with `(columns, outputs)`.
    fn linear_many(
        &self,
        step: &StepShape,
        pairs: bool,
        (weights, bias): (DevicePtr, DevicePtr),
        input: DevicePtr,
        (columns, outputs): (usize, usize),
        to: Target,
    ) -> NamedLaunch {
        let blocks = self.functions.multiprocessors as usize;
        let form = prefill::linear(self.places.shape.dense, pairs, outputs, step.rows, blocks);
        let args = PrefillLinearArgs {
            weights,
            input,
            which: DevicePtr(0),
            bias,
            output: to.output,
            hidden: to.hidden,
            tokens: u32_of(step.rows),
            columns: u32_of(columns),
            outputs: u32_of(outputs),
            unused: 0,
        };
        self.many(&form, &args)
    }

    /// Everything of one layer. `moe_row` counts layers with routed experts.
    #[must_use]
    pub fn layer_many(&self, step: &StepShape, layer: usize, moe_row: usize) -> Vec<NamedLaunch> {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let (shape, w) = (p.shape, &p.weights.layers[layer]);
        let tap = |place| if step.taps { place } else { DevicePtr(0) };
        let hidden = shape.hidden;
        let mut out = vec![
            self.norm_many(step, w.attention_norm),
            self.linear_many(
                step,
                false,
                (w.qkv, w.qkv_bias),
                b.normed,
                (hidden, shape.qkv()),
                Target {
                    output: b.qkv,
                    ..Target::default()
                },
            ),
        ];
        out.extend(self.attention_many(step, layer, w));
        let to = Target {
            output: tap(b.attention_tap),
            hidden: b.hidden,
        };
        let sizes = (shape.attended(), hidden);
        out.push(self.linear_many(step, false, (w.output, w.output_bias), b.attended, sizes, to));
        match &p.spec.layers[layer].feed_forward {
            FeedForward::Dense { .. } => {
                out.push(self.norm_many(step, w.feed_forward_norm));
                let to = Target {
                    output: tap(b.feed_forward_tap),
                    hidden: b.hidden,
                };
                out.extend(self.mlp_many(step, w, to));
            }
            FeedForward::Moe(m) => {
                let gated = m.shared.as_ref().is_some_and(|s| s.gated);
                out.push(self.router_many(step, w, m.renormalize, gated));
                if m.shared.is_some() {
                    let to = Target {
                        output: b.dense_output,
                        ..Target::default()
                    };
                    out.extend(self.mlp_many(step, w, to));
                }
                let experts = self.experts_args(step, moe_row);
                out.extend(self.grouped(step, &experts, m.shared.is_some(), gated));
            }
        }
        out
    }

    fn mlp_many(&self, step: &StepShape, w: &LayerWeights, to: Target) -> [NamedLaunch; 2] {
        let (hidden, b) = (self.places.shape.hidden, &self.places.workspace.buffers);
        let inner = Target {
            output: b.dense_inner,
            ..Target::default()
        };
        let none = DevicePtr(0);
        [
            self.linear_many(step, true, (w.pairs, none), b.normed, (hidden, w.width), inner),
            self.linear_many(step, false, (w.down, none), b.dense_inner, (w.width, hidden), to),
        ]
    }

    fn attention_many(&self, step: &StepShape, layer: usize, w: &LayerWeights) -> [NamedLaunch; 2] {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let (shape, a) = (p.shape, &p.spec.attention);
        let cache = b.cache.offset(layer * shape.layer_cache_bytes());
        let context = u32_of(shape.regime.context);
        let qkv = PrefillQkvArgs {
            rows: b.rows,
            qkv: b.qkv,
            q_norm: w.q_norm,
            k_norm: w.k_norm,
            rotary: b.rotary,
            cache,
            queries: b.queries,
            heads: u32_of(a.heads),
            kv_heads: u32_of(a.kv_heads),
            head_dim: u32_of(a.head_dim),
            padded: u32_of(shape.padded),
            context,
            norm: norm_code(a.qk_norm),
            eps: p.spec.rms_norm_eps,
            clip: a.clip_qkv.unwrap_or(0.0),
        };
        #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
        let scale = 1.0 / (a.head_dim as f32).sqrt();
        let window = p.spec.layers[layer].window;
        let attention = PrefillAttentionArgs {
            rows: b.rows,
            queries: b.queries,
            cache,
            output: b.attended,
            tokens: u32_of(step.rows),
            heads: u32_of(a.heads),
            kv_heads: u32_of(a.kv_heads),
            head_dim: u32_of(a.head_dim),
            padded: u32_of(shape.padded),
            context,
            window: u32_of(window.map_or(0, |w| w.min(shape.regime.context))),
            scale,
        };
        [
            self.many(&prefill::qkv(step.rows), &qkv),
            self.many(&prefill::attention(step.rows, a.heads, shape.padded), &attention),
        ]
    }

    fn router_many(&self, step: &StepShape, w: &LayerWeights, renormalize: bool, gated: bool) -> NamedLaunch {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let (experts, gates) = (p.shape.experts(), usize::from(gated));
        let args = PrefillRouterArgs {
            hidden: b.hidden,
            norm: w.feed_forward_norm,
            router: w.router,
            logits: b.router_logits,
            ids: b.ids,
            chosen: b.chosen_weights,
            gate: b.gate,
            normed: b.normed,
            rows: u32_of(step.rows),
            width: u32_of(p.shape.hidden),
            experts: u32_of(experts),
            gates: u32_of(gates),
            top_k: u32_of(p.shape.top_k()),
            renormalize: u32::from(renormalize),
            eps: p.spec.rms_norm_eps,
            unused: 0,
        };
        self.many(&prefill::router(step.rows, experts, gates), &args)
    }

    /// Executor `grouped-t3`: three launches. The shared expert's output is in `dense_output`.
    pub(super) fn grouped(
        &self,
        step: &StepShape,
        experts: &ExpertsArgs,
        shared: bool,
        gated: bool,
    ) -> [NamedLaunch; 3] {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let groups = groups(p.shape, step.rows).expect("a layer with experts has a record");
        let form = groups.form();
        let when = |condition, place| if condition { place } else { DevicePtr(0) };
        let index = GroupedIndexArgs {
            ids: b.ids,
            order: b.order,
            work: b.work,
            count: b.work_count,
            rows: u32_of(step.rows),
            top_k: u32_of(p.shape.top_k()),
            experts: u32_of(p.shape.experts()),
            most: form.most(),
        };
        let args = GroupedArgs {
            experts: *experts,
            order: b.order,
            work: b.work,
            count: b.work_count,
            outputs: b.outputs,
            shared: when(shared, b.dense_output),
            gate: when(gated, b.gate),
            hidden: b.hidden,
            tap: when(step.taps, b.feed_forward_tap),
            counters: p.workspace.counters.grouped,
        };
        [
            self.many(&groups.index(), &index),
            self.many(&groups.gate_up(form), &args),
            self.many(&groups.down(form), &args),
        ]
    }
}
