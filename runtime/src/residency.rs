//! Which experts are where the backend executes them from: all of them, or the cache's share; and what was counted
//! about it.

use std::io;
use std::sync::Arc;

use horizon_cache::report::{LayerObservations, Observations, ObservedCounts};
use horizon_cache::{Geometry, HostStore, INITIAL_PLACEMENT, PROFILE, Policy, ResidentV1, SetupError};
use horizon_core::artifact::Digest;
use horizon_core::backend::ExecutorId;
use horizon_core::cpu::transport::HostTransport;
use horizon_core::ids::{ExpertId, GenerationId, LayerId};
use horizon_core::image::{ExpertImage, NoExperts};
use horizon_core::memory::align_up;
use horizon_core::observe::{Counter, Observation, ProcessMark};
use horizon_core::provider::{
    AcquireError, CacheFault, ExpertProvider, FullyResident, GroupLease, Hold, RoutedGroup, SlotMemory,
};
use horizon_core::spec::ModelSpec;
use horizon_core::transport::Completion;
use serde::Serialize;
use thiserror::Error;

use crate::budget::{BudgetError, Fit, Ledger, fit};
use crate::engine::Settings;

/// Staging buffers of the cache.
pub const STAGING_BUFFERS: usize = 4;
/// Name of the profile without a cache.
pub const FULLY_RESIDENT: &str = "fully-resident";

/// A cache that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// How many experts of each layer are resident.
    pub capacity: Capacity,
    /// Spare slots, shared by all layers; `None`: as many as a token has experts.
    pub spares: Option<usize>,
    /// Which experts make room.
    pub policy: Policy,
}

/// How many experts of each layer are resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// So many.
    Experts(usize),
    /// As many as fit.
    Budget {
        /// Bytes that the device may use in all.
        bytes: u64,
        /// So many, if they fit; otherwise it is an error.
        asked: Option<usize>,
    },
}

/// Sizes and names that were decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ResidencySettings {
    /// [`PROFILE`] or [`FULLY_RESIDENT`].
    pub profile: &'static str,
    /// Resident experts a layer; `None`: all, without a cache.
    pub capacity: Option<usize>,
    /// Spare slots.
    pub spares: Option<usize>,
    /// Staging buffers.
    pub staging_buffers: Option<usize>,
    /// Which experts make room.
    pub policy: Option<Policy>,
    /// Digest of the host store's records, taken before admission ([`HostStore::identity`]).
    pub host_store_sha256: Option<Digest>,
    /// Which experts are resident before the first request.
    pub initial_placement: &'static str,
}

impl ResidencySettings {
    /// Of a cache with its sizes, its policy and the identity of its host store, or of none.
    #[must_use]
    pub fn new(cache: Option<(&Geometry, Policy, Digest)>) -> Self {
        Self {
            profile: cache.map_or(FULLY_RESIDENT, |_| PROFILE),
            capacity: cache.map(|(g, _, _)| g.capacity),
            spares: cache.map(|(g, _, _)| g.spares),
            staging_buffers: cache.map(|_| STAGING_BUFFERS),
            policy: cache.map(|(_, p, _)| p),
            host_store_sha256: cache.map(|(_, _, identity)| identity),
            initial_placement: cache.map_or("all experts", |_| INITIAL_PLACEMENT),
        }
    }
}

/// A cache that cannot be had.
#[derive(Debug, Error)]
pub enum ResidencyError {
    /// Nothing to keep.
    #[error("-c and --vram say how many routed experts are resident; the model has none")]
    NothingRouted,
    /// The budget.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// More spares than experts.
    #[error("--spares {spares}: the model has {experts} routed experts in all")]
    Spares {
        /// Spares.
        spares: usize,
        /// Experts of all layers.
        experts: usize,
    },
    /// Slots and staging buffers.
    #[error("{bytes} bytes for expert slots and staging buffers cannot be had: {source}")]
    Memory {
        /// How many.
        bytes: u64,
        /// What the system says.
        source: io::Error,
    },
    /// The cache's own rules.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

impl ResidencyError {
    /// Whether what was asked for can be had of no machine.
    #[must_use]
    pub fn is_mistake(&self) -> bool {
        match self {
            Self::NothingRouted | Self::Spares { .. } | Self::Budget(_) => true,
            Self::Setup(e) => matches!(e, SetupError::Capacity { .. } | SetupError::Spares { .. }),
            Self::Memory { .. } => false,
        }
    }
}

/// The sizes of a cache of `capacity` resident experts a layer (`None`: the fewest that the model can run with) and
/// `spares` spare slots (`None`: as many as a token has experts).
///
/// # Errors
/// [`ResidencyError`] when the model cannot have it.
pub fn geometry(
    spec: &ModelSpec,
    capacity: Option<usize>,
    spares: Option<usize>,
) -> Result<Geometry, ResidencyError> {
    let moe = spec.moe().ok_or(ResidencyError::NothingRouted)?;
    let geometry = Geometry {
        layers: spec.moe_layers().collect(),
        experts: moe.experts,
        top_k: moe.top_k,
        capacity: capacity.unwrap_or(moe.top_k),
        spares: spares.unwrap_or(moe.top_k),
    };
    geometry.check()?;
    let experts = geometry.layers.len() * geometry.experts;
    if geometry.spares > experts {
        return Err(ResidencyError::Spares {
            spares: geometry.spares,
            experts,
        });
    }
    Ok(geometry)
}

/// The sizes of the cache that is asked for, and how they fit a budget if there is one. `beside` is what the device
/// holds beside the cache; a tiled record has `record_bytes`.
///
/// # Errors
/// [`ResidencyError`] when the model cannot have it, or the budget does not hold it.
pub fn decide(
    spec: &ModelSpec,
    asked: &CacheOptions,
    beside: impl FnOnce() -> Ledger,
    record_bytes: usize,
) -> Result<(Geometry, Option<Fit>), ResidencyError> {
    match asked.capacity {
        Capacity::Experts(capacity) => Ok((geometry(spec, Some(capacity), asked.spares)?, None)),
        Capacity::Budget { bytes, asked: given } => {
            // A capacity that the model cannot have is that mistake, whatever the budget.
            geometry(spec, given, asked.spares)?;
            let least = geometry(spec, None, asked.spares)?;
            let fit = fit(bytes, &least, given, &beside(), record_bytes)?;
            let geometry = Geometry {
                capacity: fit.capacity,
                ..least
            };
            Ok((geometry, Some(fit)))
        }
    }
}

/// Bytes of the slots of resident experts, of spare slots and of staging buffers for tiled records of `record_bytes`.
#[must_use]
pub fn device_bytes(geometry: &Geometry, record_bytes: usize) -> [(&'static str, u64); 3] {
    let stride = align_up(record_bytes) as u64;
    let resident = geometry.slots() - geometry.spares;
    [
        ("expert slots", resident as u64 * stride),
        ("spare slots", geometry.spares as u64 * stride),
        ("staging buffers", STAGING_BUFFERS as u64 * stride),
    ]
}

/// Slots to execute from, and who decides what is in them.
pub(crate) struct Opened {
    pub slots: Arc<dyn SlotMemory>,
    pub experts: Arc<dyn ExpertProvider>,
    pub residency: Residency,
    pub settings: ResidencySettings,
}

/// Fills the slots and admits requests. Without a cache, `acquires` says whether the backend asks for each group.
///
/// # Errors
/// [`ResidencyError`].
pub(crate) fn open(
    spec: &ModelSpec,
    image: Option<Arc<ExpertImage>>,
    cache: Option<(Geometry, Policy)>,
    acquires: bool,
) -> Result<Opened, ResidencyError> {
    if let Some((geometry, policy)) = cache {
        let image = image.ok_or(ResidencyError::NothingRouted)?;
        let record_bytes = image.record_bytes();
        let transport = HostTransport::new(geometry.slots(), STAGING_BUFFERS, record_bytes);
        let transport = Arc::new(transport.map_err(|source| ResidencyError::Memory {
            bytes: device_bytes(&geometry, record_bytes).iter().map(|(_, b)| b).sum(),
            source,
        })?);
        let store = Arc::new(HostStore::new(image, geometry.layers.clone()));
        let settings = ResidencySettings::new(Some((&geometry, policy, store.identity())));
        let cache = ResidentV1::new(geometry, policy, store, transport.clone())?;
        let cache = Arc::new(cache);
        return Ok(Opened {
            slots: transport,
            experts: cache.clone(),
            residency: Residency(Source::Cache(cache)),
            settings,
        });
    }
    let slots: Arc<dyn SlotMemory> = match &image {
        Some(image) => image.clone(),
        None => Arc::new(NoExperts),
    };
    let everything = Arc::new(Everything::new(spec, image, acquires));
    Ok(Opened {
        slots,
        experts: everything.clone(),
        residency: Residency(Source::Everything(everything)),
        settings: ResidencySettings::new(None),
    })
}

/// What was counted since admission, to be asked for at any time.
#[derive(Clone)]
pub struct Residency(Source);

#[derive(Clone)]
enum Source {
    Cache(Arc<ResidentV1>),
    Everything(Arc<Everything>),
}

impl Residency {
    /// The counts so far.
    #[must_use]
    pub fn observations(&self) -> Observations {
        match &self.0 {
            Source::Cache(cache) => cache.observations(),
            Source::Everything(everything) => everything.observations(),
        }
    }
}

/// Executors of routed groups, one a phase whatever the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Executors {
    /// Of steps with many rows.
    pub prefill: ExecutorId,
    /// Of steps with one.
    pub decode: ExecutorId,
}

/// What reports say about residency.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ResidencyReport {
    /// What was decided.
    #[serde(flatten)]
    pub settings: ResidencySettings,
    /// What computed.
    pub executors: Executors,
    /// What was counted since admission.
    pub observations: Observations,
}

impl ResidencyReport {
    /// The counts so far of an engine with `settings`.
    #[must_use]
    pub fn new(settings: &Settings, residency: &Residency) -> Self {
        Self {
            settings: settings.residency,
            executors: Executors {
                prefill: settings.prefill_executor,
                decode: settings.decode_executor,
            },
            observations: residency.observations(),
        }
    }
}

/// Every expert always resident, straight from the host image; counts what it serves.
struct Everything {
    experts: Option<FullyResident>,
    layers: Vec<(LayerId, Counter)>,
    /// Whether what is served passes here: a card chooses among its slots by itself.
    acquires: bool,
    admitted: ProcessMark,
}

impl Everything {
    fn new(spec: &ModelSpec, image: Option<Arc<ExpertImage>>, acquires: bool) -> Self {
        Self {
            experts: image.map(FullyResident::new),
            layers: spec.moe_layers().map(|l| (l, Counter::new())).collect(),
            acquires,
            admitted: ProcessMark::now(),
        }
    }

    /// Only what something counts: there is no transfer whose bytes could be observed.
    fn observations(&self) -> Observations {
        let counts = |hits| ObservedCounts {
            hits: if self.acquires {
                Observation::Observed(hits)
            } else {
                Observation::Unknown
            },
            misses: Observation::Unknown,
            h2d_bytes: Observation::Unknown,
            staging_waits: Observation::Unknown,
            lease_waits: Observation::Unknown,
            publications: Observation::Unknown,
            evictions: Observation::Unknown,
            failures: Observation::Unknown,
        };
        let layers = self.layers.iter().map(|(layer, hits)| LayerObservations {
            layer: *layer,
            counts: counts(hits.get()),
        });
        Observations {
            expert_d2h_bytes: Observation::Unknown,
            writebacks: Observation::Observed(self.admitted.thawed_writes()),
            host_rewrites: Observation::Observed(self.admitted.protections_lifted()),
            request_sha: Observation::Observed(self.admitted.hashed_bytes()),
            request_source_reads: Observation::Observed(self.admitted.source_reads()),
            total: counts(self.layers.iter().map(|(_, hits)| hits.get()).sum()),
            layers: layers.collect(),
        }
    }
}

impl ExpertProvider for Everything {
    fn capture(&self) -> Hold {
        self.experts.as_ref().map_or_else(
            || Hold {
                generation: GenerationId(0),
                keep: Arc::new(()),
            },
            FullyResident::capture,
        )
    }

    fn complete(&self) -> bool {
        true
    }

    fn waves(&self, _: &Hold, group: &RoutedGroup<'_>) -> Vec<Vec<ExpertId>> {
        vec![group.experts.to_vec()]
    }

    fn acquire(
        &self,
        hold: &mut Hold,
        group: &RoutedGroup<'_>,
        passed: Completion,
    ) -> Result<Box<dyn GroupLease>, AcquireError> {
        let layer = group.layer;
        let fault = || CacheFault {
            layer,
            reason: "the layer has no routed experts".into(),
        };
        let row = self.layers.binary_search_by_key(&layer, |(l, _)| *l);
        let (experts, row) = self.experts.as_ref().zip(row.ok()).ok_or_else(fault)?;
        let lease = experts.acquire(hold, group, passed)?;
        self.layers[row].1.add(group.experts.len() as u64);
        Ok(lease)
    }

    fn release(&self, _: Hold, _: Completion) {}
}
