//! Checkpoints, families, packing and text.

pub mod chat;
pub mod checkpoint;
pub mod config;
pub mod demo;
pub mod family;
pub mod generation;
pub mod pack;
pub mod source;
pub mod tokenizer;
mod transform;
