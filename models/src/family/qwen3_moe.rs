//! Qwen3-MoE: queries and keys are normalised head by head, the head width is a setting of its own, and dense layers
//! may stand between the routing ones.

use horizon_core::spec::{ModelSpec, QkNorm};

use super::common::{self, AttentionTraits, Defaults};
use super::names::{self, HubNames};
use crate::config::{Config, ConfigError};

pub(super) fn resolve(config: &Config<'_>) -> Result<(ModelSpec, HubNames), ConfigError> {
    common::refuse_clipping(config)?;
    let bias = config.bool_or("attention_bias", false)?;
    let traits = AttentionTraits {
        qk_norm: QkNorm::PerHead,
        qkv_bias: bias,
        output_bias: bias,
        clip_qkv: None,
    };
    let moe = common::qwen_experts(config, None)?;
    let layers = common::layer_count(config)?;
    let window = common::uniform_window(config, layers, common::qwen_window(config)?)?;
    let layers = common::sparse_layers(config, &moe, vec![window; layers])?;
    let defaults = Defaults {
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        kv_heads: Some(4),
    };
    let spec = common::model(config, "qwen3_moe", &defaults, traits, layers)?;
    Ok((spec, names::USUAL))
}
