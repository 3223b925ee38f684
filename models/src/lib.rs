//! Checkpoints, families, packing and text.

pub mod checkpoint;
pub mod chat;
pub mod config;
pub mod demo;
pub mod family;
pub mod pack;
pub mod source;
pub mod tokenizer;
mod transform;
