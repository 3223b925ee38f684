//! One file from the hub into the cache: resumed, tried again, checked, and only then put in its place.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use horizon_core::observe::process;
use sha2::{Digest, Sha256};

use super::client::{Client, Metadata};
use super::{HubError, HubSettings};

/// Bytes moved at a time.
const BUFFER: usize = 1 << 18;

/// A file on its way.
pub(super) struct Transfer<'a> {
    pub client: &'a Client<'a>,
    pub settings: &'a HubSettings,
    /// Its name in the repository.
    pub file: &'a str,
    pub metadata: &'a Metadata,
    /// Gets the number of bytes that are there.
    pub progress: &'a mut dyn FnMut(u64),
    /// Bytes that came from the network: 0 to begin with.
    pub received: u64,
}

/// How an attempt ended that did not fail for good.
enum Attempt {
    /// The server sent all that it had.
    Ended,
    /// The connection broke.
    Broke(String),
}

impl Transfer<'_> {
    /// Fetches the file into `blob`, going on from where an earlier run stopped, and returns the bytes that came.
    pub(super) fn run(mut self, blob: &Path) -> Result<u64, HubError> {
        if let Some(dir) = blob.parent() {
            fs::create_dir_all(dir).map_err(at(dir))?;
        }
        // Other programs of the ecosystem lock the same file; whoever waited finds the blob there.
        let lock_path = beside(blob, "lock");
        let lock = File::create(&lock_path).map_err(at(&lock_path))?;
        lock.lock().map_err(at(&lock_path))?;
        if blob.metadata().is_ok_and(|m| m.len() == self.metadata.size) {
            (self.progress)(self.metadata.size);
            return Ok(0);
        }
        let path = beside(blob, "part");
        let part = OpenOptions::new()
            .create(true)
            .append(true)
            .read(true)
            .open(&path)
            .map_err(at(&path))?;
        let mut part = Part { file: part, path };
        match self.receive(&mut part).and_then(|()| self.check(&mut part)) {
            Ok(()) => fs::rename(&part.path, blob)
                .map_err(at(blob))
                .map(|()| self.received),
            Err(e) => {
                if matches!(e, HubError::Size { .. } | HubError::Checksum { .. }) {
                    fs::remove_file(&part.path).map_err(at(&part.path))?;
                }
                Err(e)
            }
        }
    }

    /// Attempts until all bytes are there, or several in a row brought none.
    fn receive(&mut self, part: &mut Part) -> Result<(), HubError> {
        let announced = self.metadata.size;
        let mut failures = 0;
        loop {
            let before = part.len()?;
            if before == announced {
                (self.progress)(announced);
                return Ok(());
            }
            if before > announced {
                part.restart()?;
                continue;
            }
            let attempt = self.attempt(part, before)?;
            let received = part.len()?;
            if received == announced {
                continue;
            }
            failures = if received > before { 0 } else { failures + 1 };
            if failures > self.settings.retries {
                let reason = match attempt {
                    Attempt::Broke(reason) => reason,
                    Attempt::Ended => "the server sends no more".to_owned(),
                };
                return Err(HubError::Interrupted {
                    file: self.file.to_owned(),
                    announced,
                    received,
                    reason,
                });
            }
            std::thread::sleep(self.settings.retry_delay * 2u32.saturating_pow(failures.min(6)));
        }
    }

    /// One request, and as many bytes as it brings.
    fn attempt(&mut self, part: &mut Part, have: u64) -> Result<Attempt, HubError> {
        let announced = self.metadata.size;
        let wrong_size = |received| HubError::Size {
            file: self.file.to_owned(),
            announced,
            received,
        };
        let mut bytes = match self.client.bytes(self.file, have) {
            Ok(bytes) => bytes,
            Err(HubError::Network { reason, .. }) => return Ok(Attempt::Broke(reason)),
            Err(HubError::Server { status, .. }) if status >= 500 || status == 429 => {
                return Ok(Attempt::Broke(format!("HTTP {status}")));
            }
            Err(e) => return Err(e),
        };
        if let Some(total) = bytes.total.filter(|t| *t != announced) {
            return Err(wrong_size(total));
        }
        let mut have = have;
        if bytes.start != have {
            part.restart()?;
            have = 0;
            if bytes.start != 0 {
                return Ok(Attempt::Broke(
                    "the server sent another part than asked for".to_owned(),
                ));
            }
        }
        let mut buffer = vec![0; BUFFER];
        loop {
            let n = match bytes.reader.read(&mut buffer) {
                Ok(0) => return Ok(Attempt::Ended),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Ok(Attempt::Broke(e.to_string())),
            };
            have += n as u64;
            if have > announced {
                return Err(wrong_size(have));
            }
            part.file.write_all(&buffer[..n]).map_err(at(&part.path))?;
            self.received += n as u64;
            (self.progress)(have);
        }
    }

    /// Holds the bytes to the SHA-256 that the ETag of a large file is.
    fn check(&self, part: &mut Part) -> Result<(), HubError> {
        let etag = &self.metadata.etag;
        if etag.len() != 64 || !etag.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Ok(());
        }
        part.file.rewind().map_err(at(&part.path))?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; BUFFER];
        loop {
            match part.file.read(&mut buffer).map_err(at(&part.path))? {
                0 => break,
                n => {
                    process().hashed_bytes.add(n as u64);
                    hash.update(&buffer[..n]);
                }
            }
        }
        let digest: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        if digest.eq_ignore_ascii_case(etag) {
            Ok(())
        } else {
            Err(HubError::Checksum {
                file: self.file.to_owned(),
            })
        }
    }
}

/// The bytes that are there; what is written goes to the end.
struct Part {
    file: File,
    path: PathBuf,
}

impl Part {
    fn len(&self) -> Result<u64, HubError> {
        Ok(self.file.metadata().map_err(at(&self.path))?.len())
    }

    fn restart(&mut self) -> Result<(), HubError> {
        self.file.set_len(0).map_err(at(&self.path))
    }
}

/// `ETAG.suffix`, whatever the ETag looks like.
fn beside(blob: &Path, suffix: &str) -> PathBuf {
    let mut name = blob.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> HubError {
    let path = path.to_owned();
    move |source| HubError::Io { path, source }
}
