//! A miss transaction: reserve, stage, copy, publish or abort. Serialized (C11).

use horizon_core::ids::ExpertId;
use horizon_core::transport::{
    Completion, Copy, Moment, Publish, SlotId, StagingId, Transport, TransportError,
};

use crate::lease::Snapshot;
use crate::resident_v1::{CacheError, ResidentV1};
use crate::seeded::{Bug, seeded};
use crate::sync::Arc;

/// What only the holder of the miss lock touches.
pub(crate) struct MissState {
    /// The completion of the copy that reads each staging buffer (C7). Between transactions none does.
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
        let slots = self.reserve(missing.len()).inspect_err(|e| {
            if matches!(e, CacheError::Failed(_)) {
                self.cache.counters(self.layer).failures.add(1);
            }
        })?;
        let (map, victims) = self.successor(current, missing, &slots);
        let next = Arc::new(Snapshot {
            generation: current.generation.successor(self.layer, map),
        });
        let publish = Publish {
            layer: self.cache.geometry().layers[self.layer],
            generation: next.generation.id(),
            row: next.generation.layer(self.layer).clone(),
        };
        if seeded(Bug::PublishBeforeCopies) {
            self.cache.publish(next.clone());
        }
        match self.transfer(missing, &slots, publish) {
            Ok(()) => {}
            Err(e) if e.moment == Moment::BeforePublication => {
                let half = if seeded(Bug::LeaveHalfRecords) {
                    &[]
                } else {
                    &slots[..]
                };
                for slot in half {
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
        self.cache.publish(next.clone());
        let id = next.generation.id();
        self.cache.retirement().published(id, &slots, &victims);
        Ok(next)
    }

    /// Takes `n` spares, waiting for readers to let go of victims if there are too few (C6).
    fn reserve(&mut self, n: usize) -> Result<Vec<SlotId>, CacheError> {
        let retirement = self.cache.retirement();
        // Nobody would know whether the device still reads those slots.
        let fault = |e: TransportError| CacheError::Fault(self.cache.fault(e.reason));
        let (mut short, mut waited) = (false, 0);
        loop {
            self.cache.drain().map_err(fault)?;
            if let Some(slots) = retirement.take(n) {
                return Ok(slots);
            }
            if !short {
                short = true;
                self.cache.counters(self.layer).lease_waits.add(1);
            }
            // Device work ends without anybody's help, and its end lets go of a generation.
            if let Some(work) = self.cache.draining() {
                self.cache.transport().wait(work).map_err(fault)?;
                continue;
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
        let victims = self.cache.policy().victims(
            &candidates,
            leaving,
            self.cache.access().now(self.layer),
            self.cache.geometry().pinned(),
        );
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
        let mut publish = Some(publish);
        let mut queued = Vec::with_capacity(missing.len());
        let mut outcome = Ok(());
        for (i, (expert, slot)) in missing.iter().zip(slots).enumerate() {
            let buffer = match self.buffer() {
                Ok(buffer) => buffer,
                Err(e) => {
                    outcome = Err(e);
                    break;
                }
            };
            let staging = StagingId(u32::try_from(buffer).expect("staging buffers are few"));
            transport.stage(staging, self.cache.store().record(self.layer, *expert));
            let mut then = None;
            if i + 1 == missing.len() {
                // A submission's publication waits for its own copies. Those before must have ended well, too:
                // they had the time in which the last record was staged.
                outcome = ended(transport, &mut queued);
                if outcome.is_err() && !seeded(Bug::PublishAfterFailure) {
                    break;
                }
                then = publish.take();
            }
            let copy = Copy { staging, slot: *slot };
            match transport.submit(&[copy], then) {
                Ok(completion) => {
                    self.state.staging[buffer] = completion;
                    queued.push(completion);
                    let bytes = transport.record_bytes() as u64;
                    self.cache.counters(self.layer).h2d_bytes.add(bytes);
                }
                Err(e) => {
                    outcome = Err(e);
                    break;
                }
            }
        }
        // Also after an error: slots and buffers are free only when nothing is under way.
        let outcome = worse(outcome, ended(transport, &mut queued));
        self.state.staging.fill(Completion::DONE);
        outcome
    }

    /// The next staging buffer, once the copy that reads it has ended (C7).
    fn buffer(&mut self) -> Result<usize, TransportError> {
        let transport = self.cache.transport();
        let buffer = self.state.next;
        self.state.next = (buffer + 1) % self.state.staging.len();
        let busy = self.state.staging[buffer];
        if !transport.poll(busy).unwrap_or(true) {
            self.cache.counters(self.layer).staging_waits.add(1);
        }
        if !seeded(Bug::ReuseStagingAtOnce) {
            transport.wait(busy)?;
        }
        Ok(buffer)
    }
}

/// Waits for all of `queued`, whatever becomes of them, and gives the worst error.
fn ended(transport: &dyn Transport, queued: &mut Vec<Completion>) -> Result<(), TransportError> {
    let mut outcome = Ok(());
    for completion in queued.drain(..) {
        outcome = worse(outcome, transport.wait(completion));
    }
    outcome
}

/// The first error, or the second if only that one leaves readers in doubt.
fn worse(a: Result<(), TransportError>, b: Result<(), TransportError>) -> Result<(), TransportError> {
    match (a, b) {
        (Err(a), Err(b)) if a.moment == Moment::BeforePublication && b.moment != a.moment => Err(b),
        (Err(a), _) => Err(a),
        (Ok(()), b) => b,
    }
}
