//! The identity of `identity.rs`, at random: model, capacity, policy, spares, staging, threads, sequences at once and
//! failing transfers are drawn from a seed. Every record that a lease gives is compared with the host store, and every
//! logit with full residency. A failure prints the seed of its round.
//!
//! `STRESS_SECONDS=600 cargo test -p horizon-cache --test stress` goes on for ten minutes, `STRESS_SEED=7` begins at
//! that seed.

mod flaky;
mod model;

use std::env;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use flaky::{Faults, Flaky};
use horizon_cache::{HostRecords, HostStore, Policy, ResidentV1};
use horizon_core::cpu::transport::HostTransport;
use horizon_core::ids::ExpertId;
use horizon_core::observe::Observation;
use horizon_core::provider::{
    AcquireError, ExpertProvider, FullyResident, GroupLease, Hold, RoutedGroup, SlotMemory,
};
use horizon_core::qpacked::BlockSize;
use horizon_core::transport::{Completion, Transport};
use model::{Model, spec};

/// Rounds when no time is given.
const ROUNDS: u64 = 60;

/// Numbers from a seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 = flaky::mix(self.0);
        usize::try_from(self.0 % n as u64).expect("below a usize")
    }

    fn of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
}

/// A cache that compares what it leases with the host store.
struct Compared {
    cache: Arc<ResidentV1>,
    slots: Arc<HostTransport>,
    store: HostStore,
    what: String,
}

impl ExpertProvider for Compared {
    fn capture(&self) -> Hold {
        self.cache.capture()
    }

    fn waves(&self, hold: &Hold, group: &RoutedGroup<'_>) -> Vec<Vec<ExpertId>> {
        self.cache.waves(hold, group)
    }

    fn acquire(
        &self,
        hold: &mut Hold,
        group: &RoutedGroup<'_>,
        passed: Completion,
    ) -> Result<Box<dyn GroupLease>, AcquireError> {
        let lease = self.cache.acquire(hold, group, passed)?;
        let layers = &self.cache.geometry().layers;
        let layer = layers.binary_search(&group.layer).expect("it has experts");
        for (expert, address) in group.experts.iter().zip(lease.wait()?) {
            assert!(
                *self.slots.record(*address) == *self.store.record(layer, *expert),
                "the slot of {expert} of {} is not its record: {}",
                group.layer,
                self.what
            );
        }
        Ok(lease)
    }

    fn release(&self, hold: Hold, after: Completion) {
        self.cache.release(hold, after);
    }
}

/// Transactions that failed in one round.
fn round(seed: u64) -> u64 {
    let mut draw = Draw(seed);
    let (hidden, experts, top_k, width, block) = draw.of(&[
        (64, 8, 2, 72, BlockSize::B32),
        (72, 5, 4, 40, BlockSize::B64),
        (64, 32, 4, 200, BlockSize::B256),
        (128, 12, 3, 136, BlockSize::B128),
    ]);
    let model = Model::new(spec(hidden, experts, top_k, width), block, seed);
    let threads = draw.of(&[1, 2, 2, 8]);
    // The smallest capacity as often as all others: everything misses.
    let capacity = top_k + draw.below(2) * draw.below(experts - top_k + 1);
    let geometry = model.geometry(capacity, top_k + draw.below(2) * draw.below(5));
    let policy = draw.of(&Policy::ALL);
    let staging = 1 + draw.below(3);
    let faults = match draw.below(4) {
        0 => None,
        1 => Some(Faults::Random {
            seed,
            per_mille: 5 + draw.below(120) as u64,
        }),
        // Longer than a group: a transaction that begins after a failure is then over before the next.
        _ => Some(Faults::Every((geometry.spares + 1 + draw.below(7)) as u64)),
    };
    let sequences = 1 + draw.below(3);
    let what = format!(
        "seed {seed}, {experts} experts, {threads} threads, {sequences} sequences, {geometry:?}, {policy}, \
         {staging} staging buffers, {faults:?}"
    );

    let resident = Arc::new(FullyResident::new(model.image.clone()));
    let want = model
        .serve_on(threads, model.image.clone(), resident.clone())
        .text();
    // Full residency itself, once more.
    let again = model.serve(model.image.clone(), resident).text();
    assert_eq!(again.difference(&want), None, "full residency: {what}");

    let slots = HostTransport::new(geometry.slots(), staging, model.image.record_bytes()).expect("memory");
    let slots = Arc::new(slots);
    let placed = (geometry.layers.len() * capacity) as u64;
    let transport: Arc<dyn Transport> = match faults {
        None => slots.clone(),
        Some(faults) => Arc::new(Flaky::new(slots.clone(), placed, faults)),
    };
    let store = || HostStore::new(model.image.clone(), geometry.layers.clone());
    let cache = ResidentV1::new(geometry.clone(), policy, Arc::new(store()), transport).expect("sets up");
    let cache = Arc::new(cache);
    thread::scope(|scope| {
        for _ in 0..sequences {
            let provider = Arc::new(Compared {
                cache: cache.clone(),
                slots: slots.clone(),
                store: store(),
                what: what.clone(),
            });
            let mut served = model.serve_on(threads, slots.clone(), provider);
            served.tries = 1000;
            scope.spawn({
                let (want, what) = (&want, &what);
                move || {
                    for run in ["cold", "warm"] {
                        assert_eq!(served.text().difference(want), None, "{run}: {what}");
                    }
                }
            });
        }
    });
    match cache.observations().total.failures {
        Observation::Observed(n) => n,
        other => panic!("{other:?} is not counted"),
    }
}

fn number(name: &str) -> Option<NonZeroU64> {
    env::var(name).ok().map(|v| v.parse().expect("a number above 0"))
}

#[test]
fn chance_changes_no_bit() {
    let first = number("STRESS_SEED").map_or(1, NonZeroU64::get);
    let time = number("STRESS_SECONDS").map(|s| Duration::from_secs(s.get()));
    let (start, mut rounds, mut failed) = (Instant::now(), 0, 0);
    while time.map_or(rounds < ROUNDS, |t| start.elapsed() < t) {
        failed += round(first + rounds);
        rounds += 1;
    }
    println!("{rounds} rounds from seed {first}, {failed} transactions failed");
    assert!(failed > 0 || rounds < 10, "no transaction failed");
}
