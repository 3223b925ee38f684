//! Expert slots on the device, and how records get there: pageable host memory, page-locked staging, a copy stream.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use horizon_core::ids::{ExpertId, GenerationId, LayerId};
use horizon_core::image::ExpertImage;
use horizon_core::memory::align_up;
use horizon_core::observe::Counter;
use horizon_core::provider::SlotAddress;
use horizon_core::transport::{
    Completion, Copy, Moment, Publish, SlotId, StagingId, Transport, TransportError,
};

use crate::arena::{Arena, Carver, Piece, PinnedMemory};
use crate::driver::{DevicePtr, DriverError, Event, SharedDriver, Stream};

/// A copy that takes longer than this has failed.
const DEADLINE: Duration = Duration::from_secs(20);
/// Submissions that can be under way at once.
const MOST_PENDING: usize = 256;
/// Entry of the slot table for an expert that is not resident.
const ABSENT: u32 = u32::MAX;

/// Slots, staging buffers and the table that says which expert is in which slot, on one device.
pub struct CudaTransport {
    driver: SharedDriver,
    stream: Stream,
    slots: usize,
    record_bytes: usize,
    stride: usize,
    moe_layers: Vec<LayerId>,
    experts: usize,
    arena: Arena,
    slot_memory: Piece,
    table: Piece,
    staging: Vec<Mutex<PinnedMemory>>,
    queue: Mutex<Queue>,
    read_back: Counter,
}

struct Queue {
    next: u64,
    /// Submissions that have not been seen to end, oldest first.
    pending: VecDeque<(u64, Event)>,
    free: Vec<Event>,
    /// Rows of the table on their way: one per event.
    rows: PinnedMemory,
    /// The first failure: nothing after it can be trusted.
    failed: Option<TransportError>,
}

impl CudaTransport {
    /// Bytes by purpose of `slots` slots for records of `record_bytes`, and of the table.
    #[must_use]
    pub fn ledger(
        slots: usize,
        record_bytes: usize,
        moe_layers: usize,
        experts: usize,
    ) -> Vec<(&'static str, u64)> {
        let (carver, _, _) = carve(slots, record_bytes, moe_layers, experts);
        vec![carver.ledger()]
    }

    /// Allocates everything; no expert is resident yet.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(
        driver: &SharedDriver,
        slots: usize,
        staging_buffers: usize,
        record_bytes: usize,
        moe_layers: Vec<LayerId>,
        experts: usize,
    ) -> Result<Self, DriverError> {
        let (carver, slot_memory, table) = carve(slots, record_bytes, moe_layers.len(), experts);
        let arena = carver.allocate(driver)?;
        let stream = driver.stream()?;
        // SAFETY: the table lies in the arena.
        #[expect(unsafe_code, reason = "a fill of raw device memory")]
        unsafe {
            driver.fill(stream, arena.at(table), 0xFF, table.bytes)?;
        }
        driver.synchronize(stream)?;
        let staging = (0..staging_buffers)
            .map(|_| PinnedMemory::new(driver, record_bytes).map(Mutex::new))
            .collect::<Result<_, _>>()?;
        let free = (0..MOST_PENDING)
            .map(|_| driver.event())
            .collect::<Result<Vec<_>, _>>()?;
        let rows = PinnedMemory::new(driver, MOST_PENDING * experts * 4)?;
        Ok(Self {
            driver: Arc::clone(driver),
            stream,
            slots,
            record_bytes,
            stride: align_up(record_bytes),
            moe_layers,
            experts,
            arena,
            slot_memory,
            table,
            staging,
            queue: Mutex::new(Queue {
                next: 1,
                pending: VecDeque::new(),
                free,
                rows,
                failed: None,
            }),
            read_back: Counter::new(),
        })
    }

    /// Puts every expert of `image` into a slot of its own, layer by layer, and publishes all rows: full residency
    /// without a cache.
    ///
    /// # Errors
    /// [`TransportError`] of a copy.
    ///
    /// # Panics
    /// When the image has more experts than there are slots, or other layers.
    pub fn place_all(&self, image: &ExpertImage) -> Result<(), TransportError> {
        let mut busy = vec![Completion::DONE; self.staging.len()];
        let mut slots = (0u32..).map(SlotId);
        for layer in &self.moe_layers {
            let mut row = Vec::with_capacity(self.experts);
            for expert in (0u32..).map(ExpertId).take(self.experts) {
                let slot = slots.next().expect("u32 has no end here");
                let buffer = slot.index() % busy.len();
                self.wait(busy[buffer])?;
                let staging = StagingId(u32::try_from(buffer).expect("staging buffers are few"));
                let address = image
                    .address(*layer, expert)
                    .expect("the image has the layers of this transport");
                self.stage(staging, image.bytes_at(address));
                busy[buffer] = self.submit(&[Copy { staging, slot }], None)?;
                row.push(Some(slot));
            }
            let publish = Publish {
                layer: *layer,
                generation: GenerationId(0),
                row,
            };
            self.wait(self.submit(&[], Some(publish))?)?;
        }
        Ok(())
    }

    /// Where the slots lie.
    #[must_use]
    pub fn slot_memory(&self) -> DevicePtr {
        self.arena.at(self.slot_memory)
    }

    /// Bytes from one slot to the next.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.stride
    }

    /// `u32 [layers with experts, experts]`: the slot of each expert.
    #[must_use]
    pub fn slot_table(&self) -> DevicePtr {
        self.arena.at(self.table)
    }

    /// The device.
    #[must_use]
    pub fn driver(&self) -> &SharedDriver {
        &self.driver
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self, slot: SlotId) -> DevicePtr {
        assert!(slot.index() < self.slots, "slot {} of {}", slot.0, self.slots);
        self.slot_memory().offset(slot.index() * self.stride)
    }

    /// Retires what has ended. After an error nothing more is served.
    fn settle(&self, queue: &mut Queue) -> Result<(), TransportError> {
        if let Some(failed) = &queue.failed {
            return Err(failed.clone());
        }
        while let Some((_, event)) = queue.pending.front() {
            match self.driver.passed(*event) {
                Ok(true) => {
                    let (_, event) = queue.pending.pop_front().expect("looked at above");
                    queue.free.push(event);
                }
                Ok(false) => break,
                // Copies and publication are in one stream: nobody can tell how far it came.
                Err(e) => {
                    let failed = TransportError {
                        moment: Moment::AfterPublication,
                        reason: e.to_string(),
                    };
                    queue.failed = Some(failed.clone());
                    return Err(failed);
                }
            }
        }
        Ok(())
    }

    fn enqueue(
        &self,
        queue: &mut Queue,
        copies: &[Copy],
        then: Option<&Publish>,
        event: Event,
    ) -> Result<(), DriverError> {
        for copy in copies {
            let staging = self.staging[copy.staging.index()]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            // SAFETY: the staging buffer belongs to the cache until the completion of this copy has retired, the slot
            // is a spare that nothing reads, and both are `record_bytes` long.
            #[expect(unsafe_code, reason = "a copy between raw addresses")]
            unsafe {
                self.driver.copy_to_device(
                    self.stream,
                    self.slot(copy.slot),
                    staging.host(),
                    self.record_bytes,
                )?;
            }
        }
        if let Some(publish) = then {
            let row = self
                .moe_layers
                .binary_search(&publish.layer)
                .map_err(|_| DriverError::Call {
                    call: "publish",
                    reason: format!("{} has no routed experts", publish.layer),
                })?;
            let bytes = self.experts * 4;
            let at = event.0 % MOST_PENDING * bytes;
            let slots = publish.row.iter().map(|s| s.map_or(ABSENT, |s| s.0));
            for (out, slot) in queue.rows.bytes_mut()[at..at + bytes]
                .chunks_exact_mut(4)
                .zip(slots)
            {
                out.copy_from_slice(&slot.to_le_bytes());
            }
            // SAFETY: the row stays as it is until the event of this submission is used again, after it has passed.
            #[expect(unsafe_code, reason = "a copy between raw addresses")]
            unsafe {
                let from = queue.rows.host().add(at);
                self.driver.copy_to_device(
                    self.stream,
                    self.slot_table().offset(row * bytes),
                    from,
                    bytes,
                )?;
            }
        }
        self.driver.record(event, self.stream)
    }
}

fn carve(slots: usize, record_bytes: usize, moe_layers: usize, experts: usize) -> (Carver, Piece, Piece) {
    let mut carver = Carver::new("expert slots");
    let memory = carver.take(slots, align_up(record_bytes));
    let table = carver.take(moe_layers * experts, 4);
    (carver, memory, table)
}

impl Transport for CudaTransport {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn slots(&self) -> usize {
        self.slots
    }

    fn staging_buffers(&self) -> usize {
        self.staging.len()
    }

    fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    fn address(&self, slot: SlotId) -> SlotAddress {
        SlotAddress {
            buffer: 0,
            offset: (slot.index() * self.stride) as u64,
        }
    }

    fn stage(&self, buffer: StagingId, record: &[u8]) {
        assert_eq!(record.len(), self.record_bytes, "a record of another size");
        let mut staging = self.staging[buffer.index()]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        staging.bytes_mut()[..record.len()].copy_from_slice(record);
    }

    fn submit(&self, copies: &[Copy], then: Option<Publish>) -> Result<Completion, TransportError> {
        let mut queue = self.queue();
        let started = Instant::now();
        let event = loop {
            self.settle(&mut queue)?;
            if let Some(event) = queue.free.pop() {
                break event;
            }
            if started.elapsed() > DEADLINE {
                return Err(TransportError {
                    moment: Moment::BeforePublication,
                    reason: format!("{MOST_PENDING} submissions are under way and none ends"),
                });
            }
            std::thread::yield_now();
        };
        match self.enqueue(&mut queue, copies, then.as_ref(), event) {
            Ok(()) => {
                let id = queue.next;
                queue.next += 1;
                queue.pending.push_back((id, event));
                Ok(Completion(id))
            }
            // Part of it may be queued: what it will write is not known.
            Err(e) => {
                let failed = TransportError {
                    moment: Moment::AfterPublication,
                    reason: e.to_string(),
                };
                queue.failed = Some(failed.clone());
                Err(failed)
            }
        }
    }

    fn wait(&self, completion: Completion) -> Result<(), TransportError> {
        let started = Instant::now();
        while !self.poll(completion)? {
            if started.elapsed() > DEADLINE {
                return Err(TransportError {
                    moment: Moment::AfterPublication,
                    reason: format!("a copy has not ended within {} s", DEADLINE.as_secs()),
                });
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn poll(&self, completion: Completion) -> Result<bool, TransportError> {
        if completion == Completion::DONE {
            return Ok(true);
        }
        let mut queue = self.queue();
        self.settle(&mut queue)?;
        Ok(queue.pending.front().is_none_or(|(id, _)| completion.0 < *id))
    }

    fn poison(&self, slot: SlotId) {
        // SAFETY: the caller's slot is one that nothing reads, and it is `stride` bytes long.
        #[expect(unsafe_code, reason = "a fill of raw device memory")]
        let filled = unsafe { self.driver.fill(self.stream, self.slot(slot), 0xFF, self.stride) };
        if let Err(e) = filled.and_then(|()| self.driver.synchronize(self.stream)) {
            let failed = TransportError {
                moment: Moment::AfterPublication,
                reason: e.to_string(),
            };
            self.queue().failed.get_or_insert(failed);
        }
    }

    fn read_back(&self, slot: SlotId) -> Vec<u8> {
        let mut out = vec![0; self.record_bytes];
        // SAFETY: `out` and the slot are `record_bytes` long, and the stream is synchronized before `out` is used.
        #[expect(unsafe_code, reason = "a copy between raw addresses")]
        let copied = unsafe {
            self.driver
                .copy_to_host(self.stream, out.as_mut_ptr(), self.slot(slot), self.record_bytes)
        };
        self.read_back.add(self.record_bytes as u64);
        match copied.and_then(|()| self.driver.synchronize(self.stream)) {
            Ok(()) => out,
            Err(e) => {
                let failed = TransportError {
                    moment: Moment::AfterPublication,
                    reason: e.to_string(),
                };
                self.queue().failed.get_or_insert(failed);
                Vec::new()
            }
        }
    }

    fn read_back_bytes(&self) -> u64 {
        self.read_back.get()
    }
}
