//! Qwen3-MoE: queries and keys are normalised head by head, the head width is a setting of its own, and dense layers
//! may stand between the routing ones.

use horizon_core::spec::{FeedForward, LayerSpec, MoeSpec, QkNorm};

use super::common::{self, AttentionTraits, Defaults};
use super::{Resolved, names};
use crate::config::{Config, ConfigError};

pub(super) fn resolve(config: &Config<'_>) -> Result<Resolved, ConfigError> {
    common::refuse_clipping(config)?;
    let bias = config.bool_or("attention_bias", false)?;
    let traits = AttentionTraits {
        qk_norm: QkNorm::PerHead,
        qkv_bias: bias,
        output_bias: bias,
        clip_qkv: None,
    };
    let moe = MoeSpec {
        experts: common::experts(config)?,
        top_k: config.size("num_experts_per_tok")?,
        width: config.size("moe_intermediate_size")?,
        renormalize: config.bool_or("norm_topk_prob", false)?,
        shared: None,
    };
    let layers = common::layer_count(config)?;
    let window = if config.bool_or("use_sliding_window", false)? {
        common::window(config, Some(4096))?
    } else {
        None
    };
    let window = common::uniform_window(config, layers, window)?;
    let layers = common::sparse_layers(config, layers)?
        .into_iter()
        .map(|sparse| {
            let feed_forward = if sparse {
                FeedForward::Moe(moe.clone())
            } else {
                FeedForward::Dense {
                    width: config.size("intermediate_size")?,
                }
            };
            Ok(LayerSpec { window, feed_forward })
        })
        .collect::<Result<_, ConfigError>>()?;
    let defaults = Defaults {
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        kv_heads: Some(4),
    };
    let spec = common::model(config, "qwen3_moe", &defaults, traits, layers)?;
    Ok(Resolved {
        spec,
        names: Box::new(names::USUAL),
    })
}
