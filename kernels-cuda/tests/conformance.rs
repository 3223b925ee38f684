//! The suite of `horizon_core::conformance` on this backend: with the kernels compiled for the host (feature `emulator`), and
//! on a card (feature `gpu`; `cuda-report` runs it there in both dense formats and from several seeds).

#![cfg(any(feature = "emulator", feature = "gpu"))]

use std::sync::Arc;

use horizon_core::backend::{Backend, Regime};
use horizon_core::conformance::{self, Case, Opened, Subject, Tolerance};
use horizon_core::dense::DenseFormat;
use horizon_core::ids::LayerId;
use horizon_core::provider::FullyResident;
use horizon_kernels_cuda::driver::SharedDriver;
use horizon_kernels_cuda::{CudaBackend, CudaTransport, Executor};

struct Cuda {
    driver: SharedDriver,
    executor: Executor,
}

impl Subject for Cuda {
    fn open(&self, case: &Case, dense: DenseFormat, regime: &Regime, seed: u64) -> Opened {
        let image = conformance::image(case, CudaBackend::tiling(), seed);
        let layers: Vec<LayerId> = case.spec.moe_layers().collect();
        let experts = case.spec.moe().expect("every case has experts").experts;
        let slots = layers.len() * experts;
        let transport = CudaTransport::new(
            &self.driver,
            slots,
            1,
            image.record_bytes(),
            layers.clone(),
            experts,
        )
        .expect("fits");
        transport.place_all(&image).expect("copies");
        let backend = CudaBackend::new(
            self.driver.clone(),
            Some(Arc::new(transport)),
            case.encoding,
            dense,
            self.executor,
        );
        let plan = backend.plan(&case.spec, regime).expect("plans");
        let store = conformance::dense(case, dense, seed);
        Opened {
            model: backend
                .open(&Arc::new(case.spec.clone()), &plan, &store)
                .expect("opens"),
            experts: Arc::new(FullyResident::new(image)),
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
