//! The file with the process id of a server (`--pid-file`).

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use rustix::fs::{FlockOperation, fcntl_lock};
use vellum_io::error::io_text;

use super::Failure;

/// Writes the id of this process into a file, which stays locked until the process
/// ends: as QEMU does, so that of two servers with one such file the second refuses.
pub fn write_pid_file(path: &str) -> Result<(), Failure> {
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
    // The lock is the process's, and given up when it closes the file.
    std::mem::forget(file);
    Ok(())
}
