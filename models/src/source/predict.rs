//! How much host memory a model will take, before any of it is reserved.

use horizon_core::dense::{DenseFormat, conversion_bytes, held_tensors};
use horizon_core::record::{ExpertEncoding, RecordLayout, RecordTiling};
use horizon_core::spec::ModelSpec;
use serde::Serialize;

/// Bytes of host memory that a loaded model holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HostBytes {
    /// All routed experts, tiled.
    pub experts: u64,
    /// Non-routed weights.
    pub dense: u64,
    /// Buffers while loading: a thread has one tensor on its way to q8, later one canonical record. Given back before
    /// the first step.
    pub scratch: u64,
}

impl HostBytes {
    /// What `spec` takes with its experts in `encoding`, tiled by `tiling`, its non-routed weights in `format`, loaded
    /// by `threads` threads.
    #[must_use]
    pub fn predict(
        spec: &ModelSpec,
        encoding: ExpertEncoding,
        format: DenseFormat,
        tiling: &dyn RecordTiling,
        threads: usize,
    ) -> Self {
        let held = held_tensors(spec, format);
        let dense = held.iter().map(|t| t.held_bytes() as u64).sum();
        let converting = conversion_bytes(spec, format, threads) as u64;
        let Some((moe, layout)) = spec.moe().zip(RecordLayout::new(spec, encoding)) else {
            return Self {
                experts: 0,
                dense,
                scratch: converting,
            };
        };
        let records = (moe.experts * spec.moe_layers().count()) as u64;
        Self {
            experts: tiling.tiled_bytes(&layout) as u64 * records,
            dense,
            // The experts follow the non-routed weights.
            scratch: converting.max((layout.bytes * threads) as u64),
        }
    }

    /// What stays once the model is loaded.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.experts + self.dense
    }
}
