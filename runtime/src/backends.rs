//! The backends of this build, and the executors that each has for routed experts.

use std::num::NonZeroUsize;
use std::sync::Arc;

use horizon_core::backend::{Backend, BackendError};
use horizon_core::cpu::{FastCpu, ReferenceCpu};
use horizon_core::provider::SlotMemory;
use horizon_core::record::{ExpertEncoding, RecordTiling};
use serde::Serialize;

/// The backends of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// [`FastCpu`].
    Cpu,
    /// [`ReferenceCpu`].
    CpuReference,
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
}

impl ExecutorKind {
    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CpuGrouped => "cpu-grouped",
            Self::CpuGroupedI16 => "cpu-grouped-i16",
            Self::CpuReference => "cpu-reference",
        }
    }
}

impl BackendKind {
    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::CpuReference => "cpu-reference",
        }
    }

    /// The arrangement of expert records that the backend reads.
    #[must_use]
    pub fn tiling(self) -> &'static dyn RecordTiling {
        match self {
            Self::Cpu => FastCpu::tiling(),
            Self::CpuReference => ReferenceCpu::tiling(),
        }
    }

    /// Its executors; the first is the default.
    #[must_use]
    pub fn executors(self) -> &'static [ExecutorKind] {
        match self {
            Self::Cpu => &[ExecutorKind::CpuGrouped, ExecutorKind::CpuGroupedI16],
            Self::CpuReference => &[ExecutorKind::CpuReference],
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

    pub(crate) fn build(
        self,
        executor: ExecutorKind,
        threads: Option<NonZeroUsize>,
        slots: Arc<dyn SlotMemory>,
        encoding: ExpertEncoding,
    ) -> Result<Box<dyn Backend>, BackendError> {
        let integers = self.executor(Some(executor))? == ExecutorKind::CpuGroupedI16;
        Ok(match self {
            Self::Cpu => Box::new(FastCpu::new(threads, slots, encoding)?.with_integers(integers)),
            Self::CpuReference => Box::new(ReferenceCpu::new(slots, encoding)),
        })
    }
}
