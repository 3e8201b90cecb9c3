//! Socket activation: takes over the listening sockets that a service manager (systemd) passes in
//! `LISTEN_FDS`.
//!
//! Invariant: they are taken once, before the program opens anything, so that no descriptor of its
//! own is mistaken for one of them.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// The first descriptor of socket activation.
const FIRST_ACTIVATED_FD: RawFd = 3;

/// How many sockets a service manager has handed down to this process.
pub(super) fn activated_sockets() -> RawFd {
    let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
    match (number("LISTEN_PID"), number("LISTEN_FDS")) {
        (Some(pid), Some(count)) if pid == std::process::id() => {
            RawFd::try_from(count).unwrap_or(0)
        }
        _ => 0,
    }
}

/// Takes over the sockets that were handed down. Must be called once, before
/// the program opens anything.
pub(super) fn take_sockets(count: RawFd) -> Result<Vec<OwnedFd>, String> {
    let end = FIRST_ACTIVATED_FD.saturating_add(count);
    (FIRST_ACTIVATED_FD..end).map(take_socket).collect()
}

fn take_socket(fd: RawFd) -> Result<OwnedFd, String> {
    // SAFETY: no memory is involved; the call only asks whether `fd` is open.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        let error = vellum_io::error::errno_text(
            io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EBADF),
        );
        return Err(format!(
            "Socket activation failed: invalid file descriptor fd = {fd}: {error}"
        ));
    }
    // SAFETY: it is open, and by the protocol of socket activation it is this
    // program's to close; nobody else here knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
