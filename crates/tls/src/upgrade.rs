//! [`Client`] and [`Server`]: how the NBD handshake puts a socket under TLS.

use std::sync::Arc;

use vellum_io::Io;
use vellum_io::lane::net::Stream;
use vellum_nbd::{Secured, Upgrade};

use crate::authorizer::Authorizer;
use crate::credentials::Credentials;
use crate::session;

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
