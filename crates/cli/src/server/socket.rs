//! Unix sockets on which another server may be listening already.

use std::fs;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::report;

/// A server whose queue is full keeps whoever connects waiting.
const PATIENCE: Duration = Duration::from_secs(1);

/// Refuses to take the place of a socket on which a server listens, or of a file that is no
/// socket: neither could be had again. What a dead server has left may be replaced, and under
/// the names of QEMU's programs everything is, as there.
///
/// # Errors
/// What a person should read.
pub fn check_free(path: &str) -> Result<(), String> {
    if report::program().starts_with("qemu-") {
        return Ok(());
    }
    let why = match fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(found) if !found.file_type().is_socket() => "it is no socket; choose another path",
        Ok(_) => match is_live(Path::new(path)) {
            Ok(true) => "a server listens there; end that first, or choose another path",
            Ok(false) => return Ok(()),
            Err(error) => {
                return Err(format!(
                    "Failed to bind socket to {path}: {}",
                    error.message()
                ));
            }
        },
    };
    Err(format!("Failed to bind socket to {path}: {why}"))
}

/// Whether somebody answers at `path`. A server that was killed can hold its socket for a
/// while after its end was told (the kernel still takes its rings apart): whoever connects
/// then is thrown out, so only a connection that lasts, or that is greeted, counts.
fn is_live(path: &Path) -> vellum::Result<bool> {
    let (sender, receiver) = channel();
    let path = path.to_owned();
    let asking = move || {
        // Nobody listens to the answer only if it comes too late.
        let _ = sender.send(is_answered(&path));
    };
    let started = std::thread::Builder::new().spawn(asking);
    started.map_err(|error| vellum::Error::no_thread(&error))?;
    Ok(receiver.recv_timeout(PATIENCE).unwrap_or(true))
}

fn is_answered(path: &Path) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let Ok(mut stream) = UnixStream::connect(path) else {
            return false;
        };
        let greeted = stream
            .set_read_timeout(Some(PATIENCE))
            .and_then(|()| stream.read(&mut [0]));
        if greeted.is_ok_and(|count| count > 0) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}
