//! Read bandwidth, measured: the yardstick that loading is held against.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use horizon_core::memory::AnonymousMemory;
use rayon::prelude::*;
use serde::Serialize;
use thiserror::Error;

/// Bytes of one read: small enough for a core's own cache, large enough that calls do not count.
const PIECE: usize = 1 << 20;
/// Bytes that one task reads.
const TASK: usize = 8 << 20;

/// Where the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Destination {
    /// A small buffer a thread, used again and again: what the system can deliver at most.
    ReusedBuffers,
    /// Anonymous memory for all of them, new and never touched before: the least that a load must do.
    NewMemory,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ReadRate {
    /// Where the bytes went.
    pub into: Destination,
    /// Bytes read.
    pub bytes: u64,
    /// Threads that read.
    pub threads: usize,
    /// Bytes a second.
    pub bytes_per_second: f64,
}

/// A file that could not be read.
#[derive(Debug, Error)]
#[error("{}: {source}", path.display())]
pub struct DiskError {
    /// Which.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// Part of a file that one task reads.
struct Part<'a> {
    path: &'a Path,
    file: Arc<File>,
    offset: u64,
    len: usize,
}

/// Reads all of `files` once with every thread of the current pool.
///
/// # Errors
/// The first file that cannot be read, or has no room in memory.
pub fn read_rate(files: &[PathBuf], into: Destination) -> Result<ReadRate, DiskError> {
    let parts = parts(files)?;
    let bytes: usize = parts.iter().map(|p| p.len).sum();
    let start = Instant::now();
    match into {
        Destination::ReusedBuffers => {
            let parts = parts.par_iter().with_max_len(1);
            parts.try_for_each_init(
                || vec![0; PIECE],
                |buffer, part| part.read_again_and_again(buffer),
            )?;
        }
        Destination::NewMemory => {
            let place = files.first().map_or(Path::new(""), PathBuf::as_path);
            let mut memory = AnonymousMemory::zeroed(bytes).map_err(at(place))?;
            let mut rest = memory.bytes_mut();
            let mut jobs = Vec::with_capacity(parts.len());
            for part in &parts {
                let (mine, others) = rest.split_at_mut(part.len);
                jobs.push((part, mine));
                rest = others;
            }
            jobs.into_par_iter()
                .with_max_len(1)
                .try_for_each(|(part, out)| part.read_to(out))?;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(ReadRate {
        into,
        bytes: bytes as u64,
        threads: rayon::current_num_threads(),
        bytes_per_second: bytes as f64 / seconds,
    })
}

fn parts(files: &[PathBuf]) -> Result<Vec<Part<'_>>, DiskError> {
    let mut parts = Vec::new();
    for path in files {
        let file = Arc::new(File::open(path).map_err(at(path))?);
        let len = file.metadata().map_err(at(path))?.len();
        let mut offset = 0;
        while offset < len {
            let n = TASK.min(usize::try_from(len - offset).unwrap_or(TASK));
            parts.push(Part {
                path,
                file: file.clone(),
                offset,
                len: n,
            });
            offset += n as u64;
        }
    }
    Ok(parts)
}

impl Part<'_> {
    fn read_again_and_again(&self, buffer: &mut [u8]) -> Result<(), DiskError> {
        let mut done = 0;
        while done < self.len {
            let n = buffer.len().min(self.len - done);
            let offset = self.offset + done as u64;
            self.file
                .read_exact_at(&mut buffer[..n], offset)
                .map_err(at(self.path))?;
            done += n;
        }
        Ok(())
    }

    fn read_to(&self, out: &mut [u8]) -> Result<(), DiskError> {
        self.file.read_exact_at(out, self.offset).map_err(at(self.path))
    }
}

/// Asks the system to forget what it holds of `files` in memory, so that the next read comes from the disk.
///
/// # Errors
/// The first file that cannot be opened, written back, or forgotten.
pub fn drop_from_cache(files: &[PathBuf]) -> Result<(), DiskError> {
    for path in files {
        let file = File::open(path).map_err(at(path))?;
        // Pages that still wait to be written would stay.
        file.sync_all().map_err(at(path))?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
            .map_err(|e| at(path)(io::Error::from(e)))?;
    }
    Ok(())
}

fn at(path: &Path) -> impl Fn(io::Error) -> DiskError {
    move |source| DiskError {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_every_file_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let paths = [0, 1, PIECE + 17].map(|n| {
            let path = folder.path().join(n.to_string());
            std::fs::write(&path, vec![7; n]).expect("writes");
            path
        });
        drop_from_cache(&paths).expect("can be forgotten");
        for into in [Destination::ReusedBuffers, Destination::NewMemory] {
            let rate = read_rate(&paths, into).expect("can be read");
            assert_eq!((rate.into, rate.bytes), (into, PIECE as u64 + 18));
            assert!(rate.bytes_per_second > 0.0);
            let missing = folder.path().join("missing");
            let error = read_rate(std::slice::from_ref(&missing), into)
                .expect_err("is missing")
                .to_string();
            assert!(error.contains("missing"), "{error}");
        }
    }
}
