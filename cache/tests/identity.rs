//! The consequence of the contract: capacity, policy, warmth, spares and failed transfers never change a bit of what
//! the model says; and what it says comes from the published slots and from nowhere else.

mod flaky;
mod model;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use flaky::{Faults, Flaky};
use horizon_cache::{HostRecords, HostStore, Policy, ResidentV1};
use horizon_core::cpu::transport::HostTransport;
use horizon_core::ids::{ExpertId, LayerId};
use horizon_core::observe::Observation;
use horizon_core::provider::FullyResident;
use horizon_core::qpacked::BlockSize;
use horizon_core::transport::Transport;
use model::{Model, Served, Text, spec};

/// A model behind a cache.
struct Cached {
    slots: Arc<HostTransport>,
    cache: Arc<ResidentV1>,
    served: Served,
}

fn cached(model: &Model, policy: Policy, capacity: usize, spares: usize, faults: Option<Faults>) -> Cached {
    let store = HostStore::new(model.image.clone(), model.spec.moe_layers().collect());
    cached_from(model, Arc::new(store), policy, capacity, spares, faults)
}

fn cached_from(
    model: &Model,
    store: Arc<dyn HostRecords>,
    policy: Policy,
    capacity: usize,
    spares: usize,
    faults: Option<Faults>,
) -> Cached {
    let geometry = model.geometry(capacity, spares);
    let slots = HostTransport::new(geometry.slots(), 2, model.image.record_bytes()).expect("memory");
    let slots = Arc::new(slots);
    let placed = (geometry.layers.len() * capacity) as u64;
    let transport: Arc<dyn Transport> = match faults {
        None => slots.clone(),
        Some(faults) => Arc::new(Flaky::new(slots.clone(), placed, faults)),
    };
    let cache = ResidentV1::new(geometry, policy, store, transport).expect("sets up");
    let cache = Arc::new(cache);
    Cached {
        served: model.serve(slots.clone(), cache.clone()),
        slots,
        cache,
    }
}

fn resident(model: &Model) -> Text {
    model
        .serve(
            model.image.clone(),
            Arc::new(FullyResident::new(model.image.clone())),
        )
        .text()
}

fn counted(o: Observation) -> u64 {
    match o {
        Observation::Observed(n) => n,
        other => panic!("{other:?} is not counted"),
    }
}

#[test]
fn capacity_policy_warmth_spares_and_faults_change_no_bit() {
    // Blocks that end inside a row, several of them a row; as many experts as a chunk can reach and more.
    let cases = [
        (spec(64, 8, 2, 72), BlockSize::B32),
        (spec(64, 32, 4, 1408), BlockSize::B256),
        (spec(72, 5, 4, 40), BlockSize::B64),
    ];
    for (seed, (spec, block)) in (1u64..).zip(cases) {
        let model = Model::new(spec, block, seed);
        let moe = model.spec.moe().expect("there are experts");
        let want = resident(&model);
        let (mut missed, mut failed) = (0, 0);
        for capacity in moe.top_k..=moe.experts {
            for (i, policy) in Policy::ALL.into_iter().enumerate() {
                let mut settings = vec![
                    (moe.top_k, Some(Faults::Every(7))),
                    (moe.top_k + 3, Some(Faults::Random { seed, per_mille: 20 })),
                    (moe.top_k, None),
                ];
                if moe.experts > 16 {
                    // One of them each, in turn: this case takes the longest.
                    settings = vec![settings[(i + capacity) % 3]];
                }
                for (spares, faults) in settings {
                    let what = format!(
                        "{} experts, seed {seed}, capacity {capacity}, {policy}, {spares} spares, faults {faults:?}",
                        moe.experts
                    );
                    let mut c = cached(&model, policy, capacity, spares, faults);
                    assert_eq!(c.served.text().difference(&want), None, "cold: {what}");
                    assert_eq!(c.served.text().difference(&want), None, "warm: {what}");
                    let o = c.cache.observations().total;
                    missed += counted(o.misses);
                    failed += counted(o.failures);
                    if capacity == moe.experts {
                        assert_eq!(counted(o.misses), 0, "{what}");
                    }
                }
            }
        }
        // The runs were what they claim to be.
        assert!(missed > 0 && failed > 0, "{missed} misses, {failed} failures");
    }
}

#[test]
fn a_byte_of_a_published_slot_is_what_the_model_computes_from() {
    let model = Model::new(spec(64, 8, 2, 72), BlockSize::B32, 4);
    let want = resident(&model);
    for layer in 0..2 {
        let mut c = cached(&model, Policy::Lru, 8, 2, None);
        assert_eq!(c.served.text().difference(&want), None);
        let (maps, _) = c.cache.census();
        let slot =
            maps[layer][usize::try_from(used_expert(&model, layer)).expect("small")].expect("resident");
        let byte = 5;
        let before = c.slots.read_back(slot)[byte];
        c.slots.poke(slot, byte, before ^ 0x77);
        assert!(c.served.text().difference(&want).is_some(), "layer {layer}");
        c.slots.poke(slot, byte, before);
        assert_eq!(c.served.text().difference(&want), None, "layer {layer}, put back");
    }
}

/// An expert that the text uses: the one whose absence from the slots, as NaN, is seen.
fn used_expert(model: &Model, layer: usize) -> u32 {
    (0..8)
        .find(|e| {
            let mut c = cached(model, Policy::Lru, 8, 2, None);
            let (maps, _) = c.cache.census();
            c.slots.poison(maps[layer][*e as usize].expect("resident"));
            has_nan(&c.served.text())
        })
        .expect("the text uses experts")
}

fn has_nan(text: &Text) -> bool {
    text.logits
        .iter()
        .flatten()
        .any(|bits| f32::from_bits(*bits).is_nan())
}

#[test]
fn an_unpublished_slot_holds_nan_and_would_be_seen() {
    let model = Model::new(spec(64, 8, 2, 72), BlockSize::B32, 5);
    let mut c = cached(&model, Policy::Lru, 8, 4, None);
    assert!(!has_nan(&c.served.text()));
    let (maps, census) = c.cache.census();
    // Spares were never written: they hold the pattern.
    for slot in census.spares {
        let bytes = c.slots.read_back(slot);
        assert!(bytes.chunks_exact(2).all(|b| b == [0xFF, 0x7F]), "{slot:?}");
    }
    for slot in maps[0].iter().flatten() {
        c.slots.poison(*slot);
    }
    assert!(has_nan(&c.served.text()));
}

/// A store whose every byte can be turned over.
struct Turning {
    plain: Vec<Vec<u8>>,
    turned: Vec<Vec<u8>>,
    experts: usize,
    now: AtomicBool,
}

impl Turning {
    fn new(model: &Model) -> Self {
        let experts = model.spec.moe().expect("there are experts").experts;
        let record = |layer: LayerId, e: u32| {
            let address = model.image.address(layer, ExpertId(e)).expect("of the model");
            model.image.bytes_at(address).to_vec()
        };
        let plain: Vec<Vec<u8>> = model
            .spec
            .moe_layers()
            .flat_map(|l| (0..u32::try_from(experts).expect("few")).map(move |e| (l, e)))
            .map(|(l, e)| record(l, e))
            .collect();
        let turned = plain
            .iter()
            .map(|r| r.iter().map(|b| b ^ 0x11).collect())
            .collect();
        Self {
            plain,
            turned,
            experts,
            now: AtomicBool::new(false),
        }
    }
}

impl HostRecords for Turning {
    fn record(&self, layer: usize, expert: ExpertId) -> &[u8] {
        let records = if self.now.load(Ordering::Relaxed) {
            &self.turned
        } else {
            &self.plain
        };
        &records[layer * self.experts + expert.index()]
    }
}

#[test]
fn the_host_copy_of_a_resident_expert_is_not_read() {
    let model = Model::new(spec(64, 8, 2, 72), BlockSize::B32, 6);
    let want = resident(&model);
    for (capacity, same) in [(8, true), (3, false)] {
        let store = Arc::new(Turning::new(&model));
        let mut c = cached_from(&model, store.clone(), Policy::Lru, capacity, 2, None);
        assert_eq!(c.served.text().difference(&want), None);
        store.now.store(true, Ordering::Relaxed);
        // With every expert resident nothing is fetched any more; with three a layer the change arrives.
        assert_eq!(
            c.served.text().difference(&want).is_none(),
            same,
            "capacity {capacity}"
        );
    }
}
