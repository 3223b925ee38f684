//! Which resident experts make room. A policy sees access records, never bytes, and is a pure function: the same
//! records give the same victims.

use std::fmt;
use std::str::FromStr;

use horizon_core::ids::ExpertId;
use serde::{Deserialize, Serialize};

use crate::access::Access;

/// A replacement policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The least recently used goes first: the canonical policy.
    #[default]
    Lru,
    /// The least often used goes first; ties by recency.
    Lfu,
    /// The first experts of the initial placement stay, all but k; the others take turns, least recently used first.
    Static,
    /// As `lfu`, but past uses lose half their weight with every 32 acquisitions of the layer, so that it follows the
    /// text. A long prompt, which asks for nearly every expert, adds the same to all and flushes none.
    LfuAging,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Lru, Self::Lfu, Self::Static, Self::LfuAging];

    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Static => "static",
            Self::LfuAging => "lfu-aging",
        }
    }

    /// What to compare: the smallest key goes first. `now` is the layer's time; `pinned` experts are those below that
    /// id.
    #[must_use]
    pub fn key(self, expert: ExpertId, access: Access, now: u64, pinned: u32) -> (u64, u64, u32) {
        match self {
            Self::Lru => (access.last, 0, expert.0),
            Self::Lfu => (access.uses, access.last, expert.0),
            Self::Static => (u64::from(expert.0 < pinned), access.last, expert.0),
            Self::LfuAging => (access.aged(now), access.last, expert.0),
        }
    }

    /// The `n` candidates that go, in the order in which they go.
    ///
    /// # Panics
    /// When there are fewer candidates.
    #[must_use]
    pub fn victims(
        self,
        candidates: &[(ExpertId, Access)],
        n: usize,
        now: u64,
        pinned: u32,
    ) -> Vec<ExpertId> {
        assert!(
            n <= candidates.len(),
            "{n} victims asked of {} candidates",
            candidates.len()
        );
        let mut keys: Vec<_> = candidates
            .iter()
            .map(|(e, a)| (self.key(*e, *a, now, pinned), *e))
            .collect();
        keys.sort_unstable();
        keys.truncate(n);
        keys.into_iter().map(|(_, e)| e).collect()
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let known = || Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|p| p.name() == s)
            .ok_or_else(|| format!("there is no policy {s:?}; there are {}", known()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates() -> Vec<(ExpertId, Access)> {
        let access = |last, uses, weight| Access { last, uses, weight };
        vec![
            (ExpertId(0), access(90, 5, 40)),
            // Much used, but long ago: three halvings at 101.
            (ExpertId(1), access(8, 9, 240)),
            (ExpertId(4), access(100, 1, 10)),
            (ExpertId(6), access(20, 2, 80)),
            (ExpertId(7), access(0, 0, 0)),
        ]
    }

    #[test]
    fn each_policy_has_its_own_order() {
        let order = |p: Policy| {
            p.victims(&candidates(), 5, 101, 1)
                .iter()
                .map(|e| e.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(order(Policy::Lru), [7, 1, 6, 0, 4]);
        assert_eq!(order(Policy::Lfu), [7, 4, 6, 0, 1]);
        assert_eq!(order(Policy::Static), [7, 1, 6, 4, 0]);
        // 10 at the same weight go by recency; then 40 / 2 and 240 / 8.
        assert_eq!(order(Policy::LfuAging), [7, 6, 4, 0, 1]);
    }

    #[test]
    fn names_read_back() {
        for p in Policy::ALL {
            assert_eq!(p.name().parse(), Ok(p));
        }
        assert!(
            "LRU"
                .parse::<Policy>()
                .expect_err("names are lower case")
                .contains("lru, lfu, static, lfu-aging")
        );
    }
}
