//! OLMoE: every layer routes; queries and keys are normalised over all heads together; optional clipping.

use horizon_core::spec::{FeedForward, ModelSpec, MoeSpec, QkNorm};

use super::common::{self, AttentionTraits, Defaults};
use super::names::{self, HubNames};
use crate::config::{Config, ConfigError};

pub(super) fn resolve(config: &Config<'_>) -> Result<(ModelSpec, HubNames), ConfigError> {
    let bias = config.bool_or("attention_bias", false)?;
    let traits = AttentionTraits {
        qk_norm: QkNorm::AllHeads,
        qkv_bias: bias,
        output_bias: bias,
        clip_qkv: config.optional_float("clip_qkv")?.map(common::narrow),
    };
    let moe = MoeSpec {
        experts: common::experts(config)?,
        top_k: config.size("num_experts_per_tok")?,
        width: config.size("intermediate_size")?,
        renormalize: config.bool_or("norm_topk_prob", false)?,
        shared: None,
    };
    let layers = common::layer_count(config)?;
    let window = common::uniform_window(config, layers, None)?;
    let defaults = Defaults {
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        kv_heads: None,
    };
    let layers = common::uniform(layers, window, FeedForward::Moe(moe));
    let spec = common::model(config, "olmoe", &defaults, traits, layers)?;
    Ok((spec, names::USUAL))
}
