//! Mixtral: every layer routes, the chosen probabilities always sum to one, and the tensors have names of their own.

use horizon_core::spec::{FeedForward, ModelSpec, MoeSpec, QkNorm};

use super::common::{self, AttentionTraits, Defaults};
use super::names::HubNames;
use crate::config::{Config, ConfigError};

/// Gate is `w1`, up is `w3`, down is `w2`.
const NAMES: HubNames = HubNames {
    moe_block: "block_sparse_moe",
    expert: ["w1", "w3", "w2"],
};

pub(super) fn resolve(config: &Config<'_>) -> Result<(ModelSpec, HubNames), ConfigError> {
    common::refuse_clipping(config)?;
    let traits = AttentionTraits {
        qk_norm: QkNorm::None,
        qkv_bias: false,
        output_bias: false,
        clip_qkv: None,
    };
    let moe = MoeSpec {
        experts: common::experts(config)?,
        top_k: config.size("num_experts_per_tok")?,
        width: config.size("intermediate_size")?,
        renormalize: true,
        shared: None,
    };
    let layers = common::layer_count(config)?;
    let window = common::window(config, None)?;
    let window = common::uniform_window(config, layers, window)?;
    let defaults = Defaults {
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        kv_heads: Some(8),
    };
    let layers = common::uniform(layers, window, FeedForward::Moe(moe));
    let spec = common::model(config, "mixtral", &defaults, traits, layers)?;
    Ok((spec, NAMES))
}
