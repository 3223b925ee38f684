//! The cache's whole view of a device: slots, staging buffers, copies between them, and proof that copies ended.
//!
//! Slots have an address that never changes. A staging buffer belongs to whoever filled it until the completion of
//! the copy that reads it has retired. `submit` queues copies and, after them, one publication; copies of one
//! submission may end in any order, the publication never before all of them. Implementations: host memory
//! ([`HostTransport`](crate::cpu::transport::HostTransport)), a simulator (crate `horizon-cache`), devices.

use thiserror::Error;

use crate::ids::{GenerationId, LayerId};
use crate::provider::SlotAddress;

/// A slot: storage for one tiled expert record on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

/// A staging buffer: pinned host memory for one tiled expert record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StagingId(pub u32);

impl SlotId {
    /// The slot as an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl StagingId {
    /// The buffer as an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One staging buffer to one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Source.
    pub staging: StagingId,
    /// Target; a spare.
    pub slot: SlotId,
}

/// Marks a place in the device's work. Retired once everything before it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Completion(pub u64);

impl Completion {
    /// Retired from the start: there was nothing to wait for.
    pub const DONE: Self = Self(0);
}

/// A row of the device's residency table, written after a submission's copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publish {
    /// The layer whose row it is.
    pub layer: LayerId,
    /// The generation that the row belongs to; its word is written last.
    pub generation: GenerationId,
    /// Slot of each expert of the layer, `None` where it is not resident.
    pub row: Vec<Option<SlotId>>,
}

/// Whether the device may have seen the publication of a submission that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The publication did not happen, and the submission's copies are over: nothing of it touches a slot or a
    /// staging buffer any more. Work that may still be under way when a deadline passes is not this.
    BeforePublication,
    /// The publication happened, or nobody can tell.
    AfterPublication,
}

/// A transfer that failed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("transfer failed {}: {reason}", match .moment { Moment::BeforePublication => "before publication", Moment::AfterPublication => "after publication" })]
pub struct TransportError {
    /// Before or after the publication.
    pub moment: Moment,
    /// What happened, in the device's words.
    pub reason: String,
}

/// A device as the cache sees it. All numbers are fixed for the life of the transport.
pub trait Transport: Send + Sync {
    /// Name for reports.
    fn name(&self) -> &'static str;

    /// Slots there are.
    fn slots(&self) -> usize;

    /// Staging buffers there are.
    fn staging_buffers(&self) -> usize;

    /// Bytes of a slot and of a staging buffer: one tiled expert record.
    fn record_bytes(&self) -> usize;

    /// Where a slot lies.
    fn address(&self, slot: SlotId) -> SlotAddress;

    /// Copies a record from pageable memory into a staging buffer that nothing else uses.
    ///
    /// # Panics
    /// When `record` is not [`record_bytes`](Self::record_bytes) long, or the buffer is still being read.
    fn stage(&self, buffer: StagingId, record: &[u8]);

    /// Queues copies, each from a filled staging buffer to a slot that nothing reads, then a publication.
    ///
    /// # Errors
    /// When the work cannot be queued; nothing was then queued.
    fn submit(&self, copies: &[Copy], then: Option<Publish>) -> Result<Completion, TransportError>;

    /// Blocks until `completion` has retired.
    ///
    /// # Errors
    /// When its work failed, the device is lost, or the transport's deadline has passed.
    fn wait(&self, completion: Completion) -> Result<(), TransportError>;

    /// Whether `completion` has retired; never blocks.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    fn poll(&self, completion: Completion) -> Result<bool, TransportError>;

    /// Fills a slot that nothing reads with NaN: what an unpublished slot holds.
    fn poison(&self, slot: SlotId);

    /// Reads a slot back to the host and counts the bytes. The product never does; tests do.
    fn read_back(&self, slot: SlotId) -> Vec<u8>;

    /// Bytes read back from slots since the transport was made.
    fn read_back_bytes(&self) -> u64;
}
