//! Another descriptor for the same mount, with a queue of answers of its own.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::ioctl::{Opcode, Setter, opcode};
use vellum_io::{Error, Result};

use super::mount::open_device;

/// `FUSE_DEV_IOC_CLONE` of `linux/fuse.h`.
const CLONE: Opcode = opcode::read::<u32>(229, 0);

/// Another descriptor for the mount that `device` serves.
///
/// # Errors
/// What the system says.
pub(super) fn clone(device: BorrowedFd<'_>) -> Result<OwnedFd> {
    let new = open_device()?;
    let old = device.as_raw_fd() as u32;
    // SAFETY: this request reads a 32-bit number, the descriptor, and writes nothing.
    let request = unsafe { Setter::<CLONE, u32>::new(old) };
    // SAFETY: as above; both descriptors are open for the whole call.
    let cloned = unsafe { rustix::ioctl::ioctl(&new, request) };
    cloned.map_err(|errno| Error::from_errno("clone", errno.raw_os_error()).target("/dev/fuse"))?;
    Ok(new)
}
