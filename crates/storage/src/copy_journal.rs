//! The journal of a copy that was interrupted: a file beside its target, which says what of that is in its place.
//!
//! Who makes such copies reads and writes it (`vellum convert --journal`). Here is what everybody else has to do with it.
//!
//! Invariant: whoever opens a file to change it ends the journal that speaks of it, durably and before the first byte is
//! changed. So no copy goes on over what another one, a guest or a job has written since, whatever name the
//! file was opened by.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{FlockOperation, OFlags, flock};

use crate::sys;
use vellum_io::{Error, ErrorKind, Result};

/// What its name has behind that of the target.
const SUFFIX: &str = ".vellum-journal";

/// As many as the system follows.
const MAX_LINKS: u32 = 40;

/// A process that was killed gives up the files that it was locked by one after the other.
const ATTEMPTS: u32 = 50;
/// Between two of them.
const PAUSE: Duration = Duration::from_millis(2);

/// This process makes such a copy.
static IS_COPYING: AtomicBool = AtomicBool::new(false);

/// The journal of the file that `path` leads to, or will once it is made.
#[must_use]
pub fn path_of(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    // Links of folders make no difference to what lies beside a file.
    for _ in 0..MAX_LINKS {
        let Ok(target) = std::fs::read_link(&path) else {
            break;
        };
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    beside(path)
}

fn beside(path: PathBuf) -> PathBuf {
    let mut name = path.into_os_string();
    name.push(SUFFIX);
    name.into()
}

/// This process has the lock of a journal, and makes the copy: from now on opening a file ends none here.
pub fn keep() {
    IS_COPYING.store(true, Ordering::Relaxed);
}

/// Ends the journal that speaks of a file, if there is one, as the file is going to be changed.
///
/// # Errors
/// [`ErrorKind::Locked`] if the copy is being made by another process; else what the system says.
pub(crate) fn end(target: &OwnedFd, name: &str) -> Result<()> {
    if IS_COPYING.load(Ordering::Relaxed) {
        return Ok(());
    }
    // The name that the system has for it, as several lead to it.
    let known = std::fs::read_link(format!("/proc/self/fd/{}", target.as_raw_fd()));
    let path = beside(known.unwrap_or_else(|_| PathBuf::from(name)));
    let ended = end_journal(&path).map_err(|error| {
        let shown = path.display();
        let failed = Error::from_io("end the journal of a copy", &error);
        let context = format!("Could not remove '{shown}', which speaks of '{name}' as it was");
        failed.context("end the journal of a copy", context)
    })?;
    match ended {
        true => Ok(()),
        false => {
            let message = format!(
                "'{name}' is being made: somebody else is using '{}'",
                path.display()
            );
            Err(Error::new(ErrorKind::Locked, "open", message).target(name))
        }
    }
}

/// Says whether it has ended, or nobody has begun it; `false` if another process has it.
fn end_journal(path: &Path) -> io::Result<bool> {
    for _ in 0..ATTEMPTS {
        let Some(journal) = open(path)? else {
            return Ok(true);
        };
        match flock(&journal, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if !is_named(&journal, path) => {}
            Ok(()) => return remove(&journal, path).map(|()| true),
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(PAUSE),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(false)
}

/// The journal; `None` where there is none, or what has its name is none.
fn open(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    match sys::open(path, flags) {
        Ok(fd) => {
            let file = File::from(fd);
            Ok(file.metadata()?.is_file().then_some(file))
        }
        Err(libc::ENOENT) => Ok(None),
        // A folder, say, or a name that is too long to be had.
        Err(_) if !std::fs::symlink_metadata(path).is_ok_and(|found| found.is_file()) => Ok(None),
        // Another user's, whose copy has ended if the file's locks could be had.
        Err(libc::EACCES) => std::fs::remove_file(path).map(|()| None),
        Err(errno) => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Who had the lock before may have replaced or removed it.
fn is_named(journal: &File, path: &Path) -> bool {
    let place = |file: std::fs::Metadata| (file.dev(), file.ino());
    let named = std::fs::symlink_metadata(path).map(place);
    journal.metadata().map(place).ok() == named.ok()
}

fn remove(journal: &File, path: &Path) -> io::Result<()> {
    // An empty one says nothing, which is enough where names may not be removed.
    journal.set_len(0)?;
    journal.sync_all()?;
    let _ = std::fs::remove_file(path);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::file::Create;
    use crate::{FileOptions, FileStorage};

    #[test]
    fn whoever_opens_a_file_to_change_it_ends_its_journal() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("target"), "content").expect("a file");
        symlink("target", at("link")).expect("a link");
        let journal = path_of(&at("link"));
        assert_eq!(journal, at("target.vellum-journal"));
        assert_eq!(path_of(Path::new("new")), Path::new("new.vellum-journal"));
        let begin = || std::fs::write(&journal, "{}").expect("a journal");
        begin();
        let read_only = FileOptions::default().read_only(true);
        drop(FileStorage::open(at("link"), &read_only).expect("the file"));
        assert!(journal.exists(), "nobody has changed the file");
        for options in [
            FileOptions::default(),
            FileOptions::default().create(Create::Truncate),
        ] {
            begin();
            drop(FileStorage::open(at("link"), &options).expect("the file"));
            assert!(!journal.exists(), "{options:?}");
        }
    }

    #[test]
    fn a_copy_that_runs_keeps_its_journal() {
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("target");
        std::fs::write(&target, "content").expect("a file");
        let journal = File::create(path_of(&target)).expect("a journal");
        flock(&journal, FlockOperation::LockExclusive).expect("the lock");
        let create = FileOptions::default().create(Create::Truncate);
        let refused = FileStorage::open(&target, &create).expect_err("it is being made");
        assert_eq!(refused.kind(), ErrorKind::Locked);
        assert!(refused.message().contains("is being made"), "{refused}");
        assert_eq!(std::fs::read(&target).expect("the file"), b"content");
        assert!(path_of(&target).exists());
    }

    #[test]
    fn what_is_no_file_is_no_journal() {
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("target");
        std::fs::write(&target, "content").expect("a file");
        std::fs::create_dir(path_of(&target)).expect("room");
        FileStorage::open(&target, &FileOptions::default()).expect("the file");
    }
}
