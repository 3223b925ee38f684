//! The backends of this build, and the executors that each has for routed experts.

use std::num::NonZeroUsize;
use std::sync::Arc;

use horizon_core::backend::{Backend, BackendError, CUDA_PREFILL_CHUNK, PREFILL_CHUNK};
use horizon_core::cpu::{FastCpu, ReferenceCpu};
use horizon_core::provider::SlotMemory;
use horizon_core::record::{ExpertEncoding, RecordTiling};
use horizon_kernels_cuda::{CudaBackend, Executor};
use serde::Serialize;

/// The backends of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// [`FastCpu`].
    Cpu,
    /// [`ReferenceCpu`].
    CpuReference,
    /// [`CudaBackend`].
    Cuda,
}

/// A backend that is asked for, or none in particular.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendChoice {
    /// This one, or an error.
    Named(BackendKind),
    /// A card if there is one that can hold the model and run it as asked, else the CPU.
    Automatic,
}

/// Ways of computing routed groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutorKind {
    /// Tiled experts, FP32 fused multiply-adds.
    CpuGrouped,
    /// Tiled packed experts, 16-bit integer activations, exact integer sums of a word.
    CpuGroupedI16,
    /// Written like the formulas.
    CpuReference,
    /// One of the CUDA backend's, for decode.
    Cuda(Executor),
}

impl ExecutorKind {
    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CpuGrouped => "cpu-grouped",
            Self::CpuGroupedI16 => "cpu-grouped-i16",
            Self::CpuReference => "cpu-reference",
            Self::Cuda(executor) => executor.name(),
        }
    }

    /// Those of all backends.
    pub fn all() -> impl Iterator<Item = Self> {
        BackendKind::ALL.into_iter().flat_map(BackendKind::executors)
    }
}

impl BackendKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Cpu, Self::CpuReference, Self::Cuda];

    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::CpuReference => "cpu-reference",
            Self::Cuda => "cuda",
        }
    }

    /// The arrangement of expert records that the backend reads.
    #[must_use]
    pub fn tiling(self) -> &'static dyn RecordTiling {
        match self {
            Self::Cpu => FastCpu::tiling(),
            Self::CpuReference => ReferenceCpu::tiling(),
            Self::Cuda => CudaBackend::tiling(),
        }
    }

    /// Most rows of a prefill step.
    #[must_use]
    pub fn prefill_chunk(self) -> usize {
        match self {
            Self::Cpu | Self::CpuReference => PREFILL_CHUNK,
            Self::Cuda => CUDA_PREFILL_CHUNK,
        }
    }

    /// Its executors; the first is the default.
    #[must_use]
    pub fn executors(self) -> Vec<ExecutorKind> {
        match self {
            Self::Cpu => vec![ExecutorKind::CpuGrouped, ExecutorKind::CpuGroupedI16],
            Self::CpuReference => vec![ExecutorKind::CpuReference],
            Self::Cuda => {
                let default = Executor::PersistentV1;
                let others = Executor::ALL.into_iter().filter(|e| *e != default);
                [default]
                    .into_iter()
                    .chain(others)
                    .map(ExecutorKind::Cuda)
                    .collect()
            }
        }
    }

    /// The executor that was asked for, or the default.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] when this backend does not have it, with those that it has.
    pub fn executor(self, asked: Option<ExecutorKind>) -> Result<ExecutorKind, BackendError> {
        let all = self.executors();
        match asked {
            None => Ok(all[0]),
            Some(e) if all.contains(&e) => Ok(e),
            Some(e) => {
                let known: Vec<_> = all.iter().map(|e| e.name()).collect();
                Err(BackendError::Unsupported {
                    backend: self.name(),
                    reason: format!("there is no executor {}; there is {}", e.name(), known.join(", ")),
                })
            }
        }
    }
}

/// Builds the backend of an executor that computes on the host.
pub(crate) fn build_host(
    executor: ExecutorKind,
    threads: Option<NonZeroUsize>,
    slots: Arc<dyn SlotMemory>,
    encoding: ExpertEncoding,
) -> Result<Box<dyn Backend>, BackendError> {
    let fast = |integers| -> Result<Box<dyn Backend>, BackendError> {
        Ok(Box::new(
            FastCpu::new(threads, slots.clone(), encoding)?.with_integers(integers),
        ))
    };
    match executor {
        ExecutorKind::CpuGrouped => fast(false),
        ExecutorKind::CpuGroupedI16 => fast(true),
        ExecutorKind::CpuReference => Ok(Box::new(ReferenceCpu::new(slots, encoding))),
        ExecutorKind::Cuda(e) => Err(BackendError::Unsupported {
            backend: BackendKind::Cuda.name(),
            reason: format!("executor {} does not compute on the host", e.name()),
        }),
    }
}
