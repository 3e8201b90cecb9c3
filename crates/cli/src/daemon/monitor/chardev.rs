//! `--chardev`: where a monitor finds its client.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;

use vellum_control::Options;
use vellum_control::daemon::need;
use vellum_io::error::io_text;
use vellum_io::lane::{self, net};
use vellum_io::{Buffer, Buffers};

use crate::report;
use crate::server::{Failure, bad_port, check_free};

/// Bytes received at once.
const PIECE_BYTES: usize = 4096;
/// A pipe that can be written to at all takes so many bytes at once.
const PIPE_BYTES: usize = 4096;

/// A character device as the options describe it.
#[derive(Debug)]
pub(in crate::daemon) enum Chardev {
    /// Standard input and output.
    Stdio,
    /// A connection to somebody who listens.
    Client(Address),
    /// Somebody will connect; clients come one after the other.
    Server { address: Address, wait: bool },
    /// Nobody is there.
    Null,
}

/// Where a socket is.
#[derive(Debug, Clone)]
pub(in crate::daemon) enum Address {
    Unix(String),
    Tcp { host: String, port: u16 },
}

impl Chardev {
    /// Takes the options apart; the id comes with it.
    pub(in crate::daemon) fn take(mut options: Options) -> Result<(String, Self), Failure> {
        let kind = need(&mut options, "backend")?;
        let Some(id) = options.take_text("id")? else {
            return Err(Failure::message("chardev: no id specified"));
        };
        let chardev = match kind.as_str() {
            "stdio" => {
                // Signals end the program, whatever is said here.
                options.take_bool("signal")?;
                Chardev::Stdio
            }
            "null" => Chardev::Null,
            "socket" => take_socket(&mut options)?,
            other => {
                return Err(Failure::message(format!(
                    "'{other}' is not a valid char driver name"
                )));
            }
        };
        match options.keys().next() {
            None => Ok((id, chardev)),
            Some(key) => Err(Failure::message(format!("Invalid parameter '{key}'"))),
        }
    }

    /// Opens it, or listens for those who come.
    pub(in crate::daemon) async fn open(self) -> Result<Source, Failure> {
        Ok(match self {
            Chardev::Null => Source::Nobody,
            Chardev::Stdio => Source::One(Port::stdio().map_err(|error| {
                Failure::message(format!("cannot use standard input: {}", io_text(&error)))
            })?),
            Chardev::Client(address) => Source::One(Port::Socket(address.connect().await?)),
            Chardev::Server { address, wait } => {
                let mut source = Source::Many {
                    listener: address.listen()?,
                    path: address.path(),
                    first: None,
                };
                if let (
                    Source::Many {
                        listener, first, ..
                    },
                    true,
                ) = (&mut source, wait)
                {
                    report::info(format_args!(
                        "QEMU waiting for connection on: disconnected:{address},server=on"
                    ));
                    let client = listener.accept().await;
                    *first = Some(Port::Socket(client?));
                }
                source
            }
        })
    }
}

fn take_socket(options: &mut Options) -> Result<Chardev, Failure> {
    let server = options.take_bool("server")?;
    let wait = options.take_bool("wait")?;
    let path = options.take_text("path")?;
    let address = match path {
        Some(path) => Address::Unix(path),
        None => {
            let mut part = |key: &str| {
                let value = options.take_text(key)?;
                value.ok_or_else(|| Failure::message(format!("chardev: socket: no {key} given")))
            };
            let (host, port) = (part("host")?, part("port")?);
            let number = port.parse();
            let port = number.map_err(|_| bad_port(&host, &port))?;
            Address::Tcp { host, port }
        }
    };
    match (server.unwrap_or(false), wait) {
        (true, wait) => Ok(Chardev::Server {
            address,
            wait: wait.unwrap_or(true),
        }),
        (false, Some(true)) => Err(Failure::message(
            "'wait' option is incompatible with socket in client connect mode",
        )),
        (false, _) => Ok(Chardev::Client(address)),
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{path}"),
            Address::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
        }
    }
}

impl Address {
    async fn connect(&self) -> Result<net::Stream, Failure> {
        let (connected, name) = match self {
            Address::Unix(path) => (net::Stream::connect_unix(Path::new(path)), path.clone()),
            Address::Tcp { host, port } => (
                net::Stream::connect_tcp(host, *port),
                format!("{host}:{port}"),
            ),
        };
        connected.await.map_err(|error| {
            let text = report::error_text(&error);
            Failure::message(format!("Failed to connect to '{name}': {text}"))
        })
    }

    fn listen(&self) -> Result<net::Listener, Failure> {
        let (bound, name) = match self {
            Address::Unix(path) => {
                check_free(path).map_err(Failure::Message)?;
                // A socket that is left over; if it is something else, binding fails.
                if is_socket(path) {
                    let _ = std::fs::remove_file(path);
                }
                (net::Listener::unix(Path::new(path)), path.clone())
            }
            Address::Tcp { host, port } => (
                net::Listener::tcp((host.as_str(), *port)),
                format!("{host}:{port}"),
            ),
        };
        bound.map_err(|error| {
            let text = report::error_text(&error);
            Failure::message(format!("Failed to bind socket to {name}: {text}"))
        })
    }

    /// The file to remove in the end.
    fn path(&self) -> Option<String> {
        match self {
            Address::Unix(path) => Some(path.clone()),
            Address::Tcp { .. } => None,
        }
    }
}

fn is_socket(path: &str) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let kind = std::fs::symlink_metadata(path).map(|metadata| metadata.file_type());
    kind.is_ok_and(|kind| kind.is_socket())
}

/// Where clients come from.
#[derive(Debug)]
pub(in crate::daemon) enum Source {
    Nobody,
    One(Port),
    Many {
        listener: net::Listener,
        path: Option<String>,
        /// The first client, if it was waited for.
        first: Option<Port>,
    },
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Source::Many {
            path: Some(path), ..
        } = self
        {
            // Somebody may have removed it already.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A connection to a client. Clones share it.
#[derive(Debug, Clone)]
pub(in crate::daemon) enum Port {
    Stdio { input: Rc<File>, output: Rc<File> },
    Socket(net::Stream),
}

impl Port {
    fn stdio() -> io::Result<Self> {
        let input = io::stdin().as_fd().try_clone_to_owned()?;
        let output = io::stdout().as_fd().try_clone_to_owned()?;
        Ok(Port::Stdio {
            input: Rc::new(input.into()),
            output: Rc::new(output.into()),
        })
    }

    /// Receives what is there; `None` when no more comes.
    pub(super) async fn receive(&self) -> Option<Vec<u8>> {
        match self {
            Port::Socket(stream) => {
                let (buffer, count) = stream.recv(Buffer::for_read(PIECE_BYTES)).await.ok()?;
                (count > 0).then(|| buffer[..count].to_vec())
            }
            Port::Stdio { input, .. } => {
                lane::poll_readable(input.as_fd()).await.ok()?;
                let mut piece = vec![0; PIECE_BYTES];
                let count = (&**input).read(&mut piece).ok()?;
                piece.truncate(count);
                (count > 0).then_some(piece)
            }
        }
    }

    /// Sends a text; whether that worked.
    pub(super) async fn send(&self, text: &str) -> bool {
        match self {
            Port::Socket(stream) => {
                let bytes = Buffers::from_iter([Buffer::copy_of(text.as_bytes())]);
                stream.send(bytes).await.is_ok()
            }
            Port::Stdio { output, .. } => {
                let mut rest = text.as_bytes();
                while !rest.is_empty() {
                    if lane::poll_writable(output.as_fd()).await.is_err() {
                        return false;
                    }
                    match (&**output).write(&rest[..rest.len().min(PIPE_BYTES)]) {
                        Ok(count) if count > 0 => rest = &rest[count..],
                        _ => return false,
                    }
                }
                true
            }
        }
    }

    /// Ends the connection.
    pub(super) fn hang_up(&self) {
        if let Port::Socket(stream) = self {
            // It may have gone by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
