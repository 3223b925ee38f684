//! Where experts are: the boundary between a step and whoever decides what is resident.
//!
//! A step captures one generation, then asks for each layer's routed group and gets a lease with the slot
//! address of every expert, in the order asked. The provider never computes; the backend has no policy.

use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use thiserror::Error;

use crate::ids::{ExpertId, GenerationId, LayerId};
use crate::image::ExpertImage;
use crate::transport::Completion;

/// Place of an expert record: a buffer of the backend and a byte offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotAddress {
    /// Index of the buffer (some APIs cannot bind one arena).
    pub buffer: u32,
    /// Bytes from its start.
    pub offset: u64,
}

/// Slots that the host can read: what the CPU backend executes from.
pub trait SlotMemory: Send + Sync {
    /// The tiled record at `address`, readable until the guard is dropped.
    ///
    /// # Panics
    /// When the address is not one that the provider gave for this memory, or the slot is being written.
    fn record(&self, address: SlotAddress) -> RecordGuard<'_>;
}

/// A record that is being read.
#[derive(Debug)]
pub struct RecordGuard<'a> {
    bytes: &'a [u8],
    readers: Option<&'a AtomicU32>,
}

impl<'a> RecordGuard<'a> {
    /// Bytes that are never written.
    #[must_use]
    pub fn immutable(bytes: &'a [u8]) -> Self {
        Self { bytes, readers: None }
    }

    /// Bytes that are not written while `readers`, which already counts this guard, is above zero.
    #[must_use]
    pub fn counted(bytes: &'a [u8], readers: &'a AtomicU32) -> Self {
        Self {
            bytes,
            readers: Some(readers),
        }
    }
}

impl Deref for RecordGuard<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl Drop for RecordGuard<'_> {
    fn drop(&mut self) {
        if let Some(readers) = self.readers {
            // Release: the next writer's acquire sees every read of this guard done.
            readers.fetch_sub(1, Ordering::Release);
        }
    }
}

/// The routed experts of one layer that a step needs: distinct, in ascending order.
#[derive(Clone, Copy, Debug)]
pub struct RoutedGroup<'a> {
    /// Layer.
    pub layer: LayerId,
    /// Distinct experts, ascending.
    pub experts: &'a [ExpertId],
}

/// A step's hold on one generation. Dropping it lets the generation retire.
pub struct Hold {
    /// The generation held.
    pub generation: GenerationId,
    /// Keeps what the generation maps to alive.
    pub keep: Arc<dyn Any + Send + Sync>,
}

/// A hold on the slots of one routed group. Dropping it releases them.
pub trait GroupLease: Send {
    /// Blocks until every expert of the group may be read; addresses stand in the order of the group.
    ///
    /// # Errors
    /// [`CacheFault`] when the group will never be readable.
    fn wait(&self) -> Result<&[SlotAddress], CacheFault>;
}

/// The provider cannot vouch for what its slots hold; nothing more is served.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("expert provider fault at {layer}: {reason}")]
pub struct CacheFault {
    /// Layer of the group that was asked for.
    pub layer: LayerId,
    /// What happened.
    pub reason: String,
}

/// A group that could not be had.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum AcquireError {
    /// Bringing the group failed before anything was published: nothing changed, and asking again may succeed.
    #[error("the experts of {layer} could not be brought: {reason}")]
    Failed {
        /// Layer of the group.
        layer: LayerId,
        /// What happened.
        reason: String,
    },
    /// The group does not fit at once; [`ExpertProvider::waves`] cuts it.
    #[error(
        "a group of {experts} experts, {missing} of them missing, does not fit at once: cut it into waves"
    )]
    TooLarge {
        /// Experts asked for.
        experts: usize,
        /// How many are missing.
        missing: usize,
    },
    /// Nothing more is served.
    #[error(transparent)]
    Fault(#[from] CacheFault),
}

/// Decides which experts are where.
pub trait ExpertProvider: Send + Sync {
    /// Captures the current generation, wait-free; once a step.
    fn capture(&self) -> Hold;

    /// Whether every generation shows every expert, so that a step need not acquire.
    fn complete(&self) -> bool {
        false
    }

    /// Cuts a group into waves that can each be acquired: what `hold` shows first, then the rest in ascending order.
    /// The cut depends on residency; results do not depend on the cut.
    fn waves(&self, hold: &Hold, group: &RoutedGroup<'_>) -> Vec<Vec<ExpertId>>;

    /// Leases a routed group. A group that `hold` does not show moves it to the generation that does: the old one
    /// is let go once `passed`, the end of the device work that reads it, has retired.
    ///
    /// # Errors
    /// [`AcquireError`].
    fn acquire(
        &self,
        hold: &mut Hold,
        group: &RoutedGroup<'_>,
        passed: Completion,
    ) -> Result<Box<dyn GroupLease>, AcquireError>;

    /// Ends a step's hold once `after`, the end of the device work that reads it, has retired.
    fn release(&self, hold: Hold, after: Completion);
}

/// The control: every expert always resident, straight from the host image.
pub struct FullyResident {
    image: Arc<ExpertImage>,
}

impl FullyResident {
    /// Serves all experts of `image`.
    #[must_use]
    pub fn new(image: Arc<ExpertImage>) -> Self {
        Self { image }
    }
}

impl ExpertProvider for FullyResident {
    fn capture(&self) -> Hold {
        Hold {
            generation: GenerationId(0),
            keep: self.image.clone(),
        }
    }

    fn complete(&self) -> bool {
        true
    }

    fn waves(&self, _: &Hold, group: &RoutedGroup<'_>) -> Vec<Vec<ExpertId>> {
        vec![group.experts.to_vec()]
    }

    fn acquire(
        &self,
        _: &mut Hold,
        group: &RoutedGroup<'_>,
        _: Completion,
    ) -> Result<Box<dyn GroupLease>, AcquireError> {
        let addresses = group
            .experts
            .iter()
            .map(|e| {
                self.image.address(group.layer, *e).ok_or_else(|| CacheFault {
                    layer: group.layer,
                    reason: format!("there is no {e}"),
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Box::new(AllResident(addresses)))
    }

    fn release(&self, _: Hold, _: Completion) {}
}

struct AllResident(Vec<SlotAddress>);

impl GroupLease for AllResident {
    fn wait(&self) -> Result<&[SlotAddress], CacheFault> {
        Ok(&self.0)
    }
}
