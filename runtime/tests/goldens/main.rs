//! The forward pass against recorded outputs of Hugging Face transformers, in every backend and arithmetic.

mod arm;
mod capacities;
mod demo;
mod files;
#[path = "../../../cache/tests/flaky/mod.rs"]
#[expect(
    dead_code,
    reason = "made for the tests of the cache itself, which use all of it"
)]
mod flaky;
mod spread;
mod tiny;
