//! From a model's files to a model that is ready to run: load, plan, open.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use horizon_cache::{Geometry, Policy};
use horizon_core::artifact::Progress;
use horizon_core::backend::{Activations, BackendError, CompiledModel, PREFILL_CHUNK, Regime};
use horizon_core::dense::DenseFormat;
use horizon_core::provider::ExpertProvider;
use horizon_core::qpacked::Quantizer;
use horizon_core::record::{ExpertEncoding, RecordLayout};
use horizon_core::spec::ModelSpec;
use horizon_models::pack::{DEFAULT_BLOCK, DEFAULT_QUANTIZER};
use horizon_models::source::{ExpertsMode, HostBytes, LoadError, LoadOptions, LoadedModel, ModelSource};
use thiserror::Error;

use crate::backends::build_host;
pub use crate::backends::{BackendChoice, BackendKind, ExecutorKind};
use crate::budget::Fit;
use crate::choice::{Chosen, choose, plan, record_bytes};
use crate::device::{Device, DeviceError, OpenDevice, first_card};
use crate::eval::Evaluator;
use crate::residency::{
    self, CacheOptions, Opened, Residency, ResidencyError, STAGING_BUFFERS, device_bytes,
};
use crate::session::{Limits, Session};
pub use crate::settings::{ExpertsRecord, HostMemory, ModelIdentity, OpenTimings, Settings};

/// Most positions of the context unless more are asked for: a KV cache for 100 000 positions can outweigh the model.
pub const DEFAULT_CONTEXT: usize = 4096;

/// How a model is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// What computes.
    pub backend: BackendChoice,
    /// Executor of routed groups, one that the backend has; `None`: its default.
    pub executor: Option<ExecutorKind>,
    /// The cache; `None`: every expert is resident.
    pub cache: Option<CacheOptions>,
    /// Form of the routed experts.
    pub experts: ExpertsMode,
    /// Form of the non-routed weights.
    pub dense: DenseFormat,
    /// Activation type.
    pub activations: Activations,
    /// Positions of the KV cache; `None`: the model's context, at most [`DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Threads; `None`: all cores.
    pub threads: Option<NonZeroUsize>,
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
    /// The cache.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    /// The card.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A model that is ready to run.
pub struct Engine {
    spec: Arc<ModelSpec>,
    layout: Option<RecordLayout>,
    model: Box<dyn CompiledModel>,
    experts: Arc<dyn ExpertProvider>,
    residency: Residency,
    settings: Settings,
    memory: HostMemory,
    timings: OpenTimings,
    device: Option<Device>,
    notes: Vec<String>,
    details: Vec<String>,
}

/// A model whose weights are in memory. Nothing is read from its source any more.
pub struct LoadedEngine {
    options: EngineOptions,
    chosen: Chosen,
    cache: Option<(Geometry, Policy)>,
    fit: Option<Fit>,
    loaded: LoadedModel,
    identity: ModelIdentity,
    memory: HostMemory,
    threads: usize,
    load_s: f64,
}

impl LoadedEngine {
    /// Loads the weights of `source`, after everything that can be refused without them.
    ///
    /// # Errors
    /// [`EngineError`] naming the setting, the file or the limit.
    pub fn load(
        source: &ModelSource,
        options: &EngineOptions,
        progress: &dyn Progress,
    ) -> Result<Self, EngineError> {
        Self::load_for(source, options, &first_card, progress)
    }

    /// As [`load`](Self::load), for a card that `open` gives.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_for(
        source: &ModelSource,
        options: &EngineOptions,
        open: OpenDevice<'_>,
        progress: &dyn Progress,
    ) -> Result<Self, EngineError> {
        let chosen = choose(source.spec(), options, encoding(source, options.experts), open)?;
        if let Some(note) = &chosen.note {
            progress.note(note);
        }
        let Prediction { memory, cache, fit } = predict(source, options, (chosen.kind, chosen.executor))?;
        let pool = pool(options.threads.map_or(0, NonZeroUsize::get))?;
        let started = Instant::now();
        let load = LoadOptions {
            experts: options.experts,
            dense: options.dense,
            ..LoadOptions::default()
        };
        let loaded = pool.install(|| source.load(&load, chosen.kind.tiling(), progress))?;
        Ok(Self {
            options: *options,
            chosen,
            cache,
            fit,
            loaded,
            identity: ModelIdentity::of(source),
            memory,
            threads: pool.current_num_threads(),
            load_s: started.elapsed().as_secs_f64(),
        })
    }

    /// Opens the model: from here on whatever is read, hashed or rewritten is a request's doing. To be called when
    /// nobody reads the source any more.
    ///
    /// # Errors
    /// [`EngineError`] naming the limit.
    pub fn admit(self) -> Result<Engine, EngineError> {
        let Self {
            options,
            loaded,
            chosen,
            ..
        } = self;
        let started = Instant::now();
        let regime = regime(&loaded.spec, &options, chosen.kind)?;
        let image = loaded.image.clone();
        let Opened {
            slots,
            experts,
            residency,
            settings,
        } = residency::open(&loaded.spec, loaded.image, self.cache, chosen.device.is_none())?;
        let backend = match (&chosen.device, chosen.executor) {
            (Some(device), ExecutorKind::Cuda(executor)) => {
                let image = image.as_deref();
                device.backend(&loaded.spec, image, loaded.encoding, options.dense, executor)?
            }
            (_, executor) => build_host(executor, options.threads, slots, loaded.encoding)?,
        };
        let plan = backend.plan(&loaded.spec, &regime)?;
        let model = backend.open(&loaded.spec, &plan, &loaded.dense)?;
        Ok(Engine {
            settings: Settings {
                model: self.identity,
                backend: chosen.kind,
                backend_reason: chosen.reason,
                device_memory: chosen.device.as_ref().map(|d| d.memory().clone()),
                prefill_executor: model.prefill_executor(),
                decode_executor: model.executor(),
                residency: settings,
                budget: self.fit,
                experts: ExpertsRecord::new(loaded.encoding, loaded.quantizer),
                activations: options.activations,
                dense: options.dense,
                context: regime.context,
                model_context: loaded.spec.context,
                prefill_chunk: chosen.kind.prefill_chunk(),
                threads: match chosen.kind {
                    BackendKind::CpuReference => 1,
                    BackendKind::Cpu | BackendKind::Cuda => self.threads,
                },
            },
            memory: self.memory,
            timings: OpenTimings {
                load_s: self.load_s,
                open_s: started.elapsed().as_secs_f64(),
            },
            device: chosen.device,
            spec: loaded.spec,
            layout: loaded.layout,
            notes: loaded.notes,
            details: loaded.details,
            model,
            experts,
            residency,
        })
    }
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
        LoadedEngine::load(source, options, progress)?.admit()
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

    /// What is counted about its experts; it stays usable when the engine has become a session.
    #[must_use]
    pub fn residency(&self) -> Residency {
        self.residency.clone()
    }

    /// What it holds of host memory.
    #[must_use]
    pub fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// The card that it runs on, if it does; usable when the engine has become a session or is gone.
    #[must_use]
    pub fn device(&self) -> Option<Device> {
        self.device.clone()
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

    /// The notes and what belongs into a record without being news.
    #[must_use]
    pub fn record(&self) -> Vec<String> {
        [self.notes(), &self.details].concat()
    }

    /// For measurements.
    pub fn evaluator(&mut self) -> Evaluator<'_> {
        Evaluator {
            model: self.model.as_mut(),
            experts: &self.experts,
            chunk: self.settings.prefill_chunk,
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

/// Host memory that `source` would take under `options`, by the same sums that [`Engine::open`] reports. No card is
/// looked for: without a backend that is named it is that of the CPU backend.
///
/// # Errors
/// As [`Engine::open`].
pub fn predict_host_memory(source: &ModelSource, options: &EngineOptions) -> Result<HostMemory, EngineError> {
    let kind = named(options);
    Ok(predict(source, options, (kind, kind.executor(options.executor)?))?.memory)
}

/// The backend that is named; else the one that every machine has.
fn named(options: &EngineOptions) -> BackendKind {
    match options.backend {
        BackendChoice::Named(kind) => kind,
        BackendChoice::Automatic => BackendKind::Cpu,
    }
}

/// What is known before a byte of weights is read.
struct Prediction {
    memory: HostMemory,
    cache: Option<(Geometry, Policy)>,
    fit: Option<Fit>,
}

fn predict(
    source: &ModelSource,
    options: &EngineOptions,
    (kind, executor): (BackendKind, ExecutorKind),
) -> Result<Prediction, EngineError> {
    let (spec, encoding) = (source.spec(), encoding(source, options.experts));
    let regime = regime(spec, options, kind)?;
    let record = record_bytes(spec, kind, encoding);
    let plan = plan(spec, options, (kind, executor), encoding, &regime)?;
    let threads = pool(options.threads.map_or(0, NonZeroUsize::get))?.current_num_threads();
    let weights = HostBytes::predict(spec, encoding, options.dense, kind.tiling(), threads);
    if kind == BackendKind::Cuda {
        return Ok(Prediction {
            memory: HostMemory::new(weights, page_locked(spec, &regime, record)),
            cache: None,
            fit: None,
        });
    }
    let beside = || [&[("non-routed weights", weights.dense)], plan.ledger.as_slice()].concat();
    let (cache, fit) = match &options.cache {
        None => (None, None),
        Some(asked) => {
            let (geometry, fit) = residency::decide(spec, asked, beside, record)?;
            (Some((geometry, asked.policy)), fit)
        }
    };
    let device = cache.as_ref().map(|(geometry, _)| device_bytes(geometry, record));
    let device = device.as_ref().map_or(&[] as &[_], |d| d.as_slice());
    Ok(Prediction {
        memory: HostMemory::new(weights, [&plan.ledger, device].concat()),
        cache,
        fit,
    })
}

/// Host memory that a card reads and writes by itself.
fn page_locked(spec: &ModelSpec, regime: &Regime, record: usize) -> Vec<(&'static str, u64)> {
    vec![
        (
            "page-locked embedding table",
            (spec.vocab * spec.hidden * 2) as u64,
        ),
        ("page-locked logits", (regime.max_rows * spec.vocab * 4) as u64),
        ("page-locked staging buffers", (STAGING_BUFFERS * record) as u64),
    ]
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

/// What a session of `spec` under `options` holds its prompts to.
///
/// # Errors
/// [`EngineError::ContextTooLong`].
pub fn limits(spec: &ModelSpec, options: &EngineOptions) -> Result<Limits, EngineError> {
    Ok(Limits {
        context: context(spec, options)?,
        model_context: spec.context,
        prefill_chunk: match options.backend {
            BackendChoice::Named(kind) => kind.prefill_chunk(),
            BackendChoice::Automatic => PREFILL_CHUNK,
        },
    })
}

pub(crate) fn regime(
    spec: &ModelSpec,
    options: &EngineOptions,
    kind: BackendKind,
) -> Result<Regime, EngineError> {
    let context = context(spec, options)?;
    Ok(Regime {
        activations: options.activations,
        context,
        sequences: 1,
        max_rows: kind.prefill_chunk(),
    })
}
