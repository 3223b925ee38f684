//! Sizes that are fixed before admission, and what is refused there (C3).

use horizon_core::ids::LayerId;
use horizon_core::transport::TransportError;
use thiserror::Error;

/// Sizes that are fixed before admission, for the life of the process (C3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Layers with routed experts, ascending.
    pub layers: Vec<LayerId>,
    /// E.
    pub experts: usize,
    /// k.
    pub top_k: usize,
    /// c: resident slots a layer.
    pub capacity: usize,
    /// Spare slots, shared by all layers.
    pub spares: usize,
}

impl Geometry {
    /// Slots in all.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.layers.len() * self.capacity + self.spares
    }

    /// Experts below this id stay under [`Policy::Static`](crate::Policy::Static).
    #[must_use]
    pub fn pinned(&self) -> u32 {
        u32::try_from(self.capacity - self.top_k).unwrap_or(u32::MAX)
    }

    /// Checks what C3 asks.
    ///
    /// # Errors
    /// [`SetupError`] with the numbers.
    pub fn check(&self) -> Result<(), SetupError> {
        if self.capacity < self.top_k || self.capacity > self.experts {
            return Err(SetupError::Capacity {
                capacity: self.capacity,
                top_k: self.top_k,
                experts: self.experts,
            });
        }
        if !ascending(&self.layers) {
            return Err(SetupError::Layers);
        }
        if self.spares < self.top_k {
            return Err(SetupError::Spares {
                spares: self.spares,
                top_k: self.top_k,
            });
        }
        Ok(())
    }
}

/// A cache that cannot be set up.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SetupError {
    /// Capacity outside k..=E.
    #[error(
        "capacity {capacity}: -c is the number of resident experts in each layer, {top_k} (a token's experts) to \
         {experts} (all of them); the length of the context is --ctx"
    )]
    Capacity {
        /// c.
        capacity: usize,
        /// k.
        top_k: usize,
        /// E.
        experts: usize,
    },
    /// Too few spares.
    #[error("--spares {spares}: so few spare slots cannot hold the {top_k} experts of one token")]
    Spares {
        /// Spares.
        spares: usize,
        /// k.
        top_k: usize,
    },
    /// Layers out of order.
    #[error("the layers with routed experts are not distinct and ascending")]
    Layers,
    /// The transport's numbers are not the geometry's.
    #[error("the device has {found} {what}, {needed} are needed")]
    Device {
        /// What.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there must be.
        needed: usize,
    },
    /// The device could not be filled.
    #[error("the first experts could not be brought to the device: {0}")]
    Transfer(#[from] TransportError),
}

/// Whether `items` are distinct and in order.
pub(crate) fn ascending<T: Ord>(items: &[T]) -> bool {
    items.windows(2).all(|pair| pair[0] < pair[1])
}
