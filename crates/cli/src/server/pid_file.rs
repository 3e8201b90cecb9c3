//! The file with the process id of a server (`--pid-file`).

use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FlockOperation, fcntl_lock, linkat};
use vellum_io::error::io_text;

use super::Failure;

/// Writes the id of this process into a file, which stays locked until the process
/// ends: as QEMU does, so that of two servers with one such file the second refuses.
pub fn write_pid_file(path: &str) -> Result<(), Failure> {
    if let Some(file) = appear_whole(path) {
        // The lock is the process's, and given up when it closes the file.
        std::mem::forget(file);
        return Ok(());
    }
    let failed = |what: &str, error: std::io::Error| {
        Failure::message(format!("{what}: {}", io_text(&error)))
    };
    let mut file = loop {
        let file = fs::File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|error| failed(&format!("Could not create '{path}'"), error))?;
        let lock = fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive);
        lock.map_err(|errno| failed("Cannot lock pid file", errno.into()))?;
        let own = file.metadata();
        let own = own.map_err(|error| failed("Cannot stat file", error))?;
        // Who had the lock before may have removed the file.
        let named = fs::metadata(path);
        if named.is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino())) {
            break file;
        }
    };
    file.set_len(0)
        .map_err(|error| failed("Failed to truncate pid file", error))?;
    writeln!(file, "{}", std::process::id())
        .map_err(|error| failed("Failed to write pid file", error))?;
    std::mem::forget(file);
    Ok(())
}

/// A file that has its lock and the id before it has a name, so that whoever waits for it never
/// reads an empty one. `None` if there is one already, or the file system has no such files.
fn appear_whole(path: &str) -> Option<fs::File> {
    let folder = match Path::new(path).parent()? {
        folder if folder.as_os_str().is_empty() => Path::new("."),
        folder => folder,
    };
    let mut options = fs::File::options();
    let options = options.write(true).custom_flags(libc::O_TMPFILE);
    let mut file = options.mode(0o600).open(folder).ok()?;
    fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    writeln!(file, "{}", std::process::id()).ok()?;
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    linkat(CWD, own, CWD, path, AtFlags::SYMLINK_FOLLOW).ok()?;
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_whole_and_only_where_there_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pid");
        let word = path.to_str().expect("a path of letters");
        let file = appear_whole(word).expect("a new file");
        let id = format!("{}\n", std::process::id());
        assert_eq!(fs::read_to_string(&path).expect("the file"), id);
        let named = fs::metadata(&path).expect("the file");
        assert_eq!(named.ino(), file.metadata().expect("the file").ino());
        assert!(appear_whole(word).is_none());
    }
}
