//! Everything that a card can be asked about this backend, in one run: correctness first, then, only if it holds, the
//! card's ceilings, each kernel, decode and prefill of full-size synthetic models.
//!
//! `cargo run --release -p horizon-kernels-cuda --features report --bin cuda-report -- [--models A,B] [--steps N] [--quick] [--check]
//! [--only CASE]`; figures are printed only after all cases were checked.

mod correct;
mod models;
mod time;

use std::process::ExitCode;
use std::sync::Arc;

use horizon_core::dense::DenseFormat;
use horizon_kernels_cuda::Executor;
use horizon_kernels_cuda::driver::{DriverError, SharedDriver};

struct Options {
    models: Vec<String>,
    steps: usize,
    quick: bool,
    only_check: bool,
    /// Part of the names of the cases that are checked.
    only: String,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        models: vec!["olmoe".into()],
        steps: 128,
        quick: false,
        only_check: false,
        only: String::new(),
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--models" => options.models = value()?.split(',').map(str::to_owned).collect(),
            "--steps" => options.steps = value()?.parse().map_err(|e| format!("--steps: {e}"))?,
            "--quick" => options.quick = true,
            "--check" => options.only_check = true,
            "--only" => options.only = value()?,
            _ => {
                return Err(format!(
                    "{arg}: unknown; there is --models, --steps, --quick, --check and --only"
                ));
            }
        }
    }
    Ok(options)
}

fn device() -> Result<SharedDriver, DriverError> {
    Ok(Arc::new(horizon_kernels_cuda::driver::cuda::CudaDriver::open(0)?))
}

fn report() -> Result<(), String> {
    let options = options()?;
    let driver = device().map_err(|e| e.to_string())?;
    println!("{:?}", driver.info());
    correct::check(&driver, options.quick, &options.only)?;
    if options.only_check || !options.only.is_empty() {
        return Ok(());
    }
    let ceiling = time::read_bandwidth(&driver).map_err(|e| e.to_string())?;
    println!("read bandwidth, 2 GiB: {:.0} GB/s", ceiling / 1e9);
    for name in &options.models {
        for dense in [DenseFormat::F16, DenseFormat::Q8] {
            let loaded = models::Loaded::new(name, dense)?;
            let executors: &[Executor] = if options.quick {
                &[Executor::PersistentV1, Executor::Top4FusedV1]
            } else {
                &Executor::ALL
            };
            for executor in executors {
                time::model(&driver, &loaded, *executor, ceiling, &options.steps)?;
            }
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match report() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
