//! The oracles. They see every write to a slot, every use of a staging buffer and every publication of the simulated
//! device, and know which generations are held; each panics with the clause that was broken.

use std::collections::{BTreeMap, BTreeSet};

use horizon_core::ids::ExpertId;
use horizon_core::transport::{Publish, SlotId};

use super::Records;
use crate::generation::{Census, LayerMap};
use crate::geometry::Geometry;
use crate::host_store::HostRecords;
use crate::sync::Shared;

/// Layer (by position) and expert that each slot shows in one generation.
type Shown = Vec<Option<(usize, ExpertId)>>;

/// What is known of the cache from outside.
pub struct Checker {
    geometry: Geometry,
    records: Shared<Records>,
    /// The current generation and those that are held.
    generations: BTreeMap<u64, Shown>,
    held: BTreeMap<u64, usize>,
    current: u64,
    /// By slot: reads of device work under way.
    reading: Vec<u32>,
    /// By buffer: copies under way from it.
    staging: Vec<u32>,
    /// Slots written since the last publication, and not poisoned.
    filling: BTreeSet<SlotId>,
}

impl Checker {
    /// Nothing is published yet.
    #[must_use]
    pub fn new(geometry: Geometry, staging: usize, records: Shared<Records>) -> Self {
        Self {
            reading: vec![0; geometry.slots()],
            staging: vec![0; staging],
            geometry,
            records,
            generations: BTreeMap::new(),
            held: BTreeMap::new(),
            current: 0,
            filling: BTreeSet::new(),
        }
    }

    /// The record that `expert` must show.
    #[must_use]
    pub fn record(&self, layer: usize, expert: ExpertId) -> &[u8] {
        self.records.record(layer, expert)
    }

    /// The first generation is `maps`; `bytes` are all slots.
    pub fn admitted(&mut self, maps: &[LayerMap], bytes: &[Vec<u8>]) {
        let mut shown = vec![None; self.geometry.slots()];
        for (layer, map) in maps.iter().enumerate() {
            self.show(&mut shown, layer, map, bytes);
        }
        self.generations.insert(1, shown);
        self.current = 1;
        self.filling.clear();
    }

    fn show(&self, shown: &mut Shown, layer: usize, map: &LayerMap, bytes: &[Vec<u8>]) {
        let resident = map.iter().flatten().count();
        assert!(
            resident <= self.geometry.capacity,
            "C3: {resident} residents in a layer of capacity {}",
            self.geometry.capacity
        );
        for (expert, slot) in (0u32..).map(ExpertId).zip(map) {
            let Some(slot) = slot else { continue };
            let before = shown[slot.index()].replace((layer, expert));
            assert_eq!(before, None, "C8: {slot:?} is in one generation twice");
            assert!(
                bytes[slot.index()] == self.record(layer, expert),
                "C8: {expert} is published before its copy has ended"
            );
        }
    }

    /// The device has written a row of its table.
    pub fn publish(&mut self, publish: &Publish, bytes: &[Vec<u8>]) {
        let id = publish.generation.0;
        assert_eq!(id, self.current + 1, "C8: generations are consecutive");
        let layer = self.position(publish);
        let mut shown = self.generations[&self.current].clone();
        for slot in &mut shown {
            if slot.is_some_and(|(l, _)| l == layer) {
                *slot = None;
            }
        }
        self.show(&mut shown, layer, &publish.row, bytes);
        for slot in &self.filling {
            let place = shown[slot.index()];
            assert!(
                place.is_some_and(|(l, _)| l == layer),
                "C11: {slot:?} was filled beside the transaction that published {layer}"
            );
        }
        self.filling.clear();
        for generation in self.held.keys() {
            for (slot, (old, new)) in self.generations[generation].iter().zip(&shown).enumerate() {
                assert!(
                    old.is_none() || new.is_none() || old == new,
                    "C9: slot {slot} shows {old:?} in generation {generation}, which is held, and {new:?} in {id}"
                );
            }
        }
        self.generations.insert(id, shown);
        let before = std::mem::replace(&mut self.current, id);
        self.forget(before);
    }

    fn position(&self, publish: &Publish) -> usize {
        self.geometry
            .layers
            .binary_search(&publish.layer)
            .expect("C8: a layer with routed experts is published")
    }

    fn forget(&mut self, generation: u64) {
        if generation != self.current && !self.held.contains_key(&generation) {
            self.generations.remove(&generation);
        }
    }

    /// Whether `generation`, which is held, shows all of a group.
    #[must_use]
    pub fn shows(&self, generation: u64, layer: usize, group: &[ExpertId]) -> bool {
        let shown = &self.generations[&generation];
        group.iter().all(|e| shown.contains(&Some((layer, *e))))
    }

    /// How many of a group the current generation does not show.
    #[must_use]
    pub fn missing(&self, layer: usize, group: &[ExpertId]) -> usize {
        let one = |e: &ExpertId| self.shows(self.current, layer, std::slice::from_ref(e));
        group.iter().filter(|e| !one(e)).count()
    }

    /// Somebody holds `generation`.
    pub fn hold(&mut self, generation: u64) {
        assert!(
            self.generations.contains_key(&generation),
            "C4: generation {generation} is held but was let go before"
        );
        *self.held.entry(generation).or_default() += 1;
    }

    /// One holder less.
    pub fn let_go(&mut self, generation: u64) {
        let holders = self.held.get_mut(&generation).expect("it was held");
        *holders -= 1;
        if *holders == 0 {
            self.held.remove(&generation);
            self.forget(generation);
        }
    }

    /// Device work begins (`by` 1) or has ended (−1) to read a slot.
    pub fn device_reads(&mut self, slot: SlotId, by: i32) {
        let count = &mut self.reading[slot.index()];
        *count = count.checked_add_signed(by).expect("reads begin before they end");
    }

    /// A slot is about to be written.
    pub fn write(&mut self, slot: SlotId) {
        assert_eq!(
            self.reading[slot.index()],
            0,
            "C9: {slot:?} is written while device work reads it"
        );
        for (id, shown) in &self.generations {
            assert!(
                shown[slot.index()].is_none(),
                "C9: {slot:?} is written while generation {id} shows it"
            );
        }
    }

    /// A copy has written to a slot.
    pub fn filled(&mut self, slot: SlotId) {
        self.filling.insert(slot);
    }

    /// A slot holds NaN.
    pub fn poisoned(&mut self, slot: SlotId) {
        self.filling.remove(&slot);
    }

    /// A staging buffer is about to be filled.
    pub fn stage(&self, buffer: usize) {
        assert!(
            buffer < self.staging.len(),
            "C6: staging buffer {buffer} does not exist"
        );
        assert_eq!(
            self.staging[buffer], 0,
            "C7: staging buffer {buffer} is filled while a copy reads it"
        );
    }

    /// A copy from a staging buffer is queued (`by` 1) or has ended (−1).
    pub fn copies(&mut self, buffer: usize, by: i32) {
        let count = &mut self.staging[buffer];
        *count = count
            .checked_add_signed(by)
            .expect("copies begin before they end");
    }

    /// The device is lost: nothing reads or writes any more.
    pub fn lost(&mut self) {
        self.reading.fill(0);
        self.staging.fill(0);
    }

    /// Between two calls of the cache, which has not faulted: every slot is in one place.
    pub fn conserved(&self, maps: &[LayerMap], census: &Census) {
        let mut places = vec![0u8; self.geometry.slots()];
        let resident = maps.iter().flatten().flatten();
        for slot in resident.chain(&census.spares).chain(&census.retiring) {
            places[slot.index()] += 1;
        }
        assert!(
            places.iter().all(|n| *n == 1),
            "C12: slots are in {places:?} places each, not one: {census:?}"
        );
        assert!(
            self.filling.is_empty(),
            "C12: {:?} hold parts of records that nobody publishes",
            self.filling
        );
        for (layer, map) in maps.iter().enumerate() {
            for (expert, slot) in (0u32..).map(ExpertId).zip(map) {
                let Some(slot) = slot else { continue };
                assert_eq!(
                    self.generations[&self.current][slot.index()],
                    Some((layer, expert)),
                    "C8: host and device disagree about {slot:?}"
                );
            }
        }
        for (generation, shown) in &self.generations {
            for slot in &census.spares {
                assert!(
                    shown[slot.index()].is_none(),
                    "C9: {slot:?} is spare while generation {generation} shows it"
                );
            }
        }
    }

    /// No device work is under way and the cache knows it: a victim waits only for somebody who reads it.
    pub fn retiring_are_read(&self, census: &Census) {
        for slot in &census.retiring {
            let read = self
                .held
                .keys()
                .any(|g| self.generations[g][slot.index()].is_some());
            assert!(read, "C6: {slot:?} waits though no held generation shows it");
        }
    }
}
