//! Which files of a repository are needed, and how they come.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::cache::{self, INDEX, RepoCache, SINGLE};
use super::client::{Client, Listing, Metadata};
use super::transfer::Transfer;
use super::{HubError, HubSettings, Progress, RepoId};

const CONFIG: &str = "config.json";

/// Files beside the weights that are fetched if the repository has them.
const SMALL: [&str; 7] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX,
];

/// A checkpoint directory in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The directory.
    pub dir: PathBuf,
    /// The commit that it holds.
    pub commit: String,
    /// Bytes that this call fetched.
    pub fetched_bytes: u64,
    /// Set when the hub could not be reached and the copy in the cache was taken as it is: why it could not.
    pub not_refreshed: Option<String>,
}

/// Makes sure that a repository's checkpoint is in the cache. One request tells whether anything is missing; without
/// a network a complete copy is taken as it is.
///
/// # Errors
/// See [`HubError`]. A file that did not arrive in full is never put in the cache.
pub fn fetch(
    repo: &RepoId,
    settings: &HubSettings,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Fetched, HubError> {
    let cache = RepoCache::new(&settings.cache, repo);
    let cached = |reason: Option<String>| {
        let (dir, commit) = (cache.complete()?, cache.known_commit()?);
        Some(Fetched {
            dir,
            commit,
            fetched_bytes: 0,
            not_refreshed: reason,
        })
    };
    if settings.offline {
        return cached(None).ok_or_else(|| HubError::Offline {
            repo: repo.clone(),
            cache: settings.cache.clone(),
        });
    }
    let client = Client::new(settings, repo)?;
    let download = Download {
        repo,
        settings,
        client: &client,
        cache: &cache,
        listing: None,
        commit: String::new(),
        progress,
        done: 0,
        total: 0,
        fetched: 0,
    };
    match download.run() {
        Err(HubError::Network { url, reason }) => {
            cached(Some(format!("{url}: {reason}"))).ok_or(HubError::Network { url, reason })
        }
        other => other,
    }
}

struct Download<'a> {
    repo: &'a RepoId,
    settings: &'a HubSettings,
    client: &'a Client<'a>,
    cache: &'a RepoCache,
    /// `None`: this hub lists no files, each is asked for.
    listing: Option<Listing>,
    commit: String,
    progress: &'a mut dyn FnMut(Progress<'_>),
    /// Bytes of finished files, and of all that are known to be needed.
    done: u64,
    total: u64,
    fetched: u64,
}

impl Download<'_> {
    fn run(mut self) -> Result<Fetched, HubError> {
        self.listing = self.client.listing()?;
        self.commit = match &self.listing {
            Some(listing) => listing.commit.clone(),
            None => self.commit_of_config()?,
        };
        if !self.lists(CONFIG) {
            return Err(self.incomplete(CONFIG));
        }
        let small = SMALL
            .iter()
            .map(|f| (*f).to_owned())
            .filter(|f| self.lists(f))
            .collect();
        self.files(small)?;
        let weights = self.weights()?;
        if let Some(missing) = self.files(weights)?.first() {
            return Err(self.incomplete(missing));
        }
        let dir = self.cache.snapshot(&self.commit);
        if !dir.join(CONFIG).is_file() {
            return Err(self.incomplete(CONFIG));
        }
        self.cache.remember_commit(&self.commit)?;
        Ok(Fetched {
            dir,
            commit: self.commit,
            fetched_bytes: self.fetched,
            not_refreshed: None,
        })
    }

    /// On a hub that lists nothing: the commit that comes with the one file that must be there.
    fn commit_of_config(&self) -> Result<String, HubError> {
        let metadata = self.client.metadata(CONFIG)?.ok_or_else(|| HubError::NotFound {
            repo: self.repo.clone(),
            endpoint: self.settings.endpoint.clone(),
        })?;
        metadata.commit.ok_or_else(|| HubError::Protocol {
            url: self.settings.endpoint.clone(),
            problem: "it says no commit (X-Repo-Commit)".to_owned(),
        })
    }

    fn lists(&self, file: &str) -> bool {
        self.listing
            .as_ref()
            .is_none_or(|l| l.files.iter().any(|f| f == file))
    }

    fn incomplete(&self, file: &str) -> HubError {
        HubError::Incomplete {
            repo: self.repo.clone(),
            file: file.to_owned(),
        }
    }

    /// The weight files: those of the index, else the single file, else all that are named so.
    fn weights(&self) -> Result<BTreeSet<String>, HubError> {
        let index = self.cache.snapshot(&self.commit).join(INDEX);
        if let Ok(bytes) = std::fs::read(&index) {
            return cache::shards(&bytes).map_err(|problem| HubError::Protocol {
                url: format!("{}/{INDEX}", self.repo),
                problem,
            });
        }
        if self.lists(SINGLE) {
            return Ok([SINGLE.to_owned()].into());
        }
        let files = self.listing.iter().flat_map(|l| &l.files);
        let weights: BTreeSet<String> = files
            .filter(|f| f.ends_with(".safetensors") && cache::is_file_name(f))
            .cloned()
            .collect();
        if weights.is_empty() {
            return Err(self.incomplete("*.safetensors (weights in another format cannot be read)"));
        }
        Ok(weights)
    }

    /// Fetches those that the snapshot lacks, and returns those that the repository lacks.
    fn files(&mut self, names: BTreeSet<String>) -> Result<Vec<String>, HubError> {
        let dir = self.cache.snapshot(&self.commit);
        let mut needed: Vec<(String, Metadata)> = Vec::new();
        let mut missing = Vec::new();
        for name in names {
            if dir.join(&name).is_file() {
                continue;
            }
            match self.client.metadata(&name)? {
                Some(metadata) => {
                    self.total += metadata.size;
                    needed.push((name, metadata));
                }
                None => missing.push(name),
            }
        }
        for (name, metadata) in needed {
            if let Some(commit) = metadata.commit.as_ref().filter(|c| **c != self.commit) {
                return Err(HubError::Changed {
                    repo: self.repo.clone(),
                    commit: commit.clone(),
                });
            }
            self.file(&name, &metadata)?;
        }
        Ok(missing)
    }

    fn file(&mut self, name: &str, metadata: &Metadata) -> Result<(), HubError> {
        let (done, total) = (self.done, self.total);
        let report = &mut *self.progress;
        let mut progress = |bytes: u64| {
            report(Progress {
                file: name,
                file_bytes: (bytes, metadata.size),
                total_bytes: (done + bytes, total),
            });
        };
        let transfer = Transfer {
            client: self.client,
            settings: self.settings,
            file: name,
            metadata,
            progress: &mut progress,
            received: 0,
        };
        self.fetched += transfer.run(&self.cache.blob(&metadata.etag))?;
        self.cache.link(&metadata.etag, &self.commit, name)?;
        self.done += metadata.size;
        Ok(())
    }
}
