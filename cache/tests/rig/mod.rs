//! A cache on a simulated device, and one on host memory whose copies can be held up.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use horizon_cache::host_store::HostRecords;
use horizon_cache::sim::Records;
use horizon_cache::sim::checker::Checker;
use horizon_cache::sim::transport::{SimTransport, layers};
use horizon_cache::{Geometry, Policy, ResidentV1, SetupError};
use horizon_core::cpu::transport::HostTransport;
use horizon_core::ids::ExpertId;
use horizon_core::provider::{
    AcquireError, ExpertProvider, GroupLease, Hold, RoutedGroup, SlotAddress, SlotMemory,
};
use horizon_core::transport::{Completion, Copy, Publish, SlotId, StagingId, Transport, TransportError};

/// Bytes of a record.
const RECORD: usize = 24;

pub fn geometry(n: usize, experts: usize, top_k: usize, capacity: usize, spares: usize) -> Geometry {
    Geometry {
        layers: layers(n),
        experts,
        top_k,
        capacity,
        spares,
    }
}

pub fn ids(experts: &[u32]) -> Vec<ExpertId> {
    experts.iter().copied().map(ExpertId).collect()
}

/// Runs `f` on a thread of its own and fails if it has not ended in time.
pub fn terminates(time: Duration, f: impl FnOnce() + Send + 'static) {
    let (send, receive) = mpsc::channel();
    let thread = thread::spawn(move || {
        f();
        send.send(()).expect("the test waits");
    });
    match receive.recv_timeout(time) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("still running after {time:?}"),
        _ => thread.join().expect("ends well"),
    }
}

/// A host store that counts what is read of it.
pub struct Counted {
    records: Arc<Records>,
    places: (usize, u32),
    pub reads: AtomicUsize,
}

impl Counted {
    fn new(g: &Geometry) -> Self {
        let places = (g.layers.len(), u32::try_from(g.experts).expect("few"));
        Self {
            records: Arc::new(Records::new(places.0, g.experts, RECORD, 5)),
            places,
            reads: AtomicUsize::new(0),
        }
    }

    /// All bytes, not counted.
    pub fn copy(&self) -> Vec<u8> {
        (0..self.places.0)
            .flat_map(|l| (0..self.places.1).map(move |e| (l, ExpertId(e))))
            .flat_map(|(l, e)| self.records.record(l, e).to_vec())
            .collect()
    }
}

impl HostRecords for Counted {
    fn record(&self, layer: usize, expert: ExpertId) -> &[u8] {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.records.record(layer, expert)
    }
}

fn acquire(
    cache: &ResidentV1,
    hold: &mut Hold,
    layer: u32,
    experts: &[u32],
) -> Result<Box<dyn GroupLease>, AcquireError> {
    let experts = ids(experts);
    let group = RoutedGroup {
        layer: cache.geometry().layers[layer as usize],
        experts: &experts,
    };
    cache.acquire(hold, &group, Completion::DONE)
}

/// A cache on a simulated device without random faults. Single-threaded unless it is [`patient`](Rig::patient).
pub struct Rig {
    pub cache: ResidentV1,
    pub sim: Arc<SimTransport>,
    pub store: Arc<Counted>,
}

impl Rig {
    pub fn new(g: Geometry) -> Self {
        Self::with_staging(g, 2)
    }

    pub fn with_staging(g: Geometry, staging: usize) -> Self {
        Self::make(g, Policy::Lru, staging, 0)
    }

    pub fn with_policy(g: Geometry, policy: Policy) -> Self {
        Self::make(g, policy, 2, 0)
    }

    /// Waits for readers on other threads.
    pub fn patient(g: Geometry) -> Self {
        Self::make(g, Policy::Lru, 2, 10_000)
    }

    fn make(g: Geometry, policy: Policy, staging: usize, patience: u32) -> Self {
        let slots = g.slots();
        let (cache, sim, store) = Self::parts(g, policy, slots, staging, RECORD).expect("fits");
        sim.admitted(&cache.census().0);
        Self {
            cache: cache.with_patience(patience),
            sim,
            store,
        }
    }

    /// Admission on a device of these numbers.
    pub fn build(g: Geometry, slots: usize, staging: usize, bytes: usize) -> Result<(), SetupError> {
        Self::parts(g, Policy::Lru, slots, staging, bytes).map(drop)
    }

    fn parts(
        g: Geometry,
        policy: Policy,
        slots: usize,
        staging: usize,
        bytes: usize,
    ) -> Result<(ResidentV1, Arc<SimTransport>, Arc<Counted>), SetupError> {
        let store = Arc::new(Counted::new(&g));
        let checker = Checker::new(g.clone(), staging, store.records.clone());
        let sim = Arc::new(SimTransport::new(slots, staging, bytes, checker, 11));
        let cache = ResidentV1::new(g, policy, store.clone(), sim.clone())?;
        Ok((cache, sim, store))
    }

    pub fn lease(
        &self,
        hold: &mut Hold,
        layer: u32,
        experts: &[u32],
    ) -> Result<Box<dyn GroupLease>, AcquireError> {
        acquire(&self.cache, hold, layer, experts)
    }

    pub fn look(&self, lease: &dyn GroupLease, layer: u32, experts: &[u32]) {
        let addresses = lease.wait().expect("readable");
        assert_eq!(addresses.len(), experts.len());
        for (address, expert) in addresses.iter().zip(ids(experts)) {
            self.sim.assert_shows(*address, layer as usize, expert);
        }
    }

    /// Acquires a group, looks at every byte, lets go of the lease.
    pub fn visit(&self, hold: &mut Hold, layer: u32, experts: &[u32]) {
        let lease = self.lease(hold, layer, experts).expect("can be had");
        self.look(lease.as_ref(), layer, experts);
    }

    pub fn waves(&self, hold: &Hold, layer: u32, experts: &[u32]) -> Vec<Vec<u32>> {
        let experts = ids(experts);
        let group = RoutedGroup {
            layer: self.cache.geometry().layers[layer as usize],
            experts: &experts,
        };
        let waves = self.cache.waves(hold, &group);
        waves.iter().map(|w| w.iter().map(|e| e.0).collect()).collect()
    }
}

/// Host memory whose `wait` blocks while the gate is closed.
struct Gated {
    device: Arc<HostTransport>,
    closed: Mutex<bool>,
    opened: Condvar,
    waited: AtomicBool,
    panics: AtomicBool,
    submissions: AtomicU64,
}

impl Transport for Gated {
    fn name(&self) -> &'static str {
        "gated host memory"
    }
    fn slots(&self) -> usize {
        self.device.slots()
    }
    fn staging_buffers(&self) -> usize {
        self.device.staging_buffers()
    }
    fn record_bytes(&self) -> usize {
        self.device.record_bytes()
    }
    fn address(&self, slot: SlotId) -> SlotAddress {
        self.device.address(slot)
    }
    fn stage(&self, buffer: StagingId, record: &[u8]) {
        assert!(!self.panics.swap(false, Ordering::Relaxed), "as planned");
        self.device.stage(buffer, record);
    }
    fn submit(&self, copies: &[Copy], then: Option<Publish>) -> Result<Completion, TransportError> {
        self.submissions.fetch_add(1, Ordering::SeqCst);
        self.device.submit(copies, then)
    }
    fn wait(&self, completion: Completion) -> Result<(), TransportError> {
        if completion != Completion::DONE {
            let mut closed = self.closed.lock().expect("nobody panics");
            while *closed {
                self.waited.store(true, Ordering::SeqCst);
                closed = self.opened.wait(closed).expect("nobody panics");
            }
        }
        self.device.wait(completion)
    }
    fn poll(&self, completion: Completion) -> Result<bool, TransportError> {
        self.device.poll(completion)
    }
    fn poison(&self, slot: SlotId) {
        self.device.poison(slot);
    }
    fn read_back(&self, slot: SlotId) -> Vec<u8> {
        self.device.read_back(slot)
    }
    fn read_back_bytes(&self) -> u64 {
        self.device.read_back_bytes()
    }
}

/// A cache whose copies can be held up, for tests on real threads.
pub struct Gate {
    pub cache: ResidentV1,
    pub device: Arc<HostTransport>,
    gated: Arc<Gated>,
    store: Arc<Counted>,
}

impl Gate {
    pub fn new(g: Geometry) -> Arc<Self> {
        let store = Arc::new(Counted::new(&g));
        let device = HostTransport::new(g.slots(), 4, RECORD).expect("a little memory");
        let device = Arc::new(device);
        let gated = Arc::new(Gated {
            device: device.clone(),
            closed: Mutex::new(false),
            opened: Condvar::new(),
            waited: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            submissions: AtomicU64::new(0),
        });
        let cache = ResidentV1::new(g, Policy::Lru, store.clone(), gated.clone()).expect("fits");
        Arc::new(Self {
            cache,
            device,
            gated,
            store,
        })
    }

    pub fn close(&self) {
        *self.gated.closed.lock().expect("nobody panics") = true;
    }

    pub fn open(&self) {
        *self.gated.closed.lock().expect("nobody panics") = false;
        self.gated.opened.notify_all();
    }

    /// Returns when somebody stands at the closed gate.
    pub fn until_waited(&self) {
        while !self.gated.waited.load(Ordering::SeqCst) {
            thread::yield_now();
        }
    }

    /// The next record cannot be staged.
    pub fn panic_next(&self) {
        self.gated.panics.store(true, Ordering::Relaxed);
    }

    pub fn submissions(&self) -> u64 {
        self.gated.submissions.load(Ordering::SeqCst)
    }

    pub fn lease(
        &self,
        hold: &mut Hold,
        layer: u32,
        experts: &[u32],
    ) -> Result<Box<dyn GroupLease>, AcquireError> {
        acquire(&self.cache, hold, layer, experts)
    }

    pub fn visit(&self, hold: &mut Hold, layer: u32, experts: &[u32]) {
        let lease = self.lease(hold, layer, experts).expect("can be had");
        for (address, expert) in lease.wait().expect("readable").iter().zip(ids(experts)) {
            let record = self.device.record(*address);
            assert!(*record == *self.store.records.record(layer as usize, expert));
        }
    }
}
