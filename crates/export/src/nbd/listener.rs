//! Sockets that wait for clients: unix and TCP.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_io::lane::net::{self, ListenerBackend, Stream};
use vellum_io::{Error, Result};

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
        self.socket.accept().await
    }
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
