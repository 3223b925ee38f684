//! The profile `resident-qpacked-cache-v1`: an [`ExpertProvider`] that keeps a fixed number of experts a layer on
//! the device and brings the others when they are asked for.

use horizon_core::ids::{ExpertId, LayerId};
use horizon_core::observe::ProcessMark;
use horizon_core::provider::{AcquireError, CacheFault, ExpertProvider, GroupLease, Hold, RoutedGroup};
use horizon_core::transport::{Completion, SlotId, Transport, TransportError};
use thiserror::Error;

use crate::access::AccessTable;
use crate::generation::{Census, Generation, LayerMap, Retirement};
use crate::geometry::ascending;
use crate::host_store::HostRecords;
use crate::lease::{Lease, Snapshot, held, held_by, nothing_held};
use crate::miss::{MissState, Transaction};
use crate::policy::Policy;
use crate::report::{LayerCounters, Observations, observations};
use crate::seeded::{Bug, seeded};
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, Shared, Swap, lock};

pub use crate::geometry::{Geometry, SetupError};

/// Name of the profile.
pub const PROFILE: &str = "resident-qpacked-cache-v1";
/// How the device is filled before admission: experts 0 to c − 1 of every layer.
pub const INITIAL_PLACEMENT: &str = "canonical: the first c experts of each layer";

/// A group that could not be had.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum CacheError {
    /// Nothing changed; asking again may succeed.
    #[error("{0}")]
    Failed(String),
    /// Nothing will be served any more.
    #[error("{0}")]
    Fault(String),
}

/// The cache.
pub struct ResidentV1 {
    geometry: Geometry,
    policy: Policy,
    store: Shared<dyn HostRecords>,
    transport: Shared<dyn Transport>,
    current: Swap<Snapshot>,
    retirement: Arc<Retirement>,
    miss: Mutex<MissState>,
    /// Generations let go by holders whose device still reads them, until its work has ended (C9).
    draining: Mutex<Vec<(Completion, Arc<Snapshot>)>>,
    faulted: AtomicBool,
    reason: Mutex<Option<String>>,
    access: AccessTable,
    counters: Vec<LayerCounters>,
    admitted: ProcessMark,
    patience: u32,
}

impl ResidentV1 {
    /// Fills the device with the initial placement and admits requests.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn new(
        geometry: Geometry,
        policy: Policy,
        store: Shared<dyn HostRecords>,
        transport: Shared<dyn Transport>,
    ) -> Result<Self, SetupError> {
        geometry.check()?;
        for (what, found, needed) in [
            ("slots", transport.slots(), geometry.slots()),
            ("staging buffers", transport.staging_buffers().min(1), 1),
        ] {
            if found < needed {
                return Err(SetupError::Device { what, found, needed });
            }
        }
        for layer in 0..geometry.layers.len() {
            let (found, needed) = (transport.record_bytes(), store.record(layer, ExpertId(0)).len());
            if found != needed {
                let what = "bytes in a slot and in a staging buffer";
                return Err(SetupError::Device { what, found, needed });
            }
        }
        let mut state = MissState {
            staging: vec![Completion::DONE; transport.staging_buffers()],
            next: 0,
        };
        let mut slots = (0u32..).map(SlotId);
        let mut maps: Vec<LayerMap> = Vec::with_capacity(geometry.layers.len());
        for layer in 0..geometry.layers.len() {
            let placed: LayerMap = slots.by_ref().take(geometry.capacity).map(Some).collect();
            place(&mut state, transport.as_ref(), store.as_ref(), layer, &placed)?;
            maps.push(
                placed
                    .into_iter()
                    .chain(std::iter::repeat(None))
                    .take(geometry.experts)
                    .collect(),
            );
        }
        for busy in &mut state.staging {
            transport.wait(std::mem::replace(busy, Completion::DONE))?;
        }
        let retirement = Arc::new(Retirement::new(
            geometry.slots(),
            slots.take(geometry.spares).collect(),
        ));
        let first = Snapshot {
            generation: Generation::first(maps, &retirement),
        };
        Ok(Self {
            current: Swap::new(Arc::new(first)),
            retirement,
            miss: Mutex::new(state),
            draining: Mutex::new(Vec::new()),
            faulted: AtomicBool::new(false),
            reason: Mutex::new(None),
            access: AccessTable::new(geometry.layers.len(), geometry.experts),
            counters: geometry.layers.iter().map(|_| LayerCounters::default()).collect(),
            admitted: ProcessMark::now(),
            // About half a minute of one-millisecond waits.
            patience: 30_000,
            geometry,
            policy,
            store,
            transport,
        })
    }

    /// Gives up on readers that hold their slots for more than `waits` waits of about a millisecond.
    #[must_use]
    pub fn with_patience(mut self, waits: u32) -> Self {
        self.patience = waits;
        self
    }

    /// Sizes.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Replacement policy.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Everything counted since admission.
    #[must_use]
    pub fn observations(&self) -> Observations {
        let layers = self
            .geometry
            .layers
            .iter()
            .copied()
            .zip(self.counters.iter().map(LayerCounters::counts));
        observations(layers, &self.admitted, self.transport.read_back_bytes())
    }

    /// Slot of each expert of a layer in the current generation, and where the other slots are.
    #[must_use]
    pub fn census(&self) -> (Vec<LayerMap>, Census) {
        let current = self.current.load();
        let maps = (0..current.generation.layers())
            .map(|l| current.generation.layer(l).clone())
            .collect();
        (maps, self.retirement.census())
    }

    pub(crate) fn transport(&self) -> &dyn Transport {
        self.transport.as_ref()
    }

    pub(crate) fn store(&self) -> &dyn HostRecords {
        self.store.as_ref()
    }

    pub(crate) fn retirement(&self) -> &Retirement {
        &self.retirement
    }

    /// Lets go of generations whose device work has ended.
    pub(crate) fn drain(&self) -> Result<(), TransportError> {
        let mut draining = lock(&self.draining);
        let mut error = None;
        draining.retain(|(completion, _)| match self.transport.poll(*completion) {
            Ok(ended) => !ended,
            Err(e) => {
                error = Some(e);
                true
            }
        });
        error.map_or(Ok(()), Err)
    }

    /// The device work that the longest waiting of those generations waits for.
    pub(crate) fn draining(&self) -> Option<Completion> {
        lock(&self.draining).first().map(|(completion, _)| *completion)
    }

    pub(crate) fn access(&self) -> &AccessTable {
        &self.access
    }

    pub(crate) fn counters(&self, layer: usize) -> &LayerCounters {
        &self.counters[layer]
    }

    pub(crate) fn patience(&self) -> u32 {
        self.patience
    }

    pub(crate) fn publish(&self, next: Arc<Snapshot>) {
        self.current.store(next);
    }

    /// Faults the cache: the first reason stays (C13).
    pub(crate) fn fault(&self, reason: String) -> String {
        if seeded(Bug::FaultBeforeReason) {
            self.faulted.store(true, Ordering::Release);
        }
        let mut first = lock(&self.reason);
        let reason = first.get_or_insert(reason).clone();
        // Release: whoever sees the flag sees the reason.
        self.faulted.store(true, Ordering::Release);
        reason
    }

    fn check_fault(&self, layer: LayerId) -> Result<(), CacheFault> {
        if !self.faulted.load(Ordering::Acquire) {
            return Ok(());
        }
        let reason = lock(&self.reason).clone().unwrap_or_default();
        Err(CacheFault { layer, reason })
    }

    /// Gives up a hold: now, or when the device has passed `after` (C9).
    fn let_go(&self, hold: Hold, after: Completion) {
        if after != Completion::DONE
            && !seeded(Bug::ForgetDeviceWork)
            && let Some(snapshot) = held(&hold)
        {
            lock(&self.draining).push((after, snapshot));
            // Here, too: a long run of hits has no miss that would do it.
            if let Err(e) = self.drain() {
                self.fault(e.reason);
            }
        }
    }

    /// The generation that shows `group`, and how many experts had to be brought for it.
    fn bring(
        &self,
        state: &mut MissState,
        layer: usize,
        group: &RoutedGroup<'_>,
        current: &Arc<Snapshot>,
    ) -> Result<(Arc<Snapshot>, usize), AcquireError> {
        let map = current.generation.layer(layer);
        let missing: Vec<ExpertId> = group
            .experts
            .iter()
            .copied()
            .filter(|e| map[e.index()].is_none())
            .collect();
        if missing.is_empty() {
            return Ok((current.clone(), 0));
        }
        if missing.len() > self.geometry.spares || group.experts.len() > self.geometry.capacity {
            return Err(AcquireError::TooLarge {
                experts: group.experts.len(),
                missing: missing.len(),
            });
        }
        let mut transaction = Transaction {
            cache: self,
            state,
            layer,
            group: group.experts,
        };
        match transaction.run(current, &missing) {
            Ok(next) => Ok((next, missing.len())),
            Err(CacheError::Failed(reason)) => Err(AcquireError::Failed {
                layer: group.layer,
                reason,
            }),
            Err(CacheError::Fault(reason)) => Err(CacheFault {
                layer: group.layer,
                reason,
            }
            .into()),
        }
    }

    fn position(&self, group: &RoutedGroup<'_>) -> Result<usize, CacheFault> {
        let fault = |reason| CacheFault {
            layer: group.layer,
            reason,
        };
        let layer = self.geometry.layers.binary_search(&group.layer);
        let layer = layer.map_err(|_| fault("the layer has no routed experts".into()))?;
        if !ascending(group.experts) {
            return Err(fault("a group's experts are distinct and ascending".into()));
        }
        match group.experts.last() {
            Some(e) if e.index() >= self.geometry.experts => Err(fault(format!("there is no {e}"))),
            _ => Ok(layer),
        }
    }

    /// A lease on a group that `snapshot` shows completely, or `None` (C5).
    fn lease(&self, snapshot: &Arc<Snapshot>, layer: usize, experts: &[ExpertId]) -> Option<Box<Lease>> {
        let map = snapshot.generation.layer(layer);
        let mut addresses = Vec::with_capacity(experts.len());
        for e in experts {
            addresses.push(self.transport.address(map[e.index()]?));
        }
        let now = self.access.tick(layer);
        for e in experts {
            self.access.touch(layer, *e, now);
        }
        Some(Box::new(Lease {
            addresses,
            _holds: snapshot.clone(),
        }))
    }
}

/// The initial placement of one layer: expert `i` in `placed[i]`.
fn place(
    state: &mut MissState,
    transport: &dyn Transport,
    store: &dyn HostRecords,
    layer: usize,
    placed: &LayerMap,
) -> Result<(), TransportError> {
    use horizon_core::transport::{Copy, StagingId};
    for (expert, slot) in (0u32..).map(ExpertId).zip(placed.iter().flatten()) {
        let buffer = state.next;
        state.next = (buffer + 1) % state.staging.len();
        transport.wait(state.staging[buffer])?;
        let staging = StagingId(u32::try_from(buffer).expect("staging buffers are few"));
        transport.stage(staging, store.record(layer, expert));
        state.staging[buffer] = transport.submit(&[Copy { staging, slot: *slot }], None)?;
    }
    Ok(())
}

/// Faults the cache unless it is disarmed: nobody knows what a transaction that panicked has left behind.
struct FaultOnPanic<'a>(Option<&'a ResidentV1>);

impl Drop for FaultOnPanic<'_> {
    fn drop(&mut self) {
        if let Some(cache) = self.0 {
            cache.fault("a miss transaction panicked".into());
        }
    }
}

impl ExpertProvider for ResidentV1 {
    fn capture(&self) -> Hold {
        held_by(self.current.load())
    }

    fn complete(&self) -> bool {
        self.geometry.capacity == self.geometry.experts
    }

    fn waves(&self, hold: &Hold, group: &RoutedGroup<'_>) -> Vec<Vec<ExpertId>> {
        let limit = self.geometry.capacity.min(self.geometry.spares);
        if group.experts.len() <= limit {
            return vec![group.experts.to_vec()];
        }
        let Ok(layer) = self.position(group) else {
            return vec![group.experts.to_vec()];
        };
        let snapshot = held(hold).unwrap_or_else(|| self.current.load());
        let map = snapshot.generation.layer(layer);
        let (hits, missing): (Vec<_>, Vec<_>) = group.experts.iter().partition(|e| map[e.index()].is_some());
        let hits = (!hits.is_empty()).then_some(hits);
        hits.into_iter()
            .chain(missing.chunks(limit).map(<[_]>::to_vec))
            .collect()
    }

    fn acquire(
        &self,
        hold: &mut Hold,
        group: &RoutedGroup<'_>,
        passed: Completion,
    ) -> Result<Box<dyn GroupLease>, AcquireError> {
        self.check_fault(group.layer)?;
        let layer = self.position(group)?;
        if let Some(snapshot) = held(hold)
            && let Some(lease) = self.lease(&snapshot, layer, group.experts)
        {
            self.counters[layer].hits.add(group.experts.len() as u64);
            return Ok(lease);
        }
        // The hold is let go before queueing for the miss lock: whoever waits here keeps no slot from becoming a
        // spare, except those that the device still reads until `passed` (C6).
        let early = seeded(Bug::LookBeforeQueueing).then(|| self.current.load());
        if !seeded(Bug::KeepHoldWhileQueueing) {
            self.let_go(std::mem::replace(hold, nothing_held()), passed);
        }
        let mut state = lock(&self.miss);
        if !seeded(Bug::MissFaultWhileQueueing) {
            self.check_fault(group.layer)?;
        }
        // What the group misses is decided here, where nobody else publishes.
        let current = early.unwrap_or_else(|| self.current.load());
        let mut guard = FaultOnPanic(Some(self));
        let outcome = self.bring(&mut state, layer, group, &current);
        guard.0 = None;
        *hold = held_by(match &outcome {
            Ok((next, _)) => next.clone(),
            Err(_) => current,
        });
        let (next, missed) = outcome?;
        self.counters[layer]
            .hits
            .add((group.experts.len() - missed) as u64);
        self.counters[layer].misses.add(missed as u64);
        let lease = self
            .lease(&next, layer, group.experts)
            .expect("the generation was made to show the group");
        Ok(lease)
    }

    fn release(&self, hold: Hold, after: Completion) {
        self.let_go(hold, after);
    }
}
