//! Opens an artifact and reads its tensors, checking their bytes on the way.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::digest::{Digest, Hasher, Summer};
use super::error::{ArtifactError, ManifestError};
use super::io;
use super::manifest::{
    FileRecord, INDEX_FILE, MANIFEST_FILE, MAX_MANIFEST_BYTES, MAX_SMALL_FILE_BYTES, Manifest, ShardRecord,
    TensorRecord, VERSION,
};

/// Bytes read at a time, then hashed while they are in the core's own cache.
pub const PIECE: usize = 256 << 10;

/// What is checked of the bytes that are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Check {
    /// The 128-bit XXH3: finds damage.
    #[default]
    Checksum,
    /// SHA-256 as well: identity.
    Sha256,
}

/// An artifact whose manifest, small files' sizes and shard headers have been checked. Holds no file open.
#[derive(Debug)]
pub struct Artifact {
    dir: PathBuf,
    manifest: Manifest,
    tensors: HashMap<String, (usize, usize)>,
}

impl Artifact {
    /// Opens the artifact in `dir`.
    ///
    /// # Errors
    /// [`ArtifactError`] naming the file.
    pub fn open(dir: &Path) -> Result<Self, ArtifactError> {
        let artifact = Self::open_manifest(dir)?;
        for file in &artifact.manifest.files {
            artifact.check_size(&file.name, file.bytes)?;
        }
        if artifact.manifest.files.iter().any(|f| f.name == INDEX_FILE) {
            artifact.small_file(INDEX_FILE)?;
        }
        for shard in &artifact.manifest.shards {
            artifact.check_header(shard)?;
        }
        Ok(artifact)
    }

    /// Reads and checks the manifest alone.
    ///
    /// # Errors
    /// [`ArtifactError`] naming the manifest.
    pub fn open_manifest(dir: &Path) -> Result<Self, ArtifactError> {
        let path = dir.join(MANIFEST_FILE);
        let bytes = io::read_bounded(&path, MAX_MANIFEST_BYTES).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => ArtifactError::NoManifest(dir.to_owned()),
            _ => ArtifactError::Io {
                path: path.clone(),
                source,
            },
        })?;
        let manifest = Manifest::parse(&bytes).map_err(|e| match e {
            ManifestError::Version(found) => ArtifactError::Version {
                path: path.clone(),
                found,
                supported: VERSION,
            },
            e => ArtifactError::Manifest {
                path: path.clone(),
                problem: e.to_string(),
            },
        })?;
        let mut tensors = HashMap::new();
        for (s, shard) in manifest.shards.iter().enumerate() {
            tensors.extend(
                shard
                    .tensors
                    .iter()
                    .enumerate()
                    .map(|(t, r)| (r.name.clone(), (s, t))),
            );
        }
        Ok(Self {
            dir: dir.to_owned(),
            manifest,
            tensors,
        })
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Bytes of all files, the manifest apart.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let m = &self.manifest;
        m.shards.iter().map(|s| s.bytes).sum::<u64>() + m.files.iter().map(|f| f.bytes).sum::<u64>()
    }

    /// A tensor and the name of its shard, or `None` if there is no such tensor.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<(&ShardRecord, &TensorRecord)> {
        let (s, t) = *self.tensors.get(name)?;
        let shard = &self.manifest.shards[s];
        Some((shard, &shard.tensors[t]))
    }

    /// The bytes of a file beside the shards, its SHA-256 checked; `None` if the artifact has no such file.
    ///
    /// # Errors
    /// [`ArtifactError`] naming the file.
    pub fn small_file(&self, name: &str) -> Result<Option<Vec<u8>>, ArtifactError> {
        match self.manifest.files.iter().find(|f| f.name == name) {
            Some(record) => self.read_small(record).map(Some),
            None => Ok(None),
        }
    }

    pub(super) fn read_small(&self, record: &FileRecord) -> Result<Vec<u8>, ArtifactError> {
        let path = self.dir.join(&record.name);
        self.check_size(&record.name, record.bytes)?;
        let bytes = io::read_bounded(&path, MAX_SMALL_FILE_BYTES).map_err(ArtifactError::io(&path))?;
        if Digest::of(&bytes) != record.sha256 {
            return Err(ArtifactError::Damaged {
                path,
                what: "the content",
            });
        }
        Ok(bytes)
    }

    /// Opens all shards for reading tensors; they are closed when the result is dropped.
    ///
    /// # Errors
    /// [`ArtifactError`] naming the shard that cannot be opened.
    pub fn open_shards(&self) -> Result<OpenShards<'_>, ArtifactError> {
        let files = self.manifest.shards.iter().map(|s| {
            let path = self.dir.join(&s.name);
            File::open(&path).map_err(ArtifactError::io(&path))
        });
        Ok(OpenShards {
            artifact: self,
            files: files.collect::<Result<_, _>>()?,
        })
    }

    fn check_size(&self, name: &str, expected: u64) -> Result<(), ArtifactError> {
        let path = self.dir.join(name);
        let found = std::fs::metadata(&path).map_err(ArtifactError::io(&path))?.len();
        if found != expected {
            return Err(ArtifactError::Size {
                path,
                expected,
                found,
            });
        }
        Ok(())
    }

    pub(super) fn check_header(&self, shard: &ShardRecord) -> Result<(), ArtifactError> {
        let path = self.dir.join(&shard.name);
        self.check_size(&shard.name, shard.bytes)?;
        // The manifest's check has compared this length with the inventory's own header.
        let mut bytes =
            vec![0; usize::try_from(shard.header_bytes).expect("length of a header that was built")];
        File::open(&path)
            .and_then(|f| io::read_exact_at(&f, &mut bytes, 0))
            .map_err(ArtifactError::io(&path))?;
        if Digest::of(&bytes) != shard.header_sha256 {
            return Err(ArtifactError::Damaged {
                path,
                what: "the safetensors header",
            });
        }
        Ok(())
    }
}

/// The shards of an artifact, open.
pub struct OpenShards<'a> {
    artifact: &'a Artifact,
    files: Vec<File>,
}

impl OpenShards<'_> {
    /// Reads a tensor into `out` and checks its bytes.
    ///
    /// # Errors
    /// [`ArtifactError`] naming shard and tensor. `out` then holds bytes that are in doubt.
    ///
    /// # Panics
    /// When the artifact has no such tensor, or `out` has another length; see [`Artifact::tensor`].
    pub fn read(&self, name: &str, out: &mut [u8], check: Check) -> Result<(), ArtifactError> {
        let (s, t) = self.artifact.tensors[name];
        let (shard, tensor) = (
            &self.artifact.manifest.shards[s],
            &self.artifact.manifest.shards[s].tensors[t],
        );
        assert_eq!(out.len() as u64, tensor.bytes, "length of {name}");
        let path = || self.artifact.dir.join(&shard.name);
        let mut at = tensor.offset;
        let mut sum = Summer::new();
        let mut both = Hasher::default();
        for piece in out.chunks_mut(PIECE) {
            io::read_exact_at(&self.files[s], piece, at)
                .map_err(|source| ArtifactError::Io { path: path(), source })?;
            at += piece.len() as u64;
            match check {
                Check::Checksum => sum.update(piece),
                Check::Sha256 => both.update(piece),
            }
        }
        let sound = match check {
            Check::Checksum => sum.finish() == tensor.xxh3,
            Check::Sha256 => both.finish() == (tensor.sha256, tensor.xxh3),
        };
        if !sound {
            return Err(ArtifactError::DamagedTensor {
                path: path(),
                tensor: name.to_owned(),
            });
        }
        Ok(())
    }
}
