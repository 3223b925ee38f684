//! How much host memory a model will take, before any of it is reserved.

use horizon_core::memory::align_up;
use horizon_core::record::{ExpertEncoding, RecordLayout, RecordTiling};
use horizon_core::roles::dense_tensors;
use horizon_core::spec::ModelSpec;
use serde::Serialize;

/// Bytes of host memory that a loaded model holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HostBytes {
    /// All routed experts, tiled.
    pub experts: u64,
    /// Non-routed weights.
    pub dense: u64,
    /// Buffers while loading: one canonical record a thread. Given back before the first step.
    pub scratch: u64,
}

impl HostBytes {
    /// What `spec` takes with its experts in `encoding`, tiled by `tiling`, loaded by `threads` threads.
    #[must_use]
    pub fn predict(
        spec: &ModelSpec,
        encoding: ExpertEncoding,
        tiling: &dyn RecordTiling,
        threads: usize,
    ) -> Self {
        let dense = dense_tensors(spec)
            .iter()
            .map(|(_, shape)| align_up(shape.iter().product::<usize>() * 2) as u64)
            .sum();
        let Some((moe, layout)) = spec.moe().zip(RecordLayout::new(spec, encoding)) else {
            return Self {
                experts: 0,
                dense,
                scratch: 0,
            };
        };
        let records = (moe.experts * spec.moe_layers().count()) as u64;
        Self {
            experts: tiling.tiled_bytes(&layout) as u64 * records,
            dense,
            scratch: (layout.bytes * threads) as u64,
        }
    }

    /// What stays once the model is loaded.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.experts + self.dense
    }
}
