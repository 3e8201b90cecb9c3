//! Going to the background, and what a service manager hands down.
//!
//! The only `unsafe` code of the command line: a few system calls that the
//! standard library does not offer.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The first descriptor of socket activation.
const FIRST_ACTIVATED_FD: RawFd = 3;

/// Which process this is after [`fork`].
pub(crate) enum Side {
    /// The caller's: it waits for the other one.
    Parent(Parent),
    /// The one that goes on in the background.
    Child(Ready),
}

/// Waits for the child to be ready.
pub(crate) struct Parent(File);

/// Tells the parent that the child is ready.
pub(crate) struct Ready(File);

/// Splits off a process in a session of its own. Must be called before any
/// thread is started.
pub(crate) fn fork() -> io::Result<Side> {
    let (reader, writer) = io::pipe()?;
    // SAFETY: the program has no other threads yet, so the child may go on with
    // everything that the parent could do.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(reader);
            // SAFETY: no memory is involved. It fails only for a group leader,
            // which a fresh child is not.
            unsafe { libc::setsid() };
            Ok(Side::Child(Ready(OwnedFd::from(writer).into())))
        }
        _ => {
            drop(writer);
            Ok(Side::Parent(Parent(OwnedFd::from(reader).into())))
        }
    }
}

impl Parent {
    /// Waits; whether the child made it (if not, it has said why).
    pub(crate) fn wait(mut self) -> bool {
        self.0.read_exact(&mut [0]).is_ok()
    }
}

impl Ready {
    /// Leaves the terminal (all but errors, if `keep_errors`) and lets the parent go.
    pub(crate) fn tell(mut self, keep_errors: bool) -> io::Result<()> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        let last = if keep_errors {
            libc::STDOUT_FILENO
        } else {
            libc::STDERR_FILENO
        };
        for standard in libc::STDIN_FILENO..=last {
            // SAFETY: no memory is involved; both descriptors are open.
            if unsafe { libc::dup2(null.as_raw_fd(), standard) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        self.0.write_all(&[1])
    }
}

/// How many sockets a service manager has handed down to this process.
pub(crate) fn activated_sockets() -> RawFd {
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
pub(crate) fn take_sockets(count: RawFd) -> Result<Vec<OwnedFd>, String> {
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
