//! What the cache counted: per layer and in all, each count an observation.

use horizon_core::ids::LayerId;
use horizon_core::observe::{Counter, Observation, ProcessMark};
use serde::Serialize;

/// Counters of one layer.
#[derive(Debug, Default)]
pub(crate) struct LayerCounters {
    pub hits: Counter,
    pub misses: Counter,
    pub h2d_bytes: Counter,
    pub staging_waits: Counter,
    pub lease_waits: Counter,
    pub publications: Counter,
    pub evictions: Counter,
    pub failures: Counter,
}

/// Counts of one layer, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Experts of acquired groups that were resident.
    pub hits: u64,
    /// Experts of acquired groups that had to be brought.
    pub misses: u64,
    /// Bytes brought from host to device for them.
    pub h2d_bytes: u64,
    /// Times a transfer waited for a staging buffer.
    pub staging_waits: u64,
    /// Times a miss waited for readers to let go of a slot.
    pub lease_waits: u64,
    /// Generations published.
    pub publications: u64,
    /// Experts that lost their slot.
    pub evictions: u64,
    /// Miss transactions that failed before publication.
    pub failures: u64,
}

impl LayerCounters {
    pub fn counts(&self) -> Counts {
        Counts {
            hits: self.hits.get(),
            misses: self.misses.get(),
            h2d_bytes: self.h2d_bytes.get(),
            staging_waits: self.staging_waits.get(),
            lease_waits: self.lease_waits.get(),
            publications: self.publications.get(),
            evictions: self.evictions.get(),
            failures: self.failures.get(),
        }
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, o: Self) {
        self.hits += o.hits;
        self.misses += o.misses;
        self.h2d_bytes += o.h2d_bytes;
        self.staging_waits += o.staging_waits;
        self.lease_waits += o.lease_waits;
        self.publications += o.publications;
        self.evictions += o.evictions;
        self.failures += o.failures;
    }
}

/// Everything the profile observes since admission. The first five are the zeros of the contract: each is counted
/// at the only place where it could happen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Observations {
    /// Bytes of experts copied from device to host (C10).
    pub expert_d2h_bytes: Observation,
    /// Times that protected memory was handed out for writing: what is written back to the host store has to pass
    /// there (C10).
    pub writebacks: Observation,
    /// Times that the protection of such memory was lifted, before anything could be written (C2).
    pub host_rewrites: Observation,
    /// Bytes hashed since admission (C2).
    pub request_sha: Observation,
    /// Reads of model files since admission (C1).
    pub request_source_reads: Observation,
    /// Sums over the layers.
    #[serde(flatten)]
    pub total: ObservedCounts,
    /// By layer.
    pub layers: Vec<LayerObservations>,
}

/// [`Counts`] as observations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "the fields are those of Counts")]
pub struct ObservedCounts {
    pub hits: Observation,
    pub misses: Observation,
    pub h2d_bytes: Observation,
    pub staging_waits: Observation,
    pub lease_waits: Observation,
    pub publications: Observation,
    pub evictions: Observation,
    pub failures: Observation,
}

impl From<Counts> for ObservedCounts {
    fn from(c: Counts) -> Self {
        let [
            hits,
            misses,
            h2d_bytes,
            staging_waits,
            lease_waits,
            publications,
            evictions,
            failures,
        ] = [
            c.hits,
            c.misses,
            c.h2d_bytes,
            c.staging_waits,
            c.lease_waits,
            c.publications,
            c.evictions,
            c.failures,
        ]
        .map(Observation::Observed);
        Self {
            hits,
            misses,
            h2d_bytes,
            staging_waits,
            lease_waits,
            publications,
            evictions,
            failures,
        }
    }
}

/// Observations of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerObservations {
    /// Which.
    pub layer: LayerId,
    /// Its counts.
    #[serde(flatten)]
    pub counts: ObservedCounts,
}

pub(crate) fn observations(
    layers: impl Iterator<Item = (LayerId, Counts)>,
    admitted: &ProcessMark,
    expert_d2h_bytes: u64,
) -> Observations {
    let mut total = Counts::default();
    let layers = layers
        .map(|(layer, counts)| {
            total += counts;
            LayerObservations {
                layer,
                counts: counts.into(),
            }
        })
        .collect();
    Observations {
        expert_d2h_bytes: Observation::Observed(expert_d2h_bytes),
        writebacks: Observation::Observed(admitted.thawed_writes()),
        host_rewrites: Observation::Observed(admitted.protections_lifted()),
        request_sha: Observation::Observed(admitted.hashed_bytes()),
        request_source_reads: Observation::Observed(admitted.source_reads()),
        total: total.into(),
        layers,
    }
}
