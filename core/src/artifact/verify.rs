//! Checks every byte of an artifact against its manifest.

use std::fmt;
use std::path::Path;

use rayon::prelude::*;
use serde::Serialize;

use super::digest::Hasher;
use super::error::ArtifactError;
use super::reader::{Artifact, PIECE};
use super::{Progress, io};

/// What was checked, all of it sound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VerifySummary {
    /// SHA-256 of the manifest.
    pub manifest_sha256: String,
    /// Files checked, manifest and shards included.
    pub files: usize,
    /// Tensors whose SHA-256 and checksum are right.
    pub tensors: usize,
    /// Bytes hashed, the manifest's apart.
    pub bytes: u64,
}

/// Something that is not as the manifest says.
#[derive(Debug)]
pub struct Problem(pub ArtifactError);

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Hashes every tensor, header and small file of the artifact in `dir`, on all threads of the current pool.
///
/// # Errors
/// Everything that is wrong, in order of file and position; a manifest that cannot be trusted stands alone.
pub fn verify(dir: &Path, progress: &dyn Progress) -> Result<VerifySummary, Vec<Problem>> {
    let artifact = Artifact::open_manifest(dir).map_err(|e| vec![Problem(e)])?;
    let manifest = artifact.manifest();
    progress.begin("verifying", artifact.bytes());
    let mut problems = Vec::new();
    for file in &manifest.files {
        problems.extend(artifact.read_small(file).err().map(Problem));
        progress.advance(file.bytes);
    }
    for shard in &manifest.shards {
        if let Err(e) = artifact.check_header(shard) {
            // Of a shard with another size or header, tensors could only repeat the message.
            problems.push(Problem(e));
            progress.advance(shard.bytes);
            continue;
        }
        progress.advance(shard.header_bytes);
        let path = dir.join(&shard.name);
        let file = match std::fs::File::open(&path) {
            Ok(file) => file,
            Err(source) => {
                problems.push(Problem(ArtifactError::io(&path)(source)));
                continue;
            }
        };
        let found: Vec<Problem> = shard
            .tensors
            .par_iter()
            .map_init(
                || vec![0; PIECE],
                |buffer, tensor| {
                    let mut hasher = Hasher::default();
                    let mut at = tensor.offset;
                    let end = tensor.offset + tensor.bytes;
                    while at < end {
                        let n = usize::try_from(end - at).map_or(PIECE, |n| n.min(PIECE));
                        if let Err(source) = io::read_exact_at(&file, &mut buffer[..n], at) {
                            return Some(Problem(ArtifactError::Io {
                                path: path.clone(),
                                source,
                            }));
                        }
                        hasher.update(&buffer[..n]);
                        progress.advance(n as u64);
                        at += n as u64;
                    }
                    let sound = hasher.finish() == (tensor.sha256, tensor.xxh3);
                    (!sound).then(|| {
                        Problem(ArtifactError::DamagedTensor {
                            path: path.clone(),
                            tensor: tensor.name.clone(),
                        })
                    })
                },
            )
            .flatten()
            .collect();
        problems.extend(found);
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    Ok(VerifySummary {
        manifest_sha256: manifest.manifest_sha256.to_string(),
        files: 1 + manifest.files.len() + manifest.shards.len(),
        tensors: manifest.shards.iter().map(|s| s.tensors.len()).sum(),
        bytes: artifact.bytes(),
    })
}
