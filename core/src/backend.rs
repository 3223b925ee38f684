//! The boundary that every backend implements. It is coarse: one call a step.
//!
//! [`Backend::plan`] computes bytes and allocates nothing; [`Backend::open`] allocates all of them;
//! [`CompiledModel::enqueue`] starts a step and [`CompiledModel::finish`] gives its outcome, so that a device
//! can work on one step while the host looks at the one before.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::dense::DenseStore;
use crate::provider::{AcquireError, CacheFault, ExpertProvider};
use crate::spec::ModelSpec;
use crate::stage::Tap;

/// Type that matrix products read their activations in. Everything between products is FP32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// FP32, FP32 KV cache: the mode held against float32 references.
    F32,
    /// Narrowed once to FP16 where a product reads them, FP16 KV cache: W4A16, what all backends run.
    F16,
}

/// Rows of a prefill step. A recorded constant: it never follows from a budget.
pub const PREFILL_CHUNK: usize = 128;
/// Rows of a prefill step on a CUDA device.
pub const CUDA_PREFILL_CHUNK: usize = 512;

/// What a model is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Regime {
    /// Activation type.
    pub activations: Activations,
    /// Positions of the KV cache of each sequence.
    pub context: usize,
    /// Sequences with a KV cache of their own.
    pub sequences: usize,
    /// Most rows a step.
    pub max_rows: usize,
}

/// Names a way of computing routed groups; stays attached to every figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct ExecutorId(pub &'static str);

/// Bytes a model will hold, item by item; nothing has been allocated yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// What for, and how many bytes. Weights are not in it: they are the caller's.
    pub ledger: Vec<(&'static str, u64)>,
    /// The regime planned for.
    pub regime: Regime,
}

impl Plan {
    /// Sum of the ledger.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.ledger.iter().map(|(_, b)| b).sum()
    }
}

/// A way of running models.
pub trait Backend: Send {
    /// Name of the backend, e.g. `cpu`.
    fn name(&self) -> &'static str;

    /// Bytes that `spec` needs under `regime`, weights apart.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] with the limit that is exceeded.
    fn plan(&self, spec: &ModelSpec, regime: &Regime) -> Result<Plan, BackendError>;

    /// Allocates everything in `plan` and makes the model ready to run.
    ///
    /// # Errors
    /// [`BackendError`] when memory is refused or a weight is missing.
    fn open(
        &self,
        spec: &Arc<ModelSpec>,
        plan: &Plan,
        dense: &Arc<DenseStore>,
    ) -> Result<Box<dyn CompiledModel>, BackendError>;
}

/// One row of a step: a token at a position of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRow {
    /// Token id, below the vocabulary size.
    pub token: u32,
    /// Position in the sequence, from 0. Its key and value replace what the cache held there; rows of one
    /// sequence stand in ascending order of position, and all earlier positions have been run.
    pub position: usize,
    /// Sequence, below [`Regime::sequences`].
    pub sequence: usize,
    /// Whether this row's logits are wanted.
    pub logits: bool,
}

/// The input of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepBatch {
    /// Rows, at most [`Regime::max_rows`].
    pub rows: Vec<StepRow>,
    /// Whether to copy out what each stage produced.
    pub taps: bool,
    /// Which of the backend's two ways computes the step.
    pub phase: Phase,
    /// Only the most likely tokens are wanted of the rows that ask for logits; [`StepOutput::logits`] may stay empty.
    pub tokens_only: bool,
}

/// Which executor computes a step. A row's bits depend on the phase, never on how many rows a step has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Many rows a step: a prompt, or an evaluation.
    #[default]
    Prefill,
    /// A row or a few.
    Decode,
}

/// A step that has been started. Given back to [`CompiledModel::finish`] exactly once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a step ends with finish"]
pub struct Ticket(pub u64);

/// The outcome of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// Logits of the rows that asked, row-major `[rows, vocab]`.
    pub logits: Vec<f32>,
    /// Most likely token of the same rows; ties to the lowest id; [`NO_TOKEN`](Self::NO_TOKEN) where a backend that was
    /// asked for tokens only met a logit that is NaN or +infinity.
    pub tokens: Vec<u32>,
    /// Taps, if asked for.
    pub taps: Vec<Tap>,
    /// What the step did.
    pub report: StepReport,
}

impl StepOutput {
    /// No token can be chosen.
    pub const NO_TOKEN: u32 = u32::MAX;
}

/// Counts of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepReport {
    /// (token, expert) pairs computed.
    pub routed: u64,
    /// Distinct (layer, expert) records read.
    pub records: u64,
}

/// A model that is ready to run. Owns its KV cache and workspaces.
pub trait CompiledModel: Send {
    /// The executor of routed groups in steps of [`Phase::Decode`].
    fn executor(&self) -> ExecutorId;

    /// The executor of routed groups in steps of [`Phase::Prefill`].
    fn prefill_executor(&self) -> ExecutorId {
        self.executor()
    }

    /// Starts a step.
    ///
    /// # Errors
    /// [`StepError`]; the KV cache is then unchanged at positions below the step's first.
    fn enqueue(&mut self, batch: &StepBatch, experts: &Arc<dyn ExpertProvider>) -> Result<Ticket, StepError>;

    /// Waits for a step and gives its outcome.
    ///
    /// # Errors
    /// [`StepError`] of the step.
    fn finish(&mut self, ticket: Ticket) -> Result<StepOutput, StepError>;
}

/// A model that a backend cannot run.
#[derive(Debug, Error)]
pub enum BackendError {
    /// A limit of the backend.
    #[error("backend {backend}: {reason}")]
    Unsupported {
        /// Which backend.
        backend: &'static str,
        /// What does not fit, with its limit.
        reason: String,
    },
    /// A weight that the specification asks for is not in the store.
    #[error("backend {backend}: the weights lack {role}")]
    MissingWeight {
        /// Which backend.
        backend: &'static str,
        /// The role.
        role: String,
    },
    /// The device, or its driver.
    #[error("backend {backend}: {reason}")]
    Device {
        /// Which backend.
        backend: &'static str,
        /// What happened, in the device's words.
        reason: String,
    },
    /// Memory was refused.
    #[error("backend {backend}: cannot allocate {bytes} bytes for {what}: {source}")]
    Memory {
        /// Which backend.
        backend: &'static str,
        /// What it was for.
        what: &'static str,
        /// How much.
        bytes: u64,
        /// Why.
        source: std::io::Error,
    },
}

/// A step that failed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum StepError {
    /// The batch breaks a rule of [`StepRow`].
    #[error("step: {0}")]
    Invalid(String),
    /// Experts could not be had; another try of the same step may succeed.
    #[error(transparent)]
    Experts(#[from] AcquireError),
    /// The provider of experts has faulted.
    #[error(transparent)]
    Fault(#[from] CacheFault),
    /// The device failed; what the step left behind is not known.
    #[error("step: {0}")]
    Device(String),
    /// The ticket is not of a step in flight.
    #[error("step: ticket {0} is not in flight")]
    UnknownTicket(u64),
}
