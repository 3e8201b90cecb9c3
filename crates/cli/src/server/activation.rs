//! Socket activation: takes over the listening sockets that a service manager (systemd) passes in
//! `LISTEN_FDS`.
//!
//! `nbd` serves what it is given. The daemon keeps its sockets here ([`keep_sockets`]) until somebody
//! is to listen where one of them does, or takes it by the name that it has in `LISTEN_FDNAMES`.
//!
//! Invariant: they are taken once, before the program opens anything, so that no descriptor of its
//! own is mistaken for one of them.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use parking_lot::Mutex;

/// The first descriptor of socket activation.
const FIRST_ACTIVATED_FD: RawFd = 3;

/// How many sockets a service manager has handed down to this process.
pub fn activated_sockets() -> RawFd {
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
pub fn take_sockets(count: RawFd) -> Result<Vec<OwnedFd>, String> {
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

/// A socket that nobody listens on yet, with the name that the service manager gave it.
#[derive(Debug)]
pub struct HandedSocket {
    /// Its name; `unknown` if it has none.
    pub name: String,
    fd: OwnedFd,
}

static KEPT: Mutex<Vec<HandedSocket>> = Mutex::new(Vec::new());

/// Takes over all sockets that were handed down, and keeps them. Must be called once, before the
/// program opens anything.
///
/// # Errors
/// If one of them is not there.
pub fn keep_sockets() -> Result<(), String> {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':').filter(|name| !name.is_empty());
    for fd in take_sockets(activated_sockets())? {
        let name = names.next().unwrap_or("unknown").to_owned();
        KEPT.lock().push(HandedSocket { name, fd });
    }
    Ok(())
}

/// The socket that listens at a path, if it was handed down and nobody has taken it.
pub fn handed_unix(path: &str) -> Option<OwnedFd> {
    let wanted = std::path::absolute(path).ok()?;
    take_where(|fd| {
        let listener = UnixListener::from(fd.try_clone().ok()?);
        let address = listener.local_addr().ok()?;
        Some(address.as_pathname().map(Path::to_owned) == Some(wanted.clone()))
    })
}

/// The socket that listens at one of some addresses, as [`handed_unix`].
pub fn handed_tcp(addresses: &[SocketAddr]) -> Option<OwnedFd> {
    take_where(|fd| {
        let listener = TcpListener::from(fd.try_clone().ok()?);
        Some(addresses.contains(&listener.local_addr().ok()?))
    })
}

fn take_where(is_wanted: impl Fn(&OwnedFd) -> Option<bool>) -> Option<OwnedFd> {
    let mut kept = KEPT.lock();
    let at = kept
        .iter()
        .position(|one| is_wanted(&one.fd) == Some(true))?;
    Some(kept.remove(at).fd)
}

/// The names of the sockets that nobody has taken.
pub fn left_sockets() -> Vec<String> {
    KEPT.lock().iter().map(|one| one.name.clone()).collect()
}

/// The number of a socket that nobody has taken, by its name. It stays open, for whoever is told
/// that number.
pub fn take_by_name(name: &str) -> Option<RawFd> {
    let mut kept = KEPT.lock();
    let at = kept.iter().position(|one| one.name == name)?;
    let number = kept[at].fd.as_raw_fd();
    // By the protocol it is this program's for as long as that runs.
    std::mem::forget(kept.remove(at).fd);
    Some(number)
}
