//! Sockets that wait for clients: unix and TCP.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use vellum_io::lane::net::{self, ListenerBackend, Stream};
use vellum_io::{Error, Result};

/// After so long without a word a client is asked whether it is there;
const SILENCE: Duration = Duration::from_secs(60);
/// again after so long,
const BETWEEN_PROBES: Duration = Duration::from_secs(15);
/// and so often before it is given up.
const PROBES: u32 = 4;

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    socket: net::Listener,
    /// The path to remove when the listener goes.
    path: Option<PathBuf>,
}

impl Listener {
    /// Listens on a new unix socket at `path`, in place of what was there. The
    /// socket is removed when the listener is dropped.
    ///
    /// # Errors
    /// What the system says if the old file cannot be removed or the socket cannot be made.
    pub fn bind_unix(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(Error::from_io("unlink", &error).target(path.display().to_string()));
            }
            _ => {}
        }
        Ok(Listener {
            socket: net::Listener::unix(path)?,
            path: Some(path.to_owned()),
        })
    }

    /// Listens on a TCP address.
    ///
    /// # Errors
    /// What the system says if the name is not found, or the address cannot be listened on.
    pub fn bind_tcp(address: impl ToSocketAddrs + fmt::Debug) -> Result<Self> {
        Ok(Listener {
            socket: net::Listener::tcp(address)?,
            path: None,
        })
    }

    /// Takes over a socket that listens already, as a service manager hands it down.
    ///
    /// # Errors
    /// If it is no unix or TCP socket.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        let fd = check_socket(fd).map_err(|error| Error::from_io("listen", &error))?;
        Ok(Listener {
            socket: net::Listener::from_fd(fd)?,
            path: None,
        })
    }

    /// One of a simulation.
    pub fn simulated(port: Arc<dyn ListenerBackend>) -> Self {
        Listener {
            socket: net::Listener::simulated(port),
            path: None,
        }
    }

    /// The port of a TCP listener.
    ///
    /// # Errors
    /// If this is no TCP listener.
    pub fn port(&self) -> Result<u16> {
        Ok(self.socket.local_address()?.port())
    }

    pub(crate) async fn accept(&self) -> Result<Stream> {
        let stream = self.socket.accept().await?;
        // One of a simulation has none, and needs none.
        if let Ok(socket) = stream.to_fd() {
            keep_alive(&socket);
        }
        Ok(stream)
    }
}

/// Has the system notice a client whose machine is gone without a word, while nothing is sent to it:
/// its requests may wait for room, and must not be done long after others went on. There is no limit to how
/// long data may wait for a client to read (`TCP_USER_TIMEOUT`): one that is stopped is there all the same.
fn keep_alive(socket: &OwnedFd) {
    // A unix socket has no such options: it knows at once.
    let _ = sockopt::set_socket_keepalive(socket, true)
        .and_then(|()| sockopt::set_tcp_keepidle(socket, SILENCE))
        .and_then(|()| sockopt::set_tcp_keepintvl(socket, BETWEEN_PROBES))
        .and_then(|()| sockopt::set_tcp_keepcnt(socket, PROBES));
}

/// Gives the socket back if it has a unix or an IP address.
fn check_socket(fd: OwnedFd) -> io::Result<OwnedFd> {
    let unix = UnixListener::from(fd);
    if unix.local_addr().is_ok() {
        return Ok(unix.into());
    }
    let tcp = TcpListener::from(OwnedFd::from(unix));
    tcp.local_addr()?;
    Ok(tcp.into())
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Somebody may have removed it already.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane;

    use super::*;

    #[test]
    fn who_is_silent_is_asked_whether_it_is_there() {
        let listener = Listener::bind_tcp("127.0.0.1:0").expect("a socket");
        let port = listener.port().expect("a port");
        let _client = std::net::TcpStream::connect(("127.0.0.1", port)).expect("a client");
        let accepted = lane::block_on(listener.accept()).expect("accepted");
        let socket = accepted.to_fd().expect("a socket");
        assert!(sockopt::socket_keepalive(&socket).expect("an option"));
        let silence = sockopt::tcp_keepidle(&socket).expect("an option");
        assert_eq!(silence, SILENCE);
    }
}
