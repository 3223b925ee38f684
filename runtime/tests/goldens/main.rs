//! The forward pass against recorded outputs of Hugging Face transformers, in every backend and arithmetic.

mod arm;
mod demo;
mod files;
mod spread;
mod tiny;
