//! The descriptors that come with messages.

use std::os::fd::OwnedFd;

use rustix::fs::FileType;
use vellum_io::{Error, Result};

use super::message::broken;

/// The only descriptor of a message.
pub(super) fn single(descriptors: Vec<OwnedFd>) -> Result<OwnedFd> {
    let count = descriptors.len();
    match <[OwnedFd; 1]>::try_from(descriptors) {
        Ok([only]) => Ok(only),
        Err(_) => Err(broken(format!("{count} descriptors instead of one"))),
    }
}

/// The descriptor of a message that says whether it has one: an event counter, at which nobody waits
/// unless its client wants that (see `signals.rs`).
pub(super) fn optional(descriptors: Vec<OwnedFd>, has_descriptor: bool) -> Result<Option<OwnedFd>> {
    if !has_descriptor && descriptors.is_empty() {
        return Ok(None);
    }
    let descriptor = single(descriptors)?;
    let failed =
        |errno: rustix::io::Errno| Error::from_errno("take descriptor", errno.raw_os_error());
    let found = rustix::fs::fstat(&descriptor).map_err(failed)?;
    // An event counter is no file of any kind. What is one may always be ready; who waits for room
    // in a pipe or socket could not be freed.
    match FileType::from_raw_mode(found.st_mode) {
        FileType::Unknown => {}
        _ => return Err(broken("a descriptor that counts no events")),
    }
    let set = rustix::io::ioctl_fionbio(&descriptor, true);
    set.map_err(failed)?;
    Ok(Some(descriptor))
}

/// Another descriptor of the same; none where the system has no more.
pub(super) fn duplicate(descriptor: &Option<OwnedFd>) -> Option<OwnedFd> {
    descriptor.as_ref()?.try_clone().ok()
}
