//! Where an NBD server is, and how its client behaves.

use std::net::ToSocketAddrs;
use std::sync::Arc;
use std::time::Duration;

use vellum_io::lane::net::Stream;
use vellum_io::{Error, Io, Result, lane};

use crate::channel::{Channel, Upgrade};

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A unix socket.
    Unix(String),
    /// A host (name or number) and a port.
    Tcp {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
}

impl Address {
    /// The host that a certificate should name, if there is one.
    pub fn host(&self) -> Option<&str> {
        match self {
            Address::Unix(_) => None,
            Address::Tcp { host, .. } => Some(host),
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Unix(path) => f.write_str(path),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// Connects to a server; nothing is said yet.
///
/// # Errors
/// In QEMU's words, if nobody listens there.
pub async fn connect(address: &Address) -> Result<Channel> {
    let connected = match address {
        Address::Unix(path) => Stream::connect_unix(path.as_ref()).await,
        Address::Tcp { host, port } => Stream::connect_tcp(host, *port).await,
    };
    match connected {
        Ok(stream) => Ok(Channel::from(stream)),
        Err(error) => Err(cannot_connect(address, &error).await),
    }
}

/// Why a server cannot be reached; a name that means nothing shows like a host that
/// cannot be.
async fn cannot_connect(address: &Address, error: &Error) -> Error {
    let mut message = format!("Failed to connect to '{address}': {}", error.message());
    if let (Address::Tcp { host, port }, libc::EHOSTUNREACH) = (address, error.errno()) {
        let place = (host.clone(), *port);
        let resolved = lane::compute(move || place.to_socket_addrs().map(drop)).await;
        if let Err(cause) = resolved {
            let cause = cause.to_string();
            let reason = cause.rsplit(": ").next().unwrap_or_default();
            message = format!("address resolution failed for {address}: {reason}");
        }
    }
    Error::new(error.kind(), "connect", message).with_errno(error.errno())
}

/// Makes connections instead of the system: those of a simulation, which implements this.
pub trait Dial: Send + Sync + std::fmt::Debug {
    /// Connects to a server.
    ///
    /// # Errors
    /// If nobody listens there.
    fn dial(self: Arc<Self>, address: &Address) -> Io<Stream>;
}

/// What to open, and how.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// The name for messages.
    pub name: String,
    /// The server.
    pub address: Address,
    /// The export.
    pub export: String,
    /// Changes are wanted: an export that refuses them is not opened.
    pub writable: bool,
    /// The metadata context to ask for instead of `base:allocation`.
    pub dirty_bitmap: Option<String>,
    /// How long requests wait for a lost connection to come back.
    pub reconnect_delay: Duration,
    /// How long opening goes on trying to connect.
    pub open_timeout: Duration,
    /// Insists on TLS.
    pub tls: Option<Arc<dyn Upgrade>>,
    /// Connects instead of the system.
    pub dial: Option<Arc<dyn Dial>>,
    /// Most connections, if the server allows several.
    pub max_connections: usize,
}

impl ClientOptions {
    /// The default export of a server.
    pub fn new(name: impl Into<String>, address: Address) -> Self {
        ClientOptions {
            name: name.into(),
            address,
            export: String::new(),
            writable: false,
            dirty_bitmap: None,
            reconnect_delay: Duration::ZERO,
            open_timeout: Duration::ZERO,
            tls: None,
            dial: None,
            max_connections: vellum_io::lane::compute_threads().clamp(1, 16),
        }
    }
}
