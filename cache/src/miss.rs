//! A miss transaction: reserve, stage, copy, publish or abort. Serialized (C11).

use horizon_core::ids::ExpertId;
use horizon_core::transport::{Completion, Copy, Moment, Publish, SlotId, StagingId, TransportError};

use crate::resident_v1::{CacheError, ResidentV1, Snapshot};
use crate::sync::Arc;

/// What only the holder of the miss lock touches.
pub(crate) struct MissState {
    /// The completion of the copy that last read each staging buffer (C7).
    pub staging: Vec<Completion>,
    /// The buffer to use next: buffers go round.
    pub next: usize,
}

/// A group that is being brought.
pub(crate) struct Transaction<'a> {
    pub cache: &'a ResidentV1,
    pub state: &'a mut MissState,
    /// Position of the layer.
    pub layer: usize,
    /// The whole group: never victims.
    pub group: &'a [ExpertId],
}

impl Transaction<'_> {
    /// Brings `missing`, which `current` does not show, and gives the generation that shows the whole group.
    ///
    /// # Errors
    /// [`CacheError::Failed`]: nothing changed, everything reserved was given back (C12). [`CacheError::Fault`]:
    /// the cache has faulted (C13).
    pub fn run(
        &mut self,
        current: &Arc<Snapshot>,
        missing: &[ExpertId],
    ) -> Result<Arc<Snapshot>, CacheError> {
        let slots = self.reserve(missing.len())?;
        let (map, victims) = self.successor(current, missing, &slots);
        let generation = current.generation.successor(self.layer, map);
        let publish = Publish {
            layer: self.cache.geometry().layers[self.layer],
            generation: generation.id(),
            row: generation.layer(self.layer).clone(),
        };
        match self.transfer(missing, &slots, publish) {
            Ok(()) => {}
            Err(e) if e.moment == Moment::BeforePublication => {
                for slot in &slots {
                    self.cache.transport().poison(*slot);
                }
                self.cache.retirement().put(slots);
                self.cache.counters(self.layer).failures.add(1);
                return Err(CacheError::Failed(e.reason));
            }
            Err(e) => return Err(CacheError::Fault(self.cache.fault(e.reason))),
        }
        let counters = self.cache.counters(self.layer);
        counters.publications.add(1);
        counters.evictions.add(victims.len() as u64);
        let last = current.generation.id();
        let next = Arc::new(Snapshot { generation });
        self.cache.publish(next.clone());
        self.cache.retirement().retire(last, victims);
        Ok(next)
    }

    /// Takes `n` spares, waiting for readers to let go of victims if there are too few (C6).
    fn reserve(&mut self, n: usize) -> Result<Vec<SlotId>, CacheError> {
        let retirement = self.cache.retirement();
        let mut waited = 0u32;
        loop {
            // Nobody would know whether the device still reads those slots.
            self.cache
                .drain()
                .map_err(|e| CacheError::Fault(self.cache.fault(e.reason)))?;
            if let Some(slots) = retirement.take(n) {
                return Ok(slots);
            }
            if waited == 0 {
                self.cache.counters(self.layer).lease_waits.add(1);
            }
            if waited == self.cache.patience() {
                let census = retirement.census();
                return Err(CacheError::Failed(format!(
                    "{n} spare slots needed, {} free; {} wait for readers that do not let go",
                    census.spares.len(),
                    census.retiring.len()
                )));
            }
            waited += 1;
            retirement.wait(n);
        }
    }

    /// The layer's map with `missing` in `slots`, and the slots that left it.
    fn successor(
        &self,
        current: &Arc<Snapshot>,
        missing: &[ExpertId],
        slots: &[SlotId],
    ) -> (Vec<Option<SlotId>>, Vec<SlotId>) {
        let mut map = current.generation.layer(self.layer).clone();
        let resident = map.iter().flatten().count();
        let leaving = (resident + missing.len()).saturating_sub(self.cache.geometry().capacity);
        let candidates: Vec<_> = (0u32..)
            .map(ExpertId)
            .zip(&map)
            .filter(|(e, slot)| slot.is_some() && self.group.binary_search(e).is_err())
            .map(|(e, _)| (e, self.cache.access().get(self.layer, e)))
            .collect();
        let victims = self
            .cache
            .policy()
            .victims(&candidates, leaving, self.cache.geometry().pinned());
        let freed = victims.iter().filter_map(|e| map[e.index()].take()).collect();
        for (e, slot) in missing.iter().zip(slots) {
            map[e.index()] = Some(*slot);
        }
        (map, freed)
    }

    /// Pageable memory → staging → slots, and the publication after the last copy (C7, C8).
    fn transfer(
        &mut self,
        missing: &[ExpertId],
        slots: &[SlotId],
        publish: Publish,
    ) -> Result<(), TransportError> {
        let transport = self.cache.transport();
        let counters = self.cache.counters(self.layer);
        let mut publish = Some(publish);
        let mut queued = Vec::with_capacity(missing.len());
        let mut outcome = Ok(());
        for (i, (expert, slot)) in missing.iter().zip(slots).enumerate() {
            let buffer = self.state.next;
            self.state.next = (buffer + 1) % self.state.staging.len();
            let busy = self.state.staging[buffer];
            if !transport.poll(busy).unwrap_or(true) {
                counters.staging_waits.add(1);
            }
            // An error of an earlier copy of this group is met again below; one of an earlier group was met then.
            let _ = transport.wait(busy);
            let staging = StagingId(u32::try_from(buffer).expect("staging buffers are few"));
            transport.stage(staging, self.cache.store().record(self.layer, *expert));
            let last = i + 1 == missing.len();
            let copy = Copy { staging, slot: *slot };
            match transport.submit(&[copy], if last { publish.take() } else { None }) {
                Ok(completion) => {
                    self.state.staging[buffer] = completion;
                    queued.push(completion);
                    counters.h2d_bytes.add(transport.record_bytes() as u64);
                }
                Err(e) => {
                    outcome = Err(e);
                    break;
                }
            }
        }
        // All of them, also after an error: slots and buffers are free only when nothing is under way.
        for completion in queued {
            let ended = transport.wait(completion);
            outcome = match (outcome, ended) {
                (Err(a), Err(b)) if b.moment == Moment::AfterPublication && a.moment != b.moment => Err(b),
                (Err(a), _) => Err(a),
                (Ok(()), ended) => ended,
            };
        }
        outcome
    }
}
