//! Files of a repository in the cache: `blobs/ETAG`, linked to from `snapshots/COMMIT/NAME`, and `refs/REVISION`.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use serde_json::Value;

use super::{HubError, RepoId};

pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const SINGLE: &str = "model.safetensors";

/// One repository's part of the cache.
pub(super) struct RepoCache {
    repo: CacheRepo,
    root: PathBuf,
    revision: String,
}

impl RepoCache {
    pub(super) fn new(cache: &Path, id: &RepoId) -> Self {
        let repo = Repo::with_revision(id.name.clone(), RepoType::Model, id.revision.clone());
        let root = cache.join(repo.folder_name());
        Self {
            repo: Cache::new(cache.to_owned()).repo(repo),
            root,
            revision: id.revision.clone(),
        }
    }

    /// Where a file with this ETag lies once it is complete.
    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(etag)
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.repo.pointer_path(commit)
    }

    /// The commit that the revision was at when it was last asked for.
    pub(super) fn known_commit(&self) -> Option<String> {
        let text = std::fs::read_to_string(self.root.join("refs").join(&self.revision)).ok();
        let commit = text.map(|t| t.trim().to_owned()).filter(|c| is_file_name(c));
        // A revision can be a commit itself.
        commit.or_else(|| {
            self.snapshot(&self.revision)
                .is_dir()
                .then(|| self.revision.clone())
        })
    }

    /// Records the commit that the revision is at.
    pub(super) fn remember_commit(&self, commit: &str) -> Result<(), HubError> {
        self.repo.create_ref(commit).map_err(|source| HubError::Io {
            path: self.root.join("refs").join(&self.revision),
            source,
        })
    }

    /// Makes `snapshots/COMMIT/NAME` stand for a blob.
    pub(super) fn link(&self, etag: &str, commit: &str, name: &str) -> Result<(), HubError> {
        let dir = self.snapshot(commit);
        let pointer = dir.join(name);
        let linked = std::fs::create_dir_all(&dir).and_then(|()| {
            if pointer.exists() {
                return Ok(());
            }
            // A link whose blob was deleted is in the way; if it cannot be removed, making the new one fails.
            if pointer.symlink_metadata().is_ok() && !pointer.exists() {
                let _ = std::fs::remove_file(&pointer);
            }
            // Somebody else may have been quicker.
            link(&self.blob(etag), etag, &pointer).or_else(|e| if pointer.exists() { Ok(()) } else { Err(e) })
        });
        linked.map_err(|source| HubError::Io {
            path: pointer,
            source,
        })
    }

    /// The directory of the last known snapshot, if a model can be run from it.
    pub(super) fn complete(&self) -> Option<PathBuf> {
        let dir = self.snapshot(&self.known_commit()?);
        let has = |name: &str| dir.join(name).is_file();
        let weights = match std::fs::read(dir.join(INDEX)) {
            Ok(index) => shards(&index).is_ok_and(|names| names.iter().all(|n| has(n))),
            Err(_) => has(SINGLE) || has_safetensors(&dir),
        };
        (weights && has("config.json")).then_some(dir)
    }
}

fn has_safetensors(dir: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return false;
    };
    let mut names = entries.flatten().map(|e| e.path());
    names.any(|p| p.is_file() && p.extension().is_some_and(|e| e == "safetensors"))
}

/// Names of the weight files that an index lists.
pub(super) fn shards(index: &[u8]) -> Result<BTreeSet<String>, String> {
    let index: Value = serde_json::from_slice(index).map_err(|e| format!("not JSON: {e}"))?;
    let map = index["weight_map"]
        .as_object()
        .filter(|m| !m.is_empty())
        .ok_or("it has no weight_map")?;
    map.values()
        .map(|v| {
            let name = v
                .as_str()
                .filter(|n| is_file_name(n) && n.ends_with(".safetensors"));
            name.map(str::to_owned)
                .ok_or_else(|| format!("{v} is not the name of a weight file beside it"))
        })
        .collect()
}

/// A plain name, safe to put after a directory: no separators, not hidden, no way up.
pub(super) fn is_file_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+');
    !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.chars().all(allowed)
}

/// A relative link, so that the cache can be moved.
#[cfg(unix)]
fn link(_blob: &Path, etag: &str, pointer: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(Path::new("../../blobs").join(etag), pointer)
}

/// Links need a privilege on Windows: without it the file itself goes where the link would be.
#[cfg(not(unix))]
fn link(blob: &Path, _etag: &str, pointer: &Path) -> io::Result<()> {
    std::fs::hard_link(blob, pointer).or_else(|_| std::fs::rename(blob, pointer))
}
