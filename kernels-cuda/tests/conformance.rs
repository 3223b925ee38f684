//! The suite of `horizon_core::conformance` on this backend: with the kernels compiled for the host (feature `emulator`), and
//! on a card (feature `gpu`; `cuda-report` runs it there in both dense formats and from several seeds).

#![cfg(any(feature = "emulator", feature = "gpu"))]

use std::sync::Arc;

use horizon_core::backend::{Backend, Phase, Regime};
use horizon_core::conformance::{self, Case, Opened, Subject, Tolerance};
use horizon_core::dense::DenseFormat;
use horizon_core::ids::LayerId;
use horizon_core::provider::FullyResident;
use horizon_kernels_cuda::driver::SharedDriver;
use horizon_kernels_cuda::launches::StepShape;
use horizon_kernels_cuda::{CudaBackend, CudaModel, CudaTransport, Executor};

struct Cuda {
    driver: SharedDriver,
    executor: Executor,
}

impl Cuda {
    /// The case on this backend, as what it is.
    fn open_model(
        &self,
        case: &Case,
        dense: DenseFormat,
        regime: &Regime,
        seed: u64,
    ) -> (CudaModel, Opening) {
        let image = conformance::image(case, CudaBackend::tiling(), seed);
        let layers: Vec<LayerId> = case.spec.moe_layers().collect();
        let experts = case.spec.moe().expect("every case has experts").experts;
        let slots = layers.len() * experts;
        let transport = CudaTransport::new(&self.driver, slots, 1, image.record_bytes(), layers, experts);
        let transport = Arc::new(transport.expect("fits"));
        transport.place_all(&image).expect("copies");
        let driver = self.driver.clone();
        let backend = CudaBackend::new(driver, Some(transport), case.encoding, dense, self.executor);
        let plan = backend.plan(&case.spec, regime).expect("plans");
        let store = conformance::dense(case, dense, seed);
        let spec = Arc::new(case.spec.clone());
        let model = backend.open_model(&spec, &plan, &store).expect("opens");
        (model, Arc::new(FullyResident::new(image)))
    }
}

/// Where a model's experts come from.
type Opening = Arc<FullyResident>;

impl Subject for Cuda {
    fn open(&self, case: &Case, dense: DenseFormat, regime: &Regime, seed: u64) -> Opened {
        let (model, experts) = self.open_model(case, dense, regime, seed);
        Opened {
            model: Box::new(model),
            experts,
        }
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance::FP16
    }
}

fn suite(driver: &SharedDriver, executor: Executor) {
    let subject = Cuda {
        driver: driver.clone(),
        executor,
    };
    for case in conformance::cases() {
        for dense in case.dense.iter().copied() {
            eprintln!("{}: {}, {}", executor.name(), case.name, dense.name());
            conformance::forward(&subject, &case, dense, 7);
        }
    }
}

#[cfg(feature = "emulator")]
mod emulated {
    use super::*;
    use horizon_kernels_cuda::driver::emulated::{EmulatedDriver, EmulatedOptions};

    fn driver() -> SharedDriver {
        Arc::new(EmulatedDriver::new(EmulatedOptions::default()))
    }

    /// The kernels of routed experts that a step launches.
    fn expert_kernels(executor: Executor, phase: Phase) -> Vec<&'static str> {
        let subject = Cuda {
            driver: driver(),
            executor,
        };
        let case = &conformance::cases()[0];
        let (model, _) = subject.open_model(case, DenseFormat::F16, &conformance::regime(), 7);
        let step = StepShape {
            rows: 1,
            wanted: 1,
            appended: false,
            taps: false,
            phase,
        };
        let names = model.launches(&step, &[0]).into_iter().map(|l| l.name);
        let own = ["scalar", "grouped_t3", "top4_fused_v1", "persistent_v1"];
        let mut names: Vec<_> = names.filter(|n| own.iter().any(|o| n.starts_with(o))).collect();
        names.dedup();
        names
    }

    #[test]
    fn each_executor_launches_its_own_kernels() {
        for (executor, own, launches) in [
            (Executor::Scalar, "scalar_", 2 * 8 * 2),
            (Executor::GroupedT3, "grouped_t3_", 3 * 2),
            (Executor::Top4FusedV1, "top4_fused_v1_", 1),
            (Executor::PersistentV1, "persistent_v1_", 1),
        ] {
            let names = expert_kernels(executor, Phase::Decode);
            assert!(
                names.iter().all(|n| n.starts_with(own)),
                "{}: {names:?}",
                executor.name()
            );
            assert_eq!(names.len(), launches, "{}: {names:?}", executor.name());
            let prefill = expert_kernels(executor, Phase::Prefill);
            assert!(
                prefill.iter().all(|n| n.starts_with("grouped_t3_")),
                "{prefill:?}"
            );
        }
    }

    #[test]
    fn scalar() {
        suite(&driver(), Executor::Scalar);
    }

    #[test]
    fn grouped_t3() {
        suite(&driver(), Executor::GroupedT3);
    }

    #[test]
    fn persistent_v1() {
        suite(&driver(), Executor::PersistentV1);
    }

    #[test]
    fn top4_fused_v1() {
        suite(&driver(), Executor::Top4FusedV1);
    }
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use horizon_kernels_cuda::driver::cuda::CudaDriver;

    #[test]
    fn gpu_every_executor() {
        let driver: SharedDriver = Arc::new(CudaDriver::open(0).expect("a card"));
        for executor in Executor::ALL {
            suite(&driver, executor);
        }
    }
}
