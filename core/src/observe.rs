//! Observations: counts that say whether they were counted.
//!
//! A zero is reported only where something counts: [`Observation::Unknown`] is "nobody counted",
//! [`Observation::Unsupported`] is "this platform cannot tell". Neither is ever shown as 0.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize, Serializer};

/// A count, or the reason why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "serde_json::Value")]
pub enum Observation {
    /// Counted.
    Observed(u64),
    /// Not instrumented.
    Unknown,
    /// The platform cannot tell.
    Unsupported,
}

impl Serialize for Observation {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Observed(n) => s.serialize_u64(*n),
            Self::Unknown => s.serialize_str("UNKNOWN"),
            Self::Unsupported => s.serialize_str("UNSUPPORTED"),
        }
    }
}

impl TryFrom<serde_json::Value> for Observation {
    type Error = String;

    fn try_from(v: serde_json::Value) -> Result<Self, String> {
        match (v.as_u64(), v.as_str()) {
            (Some(n), _) => Ok(Self::Observed(n)),
            (_, Some("UNKNOWN")) => Ok(Self::Unknown),
            (_, Some("UNSUPPORTED")) => Ok(Self::Unsupported),
            _ => Err(format!("{v} is neither a count nor UNKNOWN nor UNSUPPORTED")),
        }
    }
}

/// A counter that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Zero.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Counts `n`. Relaxed: a counter orders nothing.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The count so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What this process has done to files and digests, counted at the only places where it can happen.
#[derive(Debug, Default)]
pub struct ProcessCounters {
    /// Bytes given to a digest or checksum.
    pub hashed_bytes: Counter,
    /// Reads of a model's files.
    pub source_reads: Counter,
    /// Times that read-only expert memory was made writable again.
    pub protections_lifted: Counter,
    /// Times that memory whose protection was lifted was handed out for writing.
    pub thawed_writes: Counter,
}

static PROCESS: ProcessCounters = ProcessCounters {
    hashed_bytes: Counter::new(),
    source_reads: Counter::new(),
    protections_lifted: Counter::new(),
    thawed_writes: Counter::new(),
};

/// The counters of this process.
#[must_use]
pub fn process() -> &'static ProcessCounters {
    &PROCESS
}

/// The process's counts at one moment: what was counted since is what requests did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMark {
    hashed_bytes: u64,
    source_reads: u64,
    protections_lifted: u64,
    thawed_writes: u64,
}

impl ProcessMark {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        Self {
            hashed_bytes: PROCESS.hashed_bytes.get(),
            source_reads: PROCESS.source_reads.get(),
            protections_lifted: PROCESS.protections_lifted.get(),
            thawed_writes: PROCESS.thawed_writes.get(),
        }
    }

    /// Bytes hashed since.
    #[must_use]
    pub fn hashed_bytes(&self) -> u64 {
        PROCESS.hashed_bytes.get() - self.hashed_bytes
    }

    /// Reads of model files since.
    #[must_use]
    pub fn source_reads(&self) -> u64 {
        PROCESS.source_reads.get() - self.source_reads
    }

    /// Protections lifted since.
    #[must_use]
    pub fn protections_lifted(&self) -> u64 {
        PROCESS.protections_lifted.get() - self.protections_lifted
    }

    /// Times since that memory whose protection was lifted was handed out for writing.
    #[must_use]
    pub fn thawed_writes(&self) -> u64 {
        PROCESS.thawed_writes.get() - self.thawed_writes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_observation_is_a_number_or_a_word() {
        let all = [
            Observation::Observed(0),
            Observation::Unknown,
            Observation::Unsupported,
        ];
        let json = serde_json::to_string(&all).expect("serializes");
        assert_eq!(json, r#"[0,"UNKNOWN","UNSUPPORTED"]"#);
        assert_eq!(
            serde_json::from_str::<[Observation; 3]>(&json).expect("reads back"),
            all
        );
        assert!(serde_json::from_str::<Observation>("\"unknown\"").is_err());
        assert!(serde_json::from_str::<Observation>("-1").is_err());
    }

    #[test]
    fn a_mark_counts_only_what_comes_after() {
        process().hashed_bytes.add(5);
        let mark = ProcessMark::now();
        let before = mark.hashed_bytes();
        process().hashed_bytes.add(7);
        assert!(mark.hashed_bytes() >= before + 7);
    }
}
