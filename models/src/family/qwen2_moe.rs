//! Qwen2-MoE (Qwen1.5-MoE included): a gated shared expert beside the routed ones, biases on query, key and value,
//! dense layers between the routing ones, and a sliding window on some layers if `use_sliding_window` says so.

use horizon_core::spec::{ModelSpec, QkNorm, SharedExpertSpec};
use serde_json::Value;

use super::common::{self, AttentionTraits, Defaults, SLIDING};
use super::names::{self, HubNames};
use crate::config::{Config, ConfigError};

pub(super) fn resolve(config: &Config<'_>) -> Result<(ModelSpec, HubNames), ConfigError> {
    common::refuse_clipping(config)?;
    let traits = AttentionTraits {
        qk_norm: QkNorm::None,
        qkv_bias: config.bool_or("qkv_bias", true)?,
        output_bias: false,
        clip_qkv: None,
    };
    let shared = SharedExpertSpec {
        width: config.size("shared_expert_intermediate_size")?,
        gated: true,
    };
    let moe = common::qwen_experts(config, Some(shared))?;
    let windows = windows(config, common::layer_count(config)?)?;
    let layers = common::sparse_layers(config, &moe, windows)?;
    let defaults = Defaults {
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        kv_heads: Some(16),
    };
    let spec = common::model(config, "qwen2_moe", &defaults, traits, layers)?;
    Ok((spec, names::USUAL))
}

/// The window of each layer, as transformers 5 has it: `layer_types` decides; without them, and with
/// `use_sliding_window`, the even layers below `max_window_layers` slide.
fn windows(config: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>, ConfigError> {
    let enabled = config.bool_or("use_sliding_window", false)?;
    let below = config.optional_size("max_window_layers")?.unwrap_or(28);
    let sliding: Vec<bool> = match common::layer_types(config, layers)? {
        Some(types) => types.iter().map(|t| *t == SLIDING).collect(),
        None => (0..layers).map(|i| enabled && i % 2 == 0 && i < below).collect(),
    };
    let window = common::qwen_window(config)?;
    if window.is_none() && sliding.contains(&true) {
        let problem = "some layers slide, but use_sliding_window is false or there is no window";
        return Err(config.invalid(
            "sliding_window",
            config.get("sliding_window").unwrap_or(&Value::Null),
            problem,
        ));
    }
    Ok(sliding.into_iter().map(|s| window.filter(|_| s)).collect())
}
