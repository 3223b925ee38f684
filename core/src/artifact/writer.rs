//! Writes an artifact: tensors in any order from any thread, each at its place, hashed on the way.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self as stdio, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use thiserror::Error;

use super::digest::{Checksum, Digest, Hasher};
use super::manifest::{
    FileRecord, INDEX_FILE, MANIFEST_FILE, Manifest, ShardRecord, TensorRecord, shard_name,
};
use super::place::Place;
use super::{header, io, json};
use crate::dtype::DType;

/// File that marks a directory as the work of a run that has not finished.
pub const UNFINISHED_MARKER: &str = ".horizon-pack";

/// Bytes gathered before a write.
const WRITE_BYTES: usize = 1 << 20;

/// An artifact that could not be written. Nothing is left at the destination.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The destination has no name.
    #[error("{}: not a name for a new directory", .0.display())]
    NoName(PathBuf),
    /// The destination's parent is missing.
    #[error("{}: the directory {} does not exist; create it first", dest.display(), parent.display())]
    NoParent {
        /// Destination.
        dest: PathBuf,
        /// Its parent.
        parent: PathBuf,
    },
    /// There is an artifact already.
    #[error("{} exists already; --force replaces it", .0.display())]
    Exists(PathBuf),
    /// There is something else already.
    #[error("{} exists and is not an artifact; choose another output, or remove it yourself", .0.display())]
    Foreign(PathBuf),
    /// The working directory exists and is not of an earlier run.
    #[error("{} is needed for writing, but it exists and no earlier run made it; remove it first", .0.display())]
    ForeignPartial(PathBuf),
    /// Another run writes the same artifact.
    #[error("{}: another run is writing this artifact; wait for it, or choose another output", .0.display())]
    Busy(PathBuf),
    /// The disk is full.
    #[error("{}: no space left on the disk; free some, or choose another output", .0.display())]
    DiskFull(PathBuf),
    /// Writing is not allowed there.
    #[error("{}: cannot write here ({source}); choose another output", path.display())]
    NotWritable {
        /// File.
        path: PathBuf,
        /// Why.
        source: stdio::Error,
    },
    /// The system refused otherwise.
    #[error("{}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Why.
        source: stdio::Error,
    },
}

impl WriteError {
    /// Attaches a path to a system error.
    pub fn io(path: &Path) -> impl FnOnce(stdio::Error) -> Self + '_ {
        |source| {
            let path = path.to_owned();
            match source.kind() {
                stdio::ErrorKind::StorageFull | stdio::ErrorKind::QuotaExceeded => Self::DiskFull(path),
                stdio::ErrorKind::PermissionDenied | stdio::ErrorKind::ReadOnlyFilesystem => {
                    Self::NotWritable { path, source }
                }
                _ => Self::Io { path, source },
            }
        }
    }
}

/// A tensor that will be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlan {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<usize>,
}

impl TensorPlan {
    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }
}

/// An artifact that is being written. Dropping it removes everything.
#[derive(Debug)]
pub struct ArtifactWriter {
    shards: Vec<Shard>,
    files: Vec<FileRecord>,
    notes: Vec<String>,
    // Last: the files above are closed before the directory goes.
    place: Place,
}

#[derive(Debug)]
struct Shard {
    name: String,
    path: PathBuf,
    file: File,
    bytes: u64,
    header_bytes: u64,
    header_sha256: Digest,
    tensors: Vec<(TensorPlan, u64)>,
    digests: Vec<OnceLock<(Digest, Checksum)>>,
    missing: AtomicUsize,
}

impl ArtifactWriter {
    /// Starts an artifact that will appear at `dest`, with these tensors in each shard, in this order. With
    /// `force`, an artifact that is there already is replaced at the end.
    ///
    /// # Errors
    /// [`WriteError`]; nothing is left behind.
    pub fn create(dest: &Path, force: bool, plan: Vec<Vec<TensorPlan>>) -> Result<Self, WriteError> {
        let mut notes = Vec::new();
        let place = Place::claim(dest, force, &mut notes)?;
        let count = plan.len();
        let shards = plan.into_iter().enumerate().map(|(i, tensors)| {
            let name = shard_name(i, count);
            Shard::create(place.path(&name), name, tensors)
        });
        let shards = shards.collect::<Result<_, _>>()?;
        Ok(Self {
            shards,
            files: Vec::new(),
            notes,
            place,
        })
    }

    /// What the user should know so far.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Starts writing tensor `index` of shard `shard`.
    ///
    /// # Panics
    /// When the plan has no such tensor.
    #[must_use]
    pub fn tensor(&self, shard: usize, index: usize) -> TensorWriter<'_> {
        let shard = &self.shards[shard];
        let (plan, offset) = &shard.tensors[index];
        TensorWriter {
            shard,
            index,
            next: *offset,
            left: plan.bytes(),
            buffer: Vec::new(),
            hasher: Hasher::default(),
        }
    }

    /// Writes a file beside the shards.
    ///
    /// # Errors
    /// [`WriteError`] naming the file.
    pub fn small_file(&mut self, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
        self.write_file(name, bytes)?;
        let record = FileRecord {
            name: name.to_owned(),
            bytes: bytes.len() as u64,
            sha256: Digest::of(bytes),
        };
        self.files.push(record);
        Ok(())
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
        let path = self.place.path(name);
        File::create_new(&path)
            .and_then(|mut f| {
                f.write_all(bytes)?;
                f.sync_all()
            })
            .map_err(WriteError::io(&path))
    }

    /// Completes `manifest` with the inventory, writes it and the hub's index, and publishes the artifact.
    /// Gives the sealed manifest and what the user should know.
    ///
    /// # Errors
    /// [`WriteError`]; nothing is left behind.
    ///
    /// # Panics
    /// When a planned tensor was not written, or the manifest contradicts itself.
    pub fn publish(mut self, mut manifest: Manifest) -> Result<(Manifest, Vec<String>), WriteError> {
        let index = self.index();
        self.small_file(INDEX_FILE, &index)?;
        self.files.sort_by(|a, b| a.name.cmp(&b.name));
        manifest.files = std::mem::take(&mut self.files);
        manifest.shards = self.shards.iter().map(Shard::record).collect();
        let bytes = manifest.seal();
        if let Err(e) = manifest.validate() {
            panic!("the manifest that was built is not valid: {e}");
        }
        self.write_file(MANIFEST_FILE, &bytes)?;
        self.shards.clear();
        self.place.publish(&mut self.notes)?;
        Ok((manifest, self.notes))
    }

    fn index(&self) -> Vec<u8> {
        let map: BTreeMap<&str, &str> = self
            .shards
            .iter()
            .flat_map(|s| s.tensors.iter().map(|(t, _)| (t.name.as_str(), s.name.as_str())))
            .collect();
        let total: u64 = self.shards.iter().map(|s| s.bytes - s.header_bytes).sum();
        let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map });
        json::to_bytes(&index).expect("plain data with string keys")
    }
}

impl Shard {
    fn create(path: PathBuf, name: String, tensors: Vec<TensorPlan>) -> Result<Self, WriteError> {
        let header = header::encode(
            tensors
                .iter()
                .map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice())),
        );
        let mut bytes = header.len() as u64;
        let tensors: Vec<_> = tensors
            .into_iter()
            .map(|t| {
                let offset = bytes;
                bytes += t.bytes();
                (t, offset)
            })
            .collect();
        let file = File::create_new(&path)
            .and_then(|f| {
                f.set_len(bytes)?;
                io::write_all_at(&f, &header, 0)?;
                Ok(f)
            })
            .map_err(WriteError::io(&path))?;
        Ok(Self {
            name,
            path,
            file,
            bytes,
            header_bytes: header.len() as u64,
            header_sha256: Digest::of(&header),
            digests: tensors.iter().map(|_| OnceLock::new()).collect(),
            missing: AtomicUsize::new(tensors.len()),
            tensors,
        })
    }

    fn record(&self) -> ShardRecord {
        let tensors = self
            .tensors
            .iter()
            .zip(&self.digests)
            .map(|((t, offset), digest)| {
                let (sha256, xxh3) = *digest.get().expect("every planned tensor has been written");
                TensorRecord {
                    name: t.name.clone(),
                    dtype: t.dtype,
                    shape: t.shape.clone(),
                    offset: *offset,
                    bytes: t.bytes(),
                    sha256,
                    xxh3,
                }
            });
        ShardRecord {
            name: self.name.clone(),
            bytes: self.bytes,
            header_bytes: self.header_bytes,
            header_sha256: self.header_sha256,
            tensors: tensors.collect(),
        }
    }
}

/// Writes one tensor, front to back.
pub struct TensorWriter<'a> {
    shard: &'a Shard,
    index: usize,
    next: u64,
    left: u64,
    buffer: Vec<u8>,
    hasher: Hasher,
}

impl TensorWriter<'_> {
    /// Appends the next bytes.
    ///
    /// # Errors
    /// [`WriteError`] naming the shard.
    ///
    /// # Panics
    /// When the tensor would be longer than planned.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.left = self
            .left
            .checked_sub(bytes.len() as u64)
            .expect("no longer than planned");
        self.hasher.update(bytes);
        if self.buffer.is_empty() && bytes.len() >= WRITE_BYTES {
            return self.put(bytes);
        }
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= WRITE_BYTES {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// Completes the tensor. The thread that completes a shard also makes it durable.
    ///
    /// # Errors
    /// [`WriteError`] naming the shard.
    ///
    /// # Panics
    /// When the tensor is shorter than planned, or was written before.
    pub fn finish(mut self) -> Result<(), WriteError> {
        assert_eq!(self.left, 0, "every byte of the tensor is written");
        self.flush()?;
        let digest = std::mem::take(&mut self.hasher).finish();
        self.shard.digests[self.index]
            .set(digest)
            .expect("each tensor is written once");
        // AcqRel: the last one to arrive has seen all writes before it calls sync.
        if self.shard.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shard
                .file
                .sync_all()
                .map_err(WriteError::io(&self.shard.path))?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), WriteError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.put(&buffer)?;
        buffer.clear();
        self.buffer = buffer;
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        io::write_all_at(&self.shard.file, bytes, self.next).map_err(WriteError::io(&self.shard.path))?;
        self.next += bytes.len() as u64;
        Ok(())
    }
}
