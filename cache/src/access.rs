//! What is known about the use of each expert: the only thing that policies see.

use horizon_core::ids::ExpertId;

use crate::sync::{Ordering, RecordU64};

/// Group acquisitions of a layer after which an expert's past uses weigh half as much.
pub const HALVING: u64 = 32;
/// What one use adds to [`Access::weight`]; so fine that 32 halvings still tell uses apart.
pub const USE: u64 = 1 << 32;

/// When and how often one expert was asked for. Time is the number of group acquisitions of its layer so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Access {
    /// Last acquisition, 0 for never.
    pub last: u64,
    /// Acquisitions in all.
    pub uses: u64,
    /// Acquisitions, each weighing [`USE`] and half as much after every [`HALVING`], as of `last`.
    pub weight: u64,
}

impl Access {
    /// The weight at `now`: halved each time that the layer's time has passed a multiple of [`HALVING`] since.
    #[must_use]
    pub fn aged(&self, now: u64) -> u64 {
        let halvings = (now / HALVING).saturating_sub(self.last / HALVING);
        u32::try_from(halvings).map_or(0, |h| self.weight.checked_shr(h).unwrap_or(0))
    }

    /// The record after an acquisition at `now`.
    pub(crate) fn touch(&mut self, now: u64) {
        // At most HALVING uses between two halvings: the sum stays below 2 * HALVING * USE.
        self.weight = self.aged(now).saturating_add(USE);
        self.last = now;
        self.uses += 1;
    }
}

/// Access records of all experts of all layers. Touching takes no lock; a use may be lost or a record torn when two
/// sequences touch it at once, which can only change a policy's choice, never a result.
pub struct AccessTable {
    experts: usize,
    /// By layer.
    clocks: Vec<RecordU64>,
    entries: Vec<Entry>,
}

#[derive(Default)]
struct Entry {
    last: RecordU64,
    uses: RecordU64,
    weight: RecordU64,
}

impl AccessTable {
    /// All experts unused.
    #[must_use]
    pub fn new(layers: usize, experts: usize) -> Self {
        Self {
            experts,
            clocks: (0..layers).map(|_| RecordU64::default()).collect(),
            entries: (0..layers * experts).map(|_| Entry::default()).collect(),
        }
    }

    /// A new moment of a layer.
    pub fn tick(&self, layer: usize) -> u64 {
        // Relaxed here and below: records order nothing and publish nothing.
        self.clocks[layer].fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The last moment of a layer.
    #[must_use]
    pub fn now(&self, layer: usize) -> u64 {
        self.clocks[layer].load(Ordering::Relaxed)
    }

    /// `expert` was asked for at `now`.
    pub fn touch(&self, layer: usize, expert: ExpertId, now: u64) {
        let mut access = self.get(layer, expert);
        access.touch(now);
        let entry = &self.entries[layer * self.experts + expert.index()];
        entry.last.store(access.last, Ordering::Relaxed);
        entry.uses.store(access.uses, Ordering::Relaxed);
        entry.weight.store(access.weight, Ordering::Relaxed);
    }

    /// The record of an expert.
    #[must_use]
    pub fn get(&self, layer: usize, expert: ExpertId) -> Access {
        let entry = &self.entries[layer * self.experts + expert.index()];
        Access {
            last: entry.last.load(Ordering::Relaxed),
            uses: entry.uses.load(Ordering::Relaxed),
            weight: entry.weight.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn past_uses_lose_weight_and_keep_their_order() {
        let table = AccessTable::new(2, 3);
        let (often, once) = (ExpertId(0), ExpertId(2));
        for _ in 0..3 {
            table.touch(1, often, table.tick(1));
        }
        table.touch(1, once, table.tick(1));
        assert_eq!((table.now(0), table.now(1)), (0, 4));
        let (often, once) = (table.get(1, often), table.get(1, once));
        assert_eq!((often.last, often.uses, once.last, once.uses), (3, 3, 4, 1));
        assert_eq!((often.aged(31), once.aged(31)), (3 * USE, USE));
        assert_eq!((often.aged(32), once.aged(32)), (3 * USE / 2, USE / 2));
        // A thousand acquisitions later there is still a difference; in the end there is none.
        assert!(often.aged(1000) > once.aged(1000));
        assert_eq!((often.aged(3000), often.aged(u64::MAX)), (0, 0));
        // Time that another thread saw earlier.
        assert_eq!(often.aged(0), 3 * USE);
        let mut busy = Access::default();
        (1..10_000).for_each(|now| busy.touch(now));
        assert!(busy.weight < 2 * HALVING * USE);
    }
}
