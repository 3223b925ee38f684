//! Everything a step of the fast backend writes to, allocated when the model is opened.

use crate::backend::Regime;
use crate::cpu::numerics::CODE_GROUP;
use crate::cpu::simd::kernels::{padded, permuted_len};
use crate::spec::{FeedForward, ModelSpec};

/// Rows whose logits are computed together.
pub const LOGIT_ROWS: usize = 16;

/// Buffers; rows of a step are written T below.
#[derive(Debug)]
pub struct Workspace {
    /// `[T][hidden]`: the residual stream.
    pub hidden: Vec<f32>,
    /// `[T][padded(hidden)]`: normed rows, FP32; read by router and shared gate.
    pub normed: Vec<f32>,
    /// `[T][padded(widest input)]`: what dense products read.
    pub inputs: Vec<f32>,
    /// `[rows][T]`: what products write.
    pub raw: Vec<f32>,
    /// `[T][q]`, `[T][kv]`, `[T][kv]`.
    pub qkv: [Vec<f32>; 3],
    /// `[heads][T][head_dim]`
    pub heads: Vec<f32>,
    /// `[heads][context]`
    pub scores: Vec<f32>,
    /// `[T][hidden]`: what a block adds to the residual stream.
    pub block: Vec<f32>,
    /// `[T][expert input]`: normed rows as packed experts read them.
    pub expert_rows: Vec<f32>,
    /// `[T·k][expert input]`, grouped by expert.
    pub expert_inputs: Vec<f32>,
    /// `[T·k][expert width]` as the down products read them, grouped by expert.
    pub expert_acts: Vec<f32>,
    /// `[width][uses]` of each expert, gate then up; shared or dense MLP after all experts.
    pub gate: Vec<f32>,
    /// The same for up.
    pub up: Vec<f32>,
    /// `[T][padded(shared or dense width)]`
    pub mlp_acts: Vec<f32>,
    /// `[hidden][uses]` of the shared expert or dense MLP, then of each expert.
    pub down: Vec<f32>,
}

impl Workspace {
    /// Buffers for steps of at most `regime.max_rows` rows.
    #[must_use]
    pub fn new(spec: &ModelSpec, regime: &Regime) -> Self {
        let s = Sizes::new(spec, regime);
        let floats = |n: usize| vec![0.0f32; n];
        Self {
            hidden: floats(s.rows * spec.hidden),
            normed: floats(s.rows * padded(spec.hidden)),
            inputs: floats(s.rows * s.widest_input),
            raw: floats(s.raw),
            qkv: [floats(s.rows * s.q), floats(s.rows * s.kv), floats(s.rows * s.kv)],
            heads: floats(s.rows * s.q),
            scores: floats(spec.attention.heads * regime.context),
            block: floats(s.rows * spec.hidden),
            expert_rows: floats(s.rows * s.expert_input),
            expert_inputs: floats(s.uses * s.expert_input),
            expert_acts: floats(s.uses * s.expert_act),
            gate: floats(s.uses * s.expert_width + s.rows * s.mlp_width),
            up: floats(s.uses * s.expert_width + s.rows * s.mlp_width),
            mlp_acts: floats(s.rows * padded(s.mlp_width)),
            down: floats((s.uses + s.rows) * spec.hidden),
        }
    }

    /// Bytes of [`Workspace::new`].
    #[must_use]
    pub fn bytes(spec: &ModelSpec, regime: &Regime) -> usize {
        let s = Sizes::new(spec, regime);
        let per_row =
            2 * spec.hidden + padded(spec.hidden) + s.widest_input + 2 * s.q + 2 * s.kv + s.expert_input;
        let per_use = s.expert_input + s.expert_act + 2 * s.expert_width + spec.hidden;
        let mlp = 2 * s.mlp_width + padded(s.mlp_width) + spec.hidden;
        let floats =
            s.rows * (per_row + mlp) + s.uses * per_use + s.raw + spec.attention.heads * regime.context;
        floats * size_of::<f32>()
    }
}

struct Sizes {
    rows: usize,
    uses: usize,
    q: usize,
    kv: usize,
    widest_input: usize,
    raw: usize,
    expert_input: usize,
    expert_act: usize,
    expert_width: usize,
    mlp_width: usize,
}

impl Sizes {
    fn new(spec: &ModelSpec, regime: &Regime) -> Self {
        let (a, rows) = (&spec.attention, regime.max_rows);
        let (q, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let (mut expert_width, mut mlp_width, mut top_k, mut experts) = (0, 0, 0, 0);
        for l in &spec.layers {
            let mlp = match &l.feed_forward {
                FeedForward::Dense { width } => *width,
                FeedForward::Moe(m) => {
                    (expert_width, top_k, experts) = (m.width, m.top_k, m.experts);
                    m.shared.as_ref().map_or(0, |s| s.width)
                }
            };
            mlp_width = mlp_width.max(mlp);
        }
        let logit_rows = LOGIT_ROWS.min(rows);
        Self {
            rows,
            uses: rows * top_k,
            q,
            kv,
            widest_input: padded(spec.hidden.max(q)),
            raw: (rows * (q + 2 * kv))
                .max(rows * spec.hidden)
                .max(rows * (experts + 1))
                .max(logit_rows * spec.vocab),
            // Packed experts read whole groups; the control arm needs no more than that.
            expert_input: if top_k == 0 { 0 } else { permuted_len(spec.hidden) },
            expert_act: if top_k == 0 { 0 } else { permuted_len(expert_width) },
            expert_width,
            mlp_width,
        }
    }
}

const _: () = assert!(CODE_GROUP.is_multiple_of(16), "a permuted row holds a padded one");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Activations;
    use crate::spec::{AttentionSpec, LayerSpec, MoeSpec, QkNorm, SharedExpertSpec};

    #[test]
    fn the_plan_counts_every_buffer() {
        let moe = MoeSpec {
            experts: 6,
            top_k: 4,
            width: 88,
            renormalize: false,
            shared: Some(SharedExpertSpec {
                width: 120,
                gated: true,
            }),
        };
        let spec = ModelSpec {
            family: "test".into(),
            vocab: 500,
            hidden: 72,
            context: 64,
            rms_norm_eps: 1e-5,
            tied_embeddings: true,
            attention: AttentionSpec {
                heads: 4,
                kv_heads: 2,
                head_dim: 24,
                qk_norm: QkNorm::None,
                qkv_bias: true,
                output_bias: false,
                clip_qkv: None,
                rope_theta: 1e4,
            },
            layers: vec![
                LayerSpec {
                    window: None,
                    feed_forward: FeedForward::Dense { width: 200 },
                },
                LayerSpec {
                    window: None,
                    feed_forward: FeedForward::Moe(moe),
                },
            ],
        };
        let regime = Regime {
            activations: Activations::F16,
            context: 50,
            sequences: 1,
            max_rows: 7,
        };
        let w = Workspace::new(&spec, &regime);
        let [q, k, v] = &w.qkv;
        let buffers = [
            &w.hidden,
            &w.normed,
            &w.inputs,
            &w.raw,
            q,
            k,
            v,
            &w.heads,
            &w.scores,
            &w.block,
            &w.expert_rows,
            &w.expert_inputs,
            &w.expert_acts,
            &w.gate,
            &w.up,
            &w.mlp_acts,
            &w.down,
        ];
        assert_eq!(
            buffers.iter().map(|b| b.len() * 4).sum::<usize>(),
            Workspace::bytes(&spec, &regime)
        );
    }
}
