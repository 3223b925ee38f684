//! Models of the protocol, in which loom tries the orders in which threads can meet (`.ci/loom`). Each has a twin with
//! a seeded bug, which must fail: a model that cannot fail shows nothing.
//!
//! Bound: at most four preemptions an execution (`PREEMPTIONS`); every switch at a lock
//! that is taken or a wait comes on top and is free. Tiny numbers: k = 1, c = 1, one spare, four experts a layer.
#![cfg(loom)]

mod watched;

use std::process::Command;
use std::sync::Arc as Shared;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use horizon_cache::seeded::{Bug, with};
use horizon_cache::sync::{Arc, lock};
use horizon_cache::{Geometry, Policy, ResidentV1};
use horizon_core::ids::{ExpertId, LayerId};
use horizon_core::provider::{AcquireError, ExpertProvider, GroupLease, Hold, RoutedGroup};
use horizon_core::transport::{Completion, Moment};
use loom::thread;

use watched::{Device, EXPERTS, Store};

const PREEMPTIONS: usize = 4;

struct Model {
    cache: ResidentV1,
    device: Shared<Device>,
}

/// `layers` layers of four experts, k = 1, `capacity` residents, `spares` spares, one staging buffer.
fn model(layers: usize, capacity: usize, spares: usize, fails: Option<Moment>) -> Arc<Model> {
    let geometry = Geometry {
        layers: (0u32..).map(LayerId).take(layers).collect(),
        experts: EXPERTS,
        top_k: 1,
        capacity,
        spares,
    };
    let store = (0u8..)
        .take(layers)
        .flat_map(|l| [[l, 0], [l, 1], [l, 2], [l, 3]])
        .collect();
    let device = Shared::new(Device::new(geometry.slots(), 1, fails));
    let cache =
        ResidentV1::new(geometry, Policy::Lru, Shared::new(Store(store)), device.clone()).expect("fits");
    device.admitted.store(true, Relaxed);
    Arc::new(Model { cache, device })
}

impl Model {
    /// Acquires one group, reads it, and lets go of the lease.
    fn visit(&self, hold: &mut Hold, layer: u32, experts: &[u32]) -> Result<(), AcquireError> {
        let lease = self.lease(hold, layer, experts, Completion::DONE)?;
        self.look(lease.as_ref(), layer, experts);
        Ok(())
    }

    fn lease(
        &self,
        hold: &mut Hold,
        layer: u32,
        experts: &[u32],
        passed: Completion,
    ) -> Result<Box<dyn GroupLease>, AcquireError> {
        let experts: Vec<_> = experts.iter().copied().map(ExpertId).collect();
        let group = RoutedGroup {
            layer: LayerId(layer),
            experts: &experts,
        };
        self.cache.acquire(hold, &group, passed)
    }

    fn look(&self, lease: &dyn GroupLease, layer: u32, experts: &[u32]) {
        let addresses = lease.wait().expect("a lease is readable");
        for (expert, address) in experts.iter().zip(addresses) {
            let shown = self.device.read(*address).map(u32::from);
            assert_eq!(shown, [layer, *expert], "a reader sees its expert");
        }
    }

    /// Every slot is in one place.
    fn conserved(&self) {
        let (maps, census) = self.cache.census();
        let mut places: Vec<u32> = maps
            .iter()
            .flatten()
            .flatten()
            .chain(&census.spares)
            .chain(&census.retiring)
            .map(|s| s.0)
            .collect();
        places.sort_unstable();
        let all: Vec<u32> = (0u32..).take(self.device.slots.len()).collect();
        assert_eq!(places, all, "slots are conserved");
    }
}

fn explore(f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    let executions = Shared::new(AtomicUsize::new(0));
    let counted = executions.clone();
    builder.check(move || {
        counted.fetch_add(1, Relaxed);
        f();
    });
    println!("{} executions", executions.load(Relaxed));
}

/// The model fails when `bug` is in the protocol, and says `why`. In a process of its own: loom cannot unwind from
/// some failures, a deadlock among them.
fn must_fail(test: &str, bug: Bug, why: &str, f: impl Fn() + Send + Sync + 'static) {
    const CHILD: &str = "HORIZON_SEEDED_MODEL";
    if std::env::var_os(CHILD).is_some() {
        with(bug, || explore(f));
        return;
    }
    let child = Command::new(std::env::current_exe().expect("this test"))
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .expect("starts");
    let said = [child.stdout, child.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(!child.status.success(), "the model does not see {bug:?}: {said}");
    assert!(
        said.contains(why),
        "the model fails otherwise than by {why:?}: {said}"
    );
}

/// Two holders, every layer missing, minimum spares: both terminate (C4, C6).
fn two_holders() {
    let m = model(2, 1, 1, None);
    let other = {
        let m = m.clone();
        thread::spawn(move || step(&m, 1))
    };
    step(&m, 2);
    other.join().expect("terminates");
    m.conserved();
}

/// One step: a hold from before, then each layer's group.
fn step(m: &Model, expert: u32) {
    let mut hold = m.cache.capture();
    for layer in 0..2 {
        m.visit(&mut hold, layer, &[expert]).expect("spares suffice");
    }
    m.cache.release(hold, Completion::DONE);
}

#[test]
fn two_holders_every_layer_missing_terminate() {
    explore(two_holders);
}

#[test]
fn a_hold_kept_while_queueing_deadlocks() {
    must_fail(
        "a_hold_kept_while_queueing_deadlocks",
        Bug::KeepHoldWhileQueueing,
        "deadlock",
        two_holders,
    );
}

/// Two threads want the same expert: one brings it, the other may read as soon as it is published. The copy runs on
/// the device (C8).
fn publish_and_acquire() {
    let m = model(1, 2, 1, None);
    *lock(&m.device.concurrent) = true;
    let engine = {
        let m = m.clone();
        thread::spawn(move || m.device.engine(1))
    };
    let other = {
        let m = m.clone();
        thread::spawn(move || publish_one(&m, 2))
    };
    // Brings it, or finds it brought.
    publish_one(&m, 2);
    other.join().expect("ends");
    engine.join().expect("ends");
    m.conserved();
}

#[test]
fn a_group_is_published_after_its_copies() {
    explore(publish_and_acquire);
}

#[test]
fn publishing_before_the_copies_end_is_seen() {
    must_fail(
        "publishing_before_the_copies_end_is_seen",
        Bug::PublishBeforeCopies,
        "Causality violation",
        publish_and_acquire,
    );
}

/// A reader keeps a lease on a victim while its slot is wanted (C9).
fn lease_and_reuse() {
    let m = model(1, 1, 1, None);
    let reader = {
        let m = m.clone();
        let mut hold = m.cache.capture();
        let lease = m.lease(&mut hold, 0, &[0], Completion::DONE).expect("resident");
        thread::spawn(move || {
            drop(hold);
            m.look(lease.as_ref(), 0, &[0]);
            drop(lease);
        })
    };
    let mut hold = m.cache.capture();
    m.visit(&mut hold, 0, &[1]).expect("a spare is free");
    m.visit(&mut hold, 0, &[2]).expect("when the reader has let go");
    drop(hold);
    reader.join().expect("reads what it leased");
    m.conserved();
}

#[test]
fn a_slot_is_reused_after_its_last_lease() {
    explore(lease_and_reuse);
}

#[test]
fn a_victim_freed_at_once_is_seen() {
    must_fail(
        "a_victim_freed_at_once_is_seen",
        Bug::FreeVictimsAtOnce,
        "Causality violation",
        lease_and_reuse,
    );
}

/// One transaction ends in doubt while another holder queues: both get the fault (C13).
fn fault_and_queue() {
    let m = model(1, 1, 2, Some(Moment::AfterPublication));
    let other = {
        let m = m.clone();
        thread::spawn(move || faults(&m, 1))
    };
    faults(&m, 2);
    other.join().expect("gets the fault");
    // One submission was the initial placement.
    assert_eq!(lock(&m.device.queue).given, 2, "nothing is copied after a fault");
}

fn faults(m: &Model, expert: u32) {
    let mut hold = m.cache.capture();
    match m.visit(&mut hold, 0, &[expert]) {
        Err(AcquireError::Fault(fault)) => assert_eq!(fault.reason, "reported late"),
        other => panic!("served after a fault: {other:?}"),
    }
}

#[test]
fn whoever_queued_gets_the_fault() {
    explore(fault_and_queue);
}

#[test]
fn a_fault_missed_in_the_queue_is_seen() {
    must_fail(
        "a_fault_missed_in_the_queue_is_seen",
        Bug::MissFaultWhileQueueing,
        "nothing is copied after a fault",
        fault_and_queue,
    );
}

/// A hit beside a transaction that ends in doubt: it is served from the old generation, or gets the whole fault.
fn fault_and_hit() {
    let m = model(1, 1, 1, Some(Moment::AfterPublication));
    let other = {
        let m = m.clone();
        thread::spawn(move || faults(&m, 1))
    };
    let mut hold = m.cache.capture();
    if let Err(e) = m.visit(&mut hold, 0, &[0]) {
        assert!(
            matches!(&e, AcquireError::Fault(f) if f.reason == "reported late"),
            "a fault comes with its reason: {e:?}"
        );
    }
    drop(hold);
    other.join().expect("gets the fault");
}

#[test]
fn a_fault_comes_with_its_reason() {
    explore(fault_and_hit);
}

#[test]
fn a_fault_flagged_before_its_reason_is_seen() {
    must_fail(
        "a_fault_flagged_before_its_reason_is_seen",
        Bug::FaultBeforeReason,
        "a fault comes with its reason",
        fault_and_hit,
    );
}

/// A group of two through one staging buffer, the copies on the device (C7).
fn staging() {
    let m = model(1, 2, 2, None);
    *lock(&m.device.concurrent) = true;
    let engine = {
        let m = m.clone();
        thread::spawn(move || m.device.engine(2))
    };
    let mut hold = m.cache.capture();
    m.visit(&mut hold, 0, &[2, 3]).expect("spares suffice");
    engine.join().expect("ends");
    m.conserved();
}

#[test]
fn staging_is_reused_after_its_copy() {
    explore(staging);
}

#[test]
fn staging_that_is_reused_at_once_is_seen() {
    must_fail(
        "staging_that_is_reused_at_once_is_seen",
        Bug::ReuseStagingAtOnce,
        "a reader sees its expert",
        staging,
    );
}

/// Device work of a step reads a slot while another holder publishes twice (C9).
fn step_in_flight() {
    let m = model(1, 1, 1, None);
    let mut hold = m.cache.capture();
    let lease = m.lease(&mut hold, 0, &[0], Completion::DONE).expect("resident");
    let address = lease.wait().expect("readable")[0];
    let work = m.device.begin();
    let device = {
        let m = m.clone();
        thread::spawn(move || {
            assert_eq!(
                m.device.read(address),
                [0, 0],
                "device work reads what was leased"
            );
            m.device.end(work);
        })
    };
    // The step is over for the host; the device still reads.
    drop(lease);
    m.cache.release(hold, work);
    let mut hold = m.cache.capture();
    m.visit(&mut hold, 0, &[1]).expect("a spare is free");
    m.visit(&mut hold, 0, &[2]).expect("when the device has read");
    device.join().expect("reads what was leased");
    drop(hold);
    m.conserved();
}

#[test]
fn a_step_in_flight_keeps_its_slots() {
    explore(step_in_flight);
}

#[test]
fn device_work_that_is_forgotten_is_seen() {
    must_fail(
        "device_work_that_is_forgotten_is_seen",
        Bug::ForgetDeviceWork,
        "Causality violation",
        step_in_flight,
    );
}

/// Two publishers at once: neither loses the other's group (C11).
fn two_publishers() {
    let m = model(1, 1, 2, None);
    let other = {
        let m = m.clone();
        thread::spawn(move || publish_one(&m, 1))
    };
    publish_one(&m, 2);
    other.join().expect("ends");
    m.conserved();
}

fn publish_one(m: &Model, expert: u32) {
    let mut hold = m.cache.capture();
    m.visit(&mut hold, 0, &[expert]).expect("spares suffice");
}

#[test]
fn publishers_do_not_lose_each_other() {
    explore(two_publishers);
}

#[test]
fn looking_before_queueing_is_seen() {
    must_fail(
        "looking_before_queueing_is_seen",
        Bug::LookBeforeQueueing,
        "slots are conserved",
        two_publishers,
    );
}
