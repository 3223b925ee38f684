//! File access by position, and small files read within a bound. What differs between systems is here.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

use crate::observe::process;

/// Fills `buffer` from `offset`, and counts the read; the file's own position plays no part, so threads may share
/// `file`. All weights are read here.
///
/// # Errors
/// The system's error; `UnexpectedEof` when the file ends first.
pub fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    process().source_reads.add(1);
    positioned_read(file, buffer, offset)
}

#[cfg(unix)]
fn positioned_read(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
fn positioned_read(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, buffer, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                buffer = &mut buffer[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes all of `bytes` at `offset`; threads may share `file`.
///
/// # Errors
/// The system's error.
#[cfg(unix)]
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Writes all of `bytes` at `offset`; threads may share `file`.
///
/// # Errors
/// The system's error.
#[cfg(windows)]
pub fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                bytes = &bytes[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Reads a file of at most `limit` bytes, and counts the read; never reserves more than the file has.
///
/// # Errors
/// The system's error, or `FileTooLarge` with both sizes.
pub fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    process().source_reads.add(1);
    let mut out = Vec::new();
    File::open(path)?.take(limit + 1).read_to_end(&mut out)?;
    if out.len() as u64 > limit {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("the file is larger than the {limit} bytes that are accepted"),
        ));
    }
    Ok(out)
}

/// Makes the entries of a directory durable, where the system has a way.
///
/// # Errors
/// The system's error.
#[cfg(unix)]
pub fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Makes the entries of a directory durable, where the system has a way: not here.
///
/// # Errors
/// None.
#[cfg(windows)]
pub fn sync_directory(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Opens something in or at `directory` that an exclusive lock can be taken on: the directory itself, so that
/// the lock moves with a rename.
///
/// # Errors
/// The system's error.
#[cfg(unix)]
pub fn lockable(directory: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).open(directory)
}

/// Opens something in or at `directory` that an exclusive lock can be taken on: a file beside it, since a
/// directory with an open file inside cannot be renamed here.
///
/// # Errors
/// The system's error.
#[cfg(windows)]
pub fn lockable(directory: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(directory.with_extension("lock"))
}

/// Whether `file`, opened by [`lockable`], still belongs to what `directory` names now.
#[cfg(unix)]
#[must_use]
pub fn still_names(directory: &Path, file: &File) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (std::fs::metadata(directory), file.metadata()) {
        (Ok(a), Ok(b)) => a.dev() == b.dev() && a.ino() == b.ino(),
        _ => false,
    }
}

/// Whether `file`, opened by [`lockable`], still belongs to what `directory` names now.
#[cfg(windows)]
#[must_use]
pub fn still_names(directory: &Path, _: &File) -> bool {
    directory.is_dir()
}

/// Whether `name` is a plain file name: not empty, no separator, not a parent, no control character.
#[must_use]
pub fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && name != "."
        && name != ".."
        && !name.contains(['/', '\\', ':'])
        && !name.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_directory_are_not_plain() {
        for bad in [
            "",
            ".",
            "..",
            "a/b",
            "../x",
            "/etc/passwd",
            "a\\b",
            "C:x",
            "a\0b",
            "a\nb",
            &"x".repeat(256),
        ] {
            assert!(!is_plain_name(bad), "{bad:?}");
        }
        for good in [
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "..x",
            "é",
        ] {
            assert!(is_plain_name(good), "{good:?}");
        }
    }

    #[test]
    fn a_file_over_the_bound_is_refused() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("f");
        std::fs::write(&path, [7u8; 10]).expect("write");
        assert_eq!(read_bounded(&path, 10).expect("fits"), [7; 10]);
        assert_eq!(
            read_bounded(&path, 9).expect_err("too large").kind(),
            io::ErrorKind::FileTooLarge
        );
    }
}
