//! The journal of a copy that was interrupted: a file beside its target, which says what of that is in its place.
//!
//! Who makes such copies reads and writes it (`vellum convert --journal`). Here is what everybody else has to do with it.
//!
//! Invariant: whoever opens a file to change it ends the journal that speaks of it, durably and before the first byte is
//! changed. So no copy goes on over what another one, a guest or a job has written since.
//!
//! A journal is ended in two ways. The one beside the file is removed, which its name is known by. And each file of the
//! target is marked, by an extended attribute with the number of the copy that the journal has too: the mark belongs
//! to the file whatever name it was opened by, and to data files and extents as well. Without all of its marks a journal counts for
//! nothing. Where the file system has no such attributes, the first way is all there is: a target is one file with
//! one name then, and who has moved it away and back meanwhile is not noticed.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{
    FlockOperation, OFlags, XattrFlags, fgetxattr, flock, fremovexattr, fsetxattr, fsync,
};
use rustix::io::Errno;

use crate::sys;
use vellum_io::{Error, ErrorKind, Result};

/// What its name has behind that of the target.
const SUFFIX: &str = ".vellum-journal";

/// The extended attribute of the files that a journal speaks of.
const MARK: &str = "user.vellum.copy-journal";

/// The longest that a mark may be.
const MAX_MARK_BYTES: usize = 64;

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

/// Marks a file as one that the journal of the copy `id` speaks of, durably. Says `false` where the file system has no
/// extended attributes.
///
/// # Errors
/// What the system says.
pub fn mark(file: impl AsFd, id: &str) -> io::Result<bool> {
    match fsetxattr(&file, MARK, id.as_bytes(), XattrFlags::empty()) {
        Ok(()) => {
            fsync(&file)?;
            Ok(true)
        }
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether a file has the mark of the copy `id` still: nobody here has opened it to change it since.
#[must_use]
pub fn is_marked(file: impl AsFd, id: &str) -> bool {
    let mut found = [0; MAX_MARK_BYTES];
    fgetxattr(file, MARK, &mut found[..]).is_ok_and(|len| &found[..len] == id.as_bytes())
}

/// Removes the mark of a file, durably, if it has one.
///
/// # Errors
/// What the system says.
pub fn unmark(file: impl AsFd) -> io::Result<()> {
    // Looked for first: most files have none, and those of file systems without such attributes cannot.
    if fgetxattr(&file, MARK, &mut [0; 0][..]).is_err() {
        return Ok(());
    }
    match fremovexattr(&file, MARK) {
        Ok(()) => Ok(fsync(&file)?),
        Err(Errno::NODATA) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
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
        true => unmark(target).map_err(|error| {
            let failed = Error::from_io("end the journal of a copy", &error);
            let context = format!("Could not tell that '{name}' is not as a copy has left it");
            failed.context("end the journal of a copy", context)
        }),
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
            Err(Errno::WOULDBLOCK) => std::thread::sleep(PAUSE),
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
    fn a_mark_goes_with_the_file_whatever_it_is_called() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("target"), "content").expect("a file");
        let target = File::open(at("target")).expect("the file");
        unmark(&target).expect("it has none");
        if !mark(&target, "7").expect("a mark") {
            // The file system of temporary files has no such attributes.
            return;
        }
        assert!(is_marked(&target, "7") && !is_marked(&target, "8"));
        std::fs::hard_link(at("target"), at("other")).expect("a name");
        let read_only = FileOptions::default().read_only(true);
        drop(FileStorage::open(at("other"), &read_only).expect("the file"));
        assert!(is_marked(&target, "7"), "nobody has changed the file");
        drop(FileStorage::open(at("other"), &FileOptions::default()).expect("the file"));
        assert!(!is_marked(&target, "7"));
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
