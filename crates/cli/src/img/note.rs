//! A small file beside an image that tells something of it: a copy's journal, what was received.
//!
//! Invariants:
//! - It is replaced as a whole: written under another name, made durable, renamed. So it says the
//!   old or the new, whatever interrupts that.
//! - Who uses it has its lock, from before it is read to the end.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use vellum_io::error::io_text;
use vellum_storage::copy_journal;

use super::command::{Failure, fail};

/// The file, locked.
pub struct Note {
    path: PathBuf,
    /// The file that has the name now, and the lock.
    file: RefCell<File>,
}

/// Takes the journal of a copy (`convert --journal`), new and empty if there is none. From now on this process makes
/// that copy.
///
/// # Errors
/// If somebody else has it: the copy runs.
pub fn claim_journal(target_name: &str, target: &Path) -> Result<Note, Failure> {
    let path = copy_journal::path_of(target);
    match Note::claim(path.clone())? {
        Some(note) => {
            copy_journal::keep();
            Ok(note)
        }
        None => fail(format!(
            "'{target_name}' is being made: somebody else is using '{}'",
            path.display()
        )),
    }
}

impl Note {
    /// Takes the file, new and empty if there is none. `None`: somebody else has it.
    pub fn claim(path: PathBuf) -> Result<Option<Note>, Failure> {
        loop {
            let file = open_locked(&path, File::options().create(true).truncate(false))
                .or_else(|error| cannot("use", &path, &error))?;
            let Some(file) = file else {
                return Ok(None);
            };
            // Who had the lock before may have replaced or removed the file.
            let has_name = file
                .metadata()
                .and_then(|own| Ok((own, std::fs::metadata(&path)?)))
                .is_ok_and(|(own, named)| (own.dev(), own.ino()) == (named.dev(), named.ino()));
            if has_name {
                return Ok(Some(Note {
                    path,
                    file: RefCell::new(file),
                }));
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says; a new one, nothing.
    pub fn text(&self) -> Result<String, Failure> {
        let mut text = String::new();
        let mut file = self.file.borrow_mut();
        file.rewind()
            .and_then(|()| file.read_to_string(&mut text))
            .or_else(|error| self.fail("read", &error))?;
        Ok(text)
    }

    /// Has it say something else, durably.
    pub fn replace(&self, text: &str) -> Result<(), Failure> {
        let mut new = self.path.clone().into_os_string();
        new.push(".new");
        let new = PathBuf::from(new);
        // Locked before it gets the name, so that nobody else can have it in between.
        let written = open_locked(&new, File::options().create(true).truncate(true))
            .and_then(|file| file.ok_or_else(|| Errno::WOULDBLOCK.into()))
            .and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()?;
                std::fs::rename(&new, &self.path)?;
                self.sync_folder()?;
                self.file.replace(file);
                Ok(())
            });
        written.or_else(|error| self.fail("write", &error))
    }

    /// Removes it, durably.
    pub fn remove(&self) -> Result<(), Failure> {
        let removed = std::fs::remove_file(&self.path).and_then(|()| self.sync_folder());
        removed.or_else(|error| self.fail("remove", &error))
    }

    /// Makes a change of names in its folder durable.
    pub fn sync_folder(&self) -> std::io::Result<()> {
        let folder = match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        File::open(folder)?.sync_all()
    }

    /// A failure of something that was done to it.
    pub fn fail<T>(&self, verb: &str, error: &std::io::Error) -> Result<T, Failure> {
        cannot(verb, &self.path, error)
    }
}

/// A failure of something that was done to a file.
pub fn cannot<T>(verb: &str, path: &Path, error: &std::io::Error) -> Result<T, Failure> {
    let (path, why) = (path.display(), io_text(error));
    fail(format!("Cannot {verb} '{path}': {why}"))
}

/// Opens a file for reading and writing and locks it; `None` if somebody else has.
fn open_locked(path: &Path, options: &mut OpenOptions) -> std::io::Result<Option<File>> {
    let file = options.read(true).write(true).open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}
