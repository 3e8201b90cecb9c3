//! Sockets that somebody may listen on already.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::report;

/// A server whose queue is full keeps whoever connects waiting.
const PATIENCE: Duration = Duration::from_secs(1);

/// Refuses to take the place of a socket on which a server listens, or of a file that is no
/// socket: neither could be had again. What a dead server has left may be replaced, and under
/// the names of QEMU's programs everything is, as there.
///
/// # Errors
/// What a person should read.
pub(crate) fn check_free(path: &str) -> Result<(), String> {
    if report::program().starts_with("qemu-") {
        return Ok(());
    }
    let why = match fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(found) if !found.file_type().is_socket() => "it is no socket; choose another path",
        Ok(_) if is_live(Path::new(path)) => {
            "a server listens there; end that first, or choose another path"
        }
        Ok(_) => return Ok(()),
    };
    Err(format!("Failed to bind socket to {path}: {why}"))
}

fn is_live(path: &Path) -> bool {
    let (sender, receiver) = channel();
    let path = path.to_owned();
    std::thread::spawn(move || {
        // Nobody listens to the answer only if it comes too late.
        let _ = sender.send(UnixStream::connect(path).is_ok());
    });
    receiver.recv_timeout(PATIENCE).unwrap_or(true)
}
