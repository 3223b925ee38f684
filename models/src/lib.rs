//! Checkpoints, families, packing and text.

pub mod config;
pub mod family;
