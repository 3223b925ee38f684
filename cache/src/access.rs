//! What is known about the use of each expert: the only thing that policies see.

use horizon_core::ids::ExpertId;

use crate::sync::{AtomicU64, Ordering};

/// When and how often one expert was asked for. Time is the number of group acquisitions so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Access {
    /// Last acquisition, 0 for never.
    pub last: u64,
    /// The one before, 0 for never.
    pub previous: u64,
    /// Acquisitions in all.
    pub uses: u64,
}

impl Access {
    /// The record after an acquisition at `now`.
    pub(crate) fn touch(&mut self, now: u64) {
        self.previous = std::mem::replace(&mut self.last, now);
        self.uses += 1;
    }
}

/// Access records of all experts of all layers. Touching takes no lock; records of one expert may be torn when
/// two sequences touch it at once, which can only change a policy's choice, never a result.
pub struct AccessTable {
    clock: AtomicU64,
    experts: usize,
    entries: Vec<Entry>,
}

#[derive(Default)]
struct Entry {
    last: AtomicU64,
    previous: AtomicU64,
    uses: AtomicU64,
}

impl AccessTable {
    /// All experts unused.
    #[must_use]
    pub fn new(layers: usize, experts: usize) -> Self {
        Self {
            clock: AtomicU64::new(0),
            experts,
            entries: (0..layers * experts).map(|_| Entry::default()).collect(),
        }
    }

    /// A new moment.
    pub fn tick(&self) -> u64 {
        // Relaxed here and below: records order nothing and publish nothing.
        self.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// `expert` was asked for at `now`.
    pub fn touch(&self, layer: usize, expert: ExpertId, now: u64) {
        let e = &self.entries[layer * self.experts + expert.index()];
        e.previous
            .store(e.last.load(Ordering::Relaxed), Ordering::Relaxed);
        e.last.store(now, Ordering::Relaxed);
        e.uses.fetch_add(1, Ordering::Relaxed);
    }

    /// The record of an expert.
    #[must_use]
    pub fn get(&self, layer: usize, expert: ExpertId) -> Access {
        let e = &self.entries[layer * self.experts + expert.index()];
        Access {
            last: e.last.load(Ordering::Relaxed),
            previous: e.previous.load(Ordering::Relaxed),
            uses: e.uses.load(Ordering::Relaxed),
        }
    }
}
