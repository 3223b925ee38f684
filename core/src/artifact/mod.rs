//! The packed model on disk: a directory that any safetensors reader can read, with a manifest that covers
//! every byte of it.
//!
//! ```text
//! model-00001-of-000NN.safetensors   the non-routed tensors, FP16, under the hub's names
//! model-0000K-of-000NN.safetensors   one layer's experts: NAME.codes U8 [out, ceil(in / 2)], NAME.scales F16 [out, blocks]
//! model.safetensors.index.json       the hub's index
//! config.json, tokenizer files …     as in the checkpoint
//! manifest.json                      identity, types, quantizer, inventory
//! ```
//!
//! A directory is complete or absent: [`writer`] works beside it and renames at the end. [`reader`] uses
//! positioned reads, never a mapping: what is in memory afterwards is owned, and a file that somebody truncates
//! meanwhile gives an error and no signal. Each tensor has two digests: XXH3 is checked at every load, at the
//! speed of memory; SHA-256 is identity, and [`verify`] checks it.

pub mod digest;
pub mod error;
pub mod header;
pub mod io;
mod json;
pub mod manifest;
pub(crate) mod place;
pub mod reader;
mod verify;
pub mod writer;

pub use digest::{Checksum, Digest};
pub use error::{ArtifactError, ManifestError};
pub use manifest::Manifest;
pub use reader::{Artifact, Check};
pub use verify::{Problem, VerifySummary, verify};

/// Told about long work as it goes.
pub trait Progress: Sync {
    /// A phase starts that will take `bytes` bytes in.
    fn begin(&self, what: &str, bytes: u64);
    /// So many more bytes are done. Called from any thread.
    fn advance(&self, bytes: u64);
    /// Something that the user should know.
    fn note(&self, text: &str);
    /// Whether the work is not wanted any more; asked between tensors while a model is loaded.
    fn stopped(&self) -> bool {
        false
    }
}

/// Nobody is told.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn note(&self, _: &str) {}
}
