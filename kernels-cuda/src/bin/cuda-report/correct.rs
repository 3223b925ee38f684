//! The conformance suite on this card.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use horizon_core::backend::{Backend, Regime};
use horizon_core::conformance::{self, Case, Opened, Subject, Tolerance};
use horizon_core::dense::DenseFormat;
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
        let layers: Vec<_> = case.spec.moe_layers().collect();
        let experts = case.spec.moe().expect("every case has experts").experts;
        let slots = layers.len() * experts;
        let transport = CudaTransport::new(&self.driver, slots, 2, image.record_bytes(), layers, experts)
            .expect("a small model fits");
        transport.place_all(&image).expect("copies");
        let transport = Some(Arc::new(transport));
        let backend = CudaBackend::new(
            self.driver.clone(),
            transport,
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

/// Runs the suite for every executor.
pub fn check(driver: &SharedDriver, quick: bool, only: &str) -> Result<(), String> {
    let seeds: &[u64] = if quick { &[7] } else { &[7, 8, 9] };
    let mut failed = Vec::new();
    let mut passed = 0;
    for executor in Executor::ALL {
        let subject = Cuda {
            driver: driver.clone(),
            executor,
        };
        for case in conformance::cases().into_iter().filter(|c| c.name.contains(only)) {
            for dense in [DenseFormat::F16, DenseFormat::Q8] {
                for seed in seeds {
                    let run = AssertUnwindSafe(|| conformance::forward(&subject, &case, dense, *seed));
                    match catch_unwind(run) {
                        Ok(()) => passed += 1,
                        Err(_) => failed.push(format!("{}: {}", executor.name(), case.name)),
                    }
                }
            }
        }
    }
    println!("conformance: {passed} passed, {} failed", failed.len());
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!(
            "no figure is printed for kernels that are wrong: {}",
            failed.join("; ")
        ))
    }
}
