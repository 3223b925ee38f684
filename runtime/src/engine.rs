//! From a model's files to a model that is ready to run: load, plan, open.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use horizon_core::artifact::Progress;
use horizon_core::backend::{
    Activations, Backend, BackendError, CompiledModel, ExecutorId, PREFILL_CHUNK, Plan, Regime,
};
use horizon_core::cpu::{FastCpu, ReferenceCpu};
use horizon_core::ids::{ExpertId, GenerationId};
use horizon_core::image::NoExperts;
use horizon_core::provider::{
    AcquireError, CacheFault, ExpertProvider, FullyResident, GroupLease, Hold, RoutedGroup, SlotMemory,
};
use horizon_core::qpacked::{BlockSize, Quantizer};
use horizon_core::record::{ExpertEncoding, RecordLayout, RecordTiling};
use horizon_core::spec::ModelSpec;
use horizon_core::transport::Completion;
use horizon_models::pack::{DEFAULT_BLOCK, DEFAULT_QUANTIZER};
use horizon_models::source::{ExpertsMode, HostBytes, LoadError, LoadOptions, ModelSource, SourceKind};
use serde::Serialize;
use thiserror::Error;

use crate::eval::Evaluator;
use crate::session::{Limits, Session};

/// Most positions of the context unless more are asked for: a KV cache for 100 000 positions can outweigh the model.
pub const DEFAULT_CONTEXT: usize = 4096;

/// The backends of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// [`FastCpu`].
    Cpu,
    /// [`ReferenceCpu`].
    CpuReference,
}

impl BackendKind {
    /// The arrangement of expert records that the backend reads.
    #[must_use]
    pub fn tiling(self) -> &'static dyn RecordTiling {
        match self {
            Self::Cpu => FastCpu::tiling(),
            Self::CpuReference => ReferenceCpu::tiling(),
        }
    }

    fn build(
        self,
        threads: Option<NonZeroUsize>,
        slots: Arc<dyn SlotMemory>,
        encoding: ExpertEncoding,
    ) -> Result<Box<dyn Backend>, BackendError> {
        Ok(match self {
            Self::Cpu => Box::new(FastCpu::new(threads, slots, encoding)?),
            Self::CpuReference => Box::new(ReferenceCpu::new(slots, encoding)),
        })
    }
}

/// How a model is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// What computes.
    pub backend: BackendKind,
    /// Form of the routed experts.
    pub experts: ExpertsMode,
    /// Activation type.
    pub activations: Activations,
    /// Positions of the KV cache; `None`: the model's context, at most [`DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Threads; `None`: all cores.
    pub threads: Option<NonZeroUsize>,
}

/// What was decided: everything that a figure depends on, for the record.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Settings {
    /// Which model.
    pub model: ModelIdentity,
    /// What computes.
    pub backend: BackendKind,
    /// Executor of routed groups in prefill.
    pub prefill_executor: ExecutorId,
    /// Executor of routed groups in decode.
    pub decode_executor: ExecutorId,
    /// Form of the routed experts.
    pub experts: ExpertsRecord,
    /// Activation type.
    pub activations: Activations,
    /// Type of the non-routed weights.
    pub dense: &'static str,
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
    /// KV cache and workspaces.
    pub open_s: f64,
}

/// Host memory of an open model, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostMemory {
    /// Routed experts and non-routed weights.
    pub weights: HostBytes,
    /// KV cache, workspaces: as the backend plans them.
    pub plan: Vec<(&'static str, u64)>,
    /// What stays while the model runs.
    pub total: u64,
}

impl HostMemory {
    fn new(weights: HostBytes, plan: &Plan) -> Self {
        Self {
            total: weights.resident() + plan.bytes(),
            weights,
            plan: plan.ledger.clone(),
        }
    }
}

/// A model that could not be opened.
#[derive(Debug, Error)]
pub enum EngineError {
    /// More positions than the model was made for.
    #[error("--ctx {asked}: the model was made for at most {most} positions (max_position_embeddings)")]
    ContextTooLong {
        /// What was asked for.
        asked: usize,
        /// The model's.
        most: usize,
    },
    /// A pool of threads could not be started.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// How many.
        threads: usize,
        /// Why.
        source: rayon::ThreadPoolBuildError,
    },
    /// The weights.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The backend.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// A model that is ready to run.
pub struct Engine {
    spec: Arc<ModelSpec>,
    layout: Option<RecordLayout>,
    model: Box<dyn CompiledModel>,
    experts: Arc<dyn ExpertProvider>,
    settings: Settings,
    memory: HostMemory,
    timings: OpenTimings,
    notes: Vec<String>,
}

impl Engine {
    /// Loads the weights of `source` and opens the model.
    ///
    /// # Errors
    /// [`EngineError`] naming the setting, the file or the limit.
    pub fn open(
        source: &ModelSource,
        options: &EngineOptions,
        progress: &dyn Progress,
    ) -> Result<Self, EngineError> {
        let regime = regime(source.spec(), options)?;
        let threads = options.threads.map_or(0, NonZeroUsize::get);
        let pool = pool(threads)?;
        let started = Instant::now();
        let load = LoadOptions {
            experts: options.experts,
            ..LoadOptions::default()
        };
        let loaded = pool.install(|| source.load(&load, options.backend.tiling(), progress))?;
        let load_s = started.elapsed().as_secs_f64();
        let threads = pool.current_num_threads();
        drop(pool);
        let (slots, experts): (Arc<dyn SlotMemory>, Arc<dyn ExpertProvider>) = match loaded.image {
            Some(image) => (image.clone(), Arc::new(FullyResident::new(image))),
            None => (Arc::new(NoExperts), Arc::new(NothingRouted)),
        };
        let started = Instant::now();
        let backend = options.backend.build(options.threads, slots, loaded.encoding)?;
        let plan = backend.plan(&loaded.spec, &regime)?;
        let model = backend.open(&loaded.spec, &plan, &loaded.dense)?;
        let weights = HostBytes::predict(&loaded.spec, loaded.encoding, options.backend.tiling(), threads);
        Ok(Self {
            settings: Settings {
                model: ModelIdentity::of(source),
                backend: options.backend,
                prefill_executor: model.executor(),
                decode_executor: model.executor(),
                experts: ExpertsRecord::new(loaded.encoding, loaded.quantizer),
                activations: options.activations,
                dense: "f16",
                context: regime.context,
                model_context: loaded.spec.context,
                prefill_chunk: PREFILL_CHUNK,
                threads: if options.backend == BackendKind::Cpu {
                    threads
                } else {
                    1
                },
            },
            memory: HostMemory::new(weights, &plan),
            timings: OpenTimings {
                load_s,
                open_s: started.elapsed().as_secs_f64(),
            },
            spec: loaded.spec,
            layout: loaded.layout,
            notes: loaded.notes,
            model,
            experts,
        })
    }

    /// The model as data.
    #[must_use]
    pub fn spec(&self) -> &Arc<ModelSpec> {
        &self.spec
    }

    /// The record of its experts, if it has any.
    #[must_use]
    pub fn layout(&self) -> Option<&RecordLayout> {
        self.layout.as_ref()
    }

    /// What was decided.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What it holds of host memory.
    #[must_use]
    pub fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// How long opening took.
    #[must_use]
    pub fn timings(&self) -> OpenTimings {
        self.timings
    }

    /// What the user should know.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// For measurements.
    pub fn evaluator(&mut self) -> Evaluator<'_> {
        Evaluator {
            model: self.model.as_mut(),
            experts: &self.experts,
            chunk: PREFILL_CHUNK,
        }
    }

    /// For conversations.
    #[must_use]
    pub fn into_session(self) -> Session {
        let Settings {
            context,
            model_context,
            prefill_chunk,
            ..
        } = self.settings;
        Session::new(
            self.model,
            self.experts,
            Limits {
                context,
                model_context,
                prefill_chunk,
            },
        )
    }
}

/// Host memory that `source` would take under `options`, by the same sums that [`Engine::open`] reports.
///
/// # Errors
/// As [`Engine::open`].
pub fn predict_host_memory(source: &ModelSource, options: &EngineOptions) -> Result<HostMemory, EngineError> {
    let regime = regime(source.spec(), options)?;
    let encoding = encoding(source, options.experts);
    let plan = options
        .backend
        .build(options.threads, Arc::new(NoExperts), encoding)?
        .plan(source.spec(), &regime)?;
    let threads = pool(options.threads.map_or(0, NonZeroUsize::get))?.current_num_threads();
    let weights = HostBytes::predict(source.spec(), encoding, options.backend.tiling(), threads);
    Ok(HostMemory::new(weights, &plan))
}

/// How the experts of `source` would be held.
#[must_use]
pub fn encoding(source: &ModelSource, experts: ExpertsMode) -> ExpertEncoding {
    match (experts, source.artifact()) {
        (ExpertsMode::F16, _) => ExpertEncoding::F16,
        (ExpertsMode::Qpacked { .. }, Some(a)) => ExpertEncoding::Qpacked {
            block: a.manifest().quantizer.block,
        },
        (ExpertsMode::Qpacked { block, .. }, None) => ExpertEncoding::Qpacked {
            block: block.unwrap_or(DEFAULT_BLOCK),
        },
    }
}

/// How the scales of packed experts of `source` would be, or were, chosen.
#[must_use]
pub fn quantizer(source: &ModelSource, experts: ExpertsMode) -> Option<Quantizer> {
    match (experts, source.artifact()) {
        (ExpertsMode::F16, _) => None,
        (ExpertsMode::Qpacked { .. }, Some(a)) => Some(a.manifest().quantizer.method),
        (ExpertsMode::Qpacked { quantizer, .. }, None) => Some(quantizer.unwrap_or(DEFAULT_QUANTIZER)),
    }
}

/// A pool of `threads` threads; 0 means all cores.
///
/// # Errors
/// [`EngineError::Threads`].
pub fn pool(threads: usize) -> Result<rayon::ThreadPool, EngineError> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|source| EngineError::Threads { threads, source })
}

/// Positions of the KV cache that `options` ask for.
///
/// # Errors
/// [`EngineError::ContextTooLong`].
pub fn context(spec: &ModelSpec, options: &EngineOptions) -> Result<usize, EngineError> {
    match options.context {
        Some(asked) if asked > spec.context => Err(EngineError::ContextTooLong {
            asked,
            most: spec.context,
        }),
        Some(asked) => Ok(asked),
        None => Ok(spec.context.min(DEFAULT_CONTEXT)),
    }
}

fn regime(spec: &ModelSpec, options: &EngineOptions) -> Result<Regime, EngineError> {
    let context = context(spec, options)?;
    Ok(Regime {
        activations: options.activations,
        context,
        sequences: 1,
        max_rows: PREFILL_CHUNK,
    })
}

/// The provider of a model without routed experts.
struct NothingRouted;

impl ExpertProvider for NothingRouted {
    fn capture(&self) -> Hold {
        Hold {
            generation: GenerationId(0),
            keep: Arc::new(()),
        }
    }

    fn waves(&self, _: &Hold, group: &RoutedGroup<'_>) -> Vec<Vec<ExpertId>> {
        vec![group.experts.to_vec()]
    }

    fn acquire(
        &self,
        _: &mut Hold,
        group: &RoutedGroup<'_>,
        _: Completion,
    ) -> Result<Box<dyn GroupLease>, AcquireError> {
        let (layer, reason) = (group.layer, "the model has no routed experts".into());
        Err(CacheFault { layer, reason }.into())
    }

    fn release(&self, _: Hold, _: Completion) {}
}
