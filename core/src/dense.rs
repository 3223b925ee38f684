//! The non-routed weights: FP16, in anonymous memory, complete before the first step.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use half::f16;
use rayon::prelude::*;
use thiserror::Error;

use crate::dtype::NarrowingReport;
use crate::memory::{AnonymousMemory, align_up};
use crate::roles::{DenseRole, dense_tensors};
use crate::spec::ModelSpec;

/// All non-routed tensors of a model.
#[derive(Debug)]
pub struct DenseStore {
    memory: AnonymousMemory,
    ranges: BTreeMap<DenseRole, Range<usize>>,
    narrowing: NarrowingReport,
}

/// Where non-routed tensors come from: an artifact, or a checkpoint narrowed on the way.
pub trait DenseSource: Sync {
    /// Fills `out` with the tensor of `role`, whose shape is `shape`.
    ///
    /// # Errors
    /// What could not be read, named.
    fn read(&self, role: DenseRole, shape: &[usize], out: &mut [f16])
    -> Result<NarrowingReport, SourceError>;
}

/// A tensor that could not be supplied.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct SourceError(#[source] pub Box<dyn std::error::Error + Send + Sync>);

/// Weights that could not be brought into memory.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The system refused the memory.
    #[error("cannot reserve {bytes} bytes of host memory for {what}: {source}")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// How much.
        bytes: usize,
        /// Why.
        source: io::Error,
    },
    /// A tensor could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl DenseStore {
    /// Reads every tensor that `spec` asks for, on all threads of the current pool.
    ///
    /// # Errors
    /// [`LoadError`] of the first tensor that fails.
    pub fn load(spec: &ModelSpec, source: &dyn DenseSource) -> Result<Self, LoadError> {
        let mut tensors = dense_tensors(spec);
        // Largest first: the last thread to finish then holds a small tensor.
        tensors.sort_by_key(|(role, shape)| (std::cmp::Reverse(shape.iter().product::<usize>()), *role));
        let bytes = tensors.iter().map(|(_, s)| align_up(elements(s) * 2)).sum();
        let mut memory = AnonymousMemory::zeroed(bytes).map_err(|source| LoadError::Memory {
            what: "the non-routed weights",
            bytes,
            source,
        })?;
        let mut ranges = BTreeMap::new();
        let mut jobs = Vec::with_capacity(tensors.len());
        let (mut rest, mut at) = (memory.bytes_mut(), 0);
        for (role, shape) in &tensors {
            let used = elements(shape) * 2;
            let (mine, others) = rest.split_at_mut(align_up(used));
            ranges.insert(*role, at..at + used);
            at += mine.len();
            jobs.push((
                *role,
                shape,
                bytemuck::cast_slice_mut::<u8, f16>(&mut mine[..used]),
            ));
            rest = others;
        }
        let narrowing = jobs
            .into_par_iter()
            .with_max_len(1)
            .map(|(role, shape, out)| source.read(role, shape, out))
            .try_reduce(NarrowingReport::default, |mut a, b| {
                a += b;
                Ok(a)
            })?;
        Ok(Self {
            memory,
            ranges,
            narrowing,
        })
    }

    /// The tensor of `role`, if the model has it.
    #[must_use]
    pub fn get(&self, role: DenseRole) -> Option<&[f16]> {
        self.ranges
            .get(&role)
            .map(|r| bytemuck::cast_slice(&self.memory.bytes()[r.clone()]))
    }

    /// Bytes held, alignment included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// What narrowing the checkpoint to FP16 lost.
    #[must_use]
    pub fn narrowing(&self) -> NarrowingReport {
        self.narrowing
    }
}

fn elements(shape: &[usize]) -> usize {
    shape.iter().product()
}
