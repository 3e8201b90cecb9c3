//! Sockets: clients that come, and servers that are gone to.

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;
use std::{fmt, io};

use vellum_io::error::io_text;
use vellum_io::lane::{self, net};
use vellum_options::error_text;

use crate::failure::{Failure, message};
use crate::inet::{InetAddress, NO_NAME, bind_failure};
use crate::inherited;
use crate::server::{Notice, ServerEnvironment};

/// A unix socket's path in its structure, in bytes.
const PATH_BYTES: usize = 108;
/// How long to wait where the cause of a failed accept (no descriptors) will not go at once.
const PAUSE: Duration = Duration::from_secs(1);

/// A socket as it is asked for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SocketSettings {
    pub(super) address: Address,
    pub(super) server: bool,
    /// The first client is waited for.
    pub(super) wait: bool,
    /// A client tries again so long after it could not connect, or was hung up on.
    pub(super) reconnect: Option<Duration>,
}

/// Where a socket is.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Address {
    Unix {
        path: String,
        /// In the kernel's own space of names.
        is_abstract: bool,
        /// An abstract name is as long as it is, and not filled up with zeroes.
        tight: bool,
    },
    Inet(InetAddress),
    /// The number of a descriptor that the program was started with.
    Fd(String),
    /// A descriptor that a client of the monitor would have passed.
    Passed(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix {
                path,
                is_abstract,
                tight,
            } => {
                write!(f, "unix:{path}")?;
                if *is_abstract {
                    f.write_str(",abstract=on")?;
                    if *tight {
                        f.write_str(",tight=on")?;
                    }
                }
                Ok(())
            }
            Address::Inet(inet) => write!(f, "tcp:{}:{}", inet.host, inet.port),
            Address::Fd(number) | Address::Passed(number) => write!(f, "fd:{number}"),
        }
    }
}

/// An open socket.
#[derive(Debug)]
pub(super) struct Socket {
    label: String,
    address: Address,
    side: Side,
    /// How the connection is called, while there is one.
    connected: RefCell<Option<String>>,
    /// The connection that was made when the socket was opened, until it is used.
    first: RefCell<Option<net::Stream>>,
    environment: ServerEnvironment,
}

#[derive(Debug)]
enum Side {
    Server {
        listener: net::Listener,
        /// The file to remove in the end.
        path: Option<String>,
    },
    Client {
        reconnect: Option<Duration>,
        /// That it failed was told.
        told: Cell<bool>,
    },
}

impl Drop for Side {
    fn drop(&mut self) {
        if let Side::Server {
            path: Some(path), ..
        } = self
        {
            // Somebody may have removed it already.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Socket {
    pub(super) async fn open(
        label: &str,
        settings: SocketSettings,
        environment: &ServerEnvironment,
    ) -> Result<Self, Failure> {
        let SocketSettings {
            mut address,
            server,
            wait,
            reconnect,
        } = settings;
        // What somebody else made is his to remove.
        let mut is_own = true;
        let side = match server {
            true => Side::Server {
                listener: address.listen(environment, &mut is_own)?,
                path: match &address {
                    _ if !is_own => None,
                    Address::Unix {
                        path,
                        is_abstract: false,
                        ..
                    } => Some(path.clone()),
                    _ => None,
                },
            },
            false => Side::Client {
                reconnect,
                told: Cell::new(false),
            },
        };
        let socket = Socket {
            label: label.to_owned(),
            address,
            side,
            connected: RefCell::default(),
            first: RefCell::default(),
            environment: environment.clone(),
        };
        match &socket.side {
            Side::Server { listener, .. } if wait => {
                socket.tell(Notice::Info(format!(
                    "QEMU waiting for connection on: {}",
                    socket.name()
                )));
                let stream = listener.accept().await?;
                socket.note(&stream);
                socket.first.replace(Some(stream));
            }
            Side::Client {
                reconnect: None, ..
            } => {
                let stream = socket.address.connect().await?;
                socket.note(&stream);
                socket.first.replace(Some(stream));
            }
            _ => {}
        }
        Ok(socket)
    }

    fn tell(&self, notice: Notice) {
        (self.environment.tell)(notice);
    }

    /// How `query-chardev` calls it.
    pub(super) fn name(&self) -> String {
        if let Some(name) = &*self.connected.borrow() {
            return name.clone();
        }
        let server = match self.side {
            Side::Server { .. } => ",server=on",
            Side::Client { .. } => "",
        };
        format!("disconnected:{}{server}", self.address)
    }

    fn note(&self, stream: &net::Stream) {
        let server = matches!(self.side, Side::Server { .. });
        self.connected
            .replace(Some(connection_name(stream, server)));
    }

    /// The next connection; `None` if there will be none.
    pub(super) async fn next(&self) -> Option<net::Stream> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        let stream = match &self.side {
            Side::Server { listener, .. } => loop {
                match listener.accept().await {
                    Ok(stream) => break stream,
                    Err(_) => lane::sleep(PAUSE).await,
                }
            },
            Side::Client {
                reconnect: None, ..
            } => return None,
            Side::Client {
                reconnect: Some(pause),
                told,
            } => loop {
                match self.address.connect().await {
                    Ok(stream) => break stream,
                    Err(Failure(why)) if !told.replace(true) => self.tell(Notice::Error(format!(
                        "Unable to connect character device {}: {why}",
                        self.label
                    ))),
                    Err(_) => {}
                }
                lane::sleep(*pause).await;
            },
        };
        if let Side::Client { told, .. } = &self.side {
            told.set(false);
        }
        self.note(&stream);
        Some(stream)
    }

    /// The connection is over.
    pub(super) async fn hung_up(&self) {
        self.connected.take();
        if let Side::Client {
            reconnect: Some(pause),
            ..
        } = self.side
        {
            lane::sleep(pause).await;
        }
    }
}

/// How a connection is called.
fn connection_name(stream: &net::Stream, server: bool) -> String {
    let server = if server { ",server=on" } else { "" };
    let named = stream.to_fd().map_err(io::Error::other).and_then(|fd| {
        let unix = UnixStream::from(fd.try_clone()?);
        if let Ok(own) = unix.local_addr() {
            let path = own.as_pathname().map(|path| path.display().to_string());
            return Ok(format!("unix:{}{server}", path.unwrap_or_default()));
        }
        let tcp = TcpStream::from(fd);
        let (own, peer) = (tcp.local_addr()?, tcp.peer_addr()?);
        Ok(format!("tcp:{own}{server} <-> {peer}"))
    });
    named.unwrap_or_else(|_| "unknown".to_owned())
}

fn is_socket(path: &str) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let kind = std::fs::symlink_metadata(path).map(|metadata| metadata.file_type());
    kind.is_ok_and(|kind| kind.is_socket())
}

fn abstract_address(path: &str, tight: bool) -> io::Result<UnixAddr> {
    let mut name = path.as_bytes().to_vec();
    if !tight {
        // The first byte of the structure's path is the zero of abstract names.
        name.resize(PATH_BYTES - 1, 0);
    }
    UnixAddr::from_abstract_name(name)
}

impl Address {
    fn listen(
        &mut self,
        environment: &ServerEnvironment,
        is_own: &mut bool,
    ) -> Result<net::Listener, Failure> {
        let bound = match self {
            Address::Unix {
                path,
                is_abstract: true,
                tight,
            } => {
                let bound = abstract_address(path, *tight);
                bound.and_then(|address| UnixListener::bind_addr(&address))
            }
            Address::Unix { path, .. } => {
                if path.len() >= PATH_BYTES {
                    return Err(message(format!(
                        "UNIX socket path '{path}' is too long\nPath must be less than \
                         {PATH_BYTES} bytes"
                    )));
                }
                if let Some(handed) = (environment.handed_over)(path) {
                    *is_own = false;
                    return Ok(net::Listener::from_fd(handed)?);
                }
                (environment.check_free)(path)?;
                // A socket that is left over; if it is something else, binding fails.
                if is_socket(path) {
                    let _ = std::fs::remove_file(&*path);
                }
                UnixListener::bind(&*path)
            }
            Address::Inet(inet) => return Self::listen_inet(inet),
            Address::Fd(number) => return inherited::chardev_listener(number),
            Address::Passed(_) => return Err(message(NO_PASSING)),
        };
        let bound = bound.map_err(|error| {
            let Address::Unix { path, .. } = &self else {
                return message(io_text(&error));
            };
            message(format!(
                "Failed to bind socket to {path}: {}",
                io_text(&error)
            ))
        })?;
        Ok(net::Listener::from_fd(bound.into())?)
    }

    fn listen_inet(address: &mut InetAddress) -> Result<net::Listener, Failure> {
        let addresses = address.to_listen_at()?;
        let listener = TcpListener::bind(&addresses[..])
            .map_err(|error| bind_failure(&vellum::Error::from_io("bind", &error)))?;
        if let Ok(own) = listener.local_addr() {
            (address.host, address.port) = (own.ip().to_string(), own.port().to_string());
        }
        Ok(net::Listener::from_fd(listener.into())?)
    }

    async fn connect(&self) -> Result<net::Stream, Failure> {
        let (connected, name) = match self {
            Address::Unix {
                path,
                is_abstract: true,
                tight,
            } => {
                let stream = abstract_address(path, *tight)
                    .and_then(|address| UnixStream::connect_addr(&address));
                let stream = stream.map(|stream| net::Stream::from_fd(stream.into()));
                let stream = stream.map_err(|error| vellum::Error::from_io("connect", &error));
                (stream, path.clone())
            }
            Address::Unix { path, .. } => {
                let stream = net::Stream::connect_unix(Path::new(path));
                (stream.await, path.clone())
            }
            Address::Inet(inet) => {
                let connected = connect_inet(inet).await?;
                (connected, format!("{}:{}", inet.host, inet.port))
            }
            Address::Fd(number) => {
                let fd = inherited::chardev_socket(number)?;
                return Ok(net::Stream::from_fd(fd));
            }
            Address::Passed(_) => return Err(message(NO_PASSING)),
        };
        connected.map_err(|error| {
            message(format!(
                "Failed to connect to '{name}': {}",
                error_text(&error)
            ))
        })
    }
}

/// Connects to another program. Within is what the system says of that.
async fn connect_inet(inet: &InetAddress) -> Result<vellum::Result<net::Stream>, Failure> {
    let number = inet.port_number()?;
    // Names are looked up by a thread that may wait, unless one kind of address is wanted.
    let target = match inet.families {
        (None, None) if !inet.numeric && !inet.host.is_empty() => inet.host.clone(),
        _ => match inet.resolve()?.first() {
            Some(address) => address.ip().to_string(),
            None => return Err(inet.not_resolved(NO_NAME)),
        },
    };
    let connected = net::Stream::connect_tcp(&target, number).await;
    let is_unknown = |error: &vellum::Error| {
        error.errno() == libc::EHOSTUNREACH && target.parse::<IpAddr>().is_err()
    };
    if connected.as_ref().is_err_and(is_unknown) {
        return Err(inet.not_resolved(NO_NAME));
    }
    if let Ok(stream) = &connected
        && inet.keep_alive
    {
        let socket = stream.to_fd()?;
        rustix::net::sockopt::set_socket_keepalive(&socket, true).map_err(|errno| {
            message(format!(
                "Unable to set KEEPALIVE: {}",
                io_text(&errno.into())
            ))
        })?;
    }
    Ok(connected)
}

/// Clients of a monitor have no command to pass descriptors by.
const NO_PASSING: &str = "only QEMU supports file descriptor passing";
