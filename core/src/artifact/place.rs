//! Where a directory is built before it is published: beside its destination, under a lock, gone on failure.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use super::io;
use super::manifest::MANIFEST_FILE;
use super::writer::{UNFINISHED_MARKER, WriteError};

/// A directory `DEST.partial` that becomes `DEST` in one rename, or disappears.
///
/// The directory itself is locked while a run works in it. A run that was killed leaves it behind without the
/// lock; the next run empties and reuses it. With `force` the directory that `DEST` was before is renamed to
/// `DEST.replaced` for the moment between two renames; if a run dies exactly there, the next one puts it back.
#[derive(Debug)]
pub(crate) struct Place {
    dest: PathBuf,
    partial: PathBuf,
    replaced: PathBuf,
    force: bool,
    lock: File,
    published: bool,
}

impl Place {
    /// Reserves the place. Notes say what an earlier run had left.
    pub(crate) fn claim(dest: &Path, force: bool, notes: &mut Vec<String>) -> Result<Self, WriteError> {
        let Some(name) = dest.file_name().map(|n| n.to_string_lossy().into_owned()) else {
            return Err(WriteError::NoName(dest.to_owned()));
        };
        let parent = match dest.parent() {
            Some(p) if p != Path::new("") => p.to_owned(),
            _ => PathBuf::from("."),
        };
        if !parent.is_dir() {
            return Err(WriteError::NoParent {
                dest: dest.to_owned(),
                parent,
            });
        }
        // From the parent again, so that a trailing separator is gone.
        let dest = parent.join(&name);
        let partial = parent.join(format!("{name}.partial"));
        let replaced = parent.join(format!("{name}.replaced"));
        let lock = lock_partial(&partial, notes)?;
        let place = Self {
            dest,
            partial,
            replaced,
            force,
            lock,
            published: false,
        };
        File::create(place.path(UNFINISHED_MARKER)).map_err(WriteError::io(&place.partial))?;
        place.recover(notes)?;
        place.check_destination()?;
        Ok(place)
    }

    /// Path of a file in the directory that is being built.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.partial.join(name)
    }

    /// An earlier run may have died between the two renames of a replacement, or before the last removal.
    fn recover(&self, notes: &mut Vec<String>) -> Result<(), WriteError> {
        if !self.replaced.join(MANIFEST_FILE).is_file() {
            return Ok(());
        }
        if fs::symlink_metadata(&self.dest).is_ok() {
            fs::remove_dir_all(&self.replaced).map_err(WriteError::io(&self.replaced))?;
            notes.push(format!(
                "removed {}, left by an earlier run",
                self.replaced.display()
            ));
        } else {
            fs::rename(&self.replaced, &self.dest).map_err(WriteError::io(&self.replaced))?;
            notes.push(format!(
                "restored {}: an earlier run was interrupted",
                self.dest.display()
            ));
        }
        Ok(())
    }

    /// Whether something stands at the destination that must be set aside.
    fn check_destination(&self) -> Result<bool, WriteError> {
        let Ok(meta) = fs::symlink_metadata(&self.dest) else {
            return Ok(false);
        };
        let empty = meta.is_dir() && fs::read_dir(&self.dest).is_ok_and(|mut d| d.next().is_none());
        if empty {
            return Ok(true);
        }
        if !self.dest.join(MANIFEST_FILE).is_file() {
            return Err(WriteError::Foreign(self.dest.clone()));
        }
        if !self.force {
            return Err(WriteError::Exists(self.dest.clone()));
        }
        Ok(true)
    }

    /// Makes the directory durable and gives it its name.
    pub(crate) fn publish(mut self, notes: &mut Vec<String>) -> Result<PathBuf, WriteError> {
        let occupied = self.check_destination()?;
        fs::remove_file(self.path(UNFINISHED_MARKER)).map_err(WriteError::io(&self.partial))?;
        io::sync_directory(&self.partial).map_err(WriteError::io(&self.partial))?;
        if occupied {
            fs::rename(&self.dest, &self.replaced).map_err(WriteError::io(&self.dest))?;
        }
        if let Err(e) = fs::rename(&self.partial, &self.dest) {
            if occupied {
                fs::rename(&self.replaced, &self.dest).map_err(WriteError::io(&self.replaced))?;
            }
            return Err(WriteError::io(&self.dest)(e));
        }
        self.published = true;
        let parent = self.dest.parent().expect("built from a parent and a name");
        io::sync_directory(parent).map_err(WriteError::io(parent))?;
        if occupied && let Err(e) = fs::remove_dir_all(&self.replaced) {
            notes.push(format!("could not remove {}: {e}", self.replaced.display()));
        }
        Ok(self.dest.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.published && io::still_names(&self.partial, &self.lock) {
            // Nothing can be done about an error here; the next run removes what is left.
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

/// Creates and locks `partial`, or takes over what a dead run left there.
fn lock_partial(partial: &Path, notes: &mut Vec<String>) -> Result<File, WriteError> {
    // Another run may remove or rename the directory between any two of these calls; then start over.
    for _ in 0..16 {
        let fresh = match fs::create_dir(partial) {
            Ok(()) => true,
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => false,
            Err(e) => return Err(WriteError::io(partial)(e)),
        };
        let lock = match io::lockable(partial) {
            Ok(lock) => lock,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            Err(e) => return Err(WriteError::io(partial)(e)),
        };
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(WriteError::Busy(partial.to_owned())),
            Err(TryLockError::Error(e)) => return Err(WriteError::io(partial)(e)),
        }
        if !io::still_names(partial, &lock) {
            continue;
        }
        if !fresh && empty_leftover(partial)? {
            notes.push(format!(
                "removed {}, left by a run that did not finish",
                partial.display()
            ));
        }
        return Ok(lock);
    }
    Err(WriteError::Busy(partial.to_owned()))
}

/// Removes the files of an unfinished run; whether there were any.
fn empty_leftover(partial: &Path) -> Result<bool, WriteError> {
    let entries: Vec<_> = fs::read_dir(partial)
        .and_then(Iterator::collect::<Result<_, _>>)
        .map_err(WriteError::io(partial))?;
    if entries.is_empty() {
        return Ok(false);
    }
    if !partial.join(UNFINISHED_MARKER).exists() && !partial.join(MANIFEST_FILE).exists() {
        return Err(WriteError::ForeignPartial(partial.to_owned()));
    }
    // The marker goes last: a removal that is itself interrupted is still recognised.
    let (marker, others): (Vec<_>, Vec<_>) = entries
        .into_iter()
        .partition(|e| e.file_name() == UNFINISHED_MARKER);
    for entry in others.iter().chain(&marker) {
        fs::remove_file(entry.path()).map_err(WriteError::io(&entry.path()))?;
    }
    Ok(true)
}
