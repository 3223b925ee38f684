//! Replays a trace without the model: what a policy would have hit at a capacity, and the best that any could have.
//!
//! A policy is replayed with exactly the semantics of [`ResidentV1`](crate::ResidentV1) serving one sequence: the
//! same groups, the same waves, the same victims. The bound is the [`optimum`](Contender::Optimum), which knows the
//! future.

mod optimum;
mod policy;
mod workload;

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

pub use policy::PolicyReplay;
pub use workload::{Group, Workload};

use crate::policy::Policy;
use crate::{Geometry, SetupError};

/// Who is compared: a policy, or the bound on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contender {
    /// A policy that the cache has.
    Policy(Policy),
    /// The offline optimum: it evicts what is needed again last (Belady's MIN for groups). Where a group does not fit
    /// at once it may even decline to keep members of the group, which the cache cannot; it is a bound, not a policy.
    Optimum,
}

impl Contender {
    /// The policies, and the optimum.
    #[must_use]
    pub fn all() -> Vec<Self> {
        Policy::ALL
            .into_iter()
            .map(Self::Policy)
            .chain([Self::Optimum])
            .collect()
    }

    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Policy(policy) => policy.name(),
            Self::Optimum => "optimum",
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Contender {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Self::all().into_iter().find(|c| c.name() == s).ok_or_else(|| {
            let known: Vec<_> = Self::all().into_iter().map(Self::name).collect();
            format!("there is no policy {s:?}; there are {}", known.join(", "))
        })
    }
}

impl Serialize for Contender {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Hits and misses, in experts of groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Experts that were resident when their group was asked for.
    pub hits: u64,
    /// Experts that had to be brought.
    pub misses: u64,
}

impl Tally {
    /// Experts asked for.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.hits + self.misses
    }

    /// Share of the experts asked for that were resident; `None` if none was asked for.
    #[must_use]
    pub fn hit_rate(&self) -> Option<f64> {
        (self.requests() > 0).then(|| self.hits as f64 / self.requests() as f64)
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
    }
}

/// What a replay counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Steps of one row.
    pub decode: Tally,
    /// Steps of several rows.
    pub prefill: Tally,
    /// Bytes moved to the device: all misses, a record each.
    pub bytes: u64,
    /// By layer, steps of both kinds.
    pub layers: Vec<Tally>,
}

impl Counts {
    fn new(layers: usize) -> Self {
        Self {
            layers: vec![Tally::default(); layers],
            ..Self::default()
        }
    }

    /// Steps of both kinds.
    #[must_use]
    pub fn total(&self) -> Tally {
        let mut total = self.decode;
        total += self.prefill;
        total
    }

    fn add(&mut self, group: &Group<'_>, misses: usize) {
        let tally = Tally {
            hits: (group.experts.len() - misses) as u64,
            misses: misses as u64,
        };
        self.layers[group.layer] += tally;
        if group.rows == 1 {
            self.decode += tally;
        } else {
            self.prefill += tally;
        }
    }
}

/// Replays `workload` on a cache of `capacity` experts a layer and `spares` spare slots, which starts with the
/// canonical placement.
///
/// # Errors
/// [`SetupError`] for a capacity or a number of spares that the cache would refuse.
pub fn simulate(
    workload: &Workload,
    contender: Contender,
    capacity: usize,
    spares: usize,
) -> Result<Counts, SetupError> {
    let geometry = Geometry {
        capacity,
        spares,
        ..workload.geometry().clone()
    };
    geometry.check()?;
    let mut counts = Counts::new(geometry.layers.len());
    match contender {
        Contender::Policy(policy) => {
            let mut replay = PolicyReplay::new(geometry, policy);
            workload
                .groups()
                .for_each(|group| counts.add(&group, replay.acquire(group.layer, group.experts)));
        }
        Contender::Optimum => optimum::replay(workload, &geometry, &mut counts),
    }
    counts.bytes = counts.total().misses * workload.record_bytes();
    Ok(counts)
}
