//! Checkpoints by the name of their repository on the Hugging Face hub: `org/name`, or `org/name@revision`.
//!
//! Files lie where every other program of that ecosystem puts and finds them: the cache's layout is the `hf-hub`
//! crate's. The transfer is this module's own, for what that crate's client leaves out: a file enters the cache only
//! with the size (and, where the hub states it, the SHA-256) that the hub announced; the token goes to the hub and to
//! no other host that it redirects to; an interrupted download goes on where it stopped; a silent server ends in an
//! error and not in waiting.
//!
//! Only what running a model needs is fetched: the configuration, the tokenizer's files, and the weights as
//! safetensors. What is in the cache already is not fetched again, and works without a network.

mod cache;
mod client;
mod error;
mod fetch;
mod transfer;

use std::path::PathBuf;
use std::time::Duration;

pub use self::error::HubError;
pub use self::fetch::{Fetched, fetch};

/// The hub that is meant when nothing else is said.
pub const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// A model repository and a revision of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoId {
    /// `org/name`.
    pub name: String,
    /// A branch, a tag, or a commit.
    pub revision: String,
}

impl RepoId {
    /// Reads `org/name` or `org/name@revision`; `None` for anything else, which can only be a path: no slash or more
    /// than one, a part that begins with a dot, a character that the hub does not allow. An argument that exists on
    /// disk is a path whatever it looks like; that is the caller's to check first.
    #[must_use]
    pub fn parse(argument: &str) -> Option<Self> {
        let (name, revision) = match argument.split_once('@') {
            Some((name, revision)) => (name, revision),
            None => (argument, "main"),
        };
        let (org, model) = name.split_once('/')?;
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let part =
            |s: &str| !s.is_empty() && !s.starts_with('.') && !s.contains("..") && s.chars().all(allowed);
        let sound_revision = revision.split('/').all(part);
        (part(org) && part(model) && sound_revision).then(|| Self {
            name: name.to_owned(),
            revision: revision.to_owned(),
        })
    }
}

impl std::fmt::Display for RepoId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.revision.as_str() {
            "main" => f.write_str(&self.name),
            revision => write!(f, "{}@{revision}", self.name),
        }
    }
}

/// Where the hub and the cache are, and how patiently to ask.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// Directory with one folder a repository (`~/.cache/huggingface/hub`).
    pub cache: PathBuf,
    /// Address of the hub, without a slash at the end.
    pub endpoint: String,
    /// Sent to the endpoint, and nowhere else.
    pub token: Option<String>,
    /// Use the cache only.
    pub offline: bool,
    /// How often a transfer is tried again without getting any further.
    pub retries: u32,
    /// Wait before the first of these; doubled each time.
    pub retry_delay: Duration,
}

impl HubSettings {
    /// Settings with the defaults for everything but the cache.
    #[must_use]
    pub fn new(cache: PathBuf) -> Self {
        Self {
            cache,
            endpoint: DEFAULT_ENDPOINT.to_owned(),
            token: None,
            offline: false,
            retries: 4,
            retry_delay: Duration::from_millis(500),
        }
    }

    /// Reads the variables that all of Hugging Face's programs read, through `variable` (in a program:
    /// `|name| std::env::var(name).ok()`).
    ///
    /// | variable | meaning |
    /// | --- | --- |
    /// | `HF_HUB_CACHE` | the cache |
    /// | `HF_HOME` | the cache is `hub` in it, and the token is in its file `token`; else `huggingface` in `XDG_CACHE_HOME` or `~/.cache` |
    /// | `HF_ENDPOINT` | the hub |
    /// | `HF_TOKEN`, `HF_TOKEN_PATH` | the token, or a file with it |
    /// | `HF_HUB_OFFLINE` | `1`: use the cache only |
    ///
    /// # Errors
    /// When none of them, nor `HOME`, says where the cache is.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, HubError> {
        let get = |name: &str| {
            variable(name)
                .map(|v| v.trim().to_owned())
                .filter(|v| !v.is_empty())
        };
        let user = || {
            get("HOME")
                .or_else(|| get("USERPROFILE"))
                .map(|home| PathBuf::from(home).join(".cache"))
        };
        let home = get("HF_HOME").map(PathBuf::from).or_else(|| {
            get("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(user)
                .map(|c| c.join("huggingface"))
        });
        let cache = get("HF_HUB_CACHE")
            .map(PathBuf::from)
            .or_else(|| home.as_ref().map(|h| h.join("hub")));
        let mut settings = Self::new(cache.ok_or(HubError::NoCache)?);
        if let Some(endpoint) = get("HF_ENDPOINT") {
            settings.endpoint = endpoint.trim_end_matches('/').to_owned();
        }
        let token_file = get("HF_TOKEN_PATH")
            .map(PathBuf::from)
            .or_else(|| home.map(|h| h.join("token")));
        settings.token = get("HF_TOKEN").or_else(|| {
            let token = std::fs::read_to_string(token_file?).ok()?;
            Some(token.trim().to_owned()).filter(|t| !t.is_empty())
        });
        let offline = get("HF_HUB_OFFLINE").map(|v| v.to_ascii_lowercase());
        settings.offline = matches!(offline.as_deref(), Some("1" | "true" | "yes" | "on"));
        Ok(settings)
    }
}

/// How far a download is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file under way.
    pub file: &'a str,
    /// Bytes of it that are there, and its size.
    pub file_bytes: (u64, u64),
    /// Bytes of all files that are there, and the size of all that are known to be needed.
    pub total_bytes: (u64, u64),
}
