//! Character devices: where a monitor finds its clients (`--chardev`, `chardev-add`).
//!
//! `settings.rs` says what is asked for, `socket.rs` and `files.rs` open it, `port.rs` is the way
//! to whoever is there, `ring.rs` the one that is only memory.
//!
//! A device has one user at most, a monitor, which asks it for one client after the other
//! ([`Chardev::connect`]).

mod files;
mod port;
mod ring;
mod settings;
mod socket;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::net::UdpSocket;
use std::rc::Rc;
use std::time::Duration;

use serde_json::{Value, json};
use vellum_io::error::io_text;
use vellum_io::lane;

use self::files::Pty;
pub use self::port::Port;
use self::port::Wire;
use self::ring::Ring;
use self::settings::{Backend, Settings};
use self::socket::Socket;
use super::server::{Notice, ServerEnvironment};
use super::{Failure, message};
use crate::options::Options;
use crate::qmp::{self, Arguments};

/// How often is looked whether somebody has opened a terminal.
const PTY_PAUSE: Duration = Duration::from_millis(100);

/// The names of the backends that there are.
pub fn backend_names() -> &'static [&'static str] {
    &settings::NAMES
}

/// A character device.
#[derive(Debug)]
pub(super) struct Chardev {
    label: String,
    backend: Open,
    log: Option<Rc<File>>,
    /// A monitor is at it.
    in_use: Cell<bool>,
    /// The one client of a device that has one only was given out.
    given_out: Cell<bool>,
}

/// An open backend.
#[derive(Debug)]
enum Open {
    /// One client, which is there from the beginning.
    One {
        kind: &'static str,
        wire: Wire,
    },
    Pty(Pty),
    Socket(Box<Socket>),
}

impl Chardev {
    async fn open(
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
    pub(super) async fn connect(&self) -> Option<Port> {
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
    pub(super) async fn hung_up(&self) {
        if let Open::Socket(socket) = &self.backend {
            socket.hung_up().await;
        }
    }

    /// How `query-chardev` calls it.
    fn filename(&self) -> String {
        match &self.backend {
            Open::One { kind, .. } => (*kind).to_owned(),
            Open::Pty(pty) => format!("pty:{}", pty.path),
            Open::Socket(socket) => socket.name(),
        }
    }

    /// The path of the terminal that it is.
    fn terminal(&self) -> Option<&str> {
        match &self.backend {
            Open::Pty(pty) => Some(&pty.path),
            _ => None,
        }
    }

    fn is_stdio(&self) -> bool {
        matches!(self.backend, Open::One { kind: "stdio", .. })
    }

    /// The buffer that it is.
    fn ring(&self) -> Option<&Ring> {
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

/// What `chardev-add` is asked for.
pub(super) struct Wanted {
    id: String,
    /// Or what is wrong with it, apart from how it is written.
    settings: Result<Settings, Failure>,
}

impl Wanted {
    /// Takes the arguments `id` and `backend`.
    ///
    /// # Errors
    /// In QEMU's words for what no schema allows.
    pub(super) fn take(arguments: &mut Arguments) -> Result<Self, qmp::Failure> {
        let id = arguments.need_text("id")?;
        let settings = Settings::from_arguments(arguments)?;
        Ok(Wanted { id, settings })
    }
}

/// All character devices, by name.
#[derive(Debug, Default)]
pub(super) struct Chardevs(RefCell<BTreeMap<String, Rc<Chardev>>>);

impl Chardevs {
    /// Adds one as a command line describes it.
    ///
    /// # Errors
    /// In QEMU's words.
    pub(super) async fn add(
        &self,
        options: Options,
        environment: &ServerEnvironment,
        in_background: bool,
    ) -> Result<(), Failure> {
        let (id, settings) = Settings::from_options(options)?;
        if self.0.borrow().contains_key(&id) {
            return Err(message(format!(
                "attempt to add duplicate property '{id}' to object (type 'container')"
            )));
        }
        if settings.backend == Backend::Stdio {
            if in_background {
                return Err(message("cannot use stdio with -daemonize"));
            }
            self.check_stdio()?;
        }
        let chardev = Chardev::open(&id, settings, environment).await?;
        if let Some(path) = chardev.terminal() {
            (environment.tell)(Notice::Line(format!(
                "char device redirected to {path} (label {id})"
            )));
        }
        self.0.borrow_mut().insert(id, Rc::new(chardev));
        Ok(())
    }

    fn check_stdio(&self) -> Result<(), Failure> {
        match self.0.borrow().values().any(|one| one.is_stdio()) {
            true => Err(message("cannot use stdio by multiple character devices")),
            false => Ok(()),
        }
    }

    fn get(&self, id: &str) -> Option<Rc<Chardev>> {
        self.0.borrow().get(id).cloned()
    }

    /// Gives one to a monitor.
    ///
    /// # Errors
    /// If there is none, or somebody else has it.
    pub(super) fn take(&self, id: &str) -> Result<Rc<Chardev>, Failure> {
        let Some(chardev) = self.get(id) else {
            return Err(message(format!("chardev \"{id}\" not found")));
        };
        match chardev.in_use.replace(true) {
            true => Err(message(format!("chardev '{id}' is already in use"))),
            false => Ok(chardev),
        }
    }

    /// Forgets all of them: their sockets and links go.
    pub(super) fn clear(&self) {
        self.0.take();
    }

    /// Their names, and the names of their types.
    pub(super) fn kinds(&self) -> Vec<(String, String)> {
        let all = self.0.borrow();
        let typed = all.iter().map(|(id, chardev)| {
            let kind = match &chardev.backend {
                Open::One { kind, .. } => kind,
                Open::Pty(_) => "pty",
                Open::Socket(_) => "socket",
            };
            (id.clone(), format!("chardev-{kind}"))
        });
        typed.collect()
    }

    /// What `query-chardev` answers.
    pub(super) fn query(&self) -> Value {
        let all = self.0.borrow();
        let one = |chardev: &Rc<Chardev>| {
            json!({
                "frontend-open": chardev.in_use.get(),
                "filename": chardev.filename(),
                "label": chardev.label,
            })
        };
        all.values().map(one).collect()
    }

    /// `chardev-add`.
    pub(super) async fn add_new(
        &self,
        wanted: Wanted,
        environment: &ServerEnvironment,
    ) -> qmp::Outcome {
        let Wanted { id, settings } = wanted;
        let prefixed = |Failure(text): Failure| {
            qmp::Failure::new(format!("Failed to add chardev '{id}': {text}"))
        };
        let exists = || qmp::Failure::new(format!("Chardev with id '{id}' already exists"));
        if self.get(&id).is_some() {
            return Err(exists());
        }
        let settings = settings.map_err(prefixed)?;
        if settings.backend == Backend::Stdio {
            self.check_stdio().map_err(prefixed)?;
        }
        let opened = Chardev::open(&id, settings, environment).await;
        let chardev = opened.map_err(prefixed)?;
        // Opening may take its time.
        if self.get(&id).is_some() {
            return Err(exists());
        }
        let answer = match chardev.terminal() {
            Some(path) => json!({"pty": path}),
            None => json!({}),
        };
        self.0.borrow_mut().insert(id, Rc::new(chardev));
        Ok(answer)
    }

    /// `chardev-change`: takes out the one that is to be made anew.
    ///
    /// # Errors
    /// If there is none, or a monitor is at it.
    pub(super) fn take_for_change(&self, wanted: &Wanted) -> Result<(), qmp::Failure> {
        let id = &wanted.id;
        match self.get(id) {
            None => Err(qmp::Failure::new(format!("Chardev '{id}' does not exist"))),
            Some(chardev) if chardev.in_use.get() => Err(qmp::Failure::new(
                "Chardev user does not support chardev hotswap",
            )),
            Some(_) => {
                self.0.borrow_mut().remove(id);
                Ok(())
            }
        }
    }

    /// `chardev-remove`.
    ///
    /// # Errors
    /// If there is none, or a monitor is at it.
    pub(super) fn remove(&self, id: &str) -> Result<(), qmp::Failure> {
        match self.get(id) {
            None => Err(not_found(id)),
            Some(chardev) if chardev.in_use.get() => {
                Err(qmp::Failure::new(format!("Chardev '{id}' is busy")))
            }
            Some(_) => {
                self.0.borrow_mut().remove(id);
                Ok(())
            }
        }
    }

    /// Whether there is one.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn must_have(&self, id: &str) -> Result<(), qmp::Failure> {
        match self.get(id) {
            None => Err(not_found(id)),
            Some(_) => Ok(()),
        }
    }

    /// Does something with a buffer.
    ///
    /// # Errors
    /// If there is no device of this name, or it is no buffer.
    pub(super) fn with_ring<T>(
        &self,
        id: &str,
        work: impl FnOnce(&Ring) -> T,
    ) -> Result<T, qmp::Failure> {
        let Some(chardev) = self.get(id) else {
            return Err(qmp::Failure::new(format!("Device '{id}' not found")));
        };
        match chardev.ring() {
            Some(ring) => Ok(work(ring)),
            None => Err(qmp::Failure::new(format!("{id} is not a ringbuf device"))),
        }
    }
}

fn not_found(id: &str) -> qmp::Failure {
    qmp::Failure::new(format!("Chardev '{id}' not found"))
}
