//! Read bandwidth, measured: the yardstick that loading is held against.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;
use thiserror::Error;

/// Bytes of one read: small enough for a core's own cache, large enough that calls do not count.
const PIECE: usize = 1 << 20;
/// Bytes that one task reads.
const TASK: u64 = 64 << 20;

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ReadRate {
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

/// Reads all of `files` once with every thread of the current pool, into buffers that are thrown away.
///
/// # Errors
/// The first file that cannot be read.
pub fn read_rate(files: &[PathBuf]) -> Result<ReadRate, DiskError> {
    let mut tasks = Vec::new();
    let mut bytes = 0;
    for path in files {
        let failed = at(path);
        let file = File::open(path).map_err(&failed)?;
        let len = file.metadata().map_err(&failed)?.len();
        bytes += len;
        let file = std::sync::Arc::new(file);
        tasks
            .extend((0..len.div_ceil(TASK)).map(|i| (path, file.clone(), i * TASK..len.min((i + 1) * TASK))));
    }
    let start = Instant::now();
    tasks.par_iter().with_max_len(1).try_for_each_init(
        || vec![0; PIECE],
        |buffer, (path, file, range)| {
            let mut offset = range.start;
            while offset < range.end {
                let n = PIECE.min(usize::try_from(range.end - offset).unwrap_or(PIECE));
                file.read_exact_at(&mut buffer[..n], offset).map_err(at(path))?;
                offset += n as u64;
            }
            Ok(())
        },
    )?;
    let bytes_per_second = bytes as f64 / start.elapsed().as_secs_f64();
    Ok(ReadRate {
        bytes,
        threads: rayon::current_num_threads(),
        bytes_per_second,
    })
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
        let rate = read_rate(&paths).expect("can be read");
        assert_eq!(rate.bytes, PIECE as u64 + 18);
        assert!(rate.bytes_per_second > 0.0);
        let missing = folder.path().join("missing");
        assert!(
            read_rate(std::slice::from_ref(&missing))
                .expect_err("is missing")
                .to_string()
                .contains("missing")
        );
    }
}
