//! Opening the socket that a server listens on.

use std::path::Path;

use vellum_daemon::{InetAddress, bind_failure};
use vellum_export::nbd::Listener;

use super::activation::{handed_tcp, handed_unix};
use super::{Failure, check_free};
use crate::report;

/// Longest path in bytes that a unix socket can have, with its terminator.
const MAX_SOCKET_PATH_BYTES: usize = 108;

/// Listens on a unix socket.
pub fn listen_unix(path: &str) -> Result<Listener, Failure> {
    if path.len() >= MAX_SOCKET_PATH_BYTES {
        return Err(Failure::message(format!(
            "UNIX socket path '{path}' is too long\nPath must be less than \
             {MAX_SOCKET_PATH_BYTES} bytes"
        )));
    }
    if let Some(handed) = handed_unix(path) {
        return Ok(Listener::from_fd(handed)?);
    }
    check_free(path).map_err(Failure::Message)?;
    Listener::bind_unix(Path::new(path)).map_err(|error| {
        let text = report::error_text(&error);
        Failure::message(format!("Failed to bind socket to {path}: {text}"))
    })
}

/// Listens on a network.
pub fn listen_tcp(address: &InetAddress) -> Result<Listener, Failure> {
    let addresses = address.to_listen_at()?;
    if let Some(handed) = handed_tcp(&addresses) {
        return Ok(Listener::from_fd(handed)?);
    }
    Listener::bind_tcp(&addresses[..]).map_err(|error| bind_failure(&error).into())
}

/// The failure for a port that is no number.
pub fn bad_port(host: &str, port: &str) -> Failure {
    Failure::message(format!(
        "address resolution failed for {host}:{port}: Servname not supported for ai_socktype"
    ))
}
