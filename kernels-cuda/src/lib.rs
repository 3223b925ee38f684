//! CUDA backend: kernels, the images made of them, and the Rust that launches them.
//!
//! Nothing here is needed to build or to start: the NVIDIA driver is looked for at run time.

pub mod driver;
pub mod tiling;
