//! A simulated device with virtual time and injected faults, and the oracles that watch the cache on it.
//!
//! Everything that happens follows from one seed. The fault model:
//!
//! | fault | what the cache is told | what the device did |
//! | --- | --- | --- |
//! | refused | `submit` fails | nothing |
//! | copy fails | error before publication | half a record is in the slot |
//! | never ends | error at the deadline, in doubt | half a record; the rest arrives much later, or never |
//! | device lost | errors from then on; in doubt where a publication was queued | whatever had ended by then |
//! | reported late | error after publication | everything |
//!
//! Copies share a link of bounded bandwidth and may end in any order; completions retire in the order of their
//! submissions. A copy moves the first half of its record when it starts and the second half when it ends, so that
//! a staging buffer that is filled too early, or a slot that is read too early, shows.

#![expect(
    clippy::missing_panics_doc,
    reason = "an oracle panics with the clause that was broken; the modules say so"
)]

pub mod checker;
pub mod faults;
pub mod transport;
pub mod workload;

use horizon_core::ids::ExpertId;

use crate::host_store::HostRecords;

/// A small deterministic generator (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The sequence of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// A number in `low..=high`.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + usize::try_from(self.below((high - low + 1) as u64)).expect("at most high")
    }

    /// True `n` times in a million.
    pub fn millionths(&mut self, n: u32) -> bool {
        self.below(1_000_000) < u64::from(n)
    }

    /// `n` distinct experts below `experts`, ascending.
    pub fn experts(&mut self, n: usize, experts: usize) -> Vec<ExpertId> {
        let mut all: Vec<u32> = (0u32..).take(experts).collect();
        for i in 0..n {
            let j = self.within(i, experts - 1);
            all.swap(i, j);
        }
        all.truncate(n);
        all.sort_unstable();
        all.into_iter().map(ExpertId).collect()
    }
}

/// A host store of pseudo-random records, all different.
#[derive(Debug)]
pub struct Records {
    experts: usize,
    record_bytes: usize,
    bytes: Vec<u8>,
}

impl Records {
    /// `layers` × `experts` records of `record_bytes`.
    #[must_use]
    pub fn new(layers: usize, experts: usize, record_bytes: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let bytes = (0..layers * experts * record_bytes)
            .map(|_| rng.bits().to_le_bytes()[0])
            .collect();
        Self {
            experts,
            record_bytes,
            bytes,
        }
    }
}

impl HostRecords for Records {
    fn record(&self, layer: usize, expert: ExpertId) -> &[u8] {
        let start = (layer * self.experts + expert.index()) * self.record_bytes;
        &self.bytes[start..start + self.record_bytes]
    }
}
