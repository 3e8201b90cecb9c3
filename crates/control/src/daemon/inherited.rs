//! Sockets that the program was started with: addresses of type `fd`.

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use vellum_export::nbd::Listener;

use super::{Failure, message};

/// Listens on the socket of this number.
///
/// # Errors
/// In QEMU's words if there is no such number or no such socket.
pub(super) fn inherited(number: &str) -> Result<Listener, Failure> {
    let refuse = || message(format!("File descriptor '{number}' is not a socket"));
    let fd: RawFd = number
        .parse()
        .map_err(|_| message(format!("No file descriptor named '{number}' found")))?;
    let own = duplicate(fd).ok_or_else(refuse)?;
    Listener::from_fd(own).map_err(|_| refuse())
}

/// A descriptor of the same file; none if there is no such number.
fn duplicate(fd: RawFd) -> Option<OwnedFd> {
    // Its standard streams are no sockets to listen on.
    if fd < 3 || std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_err() {
        return None;
    }
    // SAFETY: not -1, and open, as was just seen. Whoever named the number on the command line means
    // what it was opened for; should it be closed at this moment, duplicating it fails.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    borrowed.try_clone_to_owned().ok()
}
