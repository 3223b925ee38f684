//! Requests to a hub: what a repository has, what a file is, and a file's bytes from some point on.

use std::io::Read;
use std::ops::Range;
use std::time::Duration;

use serde_json::Value;
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use super::cache::is_file_name;
use super::{HubError, HubSettings, RepoId};

const CONNECT: Duration = Duration::from_secs(30);
const ANSWER: Duration = Duration::from_secs(60);
const MAX_REDIRECTS: usize = 10;
const MAX_LISTING: u64 = 16 << 20;

/// A hub, and the repository that is asked for.
pub(super) struct Client<'a> {
    agent: Agent,
    settings: &'a HubSettings,
    repo: &'a RepoId,
    endpoint: Uri,
}

/// What a hub says of a repository.
pub(super) struct Listing {
    pub commit: String,
    pub files: Vec<String>,
}

/// What a hub says of a file.
#[derive(Clone, Debug)]
pub(super) struct Metadata {
    pub commit: Option<String>,
    /// Names the content; for large files its SHA-256.
    pub etag: String,
    pub size: u64,
}

/// The bytes of a file from `start` on.
pub(super) struct Bytes {
    pub start: u64,
    /// Size of the whole file, as this answer has it.
    pub total: Option<u64>,
    pub reader: Box<dyn Read>,
}

impl<'a> Client<'a> {
    pub(super) fn new(settings: &'a HubSettings, repo: &'a RepoId) -> Result<Self, HubError> {
        let wrong = || HubError::Endpoint(settings.endpoint.clone());
        let endpoint: Uri = settings.endpoint.parse().map_err(|_| wrong())?;
        if !matches!(endpoint.scheme_str(), Some("http" | "https")) {
            return Err(wrong());
        }
        let host = endpoint.host().ok_or_else(wrong)?;
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("horizon-runmap/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(ANSWER))
            .timeout_per_read(Some(ANSWER));
        if host == "localhost" || host.starts_with("127.") || host == "[::1]" {
            config = config.proxy(None);
        }
        if settings
            .token
            .as_ref()
            .is_some_and(|t| !t.bytes().all(|b| b.is_ascii_graphic()))
        {
            return Err(HubError::Token);
        }
        Ok(Self {
            agent: config.build().into(),
            settings,
            repo,
            endpoint,
        })
    }

    /// The files of the revision; `None` when this hub has no such service.
    pub(super) fn listing(&self) -> Result<Option<Listing>, HubError> {
        let url = format!(
            "{}/api/models/{}/revision/{}",
            self.settings.endpoint,
            self.repo.name,
            escape(&self.repo.revision)
        );
        let (mut response, url) = self.get(url, None)?;
        match response.status().as_u16() {
            200 => {}
            404 => return Ok(None),
            status => return Err(self.refusal(status, url)),
        }
        let wrong = |problem: &str| HubError::Protocol {
            url: url.clone(),
            problem: problem.to_owned(),
        };
        let text = response
            .body_mut()
            .with_config()
            .limit(MAX_LISTING)
            .read_to_string();
        let text = text.map_err(|e| HubError::Network {
            url: url.clone(),
            reason: e.to_string(),
        })?;
        let info: Value = serde_json::from_str(&text).map_err(|_| wrong("not JSON"))?;
        let commit = info["sha"]
            .as_str()
            .filter(|c| is_file_name(c))
            .ok_or_else(|| wrong("no commit (sha)"))?;
        let siblings = info["siblings"]
            .as_array()
            .ok_or_else(|| wrong("no list of files (siblings)"))?;
        let files = siblings
            .iter()
            .filter_map(|s| s["rfilename"].as_str().map(str::to_owned))
            .collect();
        Ok(Some(Listing {
            commit: commit.to_owned(),
            files,
        }))
    }

    /// Size and identity of a file; `None` if the revision has no such file.
    pub(super) fn metadata(&self, file: &str) -> Result<Option<Metadata>, HubError> {
        let mut url = self.file_url(file);
        let mut identity = Identity::default();
        for _ in 0..MAX_REDIRECTS {
            let (response, asked) = self.get_once(url, Some(0..1))?;
            identity.read(&response, self.is_endpoint(&asked));
            match response.status().as_u16() {
                200 | 206 | 416 => return identity.metadata(asked).map(Some),
                301 | 302 | 303 | 307 | 308 => url = redirect(&response, &asked)?,
                404 => return Ok(None),
                status => return Err(self.refusal(status, asked)),
            }
            // The hub has said everything: no need to ask where the bytes are.
            if !self.is_endpoint(&url) && identity.is_complete() {
                return identity.metadata(asked).map(Some);
            }
        }
        Err(HubError::Protocol {
            url,
            problem: "too many redirects".to_owned(),
        })
    }

    /// The bytes of a file from `start` on, or from the beginning if the server does not send parts.
    pub(super) fn bytes(&self, file: &str, start: u64) -> Result<Bytes, HubError> {
        let (response, url) = self.get(self.file_url(file), Some(start..u64::MAX))?;
        let range = content_range(&response);
        match (response.status().as_u16(), range) {
            (200, _) => {
                let total = response.body().content_length();
                Ok(Bytes {
                    start: 0,
                    total,
                    reader: Box::new(response.into_body().into_reader()),
                })
            }
            (206, Some((Some(start), total))) => Ok(Bytes {
                start,
                total,
                reader: Box::new(response.into_body().into_reader()),
            }),
            (206, _) => Err(HubError::Protocol {
                url,
                problem: "a part without Content-Range".to_owned(),
            }),
            // Nothing from there on.
            (416, range) => {
                let total = range.and_then(|(_, total)| total);
                Ok(Bytes {
                    start,
                    total: total.or(Some(start)),
                    reader: Box::new(std::io::empty()),
                })
            }
            (status, _) => Err(self.refusal(status, url)),
        }
    }

    fn file_url(&self, file: &str) -> String {
        let (endpoint, name) = (&self.settings.endpoint, &self.repo.name);
        format!("{endpoint}/{name}/resolve/{}/{file}", escape(&self.repo.revision))
    }

    /// A request, and those that it is redirected to.
    fn get(&self, mut url: String, range: Option<Range<u64>>) -> Result<(Response<Body>, String), HubError> {
        for _ in 0..MAX_REDIRECTS {
            let (response, asked) = self.get_once(url, range.clone())?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok((response, asked));
            }
            url = redirect(&response, &asked)?;
        }
        Err(HubError::Protocol {
            url,
            problem: "too many redirects".to_owned(),
        })
    }

    /// One request; asked again once if there was no answer, as a kept connection may have been closed.
    fn get_once(&self, url: String, range: Option<Range<u64>>) -> Result<(Response<Body>, String), HubError> {
        match self
            .request(&url, range.clone())
            .or_else(|_| self.request(&url, range))
        {
            Ok(response) => Ok((response, url)),
            Err(e) => Err(HubError::Network {
                url,
                reason: e.to_string(),
            }),
        }
    }

    fn request(&self, url: &str, range: Option<Range<u64>>) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url);
        if let Some(token) = self.settings.token.as_ref().filter(|_| self.is_endpoint(url)) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        match range {
            Some(r) if r.end == u64::MAX => request = request.header("range", format!("bytes={}-", r.start)),
            Some(r) => request = request.header("range", format!("bytes={}-{}", r.start, r.end - 1)),
            None => {}
        }
        request.call()
    }

    /// Whether an address is on the hub itself, to which alone the token is sent.
    fn is_endpoint(&self, url: &str) -> bool {
        url.parse::<Uri>()
            .is_ok_and(|u| u.scheme() == self.endpoint.scheme() && u.authority() == self.endpoint.authority())
    }

    fn refusal(&self, status: u16, url: String) -> HubError {
        let (repo, endpoint) = (self.repo.clone(), self.settings.endpoint.clone());
        match status {
            401 | 403 => {
                let advice = if self.settings.token.is_none() {
                    "set HF_TOKEN to a token of an account that has access (for a gated model, accept its terms on \
                     its page first)"
                } else {
                    "the account of the token in HF_TOKEN (or in the token file) needs access: accept the model's \
                     terms on its page, or use another token"
                };
                HubError::Denied {
                    repo,
                    endpoint,
                    status,
                    advice,
                }
            }
            404 => HubError::NotFound { repo, endpoint },
            status => HubError::Server { url, status },
        }
    }
}

/// What the answers on the way to a file say of it. The hub's word counts; where it redirects to fills gaps.
#[derive(Default)]
struct Identity {
    commit: Option<String>,
    linked_etag: Option<String>,
    etag: Option<String>,
    linked_size: Option<u64>,
    size: Option<u64>,
}

impl Identity {
    fn read(&mut self, response: &Response<Body>, by_hub: bool) {
        let text = |name| header(response, name);
        let number = |name| text(name).and_then(|t| t.trim().parse().ok());
        let found = Self {
            commit: text("x-repo-commit"),
            linked_etag: text("x-linked-etag"),
            etag: text("etag"),
            linked_size: number("x-linked-size"),
            size: match response.status().as_u16() {
                206 | 416 => content_range(response).and_then(|(_, total)| total),
                200 => number("content-length"),
                _ => None,
            },
        };
        let (first, second) = if by_hub {
            (found, std::mem::take(self))
        } else {
            (std::mem::take(self), found)
        };
        *self = Self {
            commit: first.commit.or(second.commit),
            linked_etag: first.linked_etag.or(second.linked_etag),
            etag: first.etag.or(second.etag),
            linked_size: first.linked_size.or(second.linked_size),
            size: first.size.or(second.size),
        };
    }

    fn is_complete(&self) -> bool {
        self.commit.is_some() && self.linked_etag.is_some() && self.linked_size.is_some()
    }

    fn metadata(self, url: String) -> Result<Metadata, HubError> {
        let wrong = |problem: &str| HubError::Protocol {
            url: url.clone(),
            problem: problem.to_owned(),
        };
        let etag = self.linked_etag.or(self.etag).ok_or_else(|| wrong("no ETag"))?;
        let etag = etag.trim_start_matches("W/").trim_matches('"');
        if !is_file_name(etag) {
            return Err(wrong("an ETag that cannot be a file's name"));
        }
        if self.commit.as_ref().is_some_and(|c| !is_file_name(c)) {
            return Err(wrong("a commit (X-Repo-Commit) that cannot be a file's name"));
        }
        let size = self.linked_size.or(self.size).ok_or_else(|| wrong("no size"))?;
        Ok(Metadata {
            commit: self.commit,
            etag: etag.to_owned(),
            size,
        })
    }
}

/// A revision as one segment of an address.
fn escape(revision: &str) -> String {
    revision.replace('/', "%2F")
}

fn header(response: &Response<Body>, name: &str) -> Option<String> {
    response.headers().get(name)?.to_str().ok().map(str::to_owned)
}

/// `bytes 3-9/10` is (3, 10), and `bytes */10` is 10 alone.
fn content_range(response: &Response<Body>) -> Option<(Option<u64>, Option<u64>)> {
    let text = header(response, "content-range")?;
    let (range, total) = text.trim().strip_prefix("bytes")?.trim().split_once('/')?;
    let start = range
        .split_once('-')
        .and_then(|(start, _)| start.trim().parse().ok());
    Some((start, total.trim().parse().ok()))
}

/// Where a redirect leads to: another address, or another path of the same server.
fn redirect(response: &Response<Body>, asked: &str) -> Result<String, HubError> {
    let wrong = || HubError::Protocol {
        url: asked.to_owned(),
        problem: "a redirect to nowhere".to_owned(),
    };
    let location = header(response, "location").ok_or_else(wrong)?;
    if location.starts_with("http://") || location.starts_with("https://") {
        return Ok(location);
    }
    let base: Uri = asked.parse().map_err(|_| wrong())?;
    match (base.scheme_str(), base.authority(), location.starts_with('/')) {
        (Some(scheme), Some(authority), true) => Ok(format!("{scheme}://{authority}{location}")),
        _ => Err(wrong()),
    }
}
