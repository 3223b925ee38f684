//! [`ModelSource`]: a model to load, whether an artifact, a checkpoint or bytes in the program itself.

mod load;
mod notes;
mod predict;
mod read;

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use horizon_core::artifact::manifest::MANIFEST_FILE;
use horizon_core::artifact::{Artifact, ArtifactError, Digest};
use horizon_core::dtype::DType;
use horizon_core::qpacked::QpackedLayout;
use horizon_core::roles::{DenseRole, ExpertMatrix, ExpertRole, TensorNames, dense_tensors, expert_tensors};
use horizon_core::spec::ModelSpec;
use serde_json::Value;
use thiserror::Error;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::config::{self, ConfigError};
use crate::family;

pub(crate) use load::layer_errors;
pub use load::{ExpertsMode, LoadError, LoadOptions, LoadedModel};
pub use predict::HostBytes;

/// Files that belong to a model beside its weights; an artifact keeps those that the checkpoint has.
pub const SMALL_FILES: [&str; 14] = [
    "LICENSE",
    "NOTICE",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// A path that no model can be opened from.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Nothing is there.
    #[error("{}: no such file or directory; give the directory of a checkpoint or an artifact", .0.display())]
    Missing(PathBuf),
    /// It is a file.
    #[error("{}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What it is, and what to do.
        what: String,
    },
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is no configuration.
    #[error("{}: there is no config.json; give the directory of a whole checkpoint or artifact", .0.display())]
    NoConfig(PathBuf),
    /// Packed experts without the manifest that describes them.
    #[error(
        "{}: these weights are an artifact's, but there is no {MANIFEST_FILE}; pack the checkpoint again",
        .0.display()
    )]
    NoManifest(PathBuf),
    /// The configuration cannot be used.
    #[error("{}: {source}", dir.display())]
    Config {
        /// Directory.
        dir: PathBuf,
        /// The field.
        source: ConfigError,
    },
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The artifact cannot be used.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

/// What a model is loaded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// A directory made by `pack`.
    Artifact,
    /// A directory as the hub has it.
    Checkpoint,
    /// Files within the program.
    Memory,
}

/// A model that can be loaded or packed. All headers and shapes have been checked; no file is open.
pub struct ModelSource {
    spec: Arc<ModelSpec>,
    config: Value,
    config_bytes: Vec<u8>,
    names: Box<dyn TensorNames>,
    notes: Vec<String>,
    origin: Origin,
}

enum Origin {
    Artifact(Box<Artifact>),
    Checkpoint(Checkpoint),
    Memory(Checkpoint),
}

impl ModelSource {
    /// Opens an artifact or a checkpoint directory.
    ///
    /// # Errors
    /// [`OpenError`] naming the file and what to do.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let meta = std::fs::metadata(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => OpenError::Missing(path.to_owned()),
            _ => OpenError::Io {
                path: path.to_owned(),
                source,
            },
        })?;
        if !meta.is_dir() {
            return Err(OpenError::File {
                path: path.to_owned(),
                what: describe_file(path),
            });
        }
        if path.join(MANIFEST_FILE).exists() {
            return Self::of_artifact(Artifact::open(path)?);
        }
        let checkpoint = Checkpoint::open(path);
        // A directory without weights and without a configuration is no checkpoint: the weights' message says so.
        match (checkpoint, path.join("config.json").exists()) {
            (Ok(_), false) => Err(OpenError::NoConfig(path.to_owned())),
            (Ok(c), _) if c.holds_packed_experts() => Err(OpenError::NoManifest(path.to_owned())),
            (checkpoint, _) => Self::of_checkpoint(checkpoint?, Origin::Checkpoint),
        }
    }

    /// A model whose files are in memory: `files` has `config.json` and those beside it, `weights` is a whole
    /// safetensors file. Errors call it `label`.
    ///
    /// # Errors
    /// [`OpenError`] naming the file.
    pub fn in_memory(
        label: &str,
        files: BTreeMap<String, Vec<u8>>,
        weights: Vec<u8>,
    ) -> Result<Self, OpenError> {
        Self::of_checkpoint(Checkpoint::in_memory(label, files, weights)?, Origin::Memory)
    }

    fn of_checkpoint(
        checkpoint: Checkpoint,
        origin: impl FnOnce(Checkpoint) -> Origin,
    ) -> Result<Self, OpenError> {
        let place = checkpoint.place().to_owned();
        let bytes = checkpoint
            .small_file("config.json")?
            .ok_or_else(|| OpenError::NoConfig(place.clone()))?;
        let wrong = |source| OpenError::Config {
            dir: place.clone(),
            source,
        };
        let config = config::parse(&bytes).map_err(wrong)?;
        let resolved = family::resolve(&config).map_err(wrong)?;
        let mut used = HashSet::new();
        for (role, shape) in dense_tensors(&resolved.spec) {
            used.insert(checkpoint.tensor(&resolved.names.dense(role), &shape)?.name);
        }
        for role in expert_tensors(&resolved.spec) {
            let shape = expert_shape(&resolved.spec, role.matrix);
            used.insert(checkpoint.tensor(&resolved.names.expert(role), &shape)?.name);
        }
        let notes = notes::unknown_keys(&resolved)
            .into_iter()
            .chain(notes::unused_tensors(&checkpoint, &resolved, &used))
            .collect();
        Ok(Self {
            notes,
            spec: Arc::new(resolved.spec),
            config,
            config_bytes: bytes,
            names: resolved.names,
            origin: origin(checkpoint),
        })
    }

    fn of_artifact(artifact: Artifact) -> Result<Self, OpenError> {
        let place = artifact.dir().to_owned();
        let bytes = artifact
            .small_file("config.json")?
            .ok_or_else(|| OpenError::NoConfig(place.clone()))?;
        let wrong = |source| OpenError::Config {
            dir: place.clone(),
            source,
        };
        let config = config::parse(&bytes).map_err(wrong)?;
        let resolved = family::resolve(&config).map_err(wrong)?;
        if resolved.spec != artifact.manifest().model {
            return Err(OpenError::Artifact(ArtifactError::Manifest {
                path: place.join(MANIFEST_FILE),
                problem: "the model is not the one that config.json describes".to_owned(),
            }));
        }
        for (role, shape) in dense_tensors(&resolved.spec) {
            expect_tensor(&artifact, &resolved.names.dense(role), DType::F16, &shape)?;
        }
        for role in expert_tensors(&resolved.spec) {
            let packed = PackedNames::new(&resolved.names.expert(role));
            let layout = packed_layout(&resolved.spec, role.matrix, artifact.manifest().quantizer.block);
            expect_tensor(
                &artifact,
                &packed.codes,
                DType::U8,
                &[layout.rows, layout.row_bytes()],
            )?;
            expect_tensor(
                &artifact,
                &packed.scales,
                DType::F16,
                &[layout.rows, layout.row_blocks()],
            )?;
        }
        let notes = notes::unknown_keys(&resolved).into_iter().collect();
        Ok(Self {
            spec: Arc::new(resolved.spec),
            config,
            config_bytes: bytes,
            notes,
            names: resolved.names,
            origin: Origin::Artifact(Box::new(artifact)),
        })
    }

    /// What it is.
    #[must_use]
    pub fn kind(&self) -> SourceKind {
        match self.origin {
            Origin::Artifact(_) => SourceKind::Artifact,
            Origin::Checkpoint(_) => SourceKind::Checkpoint,
            Origin::Memory(_) => SourceKind::Memory,
        }
    }

    /// The model.
    #[must_use]
    pub fn spec(&self) -> &Arc<ModelSpec> {
        &self.spec
    }

    /// What its files have that this program has no use for, in words.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// `config.json`.
    #[must_use]
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The directory, or the label of a model in memory.
    #[must_use]
    pub fn place(&self) -> &Path {
        match &self.origin {
            Origin::Artifact(a) => a.dir(),
            Origin::Checkpoint(c) | Origin::Memory(c) => c.place(),
        }
    }

    /// The artifact, if it is one.
    #[must_use]
    pub fn artifact(&self) -> Option<&Artifact> {
        match &self.origin {
            Origin::Artifact(a) => Some(a),
            Origin::Checkpoint(_) | Origin::Memory(_) => None,
        }
    }

    /// The checkpoint, if it is one.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.origin {
            Origin::Artifact(_) => None,
            Origin::Checkpoint(c) | Origin::Memory(c) => Some(c),
        }
    }

    /// A file beside the weights, `None` if there is none of that name. In an artifact its SHA-256 is checked.
    ///
    /// # Errors
    /// A file that cannot be read, is too large, or is damaged.
    pub fn file(&self, name: &str) -> Result<Option<Vec<u8>>, OpenError> {
        Ok(match &self.origin {
            Origin::Artifact(a) => a.small_file(name)?,
            Origin::Checkpoint(c) | Origin::Memory(c) => c.small_file(name)?,
        })
    }

    /// SHA-256 that names this model: the manifest's own, or, of a checkpoint, over its configuration and the
    /// headers of its weight files.
    #[must_use]
    pub fn identity(&self) -> String {
        match &self.origin {
            Origin::Artifact(a) => a.manifest().manifest_sha256.to_string(),
            Origin::Checkpoint(c) | Origin::Memory(c) => {
                let mut text = format!("config.json {}\n", self.config_sha256());
                for s in c.shards() {
                    text.push_str(&format!("{} {} {}\n", s.name, s.bytes, s.header_sha256));
                }
                Digest::of(text.as_bytes()).to_string()
            }
        }
    }

    /// SHA-256 of `config.json`.
    #[must_use]
    pub fn config_sha256(&self) -> Digest {
        Digest::of(&self.config_bytes)
    }

    /// The hub's names of its tensors.
    #[must_use]
    pub fn names(&self) -> &dyn TensorNames {
        &*self.names
    }

    pub(crate) fn dense_name(&self, role: DenseRole) -> String {
        self.names.dense(role)
    }

    pub(crate) fn expert_name(&self, role: ExpertRole) -> String {
        self.names.expert(role)
    }
}

/// Names of a packed matrix in an artifact.
pub(crate) struct PackedNames {
    pub codes: String,
    pub scales: String,
}

impl PackedNames {
    pub fn new(name: &str) -> Self {
        Self {
            codes: format!("{name}.codes"),
            scales: format!("{name}.scales"),
        }
    }
}

/// `[out, in]` of an expert's matrix.
///
/// # Panics
/// When `spec` has no routed experts.
pub(crate) fn expert_shape(spec: &ModelSpec, matrix: ExpertMatrix) -> [usize; 2] {
    let width = spec
        .moe()
        .expect("asked only of models with routed experts")
        .width;
    match matrix {
        ExpertMatrix::Gate | ExpertMatrix::Up => [width, spec.hidden],
        ExpertMatrix::Down => [spec.hidden, width],
    }
}

/// The packed sizes of an expert's matrix.
pub(crate) fn packed_layout(
    spec: &ModelSpec,
    matrix: ExpertMatrix,
    block: horizon_core::qpacked::BlockSize,
) -> QpackedLayout {
    let [rows, cols] = expert_shape(spec, matrix);
    QpackedLayout { rows, cols, block }
}

fn expect_tensor(
    artifact: &Artifact,
    name: &str,
    dtype: DType,
    shape: &[usize],
) -> Result<(), ArtifactError> {
    let wrong = |path, problem| ArtifactError::Tensor {
        path,
        tensor: name.to_owned(),
        problem,
    };
    let Some((shard, tensor)) = artifact.tensor(name) else {
        return Err(wrong(artifact.dir().to_owned(), "it is missing".to_owned()));
    };
    if tensor.dtype != dtype || tensor.shape != shape {
        let problem = format!(
            "{} {:?}, but {dtype} {shape:?} is needed",
            tensor.dtype, tensor.shape
        );
        return Err(wrong(artifact.dir().join(&shard.name), problem));
    }
    Ok(())
}

/// Says what a file is that was given where a directory belongs.
fn describe_file(path: &Path) -> String {
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut f| f.read_exact(&mut magic));
    if read.is_ok() && &magic == b"GGUF" {
        return "this is a GGUF file, which is not read; give the directory of the model's original \
                safetensors checkpoint"
            .to_owned();
    }
    if path.extension().is_some_and(|e| e == "safetensors") {
        return "this is one file of a checkpoint; give the directory that holds it with its config.json"
            .to_owned();
    }
    "this is a file; give the directory of a checkpoint or an artifact".to_owned()
}
