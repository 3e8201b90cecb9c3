//! `--nbd-server`, `nbd-server-start`.

use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Duration;

use vellum_export::nbd::{self, Exports, Listener, Log, ServerOptions, Stop};
use vellum_graph::tls;
use vellum_io::lane::Remote;
use vellum_io::{JoinHandle, spawn};
use vellum_options::Options;

use crate::failure::{Failure, failure, message, need, refuse_rest};

use super::inet::InetAddress;
use super::inherited::inherited;

/// QEMU's limit where none is given.
const DEFAULT_CONNECTIONS: u64 = 100;

/// What a user should read while the program runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// What is waited for.
    Info(String),
    /// What does not work, and is tried again.
    Error(String),
    /// A line for programs.
    Line(String),
}

/// What the program around the daemon listens with.
#[derive(Clone)]
pub struct ServerEnvironment {
    /// Listens on a unix socket.
    pub listen_unix: fn(path: &str) -> Result<Listener, Failure>,
    /// Listens on a network.
    pub listen_tcp: fn(address: &InetAddress) -> Result<Listener, Failure>,
    /// The socket that listens at a path, where the program was started with it.
    pub handed_over: fn(path: &str) -> Option<OwnedFd>,
    /// Refuses a path at which somebody listens, or that is no socket.
    pub check_free: fn(path: &str) -> Result<(), Failure>,
    /// Tells the user something.
    pub tell: fn(notice: Notice),
    /// Is told of clients that could not come in.
    pub log: Option<Log>,
    /// Lanes that serve clients beside the daemon's own; otherwise threads are started.
    pub lanes: Option<Vec<Remote>>,
}

impl ServerEnvironment {
    /// A program that listens nowhere.
    pub fn without_sockets() -> ServerEnvironment {
        ServerEnvironment {
            listen_unix: |_| Err(no_sockets()),
            listen_tcp: |_| Err(no_sockets()),
            handed_over: |_| None,
            check_free: |_| Err(no_sockets()),
            tell: |_| {},
            log: None,
            lanes: None,
        }
    }
}

fn no_sockets() -> Failure {
    message("Nobody can connect to this program")
}

impl fmt::Debug for ServerEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerEnvironment")
    }
}

/// The NBD server.
#[derive(Debug)]
pub struct Server {
    /// What it offers.
    pub(super) exports: Exports,
    /// Several connections may use an export at once.
    pub(super) several: bool,
    /// The last part of its address: the name of a socket, or a port.
    place: String,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Clients may come, and wait.
    Listening(Listener, ServerOptions),
    Serving {
        stop: Stop,
        ended: JoinHandle<()>,
    },
    Ended,
}

impl Server {
    /// One that nobody can connect to.
    pub(super) fn within() -> Server {
        Server {
            exports: Exports::default(),
            several: true,
            place: String::new(),
            state: State::Ended,
        }
    }

    /// Begins to serve.
    pub(super) fn start(&mut self) {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Listening(listener, options) => {
                let stop = Stop::new();
                let (exports, end) = (self.exports.clone(), stop.clone());
                let ended = spawn(async move {
                    nbd::serve(vec![listener], exports, options, &end).await;
                });
                self.state = State::Serving { stop, ended };
            }
            other => self.state = other,
        }
    }

    /// Whether what a node is called may be an export of this server.
    pub(super) fn may_be(&self, name: &str) -> bool {
        let (address, socket) = name.split_once("socket=").unwrap_or((name, ""));
        let socket = socket.rsplit('/').next().unwrap_or_default();
        let port = format!(":{}/", self.place);
        !self.place.is_empty() && (socket == self.place || address.contains(&port))
    }

    /// Ends it; everything that clients have begun is complete on return.
    pub(super) async fn end(self) {
        if let State::Serving { stop, ended } = self.state {
            stop.request();
            ended.await;
        }
    }
}

/// Listens where the options say.
pub(super) fn listen(
    mut options: Options,
    environment: &ServerEnvironment,
) -> Result<Server, Failure> {
    let authz = options.take_text("tls-authz").map_err(failure)?;
    let tls = match options.take_text("tls-creds").map_err(failure)? {
        Some(id) => Some(tls::server(&id, authz).map_err(failure)?),
        // Nobody would be asked who it is.
        None if authz.is_some() => {
            return Err(message("tls-authz is not permitted without tls-creds"));
        }
        None => None,
    };
    let max_connections = options.take_number("max-connections").map_err(failure)?;
    let handshake = options
        .take_number("handshake-max-seconds")
        .map_err(failure)?;
    let address = options.take_group("addr");
    refuse_rest(&options)?;
    let (listener, place) = listen_at(address, environment)?;
    let defaults = ServerOptions::default();
    let max_connections = max_connections.unwrap_or(DEFAULT_CONNECTIONS);
    let options = ServerOptions {
        max_connections: usize::try_from(max_connections).unwrap_or(usize::MAX),
        persistent: true,
        tls,
        log: environment.log.clone(),
        lanes: environment.lanes.clone(),
        handshake_limit: match handshake {
            None => defaults.handshake_limit,
            Some(0) => None,
            Some(seconds) => Some(Duration::from_secs(seconds)),
        },
        ..defaults
    };
    Ok(Server {
        exports: Exports::default(),
        several: max_connections != 1,
        place,
        state: State::Listening(listener, options),
    })
}

/// Takes the options of a unix socket's name that are for those without a file.
pub(super) fn refuse_abstract(address: &mut Options) -> Result<(), Failure> {
    address.take_bool("tight").map_err(failure)?;
    match address.take_bool("abstract").map_err(failure)? {
        Some(true) => Err(message(
            "Unix sockets with abstract=on are not part of this version",
        )),
        _ => Ok(()),
    }
}

/// Listens at an address; beside it the last part of that.
fn listen_at(
    mut address: Options,
    environment: &ServerEnvironment,
) -> Result<(Listener, String), Failure> {
    Ok(match need(&mut address, "type")?.as_str() {
        "unix" => {
            let path = address.take_text("path").map_err(failure)?;
            let path = path.ok_or_else(|| message("Parameter 'addr.path' is missing"))?;
            refuse_abstract(&mut address)?;
            refuse_rest(&address)?;
            let place = path.rsplit('/').next().unwrap_or_default();
            ((environment.listen_unix)(&path)?, place.to_owned())
        }
        "inet" => {
            let inet = InetAddress::take(&mut address, "addr")?;
            refuse_rest(&address)?;
            let listener = (environment.listen_tcp)(&inet)?;
            // That of the address may be the first of several.
            let port = listener.port().map_err(failure)?.to_string();
            (listener, port)
        }
        "fd" => {
            let number = address.take_text("str").map_err(failure)?;
            let number = number.ok_or_else(|| message("Parameter 'addr.str' is missing"))?;
            refuse_rest(&address)?;
            if number.parse::<i32>().is_err() {
                return Err(message(format!("Unable to parse FD number {number}")));
            }
            (inherited(&number)?, String::new())
        }
        kind @ "vsock" => {
            return Err(message(format!(
                "Addresses of type '{kind}' are not part of this version"
            )));
        }
        other => {
            return Err(message(format!(
                "Parameter 'type' does not accept value '{other}'"
            )));
        }
    })
}
