//! Use of a cache on the simulated device: several holders, interleaved on one thread, each step checked. The steps
//! come from a seed ([`Workload::run`]) or from a test ([`Workload::apply`]).

use horizon_core::ids::ExpertId;
use horizon_core::observe::Observation;
use horizon_core::provider::{AcquireError, ExpertProvider, GroupLease, Hold, RoutedGroup};
use horizon_core::transport::{Completion, Transport};

use super::checker::Checker;
use super::faults::{Fault, Faults};
use super::transport::{Injected, SimTransport, layers};
use super::{Records, Rng};
use crate::geometry::Geometry;
use crate::policy::Policy;
use crate::resident_v1::ResidentV1;
use crate::sync::Shared;

/// One step of one user. Holders and layers count modulo how many there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// A new holder captures the current generation.
    Capture,
    /// A holder's step ends; device work of this length may still read what it had leased.
    Release {
        /// Which.
        holder: usize,
        /// How long.
        work: Option<u64>,
    },
    /// A holder asks for a group; device work of this length may still read what it had leased before.
    Acquire {
        /// Which.
        holder: usize,
        /// Position of the layer.
        layer: usize,
        /// A bit an expert.
        experts: u16,
        /// Cut into waves, as a backend does.
        waves: bool,
        /// How long.
        work: Option<u64>,
    },
    /// A reader looks again at what it has leased.
    Look {
        /// Which.
        holder: usize,
    },
    /// Virtual time passes.
    Complete(u64),
    /// The next submission suffers this.
    Fail(Fault),
}

/// What one life of a cache came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Acquisitions asked for.
    pub acquisitions: u64,
    /// Those of them that missed: miss transactions that were begun.
    pub transactions: u64,
    /// Acquisitions that failed and could be retried.
    pub failed: u64,
    /// Those that failed because readers kept all victims.
    pub short: u64,
    /// Groups that were larger than what fits, and ran in waves.
    pub waves: u64,
    /// Experts missed.
    pub misses: u64,
    /// Experts hit.
    pub hits: u64,
    /// Records that readers compared with the host store.
    pub compared: u64,
    /// Lives that ended in a fault.
    pub faulted: u64,
    /// Faults injected that leave nothing in doubt.
    pub retryable: u64,
    /// Faults injected that do.
    pub ambiguous: u64,
}

impl std::ops::AddAssign for Summary {
    fn add_assign(&mut self, o: Self) {
        self.acquisitions += o.acquisitions;
        self.transactions += o.transactions;
        self.failed += o.failed;
        self.short += o.short;
        self.waves += o.waves;
        self.misses += o.misses;
        self.hits += o.hits;
        self.compared += o.compared;
        self.faulted += o.faulted;
        self.retryable += o.retryable;
        self.ambiguous += o.ambiguous;
    }
}

/// A group that a holder has leased.
struct Leased {
    lease: Box<dyn GroupLease>,
    generation: u64,
    layer: usize,
    experts: Vec<ExpertId>,
}

struct Holder {
    hold: Hold,
    lease: Option<Leased>,
    /// The end of all device work of this holder so far.
    passed: Completion,
}

/// A cache, its device and its users.
pub struct Workload {
    rng: Rng,
    geometry: Geometry,
    sim: Shared<SimTransport>,
    cache: ResidentV1,
    holders: Vec<Holder>,
    most_holders: usize,
    summary: Summary,
}

/// What an acquisition came to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Leased,
    Failed,
    TooLarge,
    Faulted,
}

impl Workload {
    /// A cache of random geometry and policy on a device with `faults`; everything follows from `seed`.
    ///
    /// # Panics
    /// When an oracle finds a clause broken, here and everywhere below.
    #[must_use]
    pub fn new(seed: u64, faults: Faults) -> Self {
        let mut rng = Rng::new(seed);
        let experts = rng.within(3, 12);
        let top_k = rng.within(1, experts.min(4));
        let geometry = Geometry {
            layers: layers(rng.within(1, 4)),
            experts,
            top_k,
            capacity: rng.within(top_k, experts),
            spares: rng.within(top_k, 2 * top_k + 1),
        };
        let policy = Policy::ALL[rng.within(0, Policy::ALL.len() - 1)];
        let (staging, record_bytes) = (rng.within(1, 4), rng.within(1, 40));
        let workload = Self::of(geometry, policy, staging, record_bytes, rng.bits());
        workload.sim.inject(faults);
        workload
    }

    /// A cache of this geometry on a device where nothing fails unless it is told to.
    #[must_use]
    pub fn of(geometry: Geometry, policy: Policy, staging: usize, record_bytes: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let (layers, slots) = (geometry.layers.len(), geometry.slots());
        let records = Shared::new(Records::new(layers, geometry.experts, record_bytes, rng.bits()));
        let checker = Checker::new(geometry.clone(), staging, records.clone());
        let sim = SimTransport::new(slots, staging, record_bytes, checker, rng.bits());
        let sim = Shared::new(sim);
        let cache = ResidentV1::new(geometry.clone(), policy, records, sim.clone())
            .expect("nothing fails yet")
            // Nobody else runs: waiting for a reader would be in vain.
            .with_patience(0);
        sim.admitted(&cache.census().0);
        Self {
            most_holders: rng.within(1, 5),
            rng,
            geometry,
            sim,
            cache,
            holders: Vec::new(),
            summary: Summary::default(),
        }
    }

    /// Up to `steps` random steps, fewer when the cache faults, and the end.
    #[must_use]
    pub fn run(mut self, steps: usize) -> Summary {
        for _ in 0..steps {
            let op = self.draw();
            if !self.apply(&op) {
                break;
            }
        }
        self.end()
    }

    fn draw(&mut self) -> Op {
        let holder = self.rng.within(0, 7);
        let length = self.rng.below(1_000);
        let work = (self.rng.below(2) == 0).then_some(length);
        let (experts, top_k) = (self.geometry.experts, self.geometry.top_k);
        let (waves, most) = match self.rng.below(100) {
            0..10 if self.holders.len() < self.most_holders => return Op::Capture,
            0..15 => return Op::Release { holder, work },
            15..25 => return Op::Complete(2 * length),
            25..35 => return Op::Look { holder },
            35..50 => (true, experts),
            50..52 => (false, experts),
            _ => (false, top_k),
        };
        let size = self.rng.within(1, most);
        let group = self.rng.experts(size, experts);
        Op::Acquire {
            holder,
            layer: self.rng.within(0, 3),
            experts: group.iter().fold(0, |bits, e| bits | 1 << e.0),
            waves,
            work,
        }
    }

    /// One step; `false` when the cache has faulted.
    pub fn apply(&mut self, op: &Op) -> bool {
        match *op {
            Op::Capture => self.capture(),
            Op::Release { holder, work } => self.release(holder, work),
            Op::Look { holder } => self.look(holder),
            Op::Complete(time) => self.sim.advance(time),
            Op::Fail(fault) => self.sim.plan([Some(fault)]),
            Op::Acquire {
                holder,
                layer,
                experts,
                waves,
                work,
            } => {
                let layer = layer % self.geometry.layers.len();
                let all = (0u32..).map(ExpertId).take(self.geometry.experts);
                let group: Vec<_> = all.filter(|e| experts >> e.0 & 1 == 1).collect();
                if self.holders.is_empty() {
                    self.capture();
                }
                let holder = holder % self.holders.len();
                let outcome = if waves {
                    self.in_waves(holder, layer, &group, work)
                } else {
                    self.acquire(holder, layer, &group, work)
                };
                if outcome == Outcome::Faulted {
                    self.summary.faulted = 1;
                    return false;
                }
            }
        }
        let (maps, census) = self.cache.census();
        self.sim.conserved(&maps, &census);
        true
    }

    fn capture(&mut self) {
        let hold = self.cache.capture();
        self.sim.hold(hold.generation.0);
        self.holders.push(Holder {
            hold,
            lease: None,
            passed: Completion::DONE,
        });
    }

    /// Ends a step, whose device work may still read what it had leased.
    fn release(&mut self, holder: usize, work: Option<u64>) {
        if self.holders.is_empty() {
            return;
        }
        let holder = holder % self.holders.len();
        let passed = self.pass(holder, work);
        let holder = self.holders.swap_remove(holder);
        self.sim.let_go(holder.hold.generation.0);
        self.cache.release(holder.hold, passed);
    }

    /// The holder is done with its lease: at once, or when the device has read it.
    fn pass(&mut self, holder: usize, work: Option<u64>) -> Completion {
        if let Some(leased) = self.holders[holder].lease.take() {
            self.compare(&leased);
            if let Some(time) = work {
                let addresses = leased.lease.wait().expect("compared above");
                let reads: Vec<_> = leased
                    .experts
                    .iter()
                    .zip(addresses)
                    .map(|(e, a)| (*a, leased.layer, *e))
                    .collect();
                self.holders[holder].passed = self.sim.work(&reads, time);
            }
            // The hold, given up later with `passed`, protects the slots from here on.
            self.sim.let_go(leased.generation);
        }
        self.holders[holder].passed
    }

    fn compare(&mut self, leased: &Leased) {
        let addresses = leased.lease.wait().expect("a lease is readable");
        assert_eq!(addresses.len(), leased.experts.len());
        for (expert, address) in leased.experts.iter().zip(addresses) {
            self.sim.assert_shows(*address, leased.layer, *expert);
            self.summary.compared += 1;
        }
    }

    /// A lease shows the same as when it was given.
    fn look(&mut self, holder: usize) {
        if self.holders.is_empty() {
            return;
        }
        let holder = holder % self.holders.len();
        if let Some(leased) = self.holders[holder].lease.take() {
            self.compare(&leased);
            self.holders[holder].lease = Some(leased);
        }
    }

    /// A group cut as a backend cuts it (C14).
    fn in_waves(&mut self, holder: usize, layer: usize, experts: &[ExpertId], work: Option<u64>) -> Outcome {
        let group = RoutedGroup {
            layer: self.geometry.layers[layer],
            experts,
        };
        let waves = self.cache.waves(&self.holders[holder].hold, &group);
        let mut all: Vec<_> = waves.concat();
        all.sort_unstable();
        assert_eq!(all, experts, "C14: waves are a cut of the group");
        self.summary.waves += u64::from(waves.len() > 1);
        for wave in waves {
            match self.acquire(holder, layer, &wave, work) {
                Outcome::Leased => {}
                Outcome::TooLarge => panic!("C14: a wave of {} does not fit", wave.len()),
                other => return other,
            }
        }
        Outcome::Leased
    }

    fn acquire(&mut self, holder: usize, layer: usize, experts: &[ExpertId], work: Option<u64>) -> Outcome {
        let passed = self.pass(holder, work);
        let group = RoutedGroup {
            layer: self.geometry.layers[layer],
            experts,
        };
        let generation = self.holders[holder].hold.generation.0;
        let hit = self.sim.shows(generation, layer, experts);
        if !hit {
            self.sim.let_go(generation);
        }
        let missing = self.sim.missing(layer, experts);
        let before = (self.sim.injected(), self.sim.submissions());
        self.summary.acquisitions += 1;
        let fits = experts.len() <= self.geometry.capacity && missing <= self.geometry.spares;
        self.summary.transactions += u64::from(!hit && missing > 0 && fits);
        let held = &mut self.holders[holder].hold;
        let outcome = self.cache.acquire(held, &group, passed);
        let now = held.generation.0;
        if !hit && !matches!(outcome, Err(AcquireError::Fault(_))) {
            self.sim.hold(now);
        }
        match outcome {
            Ok(lease) => {
                let shown = self.sim.shows(now, layer, experts);
                assert!(shown, "C4: the hold moves to the generation that shows the group");
                if hit {
                    assert_eq!(now, generation, "C5: a hit moves no hold");
                    assert_eq!(
                        self.sim.submissions(),
                        before.1,
                        "C5: nothing is copied for a hit"
                    );
                }
                let missed = if hit { 0 } else { missing as u64 };
                assert!(missed == 0 || fits, "C14: {missed} of {} fit", experts.len());
                self.summary.misses += missed;
                self.summary.hits += experts.len() as u64 - missed;
                self.sim.hold(now);
                let leased = Leased {
                    lease,
                    generation: now,
                    layer,
                    experts: experts.to_vec(),
                };
                self.compare(&leased);
                self.holders[holder].lease = Some(leased);
                Outcome::Leased
            }
            Err(e) => self.excused(&e, fits, before.0),
        }
    }

    /// Nothing fails without a reason.
    fn excused(&mut self, error: &AcquireError, fits: bool, before: Injected) -> Outcome {
        match error {
            AcquireError::TooLarge { .. } => {
                assert!(!fits, "{error}, yet it fits");
                Outcome::TooLarge
            }
            AcquireError::Failed { reason, .. } => {
                self.summary.failed += 1;
                if reason.contains("spare slots needed") {
                    self.summary.short += 1;
                    self.sim.retiring_are_read(&self.cache.census().1);
                } else {
                    let excused = self.sim.is_lost() || self.sim.injected() != before;
                    assert!(excused, "failed without a fault: {reason}");
                }
                Outcome::Failed
            }
            AcquireError::Fault(fault) => {
                let ambiguous = self.sim.injected().ambiguous;
                assert!(ambiguous > 0, "faulted without a reason: {fault}");
                Outcome::Faulted
            }
        }
    }

    /// The last checks, and what it came to.
    #[must_use]
    pub fn end(mut self) -> Summary {
        if self.summary.faulted == 1 {
            self.after_fault();
        } else {
            self.quiet();
        }
        let Injected { retryable, ambiguous } = self.sim.injected();
        self.summary.retryable = retryable;
        self.summary.ambiguous = ambiguous;
        self.summary
    }

    /// C13: nothing more is served; what was leased before stays as it was.
    fn after_fault(&mut self) {
        for _ in 0..4 {
            let layer = self.rng.within(0, self.geometry.layers.len() - 1);
            let experts = self.rng.experts(1, self.geometry.experts);
            let group = RoutedGroup {
                layer: self.geometry.layers[layer],
                experts: &experts,
            };
            let mut hold = self.cache.capture();
            let outcome = self.cache.acquire(&mut hold, &group, Completion::DONE);
            let faulted = matches!(outcome, Err(AcquireError::Fault(_)));
            assert!(faulted, "C13: the cache serves after a fault");
            self.sim.advance(1_000_000);
            for holder in 0..self.holders.len() {
                self.look(holder);
            }
        }
    }

    /// Everybody lets go: all slots come back, and the counts add up.
    fn quiet(&mut self) {
        while !self.holders.is_empty() {
            self.release(0, None);
        }
        self.sim.inject(Faults::NONE);
        self.sim.advance(1_000_000);
        // A release with device work is where the cache looks whether earlier work has ended.
        let nothing = self.sim.work(&[], 0);
        self.sim.advance(1);
        self.cache.release(self.cache.capture(), nothing);
        let (maps, census) = self.cache.census();
        if self.sim.injected().ambiguous == 0 {
            self.sim.conserved(&maps, &census);
            assert_eq!(census.retiring, [], "C9: a victim that nobody reads is a spare");
            assert_eq!(census.generations, 1, "only the current generation is held");
        }
        let seen = self.cache.observations();
        let observed = |n| Observation::Observed(n);
        assert_eq!(seen.expert_d2h_bytes, observed(0), "C10");
        assert_eq!(seen.total.misses, observed(self.summary.misses), "misses");
        assert_eq!(seen.total.hits, observed(self.summary.hits), "hits");
        if self.sim.injected() == Injected::default() {
            let bytes = self.summary.misses * self.sim.record_bytes() as u64;
            assert_eq!(seen.total.h2d_bytes, observed(bytes), "H2D bytes");
        }
    }
}
