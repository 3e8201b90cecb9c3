//! [`Chardev`]: one character device, and its clients one after the other.

use std::cell::Cell;
use std::fs::File;
use std::net::UdpSocket;
use std::rc::Rc;
use std::time::Duration;

use vellum_io::error::io_text;
use vellum_io::lane;

use crate::failure::{Failure, message};
use crate::server::ServerEnvironment;

use super::files;
use super::files::Pty;
use super::port::{Port, Wire};
use super::ring::Ring;
use super::settings::{Backend, Settings};
use super::socket::Socket;

/// How often a pseudo terminal is polled for a client.
const PTY_PAUSE: Duration = Duration::from_millis(100);

/// A character device.
#[derive(Debug)]
pub(crate) struct Chardev {
    pub(super) label: String,
    pub(super) backend: Open,
    pub(super) log: Option<Rc<File>>,
    /// A monitor is at it.
    pub(super) in_use: Cell<bool>,
    /// The one client of a device that has one only was given out.
    given_out: Cell<bool>,
}

/// An open backend.
#[derive(Debug)]
pub(super) enum Open {
    /// One client, which is there from the beginning.
    One {
        kind: &'static str,
        wire: Wire,
    },
    Pty(Pty),
    Socket(Box<Socket>),
}

impl Chardev {
    pub(super) async fn open(
        label: &str,
        settings: Settings,
        environment: &ServerEnvironment,
    ) -> Result<Self, Failure> {
        let log = settings.log.as_ref().map(files::log).transpose()?;
        let one = |kind, wire| Open::One { kind, wire };
        let backend = match settings.backend {
            Backend::File {
                output,
                input,
                append,
            } => one("file", files::file(&output, input.as_deref(), append)?),
            Backend::Null => one("null", Wire::Nobody),
            Backend::Pipe { path } => one("pipe", files::pipe(&path)?),
            Backend::Pty { link } => Open::Pty(Pty::open(link)?),
            Backend::Ring { name, size_bytes } => {
                one(name, Wire::Ring(Rc::new(Ring::new(size_bytes))))
            }
            Backend::Serial { path } => one("serial", files::serial(&path)?),
            Backend::Socket(settings) => {
                let socket = Socket::open(label, settings, environment).await?;
                Open::Socket(Box::new(socket))
            }
            Backend::Stdio => one("stdio", files::stdio()?),
            Backend::Udp { remote, local } => one("udp", datagrams(&remote, &local)?),
        };
        Ok(Chardev {
            label: label.to_owned(),
            backend,
            log,
            in_use: Cell::new(false),
            given_out: Cell::new(false),
        })
    }

    /// The next client; `None` if there will be none.
    pub(crate) async fn connect(&self) -> Option<Port> {
        let wire = match &self.backend {
            Open::One { .. } if self.given_out.replace(true) => return None,
            Open::One { wire, .. } => wire.clone(),
            Open::Pty(pty) => {
                while !pty.is_open() {
                    lane::sleep(PTY_PAUSE).await;
                }
                pty.wire()
            }
            Open::Socket(socket) => Wire::Socket(socket.next().await?),
        };
        Some(Port::new(wire, self.log.clone()))
    }

    /// The client has gone.
    pub(crate) async fn hung_up(&self) {
        if let Open::Socket(socket) = &self.backend {
            socket.hung_up().await;
        }
    }

    /// How `query-chardev` calls it.
    pub(super) fn filename(&self) -> String {
        match &self.backend {
            Open::One { kind, .. } => (*kind).to_owned(),
            Open::Pty(pty) => format!("pty:{}", pty.path),
            Open::Socket(socket) => socket.name(),
        }
    }

    /// The path of the terminal that it is.
    pub(super) fn terminal(&self) -> Option<&str> {
        match &self.backend {
            Open::Pty(pty) => Some(&pty.path),
            _ => None,
        }
    }

    pub(super) fn is_stdio(&self) -> bool {
        matches!(self.backend, Open::One { kind: "stdio", .. })
    }

    /// The buffer that it is.
    pub(super) fn ring(&self) -> Option<&Ring> {
        match &self.backend {
            Open::One {
                wire: Wire::Ring(ring),
                ..
            } => Some(ring),
            _ => None,
        }
    }
}

fn datagrams(remote: &(String, String), local: &(String, String)) -> Result<Wire, Failure> {
    let failed = |verb: &str, (host, port): &(String, String), error: std::io::Error| {
        message(format!(
            "Failed to {verb} '{host}:{port}': {}",
            io_text(&error)
        ))
    };
    let number = |(host, port): &(String, String)| {
        port.parse::<u16>().map_err(|_| {
            message(format!(
                "address resolution failed for {host}:{port}: Servname not supported for \
                 ai_socktype"
            ))
        })
    };
    let socket = UdpSocket::bind((local.0.as_str(), number(local)?))
        .map_err(|error| failed("bind socket to", local, error))?;
    socket
        .connect((remote.0.as_str(), number(remote)?))
        .and_then(|()| socket.set_nonblocking(true))
        .map_err(|error| failed("connect to", remote, error))?;
    Ok(Wire::Datagrams(Rc::new(socket)))
}
