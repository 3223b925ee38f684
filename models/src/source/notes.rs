//! What a model's files have that nobody here reads: told, because it may mean another model than is run.

use std::collections::HashSet;

use horizon_core::roles::DenseRole;

use crate::checkpoint::Checkpoint;
use crate::family::Resolved;

/// Names listed before the rest is only counted.
const SHOWN: usize = 4;

/// Keys of `config.json` of which nothing is known.
pub(super) fn unknown_keys(resolved: &Resolved) -> Option<String> {
    let keys = &resolved.unknown_keys;
    (!keys.is_empty()).then(|| {
        format!(
            "config.json: not known for model_type {}: {}; if this changes what the model computes, its output will differ",
            resolved.spec.family,
            list(keys)
        )
    })
}

/// Tensors of a checkpoint that the model has no place for.
pub(super) fn unused_tensors(
    checkpoint: &Checkpoint,
    resolved: &Resolved,
    used: &HashSet<&str>,
) -> Option<String> {
    let head = resolved.names.dense(DenseRole::OutputHead);
    let harmless = |name: &str| {
        // Old checkpoints store what follows from rope_theta; some store the tied head again.
        name.ends_with(".rotary_emb.inv_freq") || (resolved.spec.tied_embeddings && name == head)
    };
    let mut unused: Vec<String> = checkpoint
        .tensor_names()
        .filter(|name| !used.contains(name) && !harmless(name))
        .map(str::to_owned)
        .collect();
    unused.sort_unstable();
    (!unused.is_empty()).then(|| {
        format!(
            "{}: {} of {} tensors are not used, as config.json describes a model without them: {}",
            checkpoint.place().display(),
            unused.len(),
            checkpoint.tensor_count(),
            list(&unused)
        )
    })
}

fn list(names: &[String]) -> String {
    let mut text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}
