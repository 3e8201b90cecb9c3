//! Whether descriptors are ready, and waiting until they are.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use super::descriptor::Descriptor;
use super::op::Op;
use super::request::Request;
use super::submit::{finish_unit, submit};
use crate::sys;
use crate::{Buffers, Error, Io};

/// Waits until `fd` can be read. Dropping the request ends the wait.
///
/// # Errors
/// What the system says, also where the thread can have no lane.
pub fn poll_readable(fd: BorrowedFd<'_>) -> Io<()> {
    poll_descriptor(fd, libc::POLLIN)
}

/// Whether whoever is at the other end of a socket sends nothing more, or is gone, whatever has
/// been received of what it has sent.
pub fn has_peer_left(fd: BorrowedFd<'_>) -> bool {
    sys::poll_once(fd.as_raw_fd(), libc::POLLRDHUP).is_ok()
}

/// Whether nobody is at the other end of a socket any more, neither to send nor to receive. A peer of
/// TCP that has gone is not told from one that only sends no more before something is sent to it.
pub fn has_hung_up(fd: BorrowedFd<'_>) -> bool {
    // POLLHUP and POLLERR are told of without being asked for.
    sys::poll_once(fd.as_raw_fd(), 0).is_ok()
}

/// Waits until `fd` can be written. Dropping the request ends the wait.
///
/// # Errors
/// As [`poll_readable`].
pub fn poll_writable(fd: BorrowedFd<'_>) -> Io<()> {
    poll_descriptor(fd, libc::POLLOUT)
}

fn poll_descriptor(fd: BorrowedFd<'_>, events: i16) -> Io<()> {
    // A duplicate: the request must own what it waits for.
    match fd.try_clone_to_owned() {
        Ok(fd) => {
            let file = Arc::new(Descriptor::new(fd, "descriptor"));
            submit(
                Request::new(file, Op::Poll { events }, Buffers::new()),
                finish_unit,
            )
        }
        Err(error) => Io::ready(Err(Error::from_io("poll", &error))),
    }
}
