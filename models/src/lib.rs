//! Checkpoints, families, packing and text.

pub mod chat;
pub mod checkpoint;
pub mod config;
pub mod demo;
pub mod family;
pub mod generation;
#[cfg(feature = "hub")]
pub mod hub;
pub mod pack;
pub mod source;
pub mod tokenizer;
mod transform;
