//! What can be wrong with an artifact.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::spec::SpecError;

/// An artifact that cannot be read. Each message names the file and ends with what to do.
#[derive(Debug, Error)]
pub enum ArtifactError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file that the manifest names is not there.
    #[error(
        "{}: the file is missing, though manifest.json names it; copy the artifact again, or pack the checkpoint \
         again with `horizon pack --force`",
        .0.display()
    )]
    MissingFile(PathBuf),
    /// There is no manifest.
    #[error("{}: there is no manifest.json: not an artifact of `horizon pack`", .0.display())]
    NoManifest(PathBuf),
    /// The manifest is not one.
    #[error("{}: {problem}; pack the checkpoint again with `horizon pack --force`", path.display())]
    Manifest {
        /// File.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The manifest is of another version.
    #[error(
        "{}: artifact version {found}; this program reads version {supported}; \
         pack the checkpoint again with `horizon pack --force`, or use the program that made the artifact",
        path.display()
    )]
    Version {
        /// File.
        path: PathBuf,
        /// Version of the artifact.
        found: u64,
        /// Version that is read here.
        supported: u32,
    },
    /// A file has another size than the manifest says.
    #[error(
        "{}: {found} bytes, but manifest.json says {expected}: the file is truncated or was replaced; \
         copy the artifact again, or pack the checkpoint again with `horizon pack --force`",
        path.display()
    )]
    Size {
        /// File.
        path: PathBuf,
        /// Bytes the manifest says.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// A file, or the header of a shard, is not what was packed.
    #[error(
        "{}: {what} differs from what manifest.json says: the file is damaged or was edited; \
         copy the artifact again, or pack the checkpoint again with `horizon pack --force`",
        path.display()
    )]
    Damaged {
        /// File.
        path: PathBuf,
        /// The part.
        what: &'static str,
    },
    /// A tensor's bytes are not what was packed.
    #[error(
        "{}: tensor {tensor}: the bytes differ from what manifest.json says: the file is damaged; \
         copy the artifact again, or pack the checkpoint again with `horizon pack --force`",
        path.display()
    )]
    DamagedTensor {
        /// File.
        path: PathBuf,
        /// Tensor.
        tensor: String,
    },
    /// A tensor that the model needs is not there as it must be.
    #[error(
        "{}: tensor {tensor}: {problem}; pack the checkpoint again with `horizon pack --force`",
        path.display()
    )]
    Tensor {
        /// File.
        path: PathBuf,
        /// Tensor.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
}

impl ArtifactError {
    /// What a system error about a file means that the manifest names.
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| match source.kind() {
            io::ErrorKind::NotFound => Self::MissingFile(path.to_owned()),
            _ => Self::Io {
                path: path.to_owned(),
                source,
            },
        }
    }
}

/// A manifest that contradicts itself.
#[derive(Debug, Error)]
pub enum ManifestError {
    /// The self-digest does not fit.
    #[error("the manifest is damaged or was edited: its SHA-256 is not the one it states")]
    Digest,
    /// It does not start as a manifest does.
    #[error("not a manifest of `horizon pack`")]
    Foreign,
    /// Another version.
    #[error("manifest version {0}")]
    Version(u64),
    /// The JSON is not that of a manifest.
    #[error("not a valid manifest: {0}")]
    Json(#[from] serde_json::Error),
    /// The model is none that could run.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Something in the inventory or the records cannot be.
    #[error("{subject}: {problem}")]
    Record {
        /// File, tensor or field.
        subject: String,
        /// What is wrong.
        problem: String,
    },
}
