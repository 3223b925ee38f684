//! Host memory whose transfers fail before publication, in every way that leaves the old generation valid.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use horizon_core::cpu::transport::HostTransport;
use horizon_core::provider::SlotAddress;
use horizon_core::transport::{
    Completion, Copy, Moment, Publish, SlotId, StagingId, Transport, TransportError,
};

/// Which submissions fail.
#[derive(Clone, Copy, Debug)]
pub enum Faults {
    /// Every so many, in turn when it is queued and when it should have ended.
    Every(u64),
    /// So many of a thousand, and how each fails, by a seed.
    Random { seed: u64, per_mille: u64 },
}

/// How a submission fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// Nothing is queued.
    Refused,
    /// All bytes arrive, and then it is said that they did not.
    Late,
    /// The slot holds rubbish.
    Garbled,
}

/// See the module. A submission that publishes fails only by being refused: what was published stays published.
pub struct Flaky {
    inner: Arc<HostTransport>,
    faults: Faults,
    /// Submissions of the initial placement, which must succeed.
    placed: u64,
    submissions: AtomicU64,
    lost: Mutex<BTreeSet<Completion>>,
}

impl Flaky {
    pub fn new(inner: Arc<HostTransport>, placed: u64, faults: Faults) -> Self {
        Self {
            inner,
            faults,
            placed,
            submissions: AtomicU64::new(0),
            lost: Mutex::default(),
        }
    }

    fn failure(&self) -> Option<Failure> {
        let count = self.submissions.fetch_add(1, Ordering::Relaxed) + 1;
        let count = count.checked_sub(self.placed).filter(|n| *n > 0)?;
        match self.faults {
            Faults::Every(n) if !count.is_multiple_of(n) => None,
            Faults::Every(n) if (count / n).is_multiple_of(2) => Some(Failure::Late),
            Faults::Every(_) => Some(Failure::Refused),
            Faults::Random { seed, per_mille } => {
                let draw = mix(seed ^ mix(count));
                (draw % 1000 < per_mille).then_some(match draw >> 32 & 3 {
                    0 => Failure::Refused,
                    1 => Failure::Late,
                    _ => Failure::Garbled,
                })
            }
        }
    }

    fn check(&self, completion: Completion) -> Result<(), TransportError> {
        let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if lost.contains(&completion) {
            return Err(failed());
        }
        Ok(())
    }
}

/// Scatters the bits of `x` (the finalizer of splitmix64).
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn failed() -> TransportError {
    TransportError {
        moment: Moment::BeforePublication,
        reason: "made to fail".into(),
    }
}

impl Transport for Flaky {
    fn name(&self) -> &'static str {
        "host memory that fails"
    }

    fn slots(&self) -> usize {
        self.inner.slots()
    }

    fn staging_buffers(&self) -> usize {
        self.inner.staging_buffers()
    }

    fn record_bytes(&self) -> usize {
        self.inner.record_bytes()
    }

    fn address(&self, slot: SlotId) -> SlotAddress {
        self.inner.address(slot)
    }

    fn stage(&self, buffer: StagingId, record: &[u8]) {
        self.inner.stage(buffer, record);
    }

    fn submit(&self, copies: &[Copy], then: Option<Publish>) -> Result<Completion, TransportError> {
        let failure = self.failure();
        if failure == Some(Failure::Refused) || failure.is_some() && then.is_some() {
            return Err(failed());
        }
        let completion = self.inner.submit(copies, then)?;
        if failure == Some(Failure::Garbled) {
            for copy in copies {
                for byte in (0..self.record_bytes()).step_by(3) {
                    self.inner.poke(copy.slot, byte, 0x3A);
                }
            }
        }
        if failure.is_some() {
            let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
            lost.insert(completion);
        }
        Ok(completion)
    }

    fn wait(&self, completion: Completion) -> Result<(), TransportError> {
        self.check(completion)?;
        self.inner.wait(completion)
    }

    fn poll(&self, completion: Completion) -> Result<bool, TransportError> {
        self.check(completion)?;
        self.inner.poll(completion)
    }

    fn poison(&self, slot: SlotId) {
        self.inner.poison(slot);
    }

    fn read_back(&self, slot: SlotId) -> Vec<u8> {
        self.inner.read_back(slot)
    }

    fn read_back_bytes(&self) -> u64 {
        self.inner.read_back_bytes()
    }
}
