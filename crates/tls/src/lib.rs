//! TLS around the sockets of NBD connections: X.509 certificates, pre-shared keys and,
//! where nobody minds who listens, anonymous Diffie-Hellman.
//!
//! [`Credentials`] are what a user's `--object tls-creds-…` names; [`Client`] and
//! [`Server`] secure connections with them. One library does all three kinds, OpenSSL:
//! rustls has no pre-shared keys from outside.
//!
//! Invariants:
//! - A peer is looked at after the handshake and before its first byte is used: that it has
//!   the key, or its certificate, the name in it, and who may come in.
//! - Nothing is resumed: every session proves everything anew.
//! - Keys are read once, appear in no message, and are wiped when they are dropped.
//! - No lock is held across an await, but for the turn to send.
//! - Whoever receives waits for nobody who sends.
//! - OpenSSL is loaded with the first [`Credentials`] (`library`): who needs no TLS neither
//!   waits for it nor needs it.
//! - A client shows who it is only to a server that may believe it (`choose`).
#![deny(unsafe_code)]
#![deny(clippy::missing_errors_doc)]

mod choose;
mod credentials;
mod keys;
// Elsewhere the program is linked to OpenSSL, or contains it.
#[cfg_attr(
    not(all(
        target_os = "linux",
        target_env = "gnu",
        any(target_arch = "x86_64", target_arch = "aarch64")
    )),
    path = "linked.rs"
)]
mod library;
mod peer;
mod session;

use std::sync::Arc;

use vellum_io::lane::net::Stream;
use vellum_io::{Error, ErrorKind, Io};
use vellum_nbd::{Secured, Upgrade};

pub use credentials::{Credentials, CredentialsOptions, Endpoint, Kind};

/// The operation that every error here names.
const OPERATION: &str = vellum_nbd::client::handshake::TLS_OPERATION;

fn error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Protocol, OPERATION, message).with_errno(libc::EINVAL)
}

/// Decides who may come in, by the name in the certificate. Whoever runs a server implements it.
pub trait Authorizer: Send + Sync + std::fmt::Debug {
    /// Whether that name may.
    ///
    /// # Errors
    /// If nobody can tell; then the peer stays out.
    fn is_allowed(&self, identity: &str) -> vellum_io::Result<bool>;
}

/// Secures connections to servers.
#[derive(Debug)]
pub struct Client {
    credentials: Arc<Credentials>,
    hostname: Option<String>,
}

impl Client {
    /// For a server whose certificate must be for `hostname`.
    pub fn new(credentials: Arc<Credentials>, hostname: Option<String>) -> Self {
        Client {
            credentials,
            hostname,
        }
    }
}

impl Upgrade for Client {
    fn upgrade(&self, stream: Stream) -> Io<Arc<dyn Secured>> {
        let (credentials, hostname) = (self.credentials.clone(), self.hostname.clone());
        Io::boxed(async move {
            let secured = session::connect(&credentials, hostname.as_deref(), stream).await?;
            Ok(secured as Arc<dyn Secured>)
        })
    }
}

/// Secures connections of clients.
#[derive(Debug)]
pub struct Server {
    credentials: Arc<Credentials>,
    authorizer: Option<Arc<dyn Authorizer>>,
}

impl Server {
    /// For clients that the authorizer lets in.
    pub fn new(credentials: Arc<Credentials>, authorizer: Option<Arc<dyn Authorizer>>) -> Self {
        Server {
            credentials,
            authorizer,
        }
    }
}

impl Upgrade for Server {
    fn upgrade(&self, stream: Stream) -> Io<Arc<dyn Secured>> {
        let (credentials, authorizer) = (self.credentials.clone(), self.authorizer.clone());
        Io::boxed(async move {
            let secured = session::accept(&credentials, authorizer.as_deref(), stream).await?;
            Ok(secured as Arc<dyn Secured>)
        })
    }
}
