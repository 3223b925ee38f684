//! All routed experts of a model in one range of host memory, tiled for one backend.

use rayon::prelude::*;

use crate::artifact::Digest;
use crate::dense::{LoadError, SourceError};
use crate::dtype::NarrowingReport;
use crate::ids::{ExpertId, LayerId};
use crate::memory::{AnonymousMemory, FrozenMemory};
use crate::provider::{RecordGuard, SlotAddress, SlotMemory};
use crate::record::{RecordLayout, RecordTiling};
use crate::spec::ModelSpec;

/// Where expert records come from: an artifact, or a checkpoint packed on the way.
pub trait ExpertSource: Sync {
    /// Writes the canonical record of one expert, padding zeroed, to `out` (`layout.bytes` long).
    ///
    /// # Errors
    /// What could not be read or quantized, named.
    fn read(
        &self,
        layer: LayerId,
        expert: ExpertId,
        layout: &RecordLayout,
        out: &mut [u8],
    ) -> Result<NarrowingReport, SourceError>;
}

/// Every expert record of a model, tiled; immutable once built.
#[derive(Debug)]
pub struct ExpertImage {
    memory: FrozenMemory,
    layout: RecordLayout,
    record_bytes: usize,
    experts: usize,
    moe_layers: Vec<LayerId>,
    tiling: &'static str,
    narrowing: NarrowingReport,
}

impl ExpertImage {
    /// Reads, tiles and stores every routed expert, on all threads of the current pool.
    ///
    /// # Errors
    /// [`LoadError`] of the first record that fails.
    ///
    /// # Panics
    /// When `layout` is not the record of `spec`'s experts.
    pub fn load(
        spec: &ModelSpec,
        layout: &RecordLayout,
        tiling: &dyn RecordTiling,
        source: &dyn ExpertSource,
    ) -> Result<Self, LoadError> {
        let moe = spec.moe().expect("a layout exists only for a model with experts");
        assert_eq!(
            layout,
            &RecordLayout::of_shape(spec.hidden, moe.width, layout.encoding),
            "foreign layout"
        );
        let moe_layers: Vec<LayerId> = spec.moe_layers().collect();
        let record_bytes = tiling.tiled_bytes(layout);
        let bytes = record_bytes * moe.experts * moe_layers.len();
        let mut memory = AnonymousMemory::zeroed(bytes).map_err(|source| LoadError::Memory {
            what: "the routed experts",
            bytes,
            source,
        })?;
        let narrowing = memory
            .bytes_mut()
            .par_chunks_mut(record_bytes)
            .enumerate()
            .map_init(
                || vec![0u8; layout.bytes],
                |canonical, (i, tiled)| {
                    let expert = ExpertId(u32::try_from(i % moe.experts).expect("bounded by MAX_EXPERTS"));
                    let report = source.read(moe_layers[i / moe.experts], expert, layout, canonical)?;
                    tiling.tile(layout, canonical, tiled);
                    Ok::<_, SourceError>(report)
                },
            )
            .try_reduce(NarrowingReport::default, |mut a, b| {
                a += b;
                Ok(a)
            })?;
        let memory = memory.freeze().map_err(|source| LoadError::Memory {
            what: "protecting the routed experts",
            bytes,
            source,
        })?;
        Ok(Self {
            memory,
            layout: layout.clone(),
            record_bytes,
            experts: moe.experts,
            moe_layers,
            tiling: tiling.name(),
            narrowing,
        })
    }

    /// The canonical layout that the records were tiled from.
    #[must_use]
    pub fn layout(&self) -> &RecordLayout {
        &self.layout
    }

    /// Bytes of one tiled record.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Name of the tiling.
    #[must_use]
    pub fn tiling(&self) -> &'static str {
        self.tiling
    }

    /// What narrowing to FP16 lost (control arm only; zero for qpacked).
    #[must_use]
    pub fn narrowing(&self) -> NarrowingReport {
        self.narrowing
    }

    /// What tells these records from all others: the SHA-256 of the SHA-256 of each tiled record, layer by layer,
    /// expert by expert. It is computed anew, on all threads of the current pool.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let records = self.memory.bytes().par_chunks(self.record_bytes.max(1));
        let digests: Vec<[u8; 32]> = records.map(|record| Digest::of(record).0).collect();
        Digest::of(digests.as_flattened())
    }

    /// The tiled record at an address of this image.
    ///
    /// # Panics
    /// When the address is not one of [`address`](Self::address).
    #[must_use]
    pub fn bytes_at(&self, address: SlotAddress) -> &[u8] {
        let start = usize::try_from(address.offset).expect("addresses come from this image");
        &self.memory.bytes()[start..start + self.record_bytes]
    }

    /// Where the record of an expert lies, or `None` if the model has no such expert.
    #[must_use]
    pub fn address(&self, layer: LayerId, expert: ExpertId) -> Option<SlotAddress> {
        let row = self.moe_layers.binary_search(&layer).ok()?;
        (expert.index() < self.experts).then(|| SlotAddress {
            buffer: 0,
            offset: ((row * self.experts + expert.index()) * self.record_bytes) as u64,
        })
    }
}

impl SlotMemory for ExpertImage {
    fn record(&self, address: SlotAddress) -> RecordGuard<'_> {
        RecordGuard::immutable(self.bytes_at(address))
    }
}

/// An image with no experts, for a model that has only dense layers.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoExperts;

impl SlotMemory for NoExperts {
    fn record(&self, address: SlotAddress) -> RecordGuard<'_> {
        unreachable!("a model without routed experts has no slot {address:?}")
    }
}

/// Memory needed beyond the image while it loads: one canonical record a thread.
#[must_use]
pub fn scratch_bytes(layout: &RecordLayout, threads: usize) -> usize {
    layout.bytes * threads
}
