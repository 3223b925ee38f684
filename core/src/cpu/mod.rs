//! The CPU backends: a scalar reference that reads like the formulas, and a fast one that gives the same bits.

mod fast;
pub mod kv;
pub mod numerics;
mod reference;
pub mod simd;
pub mod step;
pub mod tiling;
pub mod transport;

pub use fast::{FastCpu, MAX_THREADS};
pub use reference::ReferenceCpu;
