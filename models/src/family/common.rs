//! What the families' configurations have in common: the sizes of the decoder, its attention, its rotary positions,
//! and the settings that none of them implements.

use horizon_core::spec::{
    AttentionSpec, FeedForward, LayerSpec, ModelSpec, MoeSpec, QkNorm, SharedExpertSpec,
};
use serde_json::Value;

use crate::config::{Config, ConfigError};

/// What a family's configuration class says about keys that a `config.json` leaves out.
pub(super) struct Defaults {
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    /// `None`: as many as there are query heads.
    pub kv_heads: Option<usize>,
}

/// The family's own part of the attention.
pub(super) struct AttentionTraits {
    pub qk_norm: QkNorm,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub clip_qkv: Option<f32>,
}

/// Puts a model together from the fields that all families share and the family's own layers.
pub(super) fn model(
    config: &Config<'_>,
    family: &str,
    defaults: &Defaults,
    traits: AttentionTraits,
    layers: Vec<LayerSpec>,
) -> Result<ModelSpec, ConfigError> {
    let hidden = config.size("hidden_size")?;
    let heads = config.size("num_attention_heads")?;
    let AttentionTraits {
        qk_norm,
        qkv_bias,
        output_bias,
        clip_qkv,
    } = traits;
    Ok(ModelSpec {
        family: family.to_owned(),
        vocab: config.size("vocab_size")?,
        hidden,
        context: config.size("max_position_embeddings")?,
        rms_norm_eps: narrow(config.float_or("rms_norm_eps", defaults.rms_norm_eps)?),
        tied_embeddings: config.bool_or("tie_word_embeddings", false)?,
        attention: AttentionSpec {
            heads,
            kv_heads: kv_heads(config, heads, defaults.kv_heads)?,
            head_dim: head_dim(config, hidden, heads)?,
            qk_norm,
            qkv_bias,
            output_bias,
            clip_qkv,
            rope_theta: rope_theta(config, defaults.rope_theta)?,
        },
        layers,
    })
}

/// The number of layers, bounded before anything is allocated for them.
pub(super) fn layer_count(config: &Config<'_>) -> Result<usize, ConfigError> {
    use horizon_core::spec::MAX_LAYERS;
    let n = config.size("num_hidden_layers")?;
    if n == 0 || n > MAX_LAYERS {
        return Err(config.invalid(
            "num_hidden_layers",
            &Value::from(n),
            format!("must be 1 to {MAX_LAYERS}"),
        ));
    }
    Ok(n)
}

/// `layers` times the same layer.
pub(super) fn uniform(layers: usize, window: Option<usize>, feed_forward: FeedForward) -> Vec<LayerSpec> {
    vec![LayerSpec { window, feed_forward }; layers]
}

/// The number of routed experts, which transformers writes as `num_experts` or as `num_local_experts`.
pub(super) fn experts(config: &Config<'_>) -> Result<usize, ConfigError> {
    let (a, b) = (
        config.optional_size("num_experts")?,
        config.optional_size("num_local_experts")?,
    );
    match (a, b) {
        (Some(a), Some(b)) if a != b => Err(config.invalid(
            "num_experts",
            &Value::from(a),
            format!("contradicts num_local_experts = {b}"),
        )),
        (Some(n), _) | (None, Some(n)) => Ok(n),
        (None, None) => Err(ConfigError::Missing { field: "num_experts" }),
    }
}

/// The layers of the two Qwen families: with `moe` where they route, which is every `decoder_sparse_step`-th layer that
/// is not in `mlp_only_layers`, dense elsewhere.
pub(super) fn sparse_layers(
    config: &Config<'_>,
    moe: &MoeSpec,
    windows: Vec<Option<usize>>,
) -> Result<Vec<LayerSpec>, ConfigError> {
    // Of no effect where every layer routes.
    config.know("intermediate_size");
    let step = config.optional_size("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(config.invalid("decoder_sparse_step", &Value::from(step), "must be at least 1"));
    }
    let dense = config.sizes("mlp_only_layers")?;
    windows
        .into_iter()
        .enumerate()
        .map(|(i, window)| {
            let feed_forward = if !dense.contains(&i) && (i + 1).is_multiple_of(step) {
                FeedForward::Moe(moe.clone())
            } else {
                FeedForward::Dense {
                    width: config.size("intermediate_size")?,
                }
            };
            Ok(LayerSpec { window, feed_forward })
        })
        .collect()
}

/// The routed experts of the two Qwen families.
pub(super) fn qwen_experts(
    config: &Config<'_>,
    shared: Option<SharedExpertSpec>,
) -> Result<MoeSpec, ConfigError> {
    Ok(MoeSpec {
        experts: experts(config)?,
        top_k: config.size("num_experts_per_tok")?,
        width: config.size("moe_intermediate_size")?,
        renormalize: config.bool_or("norm_topk_prob", false)?,
        shared,
    })
}

/// `sliding_window` of the two Qwen families, which have it only with `use_sliding_window`.
pub(super) fn qwen_window(config: &Config<'_>) -> Result<Option<usize>, ConfigError> {
    config.know("max_window_layers");
    config.know("sliding_window");
    if config.bool_or("use_sliding_window", false)? {
        window(config, Some(4096))
    } else {
        Ok(None)
    }
}

/// The window of a family that has it on every layer or on none. `layer_types`, where present, must agree.
pub(super) fn uniform_window(
    config: &Config<'_>,
    layers: usize,
    window: Option<usize>,
) -> Result<Option<usize>, ConfigError> {
    let here = if window.is_some() { SLIDING } else { FULL };
    if let Some(types) = layer_types(config, layers)?
        && let Some(other) = types.iter().find(|t| **t != here)
    {
        return Err(config.invalid(
            "layer_types",
            &Value::from(*other),
            format!("the other settings ask for {here:?} on every layer, and this family has one kind only"),
        ));
    }
    Ok(window)
}

/// `layer_types` of a layer that sees everything before it.
pub(super) const FULL: &str = "full_attention";
/// `layer_types` of a layer with a sliding window.
pub(super) const SLIDING: &str = "sliding_attention";

/// The checked `layer_types`, if the configuration has them.
pub(super) fn layer_types<'a>(
    config: &Config<'a>,
    layers: usize,
) -> Result<Option<Vec<&'a str>>, ConfigError> {
    let Some(types) = config.optional_strs("layer_types")? else {
        return Ok(None);
    };
    if types.len() != layers {
        let problem = format!("has {} entries for num_hidden_layers = {layers}", types.len());
        return Err(config.invalid("layer_types", &Value::from(types), problem));
    }
    if let Some(other) = types.iter().find(|t| **t != FULL && **t != SLIDING) {
        let problem = format!("not implemented; supported are {FULL:?} and {SLIDING:?}");
        return Err(config.invalid("layer_types", &Value::from(*other), problem));
    }
    Ok(Some(types))
}

/// `sliding_window` where it applies: 0 and null mean none.
pub(super) fn window(config: &Config<'_>, default: Option<usize>) -> Result<Option<usize>, ConfigError> {
    let value = if config.has("sliding_window") {
        config.optional_size("sliding_window")?
    } else {
        default
    };
    Ok(value.filter(|w| *w > 0))
}

/// `null` means as many as query heads. An absent key means the configuration class's own number, unless that
/// cannot be for so many query heads (a wrong guess does not fit the key projection's shape, and loading says so).
fn kv_heads(config: &Config<'_>, heads: usize, default: Option<usize>) -> Result<usize, ConfigError> {
    if let Some(n) = config.optional_size("num_key_value_heads")? {
        return Ok(n);
    }
    if config.has("num_key_value_heads") {
        return Ok(heads);
    }
    Ok(default.filter(|n| heads.is_multiple_of(*n)).unwrap_or(heads))
}

fn head_dim(config: &Config<'_>, hidden: usize, heads: usize) -> Result<usize, ConfigError> {
    if let Some(width) = config.optional_size("head_dim")? {
        return Ok(width);
    }
    if heads == 0 || !hidden.is_multiple_of(heads) {
        let problem = format!("does not divide hidden_size = {hidden}, and head_dim is absent");
        return Err(config.invalid("num_attention_heads", &Value::from(heads), problem));
    }
    Ok(hidden / heads)
}

/// The base of the rotary frequencies, from `rope_theta` (transformers 4) or `rope_parameters` (transformers 5).
fn rope_theta(config: &Config<'_>, default: f64) -> Result<f64, ConfigError> {
    let mut theta = config.optional_float("rope_theta")?;
    for field in ["rope_parameters", "rope_scaling"] {
        let Some(rope) = config.object(field)? else {
            continue;
        };
        let mut named = false;
        for name in ["rope_type", "type"] {
            let Some(kind) = rope.get(name) else { continue };
            named = true;
            if kind.as_str() != Some("default") {
                return Err(rope.invalid(
                    name,
                    kind,
                    "not implemented; only \"default\" rotary positions are",
                ));
            }
        }
        for nested in [FULL, SLIDING] {
            if let Some(value) = rope.get(nested) {
                return Err(rope.invalid(
                    nested,
                    value,
                    "rotary positions that differ by layer are not implemented",
                ));
            }
        }
        refuse(&rope, &[("partial_rotary_factor", Neutral::One)])?;
        if !named {
            refuse(&rope, &[("factor", Neutral::One)])?;
        }
        if let Some(inner) = rope.optional_float("rope_theta")? {
            if let Some(outer) = theta
                && outer != inner
            {
                let problem = format!("contradicts rope_theta = {outer}");
                return Err(rope.invalid("rope_theta", &Value::from(inner), problem));
            }
            theta = Some(inner);
        }
    }
    Ok(theta.unwrap_or(default))
}

/// Keys that say nothing about the forward pass: how the model was made, how it is loaded and generated from elsewhere.
const HARMLESS: [&str; 55] = [
    "add_cross_attention",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "typical_p",
    "use_cache",
];
/// Further ones, by how they begin: private fields, and the version.
const HARMLESS_PREFIXES: [&str; 3] = ["_", "transformers", "unsloth"];

/// Keys that the family did not ask for and that are not known to be harmless.
pub(super) fn unknown_keys(config: &Config<'_>) -> Vec<String> {
    HARMLESS.iter().for_each(|field| config.know(field));
    // A mapping by token or by class is none of ours, whatever is in it.
    let within = |key: &str| {
        HARMLESS
            .iter()
            .any(|h| key.strip_prefix(h).is_some_and(|r| r.starts_with('.')))
    };
    let mut keys = config.unasked();
    keys.retain(|key| !within(key) && !HARMLESS_PREFIXES.iter().any(|p| key.starts_with(p)));
    keys
}

/// A value with which a setting changes nothing.
#[derive(Clone, Copy)]
enum Neutral {
    Off,
    Zero,
    One,
}

/// Settings of related architectures that change the forward pass and that no family here implements.
const UNIMPLEMENTED: [(&str, Neutral); 20] = [
    ("attention_multiplier", Neutral::One),
    ("attention_sink", Neutral::Off),
    ("attn_logit_softcapping", Neutral::Zero),
    ("embedding_multiplier", Neutral::One),
    ("final_logit_softcapping", Neutral::Zero),
    ("first_k_dense_replace", Neutral::Zero),
    ("kv_lora_rank", Neutral::Zero),
    ("lm_head_bias", Neutral::Off),
    ("logit_scale", Neutral::One),
    ("logits_scaling", Neutral::One),
    ("mlp_bias", Neutral::Off),
    ("n_group", Neutral::One),
    ("n_shared_experts", Neutral::Zero),
    ("parallel_attn", Neutral::Off),
    ("partial_rotary_factor", Neutral::One),
    ("q_lora_rank", Neutral::Zero),
    ("residual_multiplier", Neutral::One),
    ("rope_interleave", Neutral::Off),
    ("routed_scaling_factor", Neutral::One),
    ("use_attention_sinks", Neutral::Off),
];

/// Refuses what would change the result and is not implemented, whatever the family.
pub(super) fn refuse_unimplemented(config: &Config<'_>) -> Result<(), ConfigError> {
    for field in ["hidden_act", "hidden_activation"] {
        if let Some(act) = config.get(field)
            && !matches!(act.as_str(), Some("silu" | "swish"))
        {
            return Err(config.invalid(field, act, "not implemented; only \"silu\" is"));
        }
    }
    if let Some(scoring) = config.get("scoring_func")
        && scoring.as_str() != Some("softmax")
    {
        return Err(config.invalid(
            "scoring_func",
            scoring,
            "not implemented; only \"softmax\" routing is",
        ));
    }
    if let Some(method) = config.get("quantization_config") {
        let problem =
            "a quantized checkpoint cannot be read; use the BF16, F16 or F32 one (packing quantizes it)";
        return Err(config.invalid(
            "quantization_config",
            method.get("quant_method").unwrap_or(method),
            problem,
        ));
    }
    refuse(config, &UNIMPLEMENTED)
}

/// Refuses `clip_qkv` in a family that has no clipping.
pub(super) fn refuse_clipping(config: &Config<'_>) -> Result<(), ConfigError> {
    match config.get("clip_qkv") {
        None => Ok(()),
        Some(value) => {
            Err(config.invalid("clip_qkv", value, "not implemented for this family; only null is"))
        }
    }
}

fn refuse(config: &Config<'_>, settings: &[(&str, Neutral)]) -> Result<(), ConfigError> {
    for (field, neutral) in settings {
        let Some(value) = config.get(field) else { continue };
        let (harmless, supported) = match neutral {
            Neutral::Off => (value.as_bool() == Some(false), "false"),
            Neutral::Zero => (value.as_f64() == Some(0.0), "null or 0"),
            Neutral::One => (value.as_f64() == Some(1.0), "null or 1"),
        };
        if !harmless {
            return Err(config.invalid(field, value, format!("not implemented; only {supported} is")));
        }
    }
    Ok(())
}

/// FP32 is what the specification keeps.
#[expect(clippy::cast_possible_truncation, reason = "rounding to FP32 is the purpose")]
pub(super) fn narrow(value: f64) -> f32 {
    value as f32
}
