//! Engine, sampler, streaming.

pub mod sampler;
#[cfg(test)]
mod scripted;
pub mod session;
pub mod stream;
