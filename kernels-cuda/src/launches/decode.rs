//! Steps of a row or a few: a handful of launches a layer.

use horizon_core::spec::{FeedForward, LayerSpec};

use super::functions::{
    ATTEND_THREADS, THREADS, append_shared, attend_shared, fused_shared, linear_shared, project_shared,
};
use super::{Builder, Executor, NamedLaunch, StepShape, one};
use crate::args::{
    AttendArgs, CombineArgs, ExpertsArgs, FusedArgs, LinearArgs, MOST_SPLITS, NormLinearArgs, ProjectArgs,
    ScalarArgs,
};
use crate::driver::DevicePtr;
use crate::shape::{TOKENS, activation_stride, norm_code, u32_of};
use crate::tiling::TILE_ROWS;
use crate::weights::LayerWeights;

impl Builder<'_> {
    /// Everything of one layer. `moe_row` counts layers with routed experts.
    #[must_use]
    pub fn layer(&self, step: &StepShape, layer: usize, moe_row: usize) -> Vec<NamedLaunch> {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let (shape, spec) = (p.shape, &p.spec.layers[layer]);
        let w = &p.weights.layers[layer];
        let groups = u32_of(step.rows.div_ceil(TOKENS));
        let tokens = step.rows.min(TOKENS);
        let qkv = NormLinearArgs {
            weights: w.qkv,
            hidden: b.hidden,
            norm: w.attention_norm,
            bias: w.qkv_bias,
            output: b.qkv,
            rows: u32_of(step.rows),
            columns: u32_of(shape.hidden),
            outputs: u32_of(shape.qkv()),
            eps: p.spec.rms_norm_eps,
        };
        let grid = [u32_of(shape.qkv().div_ceil(TILE_ROWS)), groups, 1];
        let shared = linear_shared(shape.hidden, tokens);
        let mut out = vec![one(self.functions.norm_linear, grid, THREADS, shared, &qkv)];
        out.extend(self.attention(step, layer, spec, w));
        let project = self.project_args(step, spec, w);
        let grid = [u32_of(shape.hidden_tiles()), groups, 1];
        out.push(one(
            self.functions.project,
            grid,
            THREADS,
            project_shared(shape, tokens),
            &project,
        ));
        match &spec.feed_forward {
            FeedForward::Dense { .. } => {
                out.extend(self.dense_mlp(step, w));
                out.push(self.combine(step, false, true, false));
            }
            FeedForward::Moe(m) => {
                let gated = m.shared.as_ref().is_some_and(|s| s.gated);
                let experts = self.experts_args(step, moe_row);
                match self.executor {
                    Executor::Scalar => {
                        if m.shared.is_some() {
                            out.extend(self.dense_mlp(step, w));
                        }
                        out.extend(self.scalar(step, &experts, m.top_k));
                        out.push(self.combine(step, true, m.shared.is_some(), gated));
                    }
                    Executor::GroupedT3 => {
                        if m.shared.is_some() {
                            out.extend(self.dense_mlp(step, w));
                        }
                        out.extend(self.grouped(step, &experts, m.shared.is_some(), gated));
                    }
                    // The persistent kernel is no launch of a layer: steps that want one are computed by this.
                    Executor::Top4FusedV1 | Executor::PersistentV1 => {
                        out.push(self.fused(step, layer, &experts, w, gated));
                    }
                }
            }
        }
        out
    }

    /// Attention's output matrix, the norm after it and the router.
    fn project_args(&self, step: &StepShape, spec: &LayerSpec, w: &LayerWeights) -> ProjectArgs {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let shape = p.shape;
        let moe = spec.moe();
        ProjectArgs {
            weights: w.output,
            input: b.attended,
            bias: w.output_bias,
            hidden: b.hidden,
            tap: if step.taps { b.attention_tap } else { DevicePtr(0) },
            norm: w.feed_forward_norm,
            router: w.router,
            shares: b.shares,
            counters: p.workspace.counters.project,
            logits: b.router_logits,
            ids: b.ids,
            chosen: b.chosen_weights,
            gate: b.gate,
            normed: b.normed,
            rows: u32_of(step.rows),
            columns: u32_of(shape.attended()),
            width: u32_of(shape.hidden),
            experts: u32_of(moe.map_or(0, |m| m.experts)),
            gates: u32::from(moe.and_then(|m| m.shared.as_ref()).is_some_and(|s| s.gated)),
            top_k: u32_of(moe.map_or(0, |m| m.top_k)),
            renormalize: u32::from(moe.is_some_and(|m| m.renormalize)),
            eps: p.spec.rms_norm_eps,
        }
    }

    fn attention(
        &self,
        step: &StepShape,
        layer: usize,
        spec: &LayerSpec,
        w: &LayerWeights,
    ) -> Vec<NamedLaunch> {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let (shape, a) = (p.shape, &p.spec.attention);
        #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
        let scale = 1.0 / (a.head_dim as f32).sqrt();
        let args = AttendArgs {
            rows: b.rows,
            qkv: b.qkv,
            q_norm: w.q_norm,
            k_norm: w.k_norm,
            rotary: b.rotary,
            cache: b.cache.offset(layer * shape.layer_cache_bytes()),
            partials: b.partials,
            counters: p.workspace.counters.attend,
            output: b.attended,
            heads: u32_of(a.heads),
            kv_heads: u32_of(a.kv_heads),
            head_dim: u32_of(a.head_dim),
            padded: u32_of(shape.padded),
            context: u32_of(shape.regime.context),
            window: u32_of(spec.window.map_or(0, |w| w.min(shape.regime.context))),
            norm: norm_code(a.qk_norm),
            appended: u32::from(step.appended),
            eps: p.spec.rms_norm_eps,
            clip: a.clip_qkv.unwrap_or(0.0),
            scale,
            unused: 0,
        };
        let (rows, heads) = (u32_of(step.rows), u32_of(a.heads));
        let mut out = Vec::with_capacity(2);
        if step.appended {
            let grid = [rows, u32_of(a.kv_heads), 1];
            out.push(one(
                self.functions.append,
                grid,
                ATTEND_THREADS,
                append_shared(shape),
                &args,
            ));
        }
        let grid = [heads, u32_of(MOST_SPLITS), rows];
        out.push(one(
            self.functions.attend,
            grid,
            ATTEND_THREADS,
            attend_shared(shape),
            &args,
        ));
        out
    }

    /// Gate, up and down of the shared expert or of a dense feed-forward, into `dense_output`.
    fn dense_mlp(&self, step: &StepShape, w: &LayerWeights) -> [NamedLaunch; 2] {
        let (shape, b) = (self.places.shape, &self.places.workspace.buffers);
        let groups = u32_of(step.rows.div_ceil(TOKENS));
        let tokens = step.rows.min(TOKENS);
        let pairs = LinearArgs {
            weights: w.pairs,
            input: b.normed,
            output: b.dense_inner,
            rows: u32_of(step.rows),
            columns: u32_of(shape.hidden),
            outputs: u32_of(w.width),
            unused: 0,
        };
        let down = LinearArgs {
            weights: w.down,
            input: b.dense_inner,
            output: b.dense_output,
            columns: u32_of(w.width),
            outputs: u32_of(shape.hidden),
            ..pairs
        };
        let tiles = u32_of(shape.hidden_tiles());
        [
            one(
                self.functions.pair_linear,
                [u32_of(w.width / 8), groups, 1],
                THREADS,
                linear_shared(shape.hidden, tokens),
                &pairs,
            ),
            one(
                self.functions.linear,
                [tiles, groups, 1],
                THREADS,
                linear_shared(w.width, tokens),
                &down,
            ),
        ]
    }

    fn combine(&self, step: &StepShape, routed: bool, dense: bool, gated: bool) -> NamedLaunch {
        let (shape, b) = (self.places.shape, &self.places.workspace.buffers);
        let when = |condition, place| if condition { place } else { DevicePtr(0) };
        let args = CombineArgs {
            outputs: when(routed, b.outputs),
            weights: b.chosen_weights,
            shared: when(dense, b.dense_output),
            gate: when(gated, b.gate),
            hidden: b.hidden,
            tap: when(step.taps, b.feed_forward_tap),
            width: u32_of(shape.hidden),
            top_k: u32_of(shape.top_k()),
        };
        let grid = [u32_of(shape.hidden.div_ceil(256)), u32_of(step.rows), 1];
        one(self.functions.combine, grid, THREADS, 0, &args)
    }

    fn scalar(&self, step: &StepShape, experts: &ExpertsArgs, top_k: usize) -> Vec<NamedLaunch> {
        let (shape, b) = (self.places.shape, &self.places.workspace.buffers);
        let rows = u32_of(step.rows);
        (0..top_k)
            .flat_map(|rank| {
                let args = ScalarArgs {
                    experts: *experts,
                    outputs: b.outputs,
                    rank: u32_of(rank),
                    unused: 0,
                };
                let (pairs, tiles) = (u32_of(shape.width() / 8), u32_of(shape.hidden_tiles()));
                [
                    one(
                        self.functions.gate_up,
                        [pairs, rows, 1],
                        ATTEND_THREADS,
                        activation_stride(shape.hidden) + 256,
                        &args,
                    ),
                    one(
                        self.functions.down,
                        [tiles, rows, 1],
                        ATTEND_THREADS,
                        activation_stride(shape.width()) + 256,
                        &args,
                    ),
                ]
            })
            .collect()
    }

    fn fused(
        &self,
        step: &StepShape,
        layer: usize,
        experts: &ExpertsArgs,
        w: &LayerWeights,
        gated: bool,
    ) -> NamedLaunch {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let shape = p.shape;
        let args = FusedArgs {
            experts: *experts,
            shared_pairs: w.pairs,
            shared_down: w.down,
            gate: if gated { b.gate } else { DevicePtr(0) },
            shared_inner: b.dense_inner,
            routed: b.routed,
            shared_output: b.dense_output,
            hidden: b.hidden,
            tap: if step.taps {
                b.feed_forward_tap
            } else {
                DevicePtr(0)
            },
            counters: p
                .workspace
                .counters
                .fused
                .offset(layer * shape.fused_counters() * 4),
            shared_width: u32_of(w.width),
            unused: 0,
        };
        let pairs = shape.top_k() * (shape.width() / 8).div_ceil(4) + w.width / 8;
        let downs = shape.hidden_tiles() * if w.width > 0 { 2 } else { 1 };
        let function = self
            .functions
            .fused
            .expect("opened only where its limits are kept");
        let grid = [u32_of(step.rows * (pairs + downs)), 1, 1];
        one(function, grid, THREADS, fused_shared(shape), &args)
    }
}
