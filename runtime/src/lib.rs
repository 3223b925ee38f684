//! Engine, sampler, streaming.

pub mod backends;
pub mod bandwidth;
pub mod disk;
pub mod engine;
pub mod eval;
pub mod footprint;
pub mod process;
pub mod residency;
pub mod routing_load;
pub mod sampler;
#[cfg(test)]
mod scripted;
pub mod session;
pub mod stream;
pub mod text;
