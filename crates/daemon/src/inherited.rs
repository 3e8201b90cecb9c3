//! Sockets that the program was started with: addresses of type `fd`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::net::sockopt::socket_type;
use vellum_export::nbd::Listener;
use vellum_io::lane::net;

use crate::failure::{Failure, failure, message};

/// So many clients may wait for a monitor.
const BACKLOG: i32 = 1;

fn no_socket(number: &str) -> Failure {
    message(format!("File descriptor '{number}' is not a socket"))
}

/// Listens on the socket of this number.
///
/// # Errors
/// In QEMU's words if there is no such number or no such socket.
pub(super) fn inherited(number: &str) -> Result<Listener, Failure> {
    let fd: RawFd = number
        .parse()
        .map_err(|_| message(format!("No file descriptor named '{number}' found")))?;
    // Standard streams are no sockets to listen on.
    let own = duplicate(fd).filter(|_| fd > 2);
    let own = own.ok_or_else(|| no_socket(number))?;
    Listener::from_fd(own).map_err(|_| no_socket(number))
}

/// The socket of this number, which a character device is to be.
///
/// # Errors
/// In QEMU's words if it is no number, or none of a socket.
pub(super) fn chardev_socket(number: &str) -> Result<OwnedFd, Failure> {
    let fd: RawFd = number.parse().map_err(|_| {
        let text = format!("Unable to parse FD number {number}");
        message(text.trim_end())
    })?;
    let own = duplicate(fd).ok_or_else(|| no_socket(number))?;
    match socket_type(own.as_fd()) {
        Ok(_) => Ok(own),
        Err(_) => Err(no_socket(number)),
    }
}

/// Listens on the socket of this number for clients of a character device.
///
/// # Errors
/// As [`chardev_socket`]; what the system says if it cannot listen.
pub(super) fn chardev_listener(number: &str) -> Result<net::Listener, Failure> {
    let own = chardev_socket(number)?;
    rustix::net::listen(&own, BACKLOG).map_err(|errno| {
        let error = vellum::Error::from_errno("listen", errno.raw_os_error());
        message(format!(
            "Failed to listen on fd socket: {}",
            vellum_options::error_text(&error)
        ))
    })?;
    net::Listener::from_fd(own).map_err(failure)
}

/// A descriptor of the same file; none if there is no such number.
fn duplicate(fd: RawFd) -> Option<OwnedFd> {
    if fd < 0 || std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_err() {
        return None;
    }
    // SAFETY: not -1, and open, as was just seen. Whoever named the number on the command line means
    // what it was opened for; should it be closed at this moment, duplicating it fails.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    borrowed.try_clone_to_owned().ok()
}
