//! Checkpoints, families, packing and text.

pub mod config;
pub mod demo;
pub mod family;
pub mod tokenizer;
