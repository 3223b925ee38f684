//! Model families: `config.json` and hub tensor names onto [`ModelSpec`] and roles.
//!
//! A family is one small file with a function from [`Config`] to a specification and names, listed in `FAMILIES` below. It contains
//! no mathematics: what it cannot express in a [`ModelSpec`] it refuses, naming the field. Defaults for absent
//! keys are those of the family's configuration class in Hugging Face transformers 5.

mod common;
mod mixtral;
mod names;
mod olmoe;
mod qwen2_moe;
mod qwen3_moe;

use std::fmt;

use horizon_core::roles::TensorNames;
use horizon_core::spec::{FeedForward, ModelSpec, SpecError};
use serde_json::Value;

use self::names::HubNames;
use crate::config::Config;
pub use crate::config::ConfigError;

/// A checkpoint's shape, and how its tensors are called.
pub struct Resolved {
    /// The model as data, validated.
    pub spec: ModelSpec,
    /// The hub's names of its tensors.
    pub names: Box<dyn TensorNames>,
    /// Keys of the `config.json` that mean nothing to this family and are not known to be harmless.
    pub unknown_keys: Vec<String>,
}

impl fmt::Debug for Resolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolved")
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

type Family = fn(&Config<'_>) -> Result<(ModelSpec, HubNames), ConfigError>;

/// Every family, by the `model_type` of its `config.json`.
const FAMILIES: [(&str, Family); 4] = [
    ("mixtral", mixtral::resolve),
    ("olmoe", olmoe::resolve),
    ("qwen2_moe", qwen2_moe::resolve),
    ("qwen3_moe", qwen3_moe::resolve),
];

/// Every `model_type` that can be run.
pub fn supported() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|(name, _)| *name)
}

/// Maps a parsed `config.json`, in the style of transformers 4 or 5, onto a model specification.
///
/// # Errors
/// An unknown `model_type`; a field that is missing, of the wrong type or out of range; a setting that changes the
/// mathematics and is not implemented. Keys that do not concern the forward pass are ignored; those of which nothing
/// is known are listed.
pub fn resolve(config: &Value) -> Result<Resolved, ConfigError> {
    let config = Config::new(config)?;
    let family = config.optional_str("model_type")?;
    let Some((_, resolve)) = FAMILIES.iter().find(|(name, _)| Some(*name) == family) else {
        return Err(ConfigError::UnknownFamily {
            found: family.map_or_else(|| "(absent)".to_owned(), |f| format!("{f:?}")),
            supported: supported().collect(),
        });
    };
    common::refuse_unimplemented(&config)?;
    let (spec, names) = resolve(&config)?;
    spec.validate().map_err(|e| in_words_of(&config, e))?;
    if spec.moe().is_none() {
        return Err(ConfigError::Invalid {
            field: "mlp_only_layers, decoder_sparse_step".to_owned(),
            value: format!("{} dense layers", dense_layers(&spec)),
            problem: "no layer is left with routed experts".to_owned(),
        });
    }
    Ok(Resolved {
        spec,
        names: Box::new(names),
        unknown_keys: common::unknown_keys(&config),
    })
}

/// The same error under the key that this `config.json` has: two families call the experts' width
/// `intermediate_size`, and some files count `num_local_experts`.
fn in_words_of(config: &Config<'_>, error: SpecError) -> SpecError {
    let field = match error.field {
        "moe_intermediate_size" if !config.has("moe_intermediate_size") => "intermediate_size",
        "num_experts" if !config.has("num_experts") => "num_local_experts",
        same => same,
    };
    SpecError { field, ..error }
}

fn dense_layers(spec: &ModelSpec) -> usize {
    spec.layers
        .iter()
        .filter(|l| matches!(l.feed_forward, FeedForward::Dense { .. }))
        .count()
}
