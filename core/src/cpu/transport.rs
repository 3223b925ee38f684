//! Host memory as a device: slots are a bounded arena, copies are copies, everything ends at once.
//!
//! The arena keeps the protocol honest at run time: each slot knows how many readers it has and whether it is being
//! written. Writing a slot that somebody reads, or reading one that is being written, is a bug in the cache and
//! panics; it is never a data race.
#![expect(
    unsafe_code,
    reason = "slots of one arena are read and written by different threads, checked per slot"
)]

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::ids::{GenerationId, LayerId};
use crate::memory::{AnonymousMemory, align_up};
use crate::observe::Counter;
use crate::provider::{RecordGuard, SlotAddress, SlotMemory};
use crate::transport::{Completion, Copy, Publish, SlotId, StagingId, Transport, TransportError};

/// State of a cell whose bytes are being written.
const WRITING: u32 = u32::MAX;
/// Two bytes of a signalling pattern that is NaN as FP16, and whose codes decode to no common weight.
const POISON: [u8; 2] = [0xFF, 0x7F];

/// Equal cells in one range of anonymous memory, each with a count of its readers.
#[derive(Debug)]
struct Cells {
    memory: UnsafeCell<AnonymousMemory>,
    base: *mut u8,
    cell_bytes: usize,
    stride: usize,
    states: Vec<AtomicU32>,
}

// SAFETY: `memory` is never touched after construction except through `base`, and a cell's bytes only while its
// state says that this thread may: shared between readers, or by the one thread that set `WRITING`.
unsafe impl Send for Cells {}
// SAFETY: as above.
unsafe impl Sync for Cells {}

impl Cells {
    fn new(count: usize, cell_bytes: usize) -> io::Result<Self> {
        let stride = align_up(cell_bytes);
        let mut memory = AnonymousMemory::zeroed(stride * count)?;
        let base = memory.bytes_mut().as_mut_ptr();
        let states = (0..count).map(|_| AtomicU32::new(0)).collect();
        Ok(Self {
            memory: UnsafeCell::new(memory),
            base,
            cell_bytes,
            stride,
            states,
        })
    }

    fn bytes(&mut self) -> usize {
        self.memory.get_mut().len()
    }

    fn read(&self, cell: usize) -> RecordGuard<'_> {
        let state = &self.states[cell];
        // Acquire: pairs with the release that ended the last write.
        let readers = state.fetch_update(Ordering::Acquire, Ordering::Relaxed, |n| {
            (n < WRITING - 1).then_some(n + 1)
        });
        assert!(readers.is_ok(), "slot {cell} is read while it is being written");
        // SAFETY: `states[cell]` exists, so the cell lies inside the memory, which lives as long as `self`. The
        // count just raised keeps writers out until the guard lowers it.
        let bytes = unsafe { std::slice::from_raw_parts(self.base.add(cell * self.stride), self.cell_bytes) };
        RecordGuard::counted(bytes, state)
    }

    fn write(&self, cell: usize, fill: impl FnOnce(&mut [u8])) {
        let state = &self.states[cell];
        // Acquire: pairs with the release of the last reader's guard.
        let taken = state.compare_exchange(0, WRITING, Ordering::Acquire, Ordering::Relaxed);
        assert!(
            taken.is_ok(),
            "slot {cell} is written while it has readers or another writer"
        );
        // SAFETY: as in `read`; the state just set keeps everybody else out until it is released below. If `fill`
        // panics the state stays `WRITING` and the cell is never touched again.
        fill(unsafe { std::slice::from_raw_parts_mut(self.base.add(cell * self.stride), self.cell_bytes) });
        state.store(0, Ordering::Release);
    }
}

/// A layer's row of the residency table and the generation it belongs to.
pub type Row = (GenerationId, Vec<Option<SlotId>>);

/// Slots and staging in host memory.
#[derive(Debug)]
pub struct HostTransport {
    slots: Cells,
    staging: Cells,
    /// A row a layer, as a device would hold it.
    table: Mutex<BTreeMap<LayerId, Row>>,
    submitted: AtomicU64,
    read_back: Counter,
    bytes: u64,
}

impl HostTransport {
    /// An arena of `slots` records of `record_bytes`, all poisoned, and `staging` buffers.
    ///
    /// # Errors
    /// The system's error when the memory cannot be had.
    pub fn new(slots: usize, staging: usize, record_bytes: usize) -> io::Result<Self> {
        let (mut slots, mut staging) = (
            Cells::new(slots, record_bytes)?,
            Cells::new(staging, record_bytes)?,
        );
        let bytes = (slots.bytes() + staging.bytes()) as u64;
        let transport = Self {
            slots,
            staging,
            table: Mutex::default(),
            submitted: AtomicU64::new(0),
            read_back: Counter::new(),
            bytes,
        };
        for (slot, _) in (0u32..).zip(&transport.slots.states) {
            transport.poison(SlotId(slot));
        }
        Ok(transport)
    }

    /// Bytes of slots and staging.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The published row of a layer: what a device would read.
    #[must_use]
    pub fn row(&self, layer: LayerId) -> Option<Row> {
        self.table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&layer)
            .cloned()
    }

    /// Changes one byte of a slot that nobody reads: for tests that ask whether data comes from slots.
    pub fn poke(&self, slot: SlotId, byte: usize, value: u8) {
        self.slots.write(slot.index(), |bytes| bytes[byte] = value);
    }
}

impl SlotMemory for HostTransport {
    fn record(&self, address: SlotAddress) -> RecordGuard<'_> {
        self.slots
            .read(usize::try_from(address.offset).expect("an offset of this arena") / self.slots.stride)
    }
}

impl Transport for HostTransport {
    fn name(&self) -> &'static str {
        "host memory"
    }

    fn slots(&self) -> usize {
        self.slots.states.len()
    }

    fn staging_buffers(&self) -> usize {
        self.staging.states.len()
    }

    fn record_bytes(&self) -> usize {
        self.slots.cell_bytes
    }

    fn address(&self, slot: SlotId) -> SlotAddress {
        SlotAddress {
            buffer: 0,
            offset: (slot.index() * self.slots.stride) as u64,
        }
    }

    fn stage(&self, buffer: StagingId, record: &[u8]) {
        self.staging
            .write(buffer.index(), |bytes| bytes.copy_from_slice(record));
    }

    fn submit(&self, copies: &[Copy], then: Option<Publish>) -> Result<Completion, TransportError> {
        for copy in copies {
            let from = self.staging.read(copy.staging.index());
            self.slots
                .write(copy.slot.index(), |to| to.copy_from_slice(&from));
        }
        if let Some(publish) = then {
            let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
            table.insert(publish.layer, (publish.generation, publish.row));
        }
        Ok(Completion(self.submitted.fetch_add(1, Ordering::Relaxed) + 1))
    }

    fn wait(&self, _: Completion) -> Result<(), TransportError> {
        Ok(())
    }

    fn poll(&self, _: Completion) -> Result<bool, TransportError> {
        Ok(true)
    }

    fn poison(&self, slot: SlotId) {
        self.slots.write(slot.index(), |bytes| {
            for pair in bytes.chunks_mut(2) {
                pair.copy_from_slice(&POISON[..pair.len()]);
            }
        });
    }

    fn read_back(&self, slot: SlotId) -> Vec<u8> {
        let bytes = self.slots.read(slot.index()).to_vec();
        self.read_back.add(bytes.len() as u64);
        bytes
    }

    fn read_back_bytes(&self) -> u64 {
        self.read_back.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transport() -> HostTransport {
        HostTransport::new(3, 1, 100).expect("a little memory")
    }

    #[test]
    fn a_record_travels_through_staging_and_the_row_follows() {
        let t = transport();
        let record: Vec<u8> = (0..100).collect();
        t.stage(StagingId(0), &record);
        let copy = Copy {
            staging: StagingId(0),
            slot: SlotId(1),
        };
        let row = vec![None, Some(SlotId(1))];
        let publish = Publish {
            layer: LayerId(2),
            generation: GenerationId(7),
            row: row.clone(),
        };
        let done = t.submit(&[copy], Some(publish)).expect("queues");
        t.wait(done).expect("ends");
        assert_eq!(&*t.record(t.address(SlotId(1))), record.as_slice());
        assert_eq!(t.row(LayerId(2)), Some((GenerationId(7), row)));
        assert_eq!(t.read_back_bytes(), 0);
        assert_eq!(t.read_back(SlotId(1)), record);
        assert_eq!(t.read_back_bytes(), 100, "the probe counts");
    }

    #[test]
    fn an_unpublished_slot_holds_nan() {
        let t = transport();
        let bytes = t.read_back(SlotId(2));
        assert!(
            bytes
                .chunks(2)
                .all(|b| half::f16::from_le_bytes([b[0], b[1]]).is_nan())
        );
    }

    #[test]
    #[should_panic(expected = "slot 0 is written while it has readers")]
    fn writing_under_a_reader_is_caught() {
        let t = transport();
        let _reader = t.record(t.address(SlotId(0)));
        t.poison(SlotId(0));
    }
}
