//! Sockets that wait for clients: unix and TCP.

use std::fmt;
use std::io::ErrorKind;
use std::net::ToSocketAddrs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use vellum_storage::lane::net::{self, Stream};
use vellum_storage::{Error, Result};

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
    pub fn bind_tcp(address: impl ToSocketAddrs + fmt::Debug) -> Result<Self> {
        Ok(Listener {
            socket: net::Listener::tcp(address)?,
            path: None,
        })
    }

    /// Takes over a socket that listens already, as a service manager hands it down.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        Ok(Listener {
            socket: net::Listener::from_fd(fd)?,
            path: None,
        })
    }

    /// The port of a TCP listener.
    pub fn port(&self) -> Result<u16> {
        Ok(self.socket.local_address()?.port())
    }

    pub(super) async fn accept(&self) -> Result<Stream> {
        self.socket.accept().await
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Somebody may have removed it already.
            let _ = std::fs::remove_file(path);
        }
    }
}
