//! The five zeros of the contract: each is seen to be 0 while a model is served, and each probe is made to count by
//! doing what it watches for. One test: the probes are of the whole process.

mod model;

use std::fs::File;
use std::sync::Arc;

use horizon_cache::report::Observations;
use horizon_cache::{HostStore, Policy, ResidentV1};
use horizon_core::artifact::digest::{Hasher, Summer};
use horizon_core::artifact::{Digest, io};
use horizon_core::cpu::transport::HostTransport;
use horizon_core::memory::AnonymousMemory;
use horizon_core::observe::Observation::{self, Observed};
use horizon_core::qpacked::BlockSize;
use horizon_core::transport::{SlotId, Transport};
use model::{Model, spec};

fn zeros(o: &Observations) -> [Observation; 5] {
    [
        o.expert_d2h_bytes,
        o.writebacks,
        o.host_rewrites,
        o.request_sha,
        o.request_source_reads,
    ]
}

#[test]
fn each_zero_was_counted() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("f");
    std::fs::write(&path, [7; 64]).expect("writes");

    let model = Model::new(spec(64, 8, 2, 72), BlockSize::B32, 1);
    let geometry = model.geometry(3, 2);
    let record = model.image.record_bytes();
    let slots = Arc::new(HostTransport::new(geometry.slots(), 2, record).expect("memory"));
    let store = HostStore::new(model.image.clone(), geometry.layers.clone());
    let cache = ResidentV1::new(geometry, Policy::Lru, Arc::new(store), slots.clone()).expect("sets up");
    let cache = Arc::new(cache);
    let now = || zeros(&cache.observations());
    assert_eq!(now(), [Observed(0); 5], "nothing was asked yet");

    let mut served = model.serve(slots.clone(), cache.clone());
    let text = served.text();
    assert_eq!(now(), [Observed(0); 5], "a model was served");
    let total = cache.observations().total;
    assert_ne!(total.misses, Observed(0));
    assert_ne!(total.evictions, Observed(0));

    slots.read_back(SlotId(0));
    let read = Observed(record as u64);
    assert_eq!(now(), [read, Observed(0), Observed(0), Observed(0), Observed(0)]);

    let memory = AnonymousMemory::zeroed(10).expect("a page");
    let mut thawed = memory.freeze().expect("protects").thaw().expect("lifts");
    assert_eq!(now(), [read, Observed(0), Observed(1), Observed(0), Observed(0)]);
    thawed.bytes_mut()[3] = 1;
    thawed.bytes_mut()[3] = 2;
    assert_eq!(now(), [read, Observed(2), Observed(1), Observed(0), Observed(0)]);

    // Every way to take a digest: SHA-256 at once, the checksum in pieces, both in pieces.
    for (hash, bytes) in [
        (
            &(|| assert_ne!(Digest::of(&[1; 100]), Digest::default())) as &dyn Fn(),
            100,
        ),
        (&|| Summer::new().update(&[1; 10]), 110),
        (&|| Hasher::default().update(&[1; 1]), 112),
    ] {
        hash();
        assert_eq!(
            now(),
            [read, Observed(2), Observed(1), Observed(bytes), Observed(0)]
        );
    }

    // Every way to read a model's file.
    let file = File::open(&path).expect("opens");
    io::read_exact_at(&file, &mut [0; 8], 3).expect("reads");
    assert_eq!(now()[4], Observed(1));
    io::read_bounded(&path, 100).expect("reads");
    assert_eq!(now()[4], Observed(2));

    // Serving on adds nothing to any of them.
    let before = now();
    assert_eq!(served.text().difference(&text), None);
    assert_eq!(now(), before);
}
