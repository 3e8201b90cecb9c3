//! What a character device is to be: from the options of a command line, or from the
//! arguments of `chardev-add`.

use std::time::Duration;

use vellum_graph::secret::is_identifier;
use vellum_options::Options;

use crate::failure::{Failure, failure, message};
use crate::inet::{InetAddress, port_of};
use crate::qmp::{self, Arguments};

use super::ring::{DEFAULT_SIZE_BYTES, MAX_SIZE_BYTES};
use super::socket::{Address, SocketSettings};

/// A character device as it is asked for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Settings {
    pub(super) backend: Backend,
    pub(super) log: Option<LogFile>,
}

/// Where a copy of what is sent goes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LogFile {
    pub(super) path: String,
    pub(super) append: bool,
}

/// A backend as it is asked for.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Backend {
    File {
        output: String,
        input: Option<String>,
        append: bool,
    },
    Null,
    Pipe {
        path: String,
    },
    Pty {
        /// A symbolic link to the terminal.
        link: Option<String>,
    },
    Ring {
        name: &'static str,
        size_bytes: usize,
    },
    Serial {
        path: String,
    },
    Socket(SocketSettings),
    Stdio,
    Udp {
        remote: (String, String),
        local: (String, String),
    },
}

/// Those that there are, in QEMU's order.
pub(super) const NAMES: [&str; 10] = [
    "serial", "pipe", "null", "ringbuf", "socket", "stdio", "memory", "udp", "file", "pty",
];
/// Those that only QEMU has.
const OTHERS: [&str; 3] = ["hub", "mux", "parallel"];
/// Types that the schema of QEMU's daemon names, and that its program does not have.
const NOWHERE: [&str; 4] = ["msmouse", "wctablet", "testdev", "vc"];
/// Options of QEMU's for character devices of all kinds; a device takes no notice of those
/// that are for others.
const KNOWN: [&str; 37] = [
    "path",
    "input-path",
    "host",
    "port",
    "fd",
    "localaddr",
    "localport",
    "to",
    "ipv4",
    "ipv6",
    "wait",
    "server",
    "delay",
    "nodelay",
    "reconnect",
    "reconnect-ms",
    "telnet",
    "tn3270",
    "tls-creds",
    "tls-authz",
    "websocket",
    "width",
    "height",
    "cols",
    "rows",
    "mux",
    "signal",
    "name",
    "debug",
    "size",
    "chardev",
    "append",
    "logfile",
    "logappend",
    "mouse",
    "clipboard",
    "chardevs",
];

fn not_here(kind: &str) -> String {
    format!("Character devices of type '{kind}' are not part of this version")
}

fn unknown(name: &str) -> String {
    format!("'{name}' is not a valid char driver name")
}

fn not_an_option(name: &str) -> String {
    format!("Option '{name}' of character devices is not part of this version")
}

impl Settings {
    /// Takes the options of a command line apart; the id comes with them.
    pub(super) fn from_options(mut options: Options) -> Result<(String, Self), Failure> {
        for key in options.keys() {
            if !KNOWN.contains(&key) && !["id", "backend", "tight", "abstract"].contains(&key) {
                return Err(message(format!("Invalid parameter '{key}'")));
            }
        }
        let id = options.take_text("id").map_err(failure)?;
        let id = id.ok_or_else(|| message("chardev: no id specified"))?;
        if !is_identifier(&id) {
            return Err(message(
                "Parameter 'id' expects an identifier\nIdentifiers consist of letters, digits, \
                 '-', '.', '_', starting with a letter.",
            ));
        }
        let kind = options.take_text("backend").map_err(failure)?;
        let kind = kind.ok_or_else(|| message(format!("chardev: \"{id}\" missing backend")))?;
        if options.take_bool("mux").map_err(failure)? == Some(true) {
            return Err(message(not_here("mux")));
        }
        let backend = Backend::from_options(&kind, &mut options)?;
        let append = options.take_bool("logappend").map_err(failure)?;
        let log = options.take_text("logfile").map_err(failure)?;
        let log = log.map(|path| LogFile {
            path,
            append: append == Some(true),
        });
        Ok((id, Settings { backend, log }))
    }

    /// Takes the argument `backend` of a command. Within is what is wrong with the device, and
    /// not with how it is written.
    pub(super) fn from_arguments(
        arguments: &mut Arguments,
    ) -> Result<Result<Self, Failure>, qmp::Failure> {
        let mut backend = arguments.need_object("backend")?;
        let all = NAMES.iter().chain(&OTHERS).chain(&NOWHERE);
        let choices: Vec<(&str, &str)> = all.map(|name| (*name, *name)).collect();
        let kind = backend.need_choice("type", &choices)?;
        let mut data = backend.need_object("data")?;
        let log = data.text("logfile")?;
        let append = data.switch("logappend")?.unwrap_or(false);
        let parsed = Backend::from_arguments(kind, &mut data)?;
        // Those that are not here have members that nobody looks at.
        if parsed.is_ok() {
            data.finish()?;
        }
        backend.finish()?;
        Ok(parsed.map(|backend| Settings {
            backend,
            log: log.map(|path| LogFile { path, append }),
        }))
    }
}

impl Backend {
    fn from_options(kind: &str, options: &mut Options) -> Result<Self, Failure> {
        let need_path = |options: &mut Options, what: &str| {
            let path = options.take_text("path").map_err(failure)?;
            path.ok_or_else(|| message(format!("chardev: {what} given")))
        };
        Ok(match kind {
            "file" => Backend::File {
                output: need_path(options, "file: no filename")?,
                input: options.take_text("input-path").map_err(failure)?,
                append: options.take_bool("append").map_err(failure)? == Some(true),
            },
            "null" => Backend::Null,
            "pipe" => Backend::Pipe {
                path: need_path(options, "pipe: no device path")?,
            },
            "pty" => Backend::Pty {
                link: options.take_text("path").map_err(failure)?,
            },
            "ringbuf" | "memory" => {
                Backend::ring(kind, options.take_size("size").map_err(failure)?).map_err(message)?
            }
            "serial" => Backend::Serial {
                path: need_path(options, "serial/tty: no device path")?,
            },
            "socket" => Backend::Socket(socket_from_options(options)?),
            "stdio" => {
                // Signals end the program, whatever is said here.
                options.take_bool("signal").map_err(failure)?;
                Backend::Stdio
            }
            "udp" => {
                let mut part = |key: &str| options.take_text(key).map_err(failure);
                let port = part("port")?;
                let port =
                    port.ok_or_else(|| message("chardev: udp: remote port not specified"))?;
                let filled = |text: Option<String>, other: &str| match text {
                    Some(text) if !text.is_empty() => text,
                    _ => other.to_owned(),
                };
                Backend::Udp {
                    remote: (filled(part("host")?, "localhost"), port),
                    local: (
                        filled(part("localaddr")?, "0.0.0.0"),
                        filled(part("localport")?, "0"),
                    ),
                }
            }
            other if OTHERS.contains(&other) => return Err(message(not_here(other))),
            other => return Err(message(unknown(other))),
        })
    }

    fn from_arguments(
        kind: &str,
        data: &mut Arguments,
    ) -> Result<Result<Self, Failure>, qmp::Failure> {
        Ok(Ok(match kind {
            "file" => Backend::File {
                input: data.text("in")?,
                output: data.need_text("out")?,
                append: data.switch("append")?.unwrap_or(false),
            },
            "null" => Backend::Null,
            "pipe" => Backend::Pipe {
                path: data.need_text("device")?,
            },
            "pty" => Backend::Pty {
                link: data.text("path")?,
            },
            "ringbuf" | "memory" => {
                let size = data.number("size")?.map(|size| size as u64);
                return Ok(Backend::ring(kind, size).map_err(message));
            }
            "serial" => Backend::Serial {
                path: data.need_text("device")?,
            },
            "socket" => return Ok(socket_from_arguments(data)?.map(Backend::Socket)),
            "stdio" => {
                data.switch("signal")?;
                Backend::Stdio
            }
            "udp" => {
                let remote = inet(data.need_object("remote")?)?;
                let local = match data.object("local")? {
                    Some(local) => inet(local)?,
                    None => ("0.0.0.0".to_owned(), "0".to_owned()),
                };
                Backend::Udp { remote, local }
            }
            other if OTHERS.contains(&other) => return Ok(Err(message(not_here(other)))),
            other => return Ok(Err(message(unknown(other)))),
        }))
    }

    fn ring(kind: &str, size_bytes: Option<u64>) -> Result<Self, String> {
        let size_bytes = size_bytes.unwrap_or(DEFAULT_SIZE_BYTES as u64);
        if !size_bytes.is_power_of_two() {
            return Err("size of ringbuf chardev must be power of two".to_owned());
        }
        match usize::try_from(size_bytes) {
            Ok(size_bytes) if size_bytes <= MAX_SIZE_BYTES => Ok(Backend::Ring {
                name: if kind == "memory" {
                    "memory"
                } else {
                    "ringbuf"
                },
                size_bytes,
            }),
            _ => Err(format!(
                "size of ringbuf chardev must be at most {MAX_SIZE_BYTES} bytes"
            )),
        }
    }
}

fn socket_from_options(options: &mut Options) -> Result<SocketSettings, Failure> {
    let mut text = |key: &str| options.take_text(key).map_err(failure);
    let (path, fd, host, port) = (text("path")?, text("fd")?, text("host")?, text("port")?);
    let (creds, authz) = (text("tls-creds")?, text("tls-authz")?);
    if usize::from(path.is_some()) + usize::from(fd.is_some()) + usize::from(host.is_some()) > 1 {
        return Err(message(
            "None or one of 'path', 'fd' or 'host' option required.",
        ));
    }
    if host.is_some() && port.is_none() {
        return Err(message("chardev: socket: no port given"));
    }
    let mut switch = |key: &str| options.take_bool(key).map_err(failure);
    if let (Some(_), Some(_)) = (switch("delay")?, switch("nodelay")?) {
        return Err(message("'delay' and 'nodelay' are mutually exclusive"));
    }
    let server = switch("server")? == Some(true);
    let wait = switch("wait")?;
    for protocol in ["telnet", "tn3270"] {
        if switch(protocol)? == Some(true) {
            return Err(message(not_an_option(protocol)));
        }
    }
    let websocket = switch("websocket")? == Some(true);
    let (is_abstract, tight) = (switch("abstract")?, switch("tight")?);
    let families = (switch("ipv4")?, switch("ipv6")?);
    let seconds = options.take_number("reconnect").map_err(failure)?;
    let milliseconds = options.take_number("reconnect-ms").map_err(failure)?;
    let last_port = options.take_number("to").map_err(failure)?;
    let last_port = last_port.map(port_of).transpose().map_err(message)?;
    let address = match (path, host, fd) {
        (Some(path), ..) => Address::Unix {
            path,
            is_abstract: is_abstract == Some(true),
            tight: tight != Some(false),
        },
        (None, Some(host), _) => Address::Inet(InetAddress {
            last_port,
            families,
            ..InetAddress::new(host, port.unwrap_or_default())
        }),
        (None, None, fd) => Address::Fd(fd.unwrap_or_default()),
    };
    let checks = Checks {
        websocket,
        creds,
        authz,
        seconds,
        milliseconds,
        wait,
    };
    checks.finish(address, server, true).map_err(message)
}

fn socket_from_arguments(
    data: &mut Arguments,
) -> Result<Result<SocketSettings, Failure>, qmp::Failure> {
    let mut outer = data.need_object("addr")?;
    let kinds = [("inet", 0), ("unix", 1), ("vsock", 2), ("fd", 3)];
    let kind = outer.need_choice("type", &kinds)?;
    let mut inner = outer.need_object("data")?;
    let address = match kind {
        0 => Address::Inet(InetAddress::from_arguments(&mut inner)?),
        1 => Address::Unix {
            path: inner.need_text("path")?,
            is_abstract: inner.switch("abstract")?.unwrap_or(false),
            tight: inner.switch("tight")?.unwrap_or(true),
        },
        3 => Address::Passed(inner.need_text("str")?),
        _ => {
            let text = "Addresses of type 'vsock' are not part of this version";
            return Ok(Err(message(text)));
        }
    };
    inner.finish()?;
    outer.finish()?;
    let (creds, authz) = (data.text("tls-creds")?, data.text("tls-authz")?);
    let server = data.switch("server")?.unwrap_or(true);
    let wait = data.switch("wait")?;
    data.switch("nodelay")?;
    for protocol in ["telnet", "tn3270"] {
        if data.switch(protocol)? == Some(true) {
            return Ok(Err(message(not_an_option(protocol))));
        }
    }
    let checks = Checks {
        websocket: data.switch("websocket")?.unwrap_or(false),
        creds,
        authz,
        seconds: data.number("reconnect")?.map(|number| number as u64),
        milliseconds: data.number("reconnect-ms")?.map(|number| number as u64),
        wait,
    };
    Ok(checks.finish(address, server, false).map_err(message))
}

/// Options of sockets that depend on each other.
struct Checks {
    websocket: bool,
    creds: Option<String>,
    authz: Option<String>,
    seconds: Option<u64>,
    milliseconds: Option<u64>,
    wait: Option<bool>,
}

impl Checks {
    /// Whether a server waits where nothing is said: on a command line it does.
    fn finish(self, address: Address, server: bool, waits: bool) -> Result<SocketSettings, String> {
        if self.creds.is_some() {
            return Err(not_an_option("tls-creds"));
        }
        let by_fd = matches!(address, Address::Fd(_) | Address::Passed(_));
        let why = if by_fd && self.seconds.is_some() {
            "'reconnect' option is incompatible with 'fd' address type"
        } else if self.authz.is_some() {
            "'tls_authz' option requires 'tls_creds' option"
        } else if server && self.seconds.is_some() {
            "'reconnect' option is incompatible with socket in server listen mode"
        } else if !server && self.websocket {
            "Websocket client is not implemented"
        } else if !server && self.wait.is_some() {
            "'wait' option is incompatible with socket in client connect mode"
        } else if self.seconds.is_some() && self.milliseconds.is_some() {
            "'reconnect' and 'reconnect-ms' are mutually exclusive"
        } else {
            ""
        };
        if !why.is_empty() {
            return Err(why.to_owned());
        }
        if self.websocket {
            return Err(not_an_option("websocket"));
        }
        let milliseconds = match self.seconds {
            Some(seconds) => seconds.saturating_mul(1000),
            None => self.milliseconds.unwrap_or(0),
        };
        Ok(SocketSettings {
            address,
            server,
            wait: server && self.wait.unwrap_or(waits),
            reconnect: (milliseconds > 0).then(|| Duration::from_millis(milliseconds)),
        })
    }
}

/// The host and the port of an address.
fn inet(mut address: Arguments) -> Result<(String, String), qmp::Failure> {
    address.need_choice("type", &[("inet", ())])?;
    let mut data = address.need_object("data")?;
    let inet = InetAddress::from_arguments(&mut data)?;
    data.finish()?;
    address.finish()?;
    Ok((inet.host, inet.port))
}

/// The names of the backends that there are.
pub fn backend_names() -> &'static [&'static str] {
    &NAMES
}
