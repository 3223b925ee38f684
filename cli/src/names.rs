//! Names that options take as values.

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use horizon_runtime::engine::ExecutorKind;

/// Backends by name; those that this build lacks are known, to say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// All cores, SIMD chosen at run time
    Cpu,
    /// One thread, written like the formulas; slow
    CpuReference,
    /// NVIDIA GPUs
    Cuda,
    /// GPUs through wgpu
    #[value(hide = true)]
    Wgpu,
}

/// `--executor`: the executors of all backends, by name.
pub fn executors() -> impl TypedValueParser<Value = ExecutorKind> {
    let help = |e| match e {
        ExecutorKind::CpuGrouped => "Tiled experts, FP32 multiply-adds",
        ExecutorKind::CpuGroupedI16 => {
            "Packed experts, rows rounded to 16-bit integers, exact sums of a word"
        }
        ExecutorKind::CpuReference => "That of --backend cpu-reference",
        ExecutorKind::Cuda(_) => "Of --backend cuda, for decode",
    };
    let values = ExecutorKind::all().map(move |e| PossibleValue::new(e.name()).help(help(e)));
    PossibleValuesParser::new(values).try_map(|name| {
        ExecutorKind::all()
            .find(|e| e.name() == name)
            .ok_or("there is no such executor")
    })
}

/// `--experts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExpertsName {
    Qpacked,
    F16,
}

/// `--dense`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DenseName {
    /// FP16, as the artifact has them
    F16,
    /// 8-bit integers, an FP16 scale for 32
    Q8,
}

/// `--activations`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ActivationsName {
    F16,
    F32,
}

/// `--quantizer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QuantizerName {
    /// The signed extreme of a block becomes -8
    Absmax,
    /// Least squared error
    Mse,
}

/// `--special-tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SpecialTokens {
    Show,
    Hide,
}
