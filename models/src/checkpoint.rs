//! A checkpoint as the hub lays it out: one or several safetensors files, read by position.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use horizon_core::artifact::Digest;
use horizon_core::artifact::header::{self, HeaderEntry, HeaderError};
use horizon_core::artifact::io::{is_plain_name, read_bounded, read_exact_at};
use horizon_core::artifact::manifest::{INDEX_FILE, MAX_SMALL_FILE_BYTES};
use horizon_core::artifact::writer::UNFINISHED_MARKER;
use horizon_core::dtype::DType;
use horizon_core::observe::process;
use serde::Deserialize;
use thiserror::Error;

/// The hub's name of the only weight file of a small checkpoint.
pub const SINGLE_FILE: &str = "model.safetensors";

/// A checkpoint that cannot be read.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There are no weights.
    #[error("{}: {problem}", dir.display())]
    NoWeights {
        /// Directory.
        dir: PathBuf,
        /// What is there instead, and what to do.
        problem: String,
    },
    /// The index is not one.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file that the index names is absent.
    #[error(
        "{}: the shard {shard} is missing, though {INDEX_FILE} names it; download the checkpoint again",
        dir.display()
    )]
    MissingShard {
        /// Directory.
        dir: PathBuf,
        /// File name.
        shard: String,
    },
    /// The header of a file is wrong.
    #[error("{}: {source}", path.display())]
    Header {
        /// File.
        path: PathBuf,
        /// What is wrong.
        source: HeaderError,
    },
    /// A tensor that the model needs is absent.
    #[error("{}: there is no tensor {tensor}, which the model described by config.json needs", path.display())]
    MissingTensor {
        /// Directory, or the file that should have it.
        path: PathBuf,
        /// Tensor.
        tensor: String,
    },
    /// A tensor has another shape than the model needs.
    #[error(
        "{}: tensor {tensor} has shape {found:?}; the model described by config.json needs {expected:?}",
        path.display()
    )]
    Shape {
        /// File.
        path: PathBuf,
        /// Tensor.
        tensor: String,
        /// Its shape.
        found: Vec<u64>,
        /// The shape it must have.
        expected: Vec<usize>,
    },
    /// A tensor's element type is not one that weights may have.
    #[error("{}: tensor {tensor} is {found}; BF16, F16 and F32 can be read", path.display())]
    DType {
        /// File.
        path: PathBuf,
        /// Tensor.
        tensor: String,
        /// Its type.
        found: String,
    },
}

/// A checkpoint whose headers have been read and checked. Holds no file open.
#[derive(Debug)]
pub struct Checkpoint {
    place: PathBuf,
    shards: Vec<Shard>,
    tensors: HashMap<String, (usize, HeaderEntry)>,
    memory_files: BTreeMap<String, Vec<u8>>,
}

/// One weight file.
#[derive(Debug)]
pub struct Shard {
    /// File name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256 of its header, length included.
    pub header_sha256: Digest,
    storage: Storage,
}

#[derive(Debug)]
enum Storage {
    File(PathBuf),
    Memory(Vec<u8>),
}

/// A tensor found with the shape that was asked for.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointTensor<'a> {
    /// Name.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    shard: usize,
    offset: u64,
    bytes: u64,
}

impl CheckpointTensor<'_> {
    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Checkpoint {
    /// Opens the checkpoint in `dir`: `model.safetensors`, or the shards that the index names.
    ///
    /// # Errors
    /// [`CheckpointError`] naming the file.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let single = dir.join(SINGLE_FILE);
        if single.exists() {
            let (shard, entries) = Shard::open(dir, SINGLE_FILE)?;
            let tensors = entries.into_iter().map(|e| (e.name.clone(), (0, e))).collect();
            return Ok(Self {
                place: dir.to_owned(),
                shards: vec![shard],
                tensors,
                memory_files: BTreeMap::new(),
            });
        }
        let index_path = dir.join(INDEX_FILE);
        let index = match read_bounded(&index_path, MAX_SMALL_FILE_BYTES) {
            Ok(bytes) => parse_index(&index_path, &bytes)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(no_weights(dir)),
            Err(source) => {
                return Err(CheckpointError::Io {
                    path: index_path,
                    source,
                });
            }
        };
        let names: BTreeSet<&String> = index.values().collect();
        let (mut shards, mut tensors) = (Vec::new(), HashMap::new());
        for name in names {
            let (shard, entries) = Shard::open(dir, name)?;
            for entry in entries {
                if index.get(&entry.name) == Some(name) {
                    tensors.insert(entry.name.clone(), (shards.len(), entry));
                }
            }
            shards.push(shard);
        }
        if let Some((tensor, shard)) = index.iter().find(|(t, _)| !tensors.contains_key(*t)) {
            return Err(CheckpointError::MissingTensor {
                path: dir.join(shard),
                tensor: tensor.clone(),
            });
        }
        Ok(Self {
            place: dir.to_owned(),
            shards,
            tensors,
            memory_files: BTreeMap::new(),
        })
    }

    /// A checkpoint whose files are in memory: `weights` is a whole safetensors file. Errors call it `label`.
    ///
    /// # Errors
    /// [`CheckpointError`] when the header is wrong.
    pub fn in_memory(
        label: &str,
        files: BTreeMap<String, Vec<u8>>,
        weights: Vec<u8>,
    ) -> Result<Self, CheckpointError> {
        let path = Path::new(label).join(SINGLE_FILE);
        let wrong = |source| CheckpointError::Header {
            path: path.clone(),
            source,
        };
        let bytes = weights.len() as u64;
        let first = *weights
            .first_chunk::<8>()
            .ok_or(HeaderError::NoLength(bytes))
            .map_err(wrong)?;
        let end = 8 + header::json_length(first, bytes).map_err(wrong)?;
        let entries = header::parse(&weights[8..end], bytes).map_err(wrong)?;
        let shard = Shard {
            name: SINGLE_FILE.to_owned(),
            bytes,
            header_sha256: Digest::of(&weights[..end]),
            storage: Storage::Memory(weights),
        };
        let tensors = entries.into_iter().map(|e| (e.name.clone(), (0, e))).collect();
        Ok(Self {
            place: PathBuf::from(label),
            shards: vec![shard],
            tensors,
            memory_files: files,
        })
    }

    /// Weight files, by name.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Whether there are tensors that only an artifact has.
    #[must_use]
    pub(crate) fn holds_packed_experts(&self) -> bool {
        self.tensors.keys().any(|name| name.ends_with(".weight.codes"))
    }

    /// Names of all tensors, in no order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Tensors of all weight files.
    #[must_use]
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The directory, or the label of a checkpoint in memory.
    #[must_use]
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// The bytes of a file beside the weights, or `None` if there is no such file.
    ///
    /// # Errors
    /// The system's error, or a file larger than is accepted.
    pub fn small_file(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        if let Some(bytes) = self.memory_files.get(name) {
            return Ok(Some(bytes.clone()));
        }
        if !is_plain_name(name)
            || self
                .shards
                .iter()
                .any(|s| matches!(s.storage, Storage::Memory(_)))
        {
            return Ok(None);
        }
        let path = self.place.join(name);
        match read_bounded(&path, MAX_SMALL_FILE_BYTES) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(CheckpointError::Io { path, source }),
        }
    }

    /// The tensor of that name, which must have this shape and a type that weights may have.
    ///
    /// # Errors
    /// [`CheckpointError`] naming file and tensor.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<CheckpointTensor<'_>, CheckpointError> {
        let Some((shard, entry)) = self.tensors.get(name) else {
            return Err(CheckpointError::MissingTensor {
                path: self.place.clone(),
                tensor: name.to_owned(),
            });
        };
        let path = || self.place.join(&self.shards[*shard].name);
        if !entry.shape.iter().copied().eq(shape.iter().map(|d| *d as u64)) {
            let (found, expected) = (entry.shape.clone(), shape.to_vec());
            return Err(CheckpointError::Shape {
                path: path(),
                tensor: name.to_owned(),
                found,
                expected,
            });
        }
        match header::dtype_of(&entry.dtype) {
            Some(dtype @ (DType::F16 | DType::BF16 | DType::F32)) => Ok(CheckpointTensor {
                name: &entry.name,
                dtype,
                shard: *shard,
                offset: entry.offset,
                bytes: entry.bytes,
            }),
            _ => Err(CheckpointError::DType {
                path: path(),
                tensor: name.to_owned(),
                found: entry.dtype.clone(),
            }),
        }
    }

    /// Path of the file that holds `tensor`, for messages.
    #[must_use]
    pub fn path_of(&self, tensor: &CheckpointTensor<'_>) -> PathBuf {
        self.place.join(&self.shards[tensor.shard].name)
    }

    /// Opens all weight files; they are closed when the result is dropped.
    ///
    /// # Errors
    /// [`CheckpointError`] naming the file, also when its size has changed since the headers were read.
    pub fn open_files(&self) -> Result<OpenCheckpoint<'_>, CheckpointError> {
        let readers = self.shards.iter().map(|shard| match &shard.storage {
            Storage::Memory(bytes) => Ok(Reader::Memory(bytes)),
            Storage::File(path) => {
                let io = |source| CheckpointError::Io {
                    path: path.clone(),
                    source,
                };
                let file = File::open(path).map_err(io)?;
                let bytes = file.metadata().map_err(io)?.len();
                if bytes != shard.bytes {
                    return Err(io(io::Error::other("the file changed while it was being read")));
                }
                Ok(Reader::File(file))
            }
        });
        Ok(OpenCheckpoint {
            checkpoint: self,
            readers: readers.collect::<Result<_, _>>()?,
        })
    }
}

/// The weight files of a checkpoint, open.
pub struct OpenCheckpoint<'a> {
    checkpoint: &'a Checkpoint,
    readers: Vec<Reader<'a>>,
}

enum Reader<'a> {
    File(File),
    Memory(&'a [u8]),
}

impl<'a> OpenCheckpoint<'a> {
    /// The checkpoint.
    #[must_use]
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// Fills `out` with the bytes of `tensor` from byte `at`.
    ///
    /// # Errors
    /// [`CheckpointError`] naming the file.
    ///
    /// # Panics
    /// When the range is not inside the tensor.
    pub fn read(
        &self,
        tensor: &CheckpointTensor<'_>,
        at: u64,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        assert!(at + out.len() as u64 <= tensor.bytes, "range of {}", tensor.name);
        let start = tensor.offset + at;
        match &self.readers[tensor.shard] {
            Reader::File(file) => read_exact_at(file, out, start).map_err(|source| CheckpointError::Io {
                path: self.checkpoint.path_of(tensor),
                source,
            }),
            Reader::Memory(bytes) => {
                // The same probe as on a file: a checkpoint in memory is a model's source all the same.
                process().source_reads.add(1);
                let start = usize::try_from(start).expect("the header was checked against these bytes");
                out.copy_from_slice(&bytes[start..start + out.len()]);
                Ok(())
            }
        }
    }
}

impl Shard {
    fn open(dir: &Path, name: &str) -> Result<(Self, Vec<HeaderEntry>), CheckpointError> {
        let path = dir.join(name);
        let io = |source| CheckpointError::Io {
            path: path.clone(),
            source,
        };
        let wrong = |source| CheckpointError::Header {
            path: path.clone(),
            source,
        };
        let file = File::open(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => CheckpointError::MissingShard {
                dir: dir.to_owned(),
                shard: name.to_owned(),
            },
            _ => io(source),
        })?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() {
            return Err(io(io::Error::other("not a regular file")));
        }
        let bytes = meta.len();
        if bytes < 8 {
            return Err(wrong(HeaderError::NoLength(bytes)));
        }
        let mut first = [0; 8];
        read_exact_at(&file, &mut first, 0).map_err(io)?;
        let mut text = first.to_vec();
        text.resize(8 + header::json_length(first, bytes).map_err(wrong)?, 0);
        read_exact_at(&file, &mut text[8..], 8).map_err(io)?;
        let entries = header::parse(&text[8..], bytes).map_err(wrong)?;
        let header_sha256 = Digest::of(&text);
        Ok((
            Self {
                name: name.to_owned(),
                bytes,
                header_sha256,
                storage: Storage::File(path),
            },
            entries,
        ))
    }
}

/// Tensor names and the files that hold them.
fn parse_index(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, String>, CheckpointError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let wrong = |problem: String| CheckpointError::Index {
        path: path.to_owned(),
        problem,
    };
    let index: Index = serde_json::from_slice(bytes)
        .map_err(|e| wrong(format!("not an index of safetensors files: {e}")))?;
    if index.weight_map.is_empty() {
        return Err(wrong("the index names no tensors".to_owned()));
    }
    if let Some(bad) = index.weight_map.values().find(|name| !is_plain_name(name)) {
        return Err(wrong(format!(
            "{bad:?} is not a plain file name; shards must lie beside the index"
        )));
    }
    Ok(index.weight_map)
}

/// Says what a directory without safetensors weights has instead.
fn no_weights(dir: &Path) -> CheckpointError {
    let names: Vec<String> = std::fs::read_dir(dir)
        .map(|entries| {
            entries
                .flatten()
                .map(|e| e.file_name().to_string_lossy().into_owned())
                .collect()
        })
        .unwrap_or_default();
    let any = |suffix: &str| names.iter().find(|n| n.ends_with(suffix));
    let needs = format!("a checkpoint has {SINGLE_FILE}, or {INDEX_FILE} with its shards");
    let problem = if names.is_empty() {
        format!("the directory is empty; {needs}")
    } else if names.iter().any(|n| n == UNFINISHED_MARKER) {
        "this is what `horizon pack` has written so far; wait for it, or run it again".to_owned()
    } else if names.iter().any(|n| n == "snapshots") {
        "this is the hub's cache of a repository; give one of the directories under snapshots/".to_owned()
    } else if let Some(f) = any(".gguf") {
        format!(
            "only GGUF weights here ({f}), which are not read; use the model's original safetensors checkpoint"
        )
    } else if let Some(f) = any(".safetensors") {
        format!("{f} is here, but neither {SINGLE_FILE} nor {INDEX_FILE}; download the whole checkpoint")
    } else if let Some(f) = any(".bin").or_else(|| any(".pth")).or_else(|| any(".pt")) {
        format!("only pickled weights here ({f}), which are not read; convert the checkpoint to safetensors")
    } else {
        format!("there are no weights; {needs}")
    };
    CheckpointError::NoWeights {
        dir: dir.to_owned(),
        problem,
    }
}
