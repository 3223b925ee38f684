//! One test for each clause of the contract, named after it: what the cache shows of C1 to C14.

mod rig;

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use horizon_cache::sim::faults::Fault;
use horizon_cache::{Policy, SetupError};
use horizon_core::observe::Observation;
use horizon_core::provider::{AcquireError, ExpertProvider};
use horizon_core::transport::{Completion, SlotId, Transport};

use rig::{Gate, Rig, geometry, ids, terminates};

const DONE: Completion = Completion::DONE;

#[test]
fn c01_a_miss_reads_one_record_of_the_host_store_and_nothing_else() {
    let rig = Rig::new(geometry(2, 6, 2, 3, 2));
    let reads = || rig.store.reads.load(Ordering::Relaxed);
    let admitted = reads();
    let mut hold = rig.cache.capture();
    rig.visit(&mut hold, 0, &[0, 1]);
    assert_eq!(reads(), admitted, "a hit reads nothing");
    rig.visit(&mut hold, 0, &[1, 5]);
    assert_eq!(reads(), admitted + 1, "a miss reads its record");
    let seen = rig.cache.observations();
    assert_eq!(seen.request_source_reads, Observation::Observed(0));
    // The store stays complete when everything is resident: an expert that was evicted and one that never was.
    for expert in 0..6 {
        rig.visit(&mut hold, 0, &[expert]);
    }
}

#[test]
fn c02_the_store_and_its_identity_stay() {
    let rig = Rig::new(geometry(2, 6, 2, 2, 2));
    let before = rig.store.copy();
    let mut hold = rig.cache.capture();
    for round in 0u32..20 {
        rig.visit(&mut hold, round % 2, &[round % 5, 5]);
    }
    assert!(before == rig.store.copy(), "no byte of the store has changed");
    let seen = rig.cache.observations();
    assert_eq!(seen.host_rewrites, Observation::Observed(0));
    assert_eq!(seen.request_sha, Observation::Observed(0));
}

#[test]
fn c03_what_does_not_fit_is_refused_with_its_numbers() {
    let refused = |g, slots, staging, bytes| match Rig::build(g, slots, staging, bytes) {
        Ok(_) => panic!("admitted"),
        Err(e) => e,
    };
    let good = || geometry(2, 6, 2, 3, 2);
    assert!(Rig::build(good(), 8, 1, 24).is_ok());
    for capacity in [1, 7] {
        let e = refused(geometry(2, 6, 2, capacity, 2), 99, 1, 24);
        assert!(e.to_string().contains("--ctx"), "{e}");
    }
    assert_eq!(
        refused(geometry(2, 6, 2, 3, 1), 99, 1, 24),
        SetupError::Spares { spares: 1, top_k: 2 }
    );
    for (slots, staging, bytes, found, needed) in [(7, 1, 24, 7, 8), (8, 0, 24, 0, 1), (8, 1, 23, 23, 24)] {
        match refused(good(), slots, staging, bytes) {
            SetupError::Device {
                found: f, needed: n, ..
            } => assert_eq!((f, n), (found, needed)),
            e => panic!("{e}"),
        }
    }
    let mut unordered = good();
    unordered.layers.reverse();
    assert_eq!(refused(unordered, 8, 1, 24), SetupError::Layers);
}

#[test]
fn c04_with_spares_for_one_group_and_every_layer_missing_a_step_terminates() {
    let rig = Rig::new(geometry(4, 8, 3, 3, 3));
    let mut hold = rig.cache.capture();
    let first = hold.generation;
    for layer in 0..4 {
        rig.visit(&mut hold, layer, &[5, 6, 7]);
        assert_eq!(
            hold.generation.0,
            first.0 + u64::from(layer) + 1,
            "the hold moves"
        );
    }
    rig.cache.release(hold, DONE);
    let (_, census) = rig.cache.census();
    assert_eq!((census.spares.len(), census.generations), (3, 1));
}

#[test]
fn c05_a_hit_returns_while_a_miss_is_stuck() {
    let gate = Gate::new(geometry(1, 4, 1, 2, 1));
    let mut hold = gate.cache.capture();
    gate.visit(&mut hold, 0, &[0]);
    gate.close();
    let miss = {
        let gate = gate.clone();
        thread::spawn(move || {
            let mut hold = gate.cache.capture();
            gate.visit(&mut hold, 0, &[3]);
        })
    };
    gate.until_waited();
    terminates(Duration::from_secs(20), {
        let gate = gate.clone();
        move || {
            for _ in 0..1_000 {
                let mut hold = gate.cache.capture();
                gate.visit(&mut hold, 0, &[0, 1]);
                gate.cache.release(hold, DONE);
            }
        }
    });
    assert!(!miss.is_finished(), "the miss is still stuck");
    gate.open();
    miss.join().expect("ends");
}

#[test]
fn c06_two_holders_with_minimum_spares_terminate() {
    let rig = std::sync::Arc::new(Rig::patient(geometry(3, 6, 2, 2, 2)));
    let user = |experts: [[u32; 2]; 2]| {
        let rig = rig.clone();
        move || {
            for round in 0..300 {
                let mut hold = rig.cache.capture();
                for layer in 0..3 {
                    rig.visit(&mut hold, layer, &experts[round % 2]);
                }
                rig.cache.release(hold, DONE);
            }
        }
    };
    let (a, b) = (user([[0, 1], [2, 3]]), user([[2, 3], [4, 5]]));
    terminates(Duration::from_secs(60), move || {
        thread::scope(|s| {
            s.spawn(a);
            s.spawn(b);
        });
    });
}

#[test]
fn c06_device_work_blocks_only_the_slots_it_may_read() {
    let rig = Rig::new(geometry(1, 8, 1, 1, 2));
    let mut old = rig.cache.capture();
    let lease = rig.lease(&mut old, 0, &[0]).expect("resident");
    let address = lease.wait().expect("readable")[0];
    let work = rig.sim.work(&[(address, 0, ids(&[0])[0])], 1_000_000);
    drop(lease);
    rig.cache.release(old, work);
    // Slots published after that generation come and go though its work is under way: two suffice for ever.
    let mut hold = rig.cache.capture();
    for round in 0..20 {
        rig.visit(&mut hold, 0, &[1 + round % 7]);
    }
    assert!(!rig.sim.poll(work).expect("well"), "the work is still under way");
    let waits = rig.cache.observations().total.lease_waits;
    assert_eq!(waits, Observation::Observed(0));
}

#[test]
fn c07_a_group_travels_through_one_staging_buffer() {
    let rig = Rig::with_staging(geometry(1, 8, 4, 4, 4), 1);
    let mut hold = rig.cache.capture();
    rig.visit(&mut hold, 0, &[4, 5, 6, 7]);
    let total = rig.cache.observations().total;
    assert_eq!(total.h2d_bytes, Observation::Observed(4 * 24));
    assert_eq!(
        total.staging_waits,
        Observation::Observed(3),
        "each after the first waits"
    );
    // A copy that does not end keeps its buffer: it is not filled again, the group fails.
    rig.sim.plan([Some(Fault::NeverEnds)]);
    let e = rig.lease(&mut hold, 0, &[0, 1, 2, 3]).err();
    assert!(matches!(e, Some(AcquireError::Fault(_))), "{e:?}");
}

#[test]
fn c08_nobody_sees_a_part_of_a_group() {
    let gate = Gate::new(geometry(1, 6, 2, 2, 2));
    gate.close();
    let miss = {
        let gate = gate.clone();
        thread::spawn(move || {
            let mut hold = gate.cache.capture();
            gate.visit(&mut hold, 0, &[4, 5]);
        })
    };
    // One copy has ended, and the cache waits to be told so.
    gate.until_waited();
    let (maps, census) = gate.cache.census();
    assert!(maps[0][4].is_none() && maps[0][5].is_none(), "{maps:?}");
    assert_eq!(census.spares, [], "both slots are being filled");
    gate.open();
    miss.join().expect("ends");
    let (maps, _) = gate.cache.census();
    assert!(maps[0][4].is_some() && maps[0][5].is_some());
    let row = gate
        .device
        .row(gate.cache.geometry().layers[0])
        .expect("published");
    assert_eq!(row.1, maps[0], "the device's table shows the same");
}

#[test]
fn c09_a_victim_is_a_spare_after_its_last_lease_and_its_last_device_read() {
    let rig = Rig::new(geometry(1, 6, 1, 1, 1));
    let mut reader = rig.cache.capture();
    let lease = rig.lease(&mut reader, 0, &[0]).expect("resident");
    let victim = rig.cache.census().0[0][0].expect("resident");
    let mut hold = rig.cache.capture();
    rig.visit(&mut hold, 0, &[1]);
    assert_eq!(rig.cache.census().1.retiring, [victim], "the lease keeps it");
    let e = rig.lease(&mut hold, 0, &[2]).err();
    assert!(
        matches!(e, Some(AcquireError::Failed { .. })),
        "no spare comes: {e:?}"
    );
    rig.look(lease.as_ref(), 0, &[0]);
    let address = lease.wait().expect("readable")[0];
    let work = rig.sim.work(&[(address, 0, ids(&[0])[0])], 50_000);
    drop(lease);
    rig.cache.release(reader, work);
    assert_eq!(rig.cache.census().1.retiring, [victim], "device work keeps it");
    // A group that needs it waits for the end of the work, which the device checks.
    rig.visit(&mut hold, 0, &[2]);
    assert!(rig.sim.poll(work).expect("well"), "the work has ended");
    assert_eq!(rig.cache.census().0[0][2], Some(victim));
}

#[test]
fn c10_eviction_discards() {
    let rig = Rig::new(geometry(1, 6, 1, 1, 1));
    let mut hold = rig.cache.capture();
    for round in 0u64..30 {
        rig.visit(&mut hold, 0, &[u32::try_from(1 + round % 5).expect("small")]);
    }
    let seen = rig.cache.observations();
    assert_eq!(seen.total.evictions, Observation::Observed(30));
    assert_eq!(seen.expert_d2h_bytes, Observation::Observed(0));
    assert_eq!(seen.writebacks, Observation::Observed(0));
    // An expert that was here before is brought again: nothing was kept of it.
    assert_eq!(seen.total.h2d_bytes, Observation::Observed(30 * 24));
    // The zero is one that counts.
    assert_eq!(rig.sim.read_back(SlotId(0)).len(), 24);
    assert_eq!(
        rig.cache.observations().expert_d2h_bytes,
        Observation::Observed(24)
    );
}

#[test]
fn c11_the_second_transaction_begins_after_the_first() {
    let gate = Gate::new(geometry(2, 6, 1, 1, 2));
    gate.close();
    let submitted = gate.submissions();
    let misses: Vec<_> = (0..2)
        .map(|layer| {
            let gate = gate.clone();
            thread::spawn(move || {
                let mut hold = gate.cache.capture();
                gate.visit(&mut hold, layer, &[5]);
            })
        })
        .collect();
    gate.until_waited();
    thread::sleep(Duration::from_millis(50));
    assert_eq!(gate.submissions(), submitted + 1, "only one group is under way");
    gate.open();
    for miss in misses {
        miss.join().expect("ends");
    }
    assert_eq!(gate.submissions(), submitted + 2);
}

#[test]
fn c12_a_failure_before_publication_changes_nothing() {
    for fault in [Fault::Refused, Fault::CopyFails] {
        for position in 0..3 {
            for staging in 1..=3 {
                let rig = Rig::with_staging(geometry(2, 8, 3, 3, 3), staging);
                let mut hold = rig.cache.capture();
                let before = rig.cache.census();
                let plan = (0..=position).map(|i| (i == position).then_some(fault));
                rig.sim.plan(plan);
                let e = rig.lease(&mut hold, 1, &[5, 6, 7]).err();
                assert!(matches!(e, Some(AcquireError::Failed { .. })), "{fault:?}: {e:?}");
                let (maps, mut census) = rig.cache.census();
                census.spares.sort_unstable();
                assert_eq!((&maps, &census), (&before.0, &before.1), "nothing changed");
                for slot in &census.spares {
                    assert!(rig.sim.is_poisoned(*slot), "{slot:?} is readable");
                }
                assert_eq!(rig.cache.observations().total.failures, Observation::Observed(1));
                rig.visit(&mut hold, 1, &[0, 1, 2]);
                rig.visit(&mut hold, 1, &[5, 6, 7]);
            }
        }
    }
}

#[test]
fn c13_after_an_ambiguous_failure_every_acquire_gets_the_fault() {
    for fault in [Fault::ReportedLate, Fault::NeverEnds] {
        for position in 0..2 {
            let rig = Rig::new(geometry(2, 6, 2, 2, 2));
            let mut reader = rig.cache.capture();
            let lease = rig.lease(&mut reader, 0, &[0, 1]).expect("resident");
            let mut hold = rig.cache.capture();
            rig.sim
                .plan((0..=position).map(|i| (i == position).then_some(fault)));
            let first = rig.lease(&mut hold, 0, &[4, 5]).err();
            let Some(AcquireError::Fault(first)) = first else {
                panic!("{fault:?} at {position}: {first:?}")
            };
            for (layer, experts) in [(0, [4, 5]), (0, [0, 1]), (1, [0, 1]), (1, [2, 3])] {
                for hold in [&mut reader, &mut hold, &mut rig.cache.capture()] {
                    match rig.lease(hold, layer, &experts).err() {
                        Some(AcquireError::Fault(f)) => assert_eq!(f.reason, first.reason),
                        other => panic!("served after a fault: {other:?}"),
                    }
                }
            }
            rig.sim.advance(10_000_000);
            rig.look(lease.as_ref(), 0, &[0, 1]);
        }
    }
}

#[test]
fn c13_a_transaction_that_panics_faults_the_cache() {
    let gate = Gate::new(geometry(1, 4, 1, 1, 1));
    gate.panic_next();
    let panicking = gate.clone();
    let outcome = thread::spawn(move || {
        let mut hold = panicking.cache.capture();
        panicking.visit(&mut hold, 0, &[3]);
    })
    .join();
    assert!(outcome.is_err());
    let e = gate.lease(&mut gate.cache.capture(), 0, &[0]).err();
    assert!(matches!(e, Some(AcquireError::Fault(_))), "{e:?}");
}

#[test]
fn c14_large_groups_run_in_waves() {
    for (capacity, spares) in [(2, 2), (5, 2), (2, 4), (8, 3)] {
        for policy in Policy::ALL {
            let rig = Rig::with_policy(geometry(2, 9, 2, capacity, spares), policy);
            let mut hold = rig.cache.capture();
            let all = [0, 1, 2, 3, 4, 5, 6, 7, 8];
            let e = rig.lease(&mut hold, 0, &all).err();
            assert!(
                matches!(e, Some(AcquireError::TooLarge { experts: 9, .. })),
                "{e:?}"
            );
            let waves = rig.waves(&hold, 0, &all);
            let mut seen = Vec::new();
            for wave in &waves {
                assert!(wave.len() <= capacity, "{wave:?}");
                rig.visit(&mut hold, 0, wave);
                seen.extend_from_slice(wave);
            }
            seen.sort_unstable();
            assert_eq!(seen, all);
            assert!(waves[1..].iter().all(|w| w.len() <= spares), "{waves:?}");
            assert_eq!(waves[0].len(), capacity, "what is resident is not moved");
        }
    }
}
