//! What was decided and measured when a model was opened, for the record.

use std::path::PathBuf;

use horizon_core::backend::{Activations, ExecutorId};
use horizon_core::dense::DenseFormat;
use horizon_core::qpacked::{BlockSize, Quantizer};
use horizon_core::record::ExpertEncoding;
use horizon_models::source::{HostBytes, ModelSource, SourceKind};
use serde::Serialize;

use crate::backends::BackendKind;
use crate::budget::Fit;
use crate::device::DeviceMemory;
use crate::residency::ResidencySettings;

/// What was decided: everything that a figure depends on, for the record.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Settings {
    /// Which model.
    pub model: ModelIdentity,
    /// What computes.
    pub backend: BackendKind,
    /// Why this backend: `named`, or what made the choice.
    pub backend_reason: String,
    /// Memory of the card that the model takes, if it runs on one.
    pub device_memory: Option<DeviceMemory>,
    /// Executor of routed groups in prefill.
    pub prefill_executor: ExecutorId,
    /// Executor of routed groups in decode.
    pub decode_executor: ExecutorId,
    /// Which experts are resident.
    pub residency: ResidencySettings,
    /// How the capacity fits a budget, if one was given.
    pub budget: Option<Fit>,
    /// Form of the routed experts.
    pub experts: ExpertsRecord,
    /// Activation type.
    pub activations: Activations,
    /// Form of the non-routed weights.
    pub dense: DenseFormat,
    /// Positions of the KV cache.
    pub context: usize,
    /// Positions the model was made for.
    pub model_context: usize,
    /// Rows of a prefill step.
    pub prefill_chunk: usize,
    /// Threads.
    pub threads: usize,
}

/// Which model it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelIdentity {
    /// `model_type` of its configuration.
    pub family: String,
    /// Directory, or what a model within the program is called.
    pub place: PathBuf,
    /// `artifact`, `checkpoint` or `embedded`.
    pub kind: &'static str,
    /// SHA-256 that names it: of an artifact's manifest, or of a checkpoint's configuration and headers.
    pub sha256: String,
}

impl ModelIdentity {
    /// The identity of a source.
    #[must_use]
    pub fn of(source: &ModelSource) -> Self {
        Self {
            family: source.spec().family.clone(),
            place: source.place().to_owned(),
            kind: match source.kind() {
                SourceKind::Artifact => "artifact",
                SourceKind::Checkpoint => "checkpoint",
                SourceKind::Memory => "embedded",
            },
            sha256: source.identity(),
        }
    }
}

/// How routed experts are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ExpertsRecord {
    /// `qpacked` or `f16`.
    pub encoding: &'static str,
    /// Values a scale.
    pub block: Option<BlockSize>,
    /// How scales were chosen.
    pub quantizer: Option<Quantizer>,
}

impl ExpertsRecord {
    /// The record of experts in `encoding`.
    #[must_use]
    pub fn new(encoding: ExpertEncoding, quantizer: Option<Quantizer>) -> Self {
        match encoding {
            ExpertEncoding::Qpacked { block } => Self {
                encoding: "qpacked",
                block: Some(block),
                quantizer,
            },
            ExpertEncoding::F16 => Self {
                encoding: "f16",
                block: None,
                quantizer: None,
            },
        }
    }
}

/// Where the time of opening a model went, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct OpenTimings {
    /// Weights into memory, checked (or narrowed and quantized), and tiled.
    pub load_s: f64,
    /// KV cache, workspaces, and the first experts in their slots.
    pub open_s: f64,
}

/// Host memory of an open model, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostMemory {
    /// Routed experts and non-routed weights.
    pub weights: HostBytes,
    /// KV cache, workspaces: as the backend plans them; the cache's slots and staging buffers. Of a model on a card, what
    /// is page-locked for it.
    pub plan: Vec<(&'static str, u64)>,
    /// What stays while the model runs; on a card, the non-routed weights only until it is open.
    pub total: u64,
}

impl HostMemory {
    pub(crate) fn new(weights: HostBytes, plan: Vec<(&'static str, u64)>) -> Self {
        Self {
            total: weights.resident() + plan.iter().map(|(_, bytes)| bytes).sum::<u64>(),
            weights,
            plan,
        }
    }
}
