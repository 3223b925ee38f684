//! What can go wrong between here and the hub, and what to do about it.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::RepoId;

/// A checkpoint that could not be had.
#[derive(Debug, Error)]
pub enum HubError {
    /// Nothing says where downloads go.
    #[error("cannot tell where the Hugging Face cache is: set HF_HOME to a directory")]
    NoCache,
    /// `HF_ENDPOINT` is no address.
    #[error("HF_ENDPOINT = {0:?}: must be an address that begins with http:// or https://")]
    Endpoint(String),
    /// A token that cannot be sent.
    #[error(
        "the Hugging Face token has characters that a token cannot have: check HF_TOKEN or the token file"
    )]
    Token,
    /// The repository or the revision does not exist.
    #[error("{repo}: there is no such model repository or revision on {endpoint}")]
    NotFound {
        /// What was asked for.
        repo: RepoId,
        /// Where.
        endpoint: String,
    },
    /// 401 or 403.
    #[error(
        "{repo}: {endpoint} refused access (HTTP {status}): the repository is gated or private, or does not exist; \
         {advice}"
    )]
    Denied {
        /// What was asked for.
        repo: RepoId,
        /// Where.
        endpoint: String,
        /// 401 or 403.
        status: u16,
        /// What to do.
        advice: &'static str,
    },
    /// No answer, or none in time.
    #[error(
        "cannot reach {url}: {reason}; without a network, give the directory of a local copy \
         (HF_ENDPOINT names another hub)"
    )]
    Network {
        /// What was asked for.
        url: String,
        /// What happened.
        reason: String,
    },
    /// The hub answers with an error.
    #[error("{url}: the server answered HTTP {status}; try again later")]
    Server {
        /// What was asked for.
        url: String,
        /// The status.
        status: u16,
    },
    /// The hub answers with something else than a hub does.
    #[error("{url}: not the answer of a Hugging Face hub: {problem}")]
    Protocol {
        /// What was asked for.
        url: String,
        /// What is missing or wrong.
        problem: String,
    },
    /// A file without which a model does not run.
    #[error("{repo}: the repository has no {file}")]
    Incomplete {
        /// The repository.
        repo: RepoId,
        /// What it lacks.
        file: String,
    },
    /// The transfer ended with another number of bytes than announced.
    #[error("{file}: the hub announced {announced} bytes and sent {received}; nothing was kept, try again")]
    Size {
        /// The file.
        file: String,
        /// Bytes announced.
        announced: u64,
        /// Bytes received.
        received: u64,
    },
    /// The bytes are not those that the hub announced.
    #[error(
        "{file}: the download's SHA-256 is not the one that the hub announced; nothing was kept, try again"
    )]
    Checksum {
        /// The file.
        file: String,
    },
    /// The connection broke again and again.
    #[error(
        "{file}: the connection broke at {received} of {announced} bytes ({reason}); \
         what is there is kept, the next run goes on from it"
    )]
    Interrupted {
        /// The file.
        file: String,
        /// Bytes announced.
        announced: u64,
        /// Bytes received so far.
        received: u64,
        /// What happened last.
        reason: String,
    },
    /// The repository was changed between two of its files.
    #[error("{repo}: the repository changed during the download (to {commit}); run again")]
    Changed {
        /// The repository.
        repo: RepoId,
        /// The commit that it is at now.
        commit: String,
    },
    /// `HF_HUB_OFFLINE`, and the cache does not have it all.
    #[error("{repo}: not complete in the cache {}, and HF_HUB_OFFLINE forbids downloading", cache.display())]
    Offline {
        /// The repository.
        repo: RepoId,
        /// The cache.
        cache: PathBuf,
    },
    /// The cache cannot be written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}
