//! A hub in a thread on 127.0.0.1, with a second address that stands for the host where large files lie.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use horizon_models::hub::HubSettings;
use sha2::{Digest, Sha256};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A file, and how the hub misbehaves with it.
#[derive(Clone, Default)]
pub struct MockFile {
    pub bytes: Vec<u8>,
    /// Large: the hub redirects to the other address and names the SHA-256.
    pub large: bool,
    /// The size announced, if not the true one.
    pub announced: Option<u64>,
    /// The ETag, if not the true one.
    pub etag: Option<String>,
    /// Each transfer is cut after so many bytes; one entry a transfer.
    pub cuts: Vec<usize>,
    /// Ranges are ignored when bytes are asked for.
    pub no_ranges: bool,
    /// No lengths are said when bytes are asked for: the end of the connection is the end of the file.
    pub no_lengths: bool,
    /// The redirect to a large file names its ETag only as any answer does, and not its size.
    pub plain_redirect: bool,
    /// Instead of the file.
    pub status: Option<u16>,
    /// The commit that comes with it.
    pub commit: Option<String>,
}

/// A request that came in.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
    /// Came to the address of large files.
    pub elsewhere: bool,
}

#[derive(Default)]
pub struct State {
    pub files: BTreeMap<String, MockFile>,
    /// Answer of the listing, if not the list.
    pub listing_status: Option<u16>,
    pub listing_body: Option<String>,
    /// Token without which everything is 401.
    pub token: Option<String>,
    /// Old name of the repository that is redirected to the new one.
    pub renamed: Option<(String, String)>,
    pub seen: Vec<Seen>,
    large_address: String,
}

pub struct MockHub {
    pub endpoint: String,
    state: Arc<Mutex<State>>,
    addresses: Vec<std::net::SocketAddr>,
    stopped: Arc<AtomicBool>,
}

impl MockHub {
    pub fn start(files: &[(&str, MockFile)]) -> Self {
        let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let addresses: Vec<_> = listeners.iter().map(|l| l.local_addr().expect("bound")).collect();
        let state = State {
            files: files.iter().map(|(n, f)| ((*n).to_owned(), f.clone())).collect(),
            large_address: format!("http://{}", addresses[1]),
            ..State::default()
        };
        let state = Arc::new(Mutex::new(state));
        let stopped = Arc::new(AtomicBool::new(false));
        for (i, listener) in listeners.into_iter().enumerate() {
            let (state, stopped) = (Arc::clone(&state), Arc::clone(&stopped));
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = Arc::clone(&state);
                    if stopped.load(Ordering::SeqCst) {
                        return;
                    }
                    std::thread::spawn(move || answer(&stream, &state, i == 1));
                }
            });
        }
        Self {
            endpoint: format!("http://{}", addresses[0]),
            state,
            addresses,
            stopped,
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test thread panicked here")
    }

    /// Transfers of bytes (not questions about size) that came for a file.
    pub fn transfers(&self, file: &str) -> Vec<Seen> {
        let is_transfer = |s: &&Seen| s.path.ends_with(file) && s.range.as_deref() != Some("bytes=0-0");
        let landed = |s: &&Seen| s.elsewhere || !self.state().files[file].large;
        let seen = self.state().seen.clone();
        seen.iter().filter(is_transfer).filter(landed).cloned().collect()
    }

    pub fn settings(&self, cache: &std::path::Path) -> HubSettings {
        HubSettings {
            endpoint: self.endpoint.clone(),
            retry_delay: Duration::from_millis(1),
            retries: 2,
            ..HubSettings::new(PathBuf::from(cache))
        }
    }
}

impl Drop for MockHub {
    fn drop(&mut self) {
        // The threads look when the next connection comes.
        self.stopped.store(true, Ordering::SeqCst);
        for address in &self.addresses {
            let _ = TcpStream::connect(address);
        }
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn answer(stream: &TcpStream, state: &Mutex<State>, elsewhere: bool) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let headers: BTreeMap<String, String> = lines
        .take_while(|l| !l.is_empty())
        .filter_map(|l| {
            l.split_once(':')
                .map(|(k, v)| (k.to_ascii_lowercase(), v.trim().to_owned()))
        })
        .collect();
    let path = first.split(' ').nth(1).unwrap_or("/").to_owned();
    let seen = Seen {
        path: path.clone(),
        range: headers.get("range").cloned(),
        token: headers.get("authorization").cloned(),
        elsewhere,
    };
    let mut state = state.lock().expect("no test thread panicked here");
    state.seen.push(seen.clone());
    let (head, body, cut) = respond(&mut state, &seen);
    drop(state);
    let mut stream = stream;
    let _ = write!(stream, "HTTP/1.1 {head}\r\nConnection: close\r\n\r\n");
    let _ = stream.write_all(&body[..cut.unwrap_or(body.len()).min(body.len())]);
    let _ = stream.shutdown(Shutdown::Both);
}

type Answer = (String, Vec<u8>, Option<usize>);

fn status(code: u16) -> Answer {
    (
        format!("{code} Status\r\nContent-Length: 2"),
        b"no".to_vec(),
        None,
    )
}

fn respond(state: &mut State, seen: &Seen) -> Answer {
    if !seen.elsewhere
        && let Some(token) = &state.token
        && seen.token.as_deref() != Some(&format!("Bearer {token}"))
    {
        return status(401);
    }
    if let Some((old, new)) = &state.renamed
        && seen.path.contains(old)
    {
        let to = seen.path.replace(old, new);
        return (
            format!("307 Moved\r\nLocation: {to}\r\nETag: \"of-the-redirect\"\r\nContent-Length: 0"),
            vec![],
            None,
        );
    }
    if seen.path.starts_with("/api/models/") {
        if let Some(code) = state.listing_status {
            return status(code);
        }
        let body = state.listing_body.clone().unwrap_or_else(|| {
            let files: Vec<_> = state
                .files
                .keys()
                .map(|f| serde_json::json!({"rfilename": f}))
                .collect();
            serde_json::json!({"sha": COMMIT, "siblings": files, "id": "org/name"}).to_string()
        });
        return (
            format!("200 OK\r\nContent-Length: {}", body.len()),
            body.into_bytes(),
            None,
        );
    }
    let address = state.large_address.clone();
    let Some(file) = seen
        .path
        .rsplit('/')
        .next()
        .and_then(|name| state.files.get_mut(name))
    else {
        return status(404);
    };
    if let Some(code) = file.status {
        return status(code);
    }
    let size = file.announced.unwrap_or(file.bytes.len() as u64);
    let etag = file
        .etag
        .clone()
        .unwrap_or_else(|| sha256(&file.bytes)[..if file.large { 64 } else { 40 }].to_owned());
    let commit = file.commit.as_deref().unwrap_or(COMMIT);
    if file.large && !seen.elsewhere {
        let to = format!("{address}{}", seen.path);
        let linked = if file.plain_redirect {
            format!("ETag: \"{etag}\"")
        } else {
            format!("X-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {size}")
        };
        let head = format!(
            "302 Found\r\nLocation: {to}\r\nX-Repo-Commit: {commit}\r\n{linked}\r\nContent-Length: 0"
        );
        return (head, vec![], None);
    }
    let identity = if seen.elsewhere {
        "ETag: \"of-the-storage\"".to_owned()
    } else {
        format!("ETag: W/\"{etag}\"\r\nX-Repo-Commit: {commit}")
    };
    let range = seen
        .range
        .as_deref()
        .and_then(|r| r.strip_prefix("bytes=")?.split_once('-'));
    let (start, end) = range.map_or((0, None), |(a, b)| {
        (a.parse().unwrap_or(0), b.parse::<usize>().ok())
    });
    let total = file.bytes.len();
    if end.is_some() {
        let body = file.bytes[..total.min(1)].to_vec();
        return (
            format!(
                "206 Part\r\n{identity}\r\nContent-Range: bytes 0-0/{size}\r\nContent-Length: {}",
                body.len()
            ),
            body,
            None,
        );
    }
    let cut = (!file.cuts.is_empty()).then(|| file.cuts.remove(0));
    if file.no_lengths {
        return (format!("200 OK\r\n{identity}"), file.bytes.clone(), cut);
    }
    if file.no_ranges || range.is_none() {
        return (
            format!("200 OK\r\n{identity}\r\nContent-Length: {total}"),
            file.bytes.clone(),
            cut,
        );
    }
    if start >= total {
        return (
            format!("416 Range\r\nContent-Range: bytes */{total}\r\nContent-Length: 0"),
            vec![],
            None,
        );
    }
    let head = format!(
        "206 Part\r\n{identity}\r\nContent-Range: bytes {start}-{}/{total}\r\nContent-Length: {}",
        total - 1,
        total - start
    );
    (head, file.bytes[start..].to_vec(), cut)
}
