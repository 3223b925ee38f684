//! Newtypes that keep layers, experts and generations apart.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Index of a decoder layer, from 0, dense layers counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerId(pub u32);

/// Index of a routed expert within its layer, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExpertId(pub u32);

/// Number of an immutable (layer, expert) → slot map; grows by one at each publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GenerationId(pub u64);

impl LayerId {
    /// The layer as an index into a slice.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl ExpertId {
    /// The expert as an index into a slice.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}", self.0)
    }
}

impl fmt::Display for ExpertId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expert {}", self.0)
    }
}
