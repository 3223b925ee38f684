//! [`ModelSpec`]: everything a backend needs to know about a model, as data.
//!
//! A model family is a mapping from its `config.json` onto this type (crate `horizon-models`); there is one
//! forward pass a backend, not one a family.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ids::LayerId;

/// A decoder-only transformer with mixture-of-experts layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// `model_type` of the checkpoint's `config.json`, e.g. `olmoe`.
    pub family: String,
    /// Rows of the embedding table and of the output head (can exceed the tokenizer's vocabulary).
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Longest sequence the model was made for (`max_position_embeddings`).
    pub context: usize,
    /// Added to the mean square under the root of every RMS norm.
    pub rms_norm_eps: f32,
    /// The output head is the embedding table.
    pub tied_embeddings: bool,
    /// The attention of every layer.
    pub attention: AttentionSpec,
    /// The feed-forward of each layer, in order.
    pub layers: Vec<LayerSpec>,
}

/// Grouped-query attention with rotary positions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head `h` reads key/value head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of one head; `heads * head_dim` need not equal the hidden width.
    pub head_dim: usize,
    /// RMS norm of queries and keys after their projection.
    pub qk_norm: QkNorm,
    /// Bias on the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub output_bias: bool,
    /// Queries, keys and values are clamped to ±this, after the norms and before the rotation.
    pub clip_qkv: Option<f32>,
    /// Base of the rotary frequencies. Halves are rotated: element `i` with element `i + head_dim / 2`.
    pub rope_theta: f64,
}

/// Normalisation of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None.
    None,
    /// One RMS norm over all heads together (OLMoE).
    AllHeads,
    /// One RMS norm for each head, weights shared by the heads (Qwen3-MoE).
    PerHead,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerSpec {
    /// Sliding window: a query at position `p` sees keys at positions above `p - window`. `None`: all.
    pub window: Option<usize>,
    /// What follows attention.
    pub feed_forward: FeedForward,
}

/// The feed-forward block of a layer. All are gated: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedForward {
    /// One MLP for every token.
    Dense {
        /// Rows of gate and up.
        width: usize,
    },
    /// Routed experts.
    Moe(MoeSpec),
}

/// A mixture-of-experts block: softmax over all experts in FP32, then the `top_k` largest, ties to the lowest id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeSpec {
    /// E: routed experts.
    pub experts: usize,
    /// k: experts a token uses.
    pub top_k: usize,
    /// Rows of an expert's gate and up matrices.
    pub width: usize,
    /// The k probabilities are divided by their sum.
    pub renormalize: bool,
    /// An expert that every token passes.
    pub shared: Option<SharedExpertSpec>,
}

/// The shared expert of Qwen2-MoE.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedExpertSpec {
    /// Rows of its gate and up matrices.
    pub width: usize,
    /// Its output is multiplied by `sigmoid(gate · x)`.
    pub gated: bool,
}

/// A specification that no backend could run.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("model specification: {field} = {value}: {problem}")]
pub struct SpecError {
    /// The field, in the words of `config.json` where there is one.
    pub field: &'static str,
    /// What it says.
    pub value: String,
    /// Why that cannot be.
    pub problem: String,
}

/// Upper bound on every size in a specification; products of two stay far inside `u64`.
pub const MAX_DIMENSION: usize = 1 << 24;
/// Most layers accepted.
pub const MAX_LAYERS: usize = 1024;
/// Most routed experts a layer accepted.
pub const MAX_EXPERTS: usize = 4096;

impl ModelSpec {
    /// Checks every size and ratio that the rest of the program relies on.
    ///
    /// # Errors
    /// The first field that is out of range, with its value and the reason.
    pub fn validate(&self) -> Result<(), SpecError> {
        let a = &self.attention;
        for (field, v) in [
            ("vocab_size", self.vocab),
            ("hidden_size", self.hidden),
            ("max_position_embeddings", self.context),
            ("num_attention_heads", a.heads),
            ("num_key_value_heads", a.kv_heads),
            ("head_dim", a.head_dim),
        ] {
            dimension(field, v)?;
        }
        if !a.heads.is_multiple_of(a.kv_heads) {
            return Err(error(
                "num_key_value_heads",
                a.kv_heads,
                format!("does not divide num_attention_heads = {}", a.heads),
            ));
        }
        if !a.head_dim.is_multiple_of(2) {
            return Err(error(
                "head_dim",
                a.head_dim,
                "rotary positions need an even width".into(),
            ));
        }
        dimension(
            "num_attention_heads * head_dim",
            a.heads.saturating_mul(a.head_dim),
        )?;
        multiple_of_8("hidden_size", self.hidden)?;
        multiple_of_8("num_attention_heads * head_dim", a.heads * a.head_dim)?;
        if !(a.rope_theta.is_finite() && a.rope_theta > 0.0) {
            return Err(error(
                "rope_theta",
                a.rope_theta,
                "must be a positive number".into(),
            ));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(error(
                "rms_norm_eps",
                self.rms_norm_eps,
                "must not be negative".into(),
            ));
        }
        if let Some(c) = a.clip_qkv
            && !(c.is_finite() && c > 0.0)
        {
            return Err(error("clip_qkv", c, "must be a positive number".into()));
        }
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return Err(error(
                "num_hidden_layers",
                self.layers.len(),
                format!("must be 1 to {MAX_LAYERS}"),
            ));
        }
        for layer in &self.layers {
            layer.validate()?;
        }
        let mut moe = self.layers.iter().filter_map(LayerSpec::moe);
        if let Some(first) = moe.next()
            && moe.any(|m| m != first)
        {
            return Err(error(
                "layers",
                "mixed",
                "all mixture-of-experts layers must have the same shape".into(),
            ));
        }
        Ok(())
    }

    /// The shape that all mixture-of-experts layers share, or `None` in a dense model.
    #[must_use]
    pub fn moe(&self) -> Option<&MoeSpec> {
        self.layers.iter().find_map(LayerSpec::moe)
    }

    /// Layers with routed experts, in order.
    pub fn moe_layers(&self) -> impl Iterator<Item = LayerId> + '_ {
        (0u32..)
            .zip(&self.layers)
            .filter_map(|(i, l)| l.moe().map(|_| LayerId(i)))
    }
}

impl LayerSpec {
    /// The mixture-of-experts block, if this layer has one.
    #[must_use]
    pub fn moe(&self) -> Option<&MoeSpec> {
        match &self.feed_forward {
            FeedForward::Moe(m) => Some(m),
            FeedForward::Dense { .. } => None,
        }
    }

    fn validate(&self) -> Result<(), SpecError> {
        if self.window == Some(0) {
            return Err(error(
                "sliding_window",
                0,
                "a window of 0 would see nothing".into(),
            ));
        }
        match &self.feed_forward {
            FeedForward::Dense { width } => {
                dimension("intermediate_size", *width)?;
                multiple_of_8("intermediate_size", *width)
            }
            FeedForward::Moe(m) => {
                if m.experts == 0 || m.experts > MAX_EXPERTS {
                    return Err(error(
                        "num_experts",
                        m.experts,
                        format!("must be 1 to {MAX_EXPERTS}"),
                    ));
                }
                if m.top_k == 0 || m.top_k > m.experts {
                    return Err(error(
                        "num_experts_per_tok",
                        m.top_k,
                        format!("must be 1 to the number of experts, {}", m.experts),
                    ));
                }
                dimension("moe_intermediate_size", m.width)?;
                multiple_of_8("moe_intermediate_size", m.width)?;
                if let Some(s) = &m.shared {
                    dimension("shared_expert_intermediate_size", s.width)?;
                    multiple_of_8("shared_expert_intermediate_size", s.width)?;
                }
                Ok(())
            }
        }
    }
}

fn error(field: &'static str, value: impl ToString, problem: String) -> SpecError {
    SpecError {
        field,
        value: value.to_string(),
        problem,
    }
}

fn dimension(field: &'static str, v: usize) -> Result<(), SpecError> {
    if v == 0 || v > MAX_DIMENSION {
        return Err(error(field, v, format!("must be 1 to {MAX_DIMENSION}")));
    }
    Ok(())
}

fn multiple_of_8(field: &'static str, v: usize) -> Result<(), SpecError> {
    if !v.is_multiple_of(8) {
        return Err(error(field, v, "executors need a multiple of 8".into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> ModelSpec {
        let moe = MoeSpec {
            experts: 8,
            top_k: 2,
            width: 32,
            renormalize: false,
            shared: None,
        };
        ModelSpec {
            family: "test".into(),
            vocab: 64,
            hidden: 64,
            context: 128,
            rms_norm_eps: 1e-5,
            tied_embeddings: false,
            attention: AttentionSpec {
                heads: 4,
                kv_heads: 2,
                head_dim: 16,
                qk_norm: QkNorm::None,
                qkv_bias: false,
                output_bias: false,
                clip_qkv: None,
                rope_theta: 1e4,
            },
            layers: vec![
                LayerSpec {
                    window: None,
                    feed_forward: FeedForward::Moe(moe)
                };
                2
            ],
        }
    }

    fn moe(s: &mut ModelSpec) -> &mut MoeSpec {
        match &mut s.layers[1].feed_forward {
            FeedForward::Moe(m) => m,
            FeedForward::Dense { .. } => unreachable!("built as MoE above"),
        }
    }

    #[test]
    fn a_sound_specification_passes() {
        assert_eq!(spec().validate(), Ok(()));
        assert_eq!(spec().moe_layers().collect::<Vec<_>>(), [LayerId(0), LayerId(1)]);
    }

    #[test]
    fn each_bad_field_is_named() {
        type Break = fn(&mut ModelSpec);
        let cases: [(&str, Break); 12] = [
            ("num_experts", |s| moe(s).experts = 0),
            ("num_experts_per_tok", |s| moe(s).top_k = 9),
            ("num_experts_per_tok", |s| moe(s).top_k = 0),
            ("moe_intermediate_size", |s| moe(s).width = 36),
            ("num_key_value_heads", |s| s.attention.kv_heads = 3),
            ("head_dim", |s| s.attention.head_dim = 15),
            ("hidden_size", |s| s.hidden = 60),
            ("vocab_size", |s| s.vocab = 0),
            ("rope_theta", |s| s.attention.rope_theta = f64::NAN),
            ("rms_norm_eps", |s| s.rms_norm_eps = -1.0),
            ("num_hidden_layers", |s| s.layers.clear()),
            ("layers", |s| moe(s).width = 64),
        ];
        for (field, mutate) in cases {
            let mut s = spec();
            mutate(&mut s);
            assert_eq!(s.validate().expect_err(field).field, field);
        }
    }
}
