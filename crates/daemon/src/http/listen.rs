//! `--metrics`: where to listen, and for whom.
//!
//! Invariant: what other machines can reach has TLS and a token.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vellum_graph::{secret, tls};
use vellum_io::error::io_text;
use vellum_nbd::Upgrade;
use vellum_options::Options;

use crate::failure::{Failure, failure, message, need, refuse_rest};
use crate::server::ServerEnvironment;

use super::access::{Access, Token, Way};

/// Clients that wait to be taken in: as many as the kernel lets there be.
const BACKLOG: i32 = 4096;
/// Only the owner may connect.
const SOCKET_MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// A socket that listens, and what those may who come over it.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(super) socket: Socket,
    pub(super) access: Access,
    /// Secures connections.
    pub(super) tls: Option<Arc<dyn Upgrade>>,
}

/// A socket.
#[derive(Debug)]
pub(super) enum Socket {
    Unix(OwnedFd, SocketFile),
    Tcp(TcpListener),
}

/// The name of a socket, which goes with this.
#[derive(Debug)]
pub(super) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have removed it already.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Listens where the options say: `address`, `token-secret`, `tls-creds`.
///
/// # Errors
/// What is needed, where it could be reached from elsewhere; what the system says if it cannot listen.
pub(crate) fn bind(
    mut options: Options,
    environment: &ServerEnvironment,
) -> Result<Bound, Failure> {
    if cfg!(not(feature = "http")) {
        return Err(message("It requires a build with the feature 'http'"));
    }
    let address = need(&mut options, "address")?;
    let token = options.take_text("token-secret").map_err(failure)?;
    let credentials = options.take_text("tls-creds").map_err(failure)?;
    refuse_rest(&options)?;
    let token = token.map(|id| take_token(&id)).transpose()?;
    let tls = credentials.map(|id| take_credentials(&id)).transpose()?;
    if let Some(path) = address.strip_prefix("unix:") {
        if tls.is_some() {
            return Err(message("A unix socket needs no 'tls-creds'"));
        }
        let way = Way::Unix;
        return Ok(Bound {
            socket: bind_unix(path, environment)?,
            access: Access { way, token },
            tls: None,
        });
    }
    let places = resolve(&address)?;
    let is_local = places.iter().all(|place| place.ip().is_loopback());
    let way = match is_local && tls.is_none() {
        true => Way::Loopback,
        false => Way::Anywhere,
    };
    if !is_local && (tls.is_none() || token.is_none()) {
        return Err(message(format!(
            "'{address}' can be reached from other machines: give tls-creds=ID, of an object \
             'tls-creds-x509', and token-secret=ID, of an object 'secret', or listen on 127.0.0.1"
        )));
    }
    let listener = TcpListener::bind(&places[..]).map_err(|error| {
        message(format!(
            "Failed to listen on {address}: {}",
            io_text(&error)
        ))
    })?;
    // What listens already may wait for more.
    rustix::net::listen(&listener, BACKLOG).map_err(|errno| {
        message(format!(
            "Failed to listen on {address}: {}",
            io_text(&errno.into())
        ))
    })?;
    Ok(Bound {
        socket: Socket::Tcp(listener),
        access: Access { way, token },
        tls,
    })
}

fn take_token(id: &str) -> Result<Token, Failure> {
    let secret = secret::bytes(id).map_err(failure)?;
    Token::new(secret.bytes())
        .map_err(|why| message(format!("The secret '{id}' is no token: {why}")))
}

fn take_credentials(id: &str) -> Result<Arc<dyn Upgrade>, Failure> {
    match tls::kind(id) {
        Some("tls-creds-x509") | None => tls::server(id, None).map_err(failure),
        Some(other) => Err(message(format!(
            "'{id}' is of the type '{other}': browsers and Prometheus need a 'tls-creds-x509'"
        ))),
    }
}

fn resolve(address: &str) -> Result<Vec<SocketAddr>, Failure> {
    let places = address.to_socket_addrs().map_err(|error| {
        let text = io_text(&error);
        message(format!(
            "'{address}' is neither unix:PATH nor HOST:PORT: {text}"
        ))
    })?;
    let places: Vec<SocketAddr> = places.collect();
    match places.is_empty() {
        true => Err(message(format!("'{address}' is no address"))),
        false => Ok(places),
    }
}

fn bind_unix(path: &str, environment: &ServerEnvironment) -> Result<Socket, Failure> {
    if path.is_empty() {
        // The kernel would choose a name without an owner, to which anybody could connect.
        return Err(message("'unix:' needs the path of a socket"));
    }
    let failed = |error: std::io::Error| {
        message(format!(
            "Failed to bind socket to {path}: {}",
            io_text(&error)
        ))
    };
    let place = SocketAddrUnix::new(path).map_err(|errno| failed(errno.into()))?;
    (environment.check_free)(path)?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let kind = (AddressFamily::UNIX, SocketType::STREAM);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(kind.0, kind.1, flags, None);
    let socket = socket.map_err(|errno| failed(errno.into()))?;
    // The name gets this mode when it is made: nobody else can connect in between.
    rustix::fs::fchmod(&socket, SOCKET_MODE).map_err(|errno| failed(errno.into()))?;
    rustix::net::bind(&socket, &place).map_err(|errno| failed(errno.into()))?;
    let file = SocketFile(PathBuf::from(path));
    rustix::net::listen(&socket, BACKLOG).map_err(|errno| failed(errno.into()))?;
    Ok(Socket::Unix(socket, file))
}

#[cfg(all(test, feature = "http"))]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn environment() -> ServerEnvironment {
        ServerEnvironment {
            check_free: |_| Ok(()),
            ..ServerEnvironment::without_sockets()
        }
    }

    fn refused(text: &str) -> String {
        let options = Options::parse_with_implied(text, Some("address")).unwrap();
        bind(options, &environment()).expect_err(text).0
    }

    #[test]
    fn what_others_could_reach_needs_tls_and_a_token() {
        for text in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
            let why = refused(text);
            assert!(
                why.contains("tls-creds=ID") && why.contains("token-secret=ID"),
                "{why}"
            );
        }
        assert!(refused("unix:/tmp/x,tls-creds=no").contains("TLS credentials"));
        assert!(refused("localhost:0,token-secret=no").contains("no"));
        assert!(refused("nonsense").contains("unix:PATH"));
        assert!(refused("localhost:0,more=1").contains("more"));
    }

    #[test]
    fn a_socket_is_its_owners_alone_and_goes_with_the_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let text = format!("unix:{}", path.display());
        let options = Options::parse_with_implied(&text, Some("address")).unwrap();
        let bound = bind(options, &environment()).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(bound.access.way, Way::Unix);
        drop(bound);
        assert!(!path.exists());
        let options = Options::parse_with_implied("localhost:0", Some("address")).unwrap();
        assert_eq!(
            bind(options, &environment()).unwrap().access.way,
            Way::Loopback
        );
    }
}
