//! Engine, sampler, streaming.

pub mod backends;
pub mod bandwidth;
pub mod budget;
mod choice;
pub mod device;
pub mod disk;
pub mod engine;
pub mod eval;
pub mod footprint;
pub mod process;
pub mod recorder;
pub mod residency;
pub mod routing_load;
pub mod sampler;
#[cfg(test)]
mod scripted;
pub mod session;
pub mod settings;
pub mod size;
pub mod stream;
pub mod text;
