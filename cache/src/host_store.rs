//! The host store: the complete, immutable copy of every routed expert (C1, C2).

use std::sync::Arc;

use horizon_core::artifact::Digest;
use horizon_core::ids::{ExpertId, LayerId};
use horizon_core::image::ExpertImage;

/// Tiled expert records that never change.
pub trait HostRecords: Send + Sync {
    /// The record of an expert; `layer` is the position among the layers with routed experts.
    fn record(&self, layer: usize, expert: ExpertId) -> &[u8];
}

/// All experts of a model in read-only memory of this process.
///
/// It wraps an [`ExpertImage`], which was built whole (every page written), whose memory the operating system
/// protects against writing, and whose source is closed. Nothing here or there gives mutable access.
pub struct HostStore {
    image: Arc<ExpertImage>,
    layers: Vec<LayerId>,
    identity: Digest,
}

impl HostStore {
    /// The store of `image`, whose layers with routed experts are `layers`. Takes the digest of all its bytes: from
    /// admission on nothing is hashed.
    #[must_use]
    pub fn new(image: Arc<ExpertImage>, layers: Vec<LayerId>) -> Self {
        let identity = image.digest();
        Self {
            image,
            layers,
            identity,
        }
    }

    /// The digest of all records as they were when the store was made ([`ExpertImage::digest`]).
    #[must_use]
    pub fn identity(&self) -> Digest {
        self.identity
    }

    /// The image.
    #[must_use]
    pub fn image(&self) -> &Arc<ExpertImage> {
        &self.image
    }
}

impl HostRecords for HostStore {
    fn record(&self, layer: usize, expert: ExpertId) -> &[u8] {
        let address = self
            .image
            .address(self.layers[layer], expert)
            .expect("the cache asks for experts of the model");
        self.image.bytes_at(address)
    }
}
