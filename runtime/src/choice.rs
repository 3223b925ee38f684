//! Which backend runs a model: the one that was named, or what this machine offers.

use std::sync::Arc;

use horizon_core::backend::{BackendError, Plan, Regime};
use horizon_core::image::NoExperts;
use horizon_core::record::{ExpertEncoding, RecordLayout};
use horizon_core::spec::ModelSpec;
use horizon_kernels_cuda::CudaBackend;
use horizon_kernels_cuda::driver::DriverError;

use crate::backends::{BackendChoice, BackendKind, ExecutorKind, build_host};
use crate::device::{Device, DeviceError, OpenDevice};
use crate::engine::{EngineError, EngineOptions, regime};
use crate::residency::Capacity;

/// A backend that can run the model.
pub(crate) struct Chosen {
    pub kind: BackendKind,
    pub executor: ExecutorKind,
    /// The card, with [`BackendKind::Cuda`].
    pub device: Option<Device>,
    /// Why this one.
    pub reason: String,
    /// What the user should know about it.
    pub note: Option<String>,
}

/// Decides before anything is loaded. A backend that was named is taken or refused; else a card is taken if there is one
/// that holds the model and can run it as asked.
pub(crate) fn choose(
    spec: &ModelSpec,
    options: &EngineOptions,
    encoding: ExpertEncoding,
    open: OpenDevice<'_>,
) -> Result<Chosen, EngineError> {
    let host = |kind: BackendKind, reason: String, note: Option<String>| {
        Ok(Chosen {
            kind,
            executor: kind.executor(options.executor)?,
            device: None,
            reason,
            note,
        })
    };
    match options.backend {
        BackendChoice::Named(BackendKind::Cuda) => cuda(spec, options, encoding, open, "named"),
        BackendChoice::Named(kind) => host(kind, "named".into(), None),
        BackendChoice::Automatic => {
            // First of all: without a card there is nothing to say about why it is not used.
            let driver = match open() {
                Ok(driver) => driver,
                Err(e @ DriverError::Absent(_)) => return host(BackendKind::Cpu, e.to_string(), None),
                Err(e) => return host(BackendKind::Cpu, e.to_string(), Some(on_cpu(&e))),
            };
            let reopen = || Ok(Arc::clone(&driver));
            match cuda(spec, options, encoding, &reopen, "a card that holds the model") {
                Ok(chosen) => Ok(chosen),
                Err(EngineError::Device(e)) => host(BackendKind::Cpu, e.to_string(), Some(on_cpu(&e))),
                Err(EngineError::Backend(e)) => host(BackendKind::Cpu, e.to_string(), Some(on_cpu(&e))),
                Err(e) => Err(e),
            }
        }
    }
}

fn on_cpu(why: &dyn std::error::Error) -> String {
    format!("the model runs on the CPU, not on the GPU: {why}")
}

fn cuda(
    spec: &ModelSpec,
    options: &EngineOptions,
    encoding: ExpertEncoding,
    open: OpenDevice<'_>,
    reason: &str,
) -> Result<Chosen, EngineError> {
    let kind = BackendKind::Cuda;
    let executor = kind.executor(options.executor)?;
    if let Some(cache) = &options.cache {
        let flag = match cache.capacity {
            Capacity::Experts(_) => "-c",
            Capacity::Budget { .. } => "--vram",
        };
        return Err(DeviceError::PartialResidency { flag }.into());
    }
    let regime = regime(spec, options, kind)?;
    let plan = plan(spec, options, (kind, executor), encoding, &regime)?;
    let device = Device::open(open, spec, &plan, record_bytes(spec, kind, encoding))?;
    let executor = admitted(spec, options, encoding, &regime, (kind, executor), &device)?;
    Ok(Chosen {
        kind,
        executor,
        device: Some(device),
        reason: reason.into(),
        note: None,
    })
}

/// The executor that was named, or the first of the backend's that can compute the model on this card.
fn admitted(
    spec: &ModelSpec,
    options: &EngineOptions,
    encoding: ExpertEncoding,
    regime: &Regime,
    (kind, first): (BackendKind, ExecutorKind),
    device: &Device,
) -> Result<ExecutorKind, EngineError> {
    let admits = |executor: ExecutorKind| match executor {
        ExecutorKind::Cuda(e) => {
            CudaBackend::admits(e, spec, encoding, options.dense, regime, device.driver())
        }
        _ => Ok(()),
    };
    let refused = match (admits(first), options.executor) {
        (Ok(()), _) => return Ok(first),
        (Err(e), Some(_)) => return Err(e.into()),
        (Err(e), None) => e,
    };
    let other = kind.executors().into_iter().find(|e| admits(*e).is_ok());
    Ok(other.ok_or(refused)?)
}

/// Bytes of an expert's record as the backend holds it; 0 without experts.
pub(crate) fn record_bytes(spec: &ModelSpec, kind: BackendKind, encoding: ExpertEncoding) -> usize {
    RecordLayout::new(spec, encoding).map_or(0, |layout| kind.tiling().tiled_bytes(&layout))
}

/// Bytes that the backend plans, weights of the CPU backends and experts apart.
pub(crate) fn plan(
    spec: &ModelSpec,
    options: &EngineOptions,
    (kind, executor): (BackendKind, ExecutorKind),
    encoding: ExpertEncoding,
    regime: &Regime,
) -> Result<Plan, BackendError> {
    match kind {
        BackendKind::Cuda => CudaBackend::predict(spec, encoding, options.dense, regime),
        BackendKind::Cpu | BackendKind::CpuReference => {
            build_host(executor, options.threads, Arc::new(NoExperts), encoding)?.plan(spec, regime)
        }
    }
}
