//! A device whose slots and staging buffers are cells that loom watches: a read beside a write fails the model.
#![expect(
    unsafe_code,
    reason = "cells that loom watches are read and written as raw memory"
)]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use horizon_cache::host_store::HostRecords;
use horizon_cache::sync::{Condvar, Mutex, lock};
use horizon_core::ids::ExpertId;
use horizon_core::provider::SlotAddress;
use horizon_core::transport::{
    Completion, Copy, Moment, Publish, SlotId, StagingId, Transport, TransportError,
};
use loom::cell::UnsafeCell;

/// Bytes of a record: its layer and its expert.
pub const RECORD: usize = 2;
/// Experts a layer.
pub const EXPERTS: usize = 4;

/// A record of two bytes: layer and expert.
pub struct Store(pub Vec<[u8; RECORD]>);

impl HostRecords for Store {
    fn record(&self, layer: usize, expert: ExpertId) -> &[u8] {
        &self.0[layer * EXPERTS + expert.index()]
    }
}

/// What is under way.
#[derive(Default)]
pub struct Queue {
    /// Copies that the device has not begun, with their completions.
    copies: Vec<(u64, Copy)>,
    /// The last completion given, and the last retired.
    pub given: u64,
    retired: u64,
    /// Device work that has ended, by completion.
    works: Vec<(u64, bool)>,
}

/// See the module.
pub struct Device {
    pub slots: Vec<UnsafeCell<[u8; RECORD]>>,
    staging: Vec<UnsafeCell<[u8; RECORD]>>,
    pub queue: Mutex<Queue>,
    changed: Condvar,
    /// Copies run on a device thread, not inside `submit`.
    pub concurrent: Mutex<bool>,
    /// What the next submission reports after all was done.
    fails: Option<Moment>,
    pub admitted: AtomicBool,
}

// SAFETY: loom checks every access to the cells against the order of events; an unordered one fails the model.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    pub fn new(slots: usize, staging: usize, fails: Option<Moment>) -> Self {
        let cells = |n| (0..n).map(|_| UnsafeCell::new([0xFF; RECORD])).collect();
        Self {
            slots: cells(slots),
            staging: cells(staging),
            queue: Mutex::new(Queue::default()),
            changed: Condvar::new(),
            concurrent: Mutex::new(false),
            fails,
            admitted: false.into(),
        }
    }

    fn copy(&self, copy: Copy) {
        self.staging[copy.staging.index()].with(|from| {
            // SAFETY: loom fails the model if anybody writes the buffer or touches the slot meanwhile.
            self.slots[copy.slot.index()].with_mut(|to| unsafe { *to = *from });
        });
    }

    /// The device's copy engine: runs `n` copies as they come.
    pub fn engine(&self, n: usize) {
        for _ in 0..n {
            let mut queue = lock(&self.queue);
            while queue.copies.is_empty() {
                queue = self.changed.wait(queue).expect("nobody panics");
            }
            let (completion, copy) = queue.copies.remove(0);
            drop(queue);
            self.copy(copy);
            lock(&self.queue).retired = completion;
            self.changed.notify_all();
        }
    }

    pub fn read(&self, address: SlotAddress) -> [u8; RECORD] {
        let slot = usize::try_from(address.offset).expect("a slot");
        // SAFETY: loom fails the model if anybody writes the slot meanwhile.
        self.slots[slot].with(|bytes| unsafe { *bytes })
    }

    /// Device work that somebody will [`end`](Self::end).
    pub fn begin(&self) -> Completion {
        let mut queue = lock(&self.queue);
        let id = 1_000 + queue.works.len() as u64;
        queue.works.push((id, false));
        Completion(id)
    }

    pub fn end(&self, work: Completion) {
        let mut queue = lock(&self.queue);
        for (id, ended) in &mut queue.works {
            *ended |= *id == work.0;
        }
        self.changed.notify_all();
    }
}

impl Queue {
    fn has_retired(&self, completion: Completion) -> bool {
        match self.works.iter().find(|(id, _)| *id == completion.0) {
            Some((_, ended)) => *ended,
            None => completion.0 <= self.retired,
        }
    }
}

impl Transport for Device {
    fn name(&self) -> &'static str {
        "model"
    }
    fn slots(&self) -> usize {
        self.slots.len()
    }
    fn staging_buffers(&self) -> usize {
        self.staging.len()
    }
    fn record_bytes(&self) -> usize {
        RECORD
    }
    fn address(&self, slot: SlotId) -> SlotAddress {
        SlotAddress {
            buffer: 0,
            offset: u64::from(slot.0),
        }
    }
    fn stage(&self, buffer: StagingId, record: &[u8]) {
        // SAFETY: loom fails the model if a copy reads the buffer meanwhile.
        self.staging[buffer.index()].with_mut(|to| unsafe { (*to).copy_from_slice(record) });
    }
    fn submit(&self, copies: &[Copy], _: Option<Publish>) -> Result<Completion, TransportError> {
        let concurrent = *lock(&self.concurrent);
        if !concurrent {
            copies.iter().for_each(|c| self.copy(*c));
        }
        let mut queue = lock(&self.queue);
        queue.given += 1;
        let id = queue.given;
        if concurrent {
            queue.copies.extend(copies.iter().map(|c| (id, *c)));
            self.changed.notify_all();
        } else {
            queue.retired = id;
        }
        Ok(Completion(id))
    }
    fn wait(&self, completion: Completion) -> Result<(), TransportError> {
        let mut queue = lock(&self.queue);
        while !queue.has_retired(completion) {
            queue = self.changed.wait(queue).expect("nobody panics");
        }
        let admitted = self.admitted.load(Relaxed);
        match self.fails {
            Some(moment) if admitted && completion != Completion::DONE => Err(TransportError {
                moment,
                reason: "reported late".into(),
            }),
            _ => Ok(()),
        }
    }
    fn poll(&self, completion: Completion) -> Result<bool, TransportError> {
        Ok(lock(&self.queue).has_retired(completion))
    }
    fn poison(&self, slot: SlotId) {
        // SAFETY: loom fails the model if anybody touches the slot meanwhile.
        self.slots[slot.index()].with_mut(|to| unsafe { *to = [0xFF; RECORD] });
    }
    fn read_back(&self, slot: SlotId) -> Vec<u8> {
        self.read(self.address(slot)).to_vec()
    }
    fn read_back_bytes(&self) -> u64 {
        0
    }
}
