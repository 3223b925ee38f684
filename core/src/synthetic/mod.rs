//! Synthetic checkpoints: Hugging Face directories with made-up weights, byte for byte reproducible.
//!
//! Two uses. A [`Recipe`] is a table of tensors from which the tiny checkpoints of the golden tests are made.
//! A [`Shape`] is a published model's shape; [`write_checkpoint`] writes a full-size model with it, named for
//! what it is (`olmoe-shape synthetic seed 1`), to measure speed and memory where the real weights are not at
//! hand.
//!
//! [`SyntheticSource`] gives the same weights without the files, and [`RandomWeights`] is a source of weights for a specification, for tests.
//!
//! With plain random weights the routing of a deep model collapses: what attention averages over the context
//! drowns the token, and every token visits the same few experts. A shape's embedding is therefore large
//! against what the layers add to the residual stream, so that the token still decides at the last router.

mod hub;
mod recipe;
mod shape;
mod source;
mod weights;
mod write;

use std::path::{Path, PathBuf};

use thiserror::Error;

pub use recipe::{Recipe, TensorRule};
pub use shape::{Shape, ShapeFamily};
pub use source::SyntheticSource;
pub use weights::RandomWeights;
pub use write::write_recipe;

use crate::artifact::Progress;
use crate::artifact::place::Place;
use crate::artifact::writer::WriteError;
use crate::spec::SpecError;

/// What [`write_checkpoint`] writes.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticSpec {
    /// Shape of the model.
    pub shape: Shape,
    /// Seed of the weights.
    pub seed: u64,
    /// Most bytes of tensors a safetensors file holds, unless one tensor is larger.
    pub shard_bytes: u64,
}

impl SyntheticSpec {
    /// A checkpoint of `shape` in shards of 4 GB.
    #[must_use]
    pub fn new(shape: Shape, seed: u64) -> Self {
        Self {
            shape,
            seed,
            shard_bytes: 4_000_000_000,
        }
    }

    /// What the checkpoint calls itself, e.g. `olmoe-shape synthetic seed 1`.
    #[must_use]
    pub fn title(&self) -> String {
        format!("{}-shape synthetic seed {}", self.shape.name, self.seed)
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Tensors.
    pub tensors: usize,
    /// Safetensors files.
    pub files: usize,
    /// Bytes of tensor data.
    pub data_bytes: u64,
    /// Bytes of the safetensors files and their index.
    pub file_bytes: u64,
}

/// A synthetic checkpoint that cannot be made.
#[derive(Debug, Error)]
pub enum SyntheticError {
    /// A recipe table that cannot be read; line 0 stands for the whole table.
    #[error("recipe line {line}: {problem}")]
    Recipe {
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// No shape has this name.
    #[error("there is no shape {name:?}; known shapes: {known}")]
    UnknownShape {
        /// The name.
        name: String,
        /// Those that exist.
        known: String,
    },
    /// A shape that no model can have.
    #[error("shape {name}: {source}")]
    Shape {
        /// Name of the shape.
        name: String,
        /// The field.
        source: SpecError,
    },
    /// The output is in the way.
    #[error("{path} already exists; remove it or choose another directory")]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// A file could not be written, or there is no place for the directory.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Writes a synthetic checkpoint as the new directory `dir`: `config.json`, safetensors files in BF16 with
/// their index, a byte-level tokenizer with its configuration, and `generation_config.json`.
///
/// Everything is written to `DIR.partial`, which is renamed at the end, so `dir` is there either complete or not
/// at all. What a run that was killed left behind is removed by the next one.
///
/// # Errors
/// [`SyntheticError`]: a shape that cannot be, a directory that exists, or a file that cannot be written.
pub fn write_checkpoint(
    dir: &Path,
    spec: &SyntheticSpec,
    progress: &dyn Progress,
) -> Result<Summary, SyntheticError> {
    let model = spec.shape.model_spec()?;
    if dir.exists() {
        return Err(SyntheticError::Exists { path: dir.to_owned() });
    }
    let mut notes = Vec::new();
    let place = Place::claim(dir, false, &mut notes)?;
    for (name, text) in hub::files(&spec.shape, &spec.title()) {
        let path = place.path(name);
        std::fs::write(&path, text).map_err(|e| WriteError::io(&path)(e))?;
    }
    let recipe = shape::recipe(&spec.shape, &model, spec.seed, spec.shard_bytes);
    let summary = write_recipe(&place.path(""), &recipe, progress)?;
    place.publish(&mut notes)?;
    notes.iter().for_each(|note| progress.note(note));
    Ok(summary)
}
