//! CUDA backend: kernels, the images made of them, and the Rust that launches them.
//!
//! Nothing here is needed to build or to start: the NVIDIA driver is looked for at run time.

pub mod arena;
pub mod args;
pub mod backend;
pub mod bandwidth;
pub mod driver;
pub mod executors;
pub mod launches;
pub mod model;
pub mod prefill;
pub mod shape;
#[cfg(any(test, feature = "nvrtc"))]
pub mod sources;
pub mod tiling;
pub mod transport;
pub mod weights;
pub mod workspace;

pub use backend::CudaBackend;
pub use launches::Executor;
pub use model::CudaModel;
pub use transport::CudaTransport;
