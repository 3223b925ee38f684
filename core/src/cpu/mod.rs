//! The CPU backends: a scalar reference that reads like the formulas, and a fast one that gives the same bits.

pub mod kv;
pub mod numerics;
mod reference;
pub mod simd;
pub mod step;
pub mod tiling;

pub use reference::ReferenceCpu;
