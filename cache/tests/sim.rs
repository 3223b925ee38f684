//! The cache on a simulated device: more than a million transactions with faults at every step, each byte that a
//! reader sees compared with the host store, every oracle asked after each step.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use horizon_cache::seeded::{Bug, with};
use horizon_cache::sim::faults::Faults;
use horizon_cache::sim::workload::{Summary, Workload};

/// One life of a cache; a failure says which.
fn life(seed: u64, faults: Faults, steps: usize) -> Summary {
    match catch_unwind(AssertUnwindSafe(|| Workload::new(seed, faults).run(steps))) {
        Ok(summary) => summary,
        Err(panic) => {
            eprintln!("seed {seed}: Workload::new({seed}, {faults:?}).run({steps}) fails");
            resume_unwind(panic)
        }
    }
}

/// Lives from `first` on until there were `transactions`, on two threads.
fn lives(first: u64, faults: Faults, transactions: u64) -> Summary {
    let half = |first: u64| {
        move || {
            let mut total = Summary::default();
            let mut seed = first;
            while total.transactions < transactions / 2 {
                total += life(seed, faults, 3_000);
                seed += 2;
            }
            total
        }
    };
    let (a, b) = (thread::spawn(half(first)), thread::spawn(half(first + 1)));
    let mut total = a.join().unwrap_or_else(|p| resume_unwind(p));
    total += b.join().unwrap_or_else(|p| resume_unwind(p));
    total
}

#[test]
fn a_million_transactions_with_faults() {
    let total = lives(1, Faults::MIXED, 1_000_000);
    println!("{total:?}");
    assert!(total.transactions >= 1_000_000);
    // The run has met everything that it is there for.
    assert!(total.faulted > 100, "{total:?}");
    assert!(total.retryable > 1_000, "{total:?}");
    assert!(total.short > 1_000, "{total:?}");
    assert!(total.waves > 10_000, "{total:?}");
    assert!(total.acquisitions > total.transactions, "{total:?}");
    assert!(total.hits > total.acquisitions / 4, "{total:?}");
}

#[test]
fn without_faults_nothing_fails_but_for_readers_that_hold() {
    let total = lives(1_000_001, Faults::NONE, 100_000);
    assert_eq!(total.failed, total.short, "{total:?}");
    assert_eq!(total.faulted, 0, "{total:?}");
    assert_eq!((total.retryable, total.ambiguous), (0, 0));
}

#[test]
fn a_seed_decides_everything() {
    assert_eq!(life(7, Faults::MIXED, 2_000), life(7, Faults::MIXED, 2_000));
}

/// What the oracles say of `bug`, within a few lives.
fn caught(bug: Bug, faults: Faults) -> String {
    for seed in 0..500 {
        let life = || with(bug, || Workload::new(seed, faults).run(500));
        if let Err(panic) = catch_unwind(AssertUnwindSafe(life)) {
            return match panic.downcast::<String>() {
                Ok(said) => *said,
                Err(_) => panic!("{bug:?}: the oracles speak in sentences"),
            };
        }
    }
    panic!("{bug:?} goes unseen")
}

#[test]
fn the_oracles_see_what_they_are_there_for() {
    for (bug, faults, clause) in [
        (Bug::FreeVictimsAtOnce, Faults::NONE, "C9: "),
        (Bug::ForgetDeviceWork, Faults::NONE, "C9: "),
        (Bug::ReuseStagingAtOnce, Faults::NONE, "C7: "),
        (Bug::PublishBeforeCopies, Faults::MIXED, "C12: "),
        (Bug::PublishAfterFailure, Faults::MIXED, "C8: "),
        (Bug::LeaveHalfRecords, Faults::MIXED, "C12: "),
    ] {
        let said = caught(bug, faults);
        assert!(said.contains(clause), "{bug:?}: {said}");
    }
}
