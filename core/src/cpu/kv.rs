//! The KV cache of the CPU backends: per layer, sequence and key/value head, positions in a row.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::backend::{Activations, BackendError, Regime};
use crate::memory::{AnonymousMemory, align_up};
use crate::spec::ModelSpec;

/// Keys and values of every layer. FP32 under FP32 activations, else FP16.
#[derive(Debug)]
pub struct KvCache {
    memory: AnonymousMemory,
    activations: Activations,
    /// Bytes of `[context][head_dim]`.
    head_bytes: usize,
    kv_heads: usize,
    sequences: usize,
    head_dim: usize,
}

/// Keys or values of one head, `[positions][head_dim]`.
#[derive(Clone, Copy, Debug)]
pub enum HeadRows<'a> {
    /// FP32 activations.
    F32(&'a [f32]),
    /// FP16 activations.
    F16(&'a [f16]),
}

impl KvCache {
    fn head_bytes(spec: &ModelSpec, regime: &Regime) -> usize {
        let element = match regime.activations {
            Activations::F32 => 4,
            Activations::F16 => 2,
        };
        align_up(regime.context * spec.attention.head_dim * element)
    }

    /// Bytes of the cache.
    #[must_use]
    pub fn bytes(spec: &ModelSpec, regime: &Regime) -> usize {
        Self::head_bytes(spec, regime) * 2 * spec.attention.kv_heads * regime.sequences * spec.layers.len()
    }

    /// An empty cache.
    ///
    /// # Errors
    /// [`BackendError::Memory`].
    pub fn new(backend: &'static str, spec: &ModelSpec, regime: &Regime) -> Result<Self, BackendError> {
        let bytes = Self::bytes(spec, regime);
        let memory = AnonymousMemory::zeroed(bytes).map_err(|source| BackendError::Memory {
            backend,
            what: "the KV cache",
            bytes: bytes as u64,
            source,
        })?;
        Ok(Self {
            memory,
            activations: regime.activations,
            head_bytes: Self::head_bytes(spec, regime),
            kv_heads: spec.attention.kv_heads,
            sequences: regime.sequences,
            head_dim: spec.attention.head_dim,
        })
    }

    fn start(&self, layer: usize, sequence: usize, head: usize, value: bool) -> usize {
        let row = ((layer * self.sequences + sequence) * self.kv_heads + head) * 2 + usize::from(value);
        row * self.head_bytes
    }

    /// Stores the key and value of every head at one position; both are `[kv_heads * head_dim]`.
    pub fn store(&mut self, layer: usize, sequence: usize, position: usize, key: &[f32], value: &[f32]) {
        for head in 0..self.kv_heads {
            let part = head * self.head_dim..(head + 1) * self.head_dim;
            for (is_value, row) in [(false, &key[part.clone()]), (true, &value[part])] {
                let start = self.start(layer, sequence, head, is_value);
                let bytes = &mut self.memory.bytes_mut()[start..start + self.head_bytes];
                let at = position * self.head_dim;
                match self.activations {
                    Activations::F32 => {
                        bytemuck::cast_slice_mut(bytes)[at..at + self.head_dim].copy_from_slice(row);
                    }
                    Activations::F16 => {
                        let out: &mut [f16] = &mut bytemuck::cast_slice_mut(bytes)[at..at + self.head_dim];
                        out.convert_from_f32_slice(row);
                    }
                }
            }
        }
    }

    /// Keys (or values) of one head at the first `positions` positions.
    #[must_use]
    pub fn rows(
        &self,
        layer: usize,
        sequence: usize,
        head: usize,
        value: bool,
        positions: usize,
    ) -> HeadRows<'_> {
        let start = self.start(layer, sequence, head, value);
        let bytes = &self.memory.bytes()[start..start + self.head_bytes];
        let n = positions * self.head_dim;
        match self.activations {
            Activations::F32 => HeadRows::F32(&bytemuck::cast_slice(bytes)[..n]),
            Activations::F16 => HeadRows::F16(&bytemuck::cast_slice(bytes)[..n]),
        }
    }
}
