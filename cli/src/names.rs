//! Names that options take as values.

use clap::ValueEnum;

/// Backends by name; those that this build lacks are known, to say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// All cores, SIMD chosen at run time
    Cpu,
    /// One thread, written like the formulas; slow
    CpuReference,
    /// NVIDIA GPUs
    #[value(hide = true)]
    Cuda,
    /// GPUs through wgpu
    #[value(hide = true)]
    Wgpu,
}

/// `--executor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExecutorName {
    /// Tiled experts, FP32 multiply-adds
    #[value(name = "cpu-grouped")]
    CpuGrouped,
    /// Packed experts, rows rounded to 16-bit integers, exact sums of a word
    #[value(name = "cpu-grouped-i16")]
    CpuGroupedI16,
    /// That of --backend cpu-reference
    #[value(name = "cpu-reference")]
    CpuReference,
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
