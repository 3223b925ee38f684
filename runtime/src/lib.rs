//! Engine, sampler, streaming.

pub mod sampler;
pub mod stream;
