//! The command line of `vellum nbd`: options as `qemu-nbd` has them, their checks, and its errors.
//! `manual` and the completions read the same tables of options.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use vellum_graph::tls;
use vellum_io::error::io_text;
use vellum_nbd::Upgrade;
use vellum_nbd::client::Address;
use vellum_options::{Aio, CacheMode, DetectZeroes};

use crate::getopt::{OptionSpec, Parser, Shape, Takes, shapes};
use crate::report;
use crate::server::Failure;

/// Where the server listens if nothing else is said.
pub(super) const DEFAULT_ADDRESS: &str = "0.0.0.0";
/// The port that is set aside for NBD.
pub(super) const DEFAULT_PORT: &str = "10809";

/// Longest name and description in bytes that the protocol allows.
const MAX_STRING_BYTES: usize = vellum_nbd::proto::MAX_STRING_BYTES;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Id {
    Help,
    Version,
    Bind,
    Port,
    Socket,
    Offset,
    ReadOnly,
    AllocationDepth,
    Bitmap,
    Connect,
    Disconnect,
    List,
    Snapshot,
    LoadSnapshot,
    NoCache,
    Cache,
    Aio,
    Discard,
    DetectZeroes,
    Shared,
    Format,
    Persistent,
    Verbose,
    Object,
    ExportName,
    Description,
    TlsCreds,
    TlsHostname,
    TlsAuthz,
    ImageOpts,
    Trace,
    Fork,
    PidFile,
    SelinuxLabel,
    HandshakeLimit,
}

const OPTIONS: &[OptionSpec<Id>] = &[
    OptionSpec::new(Id::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Id::Version, 'V', "version", Takes::Nothing),
    OptionSpec::new(Id::Bind, 'b', "bind", Takes::Value),
    OptionSpec::new(Id::Port, 'p', "port", Takes::Value),
    OptionSpec::new(Id::Socket, 'k', "socket", Takes::Value),
    OptionSpec::new(Id::Offset, 'o', "offset", Takes::Value),
    OptionSpec::new(Id::ReadOnly, 'r', "read-only", Takes::Nothing),
    OptionSpec::new(Id::AllocationDepth, 'A', "allocation-depth", Takes::Nothing),
    OptionSpec::new(Id::Bitmap, 'B', "bitmap", Takes::Value),
    OptionSpec::new(Id::Connect, 'c', "connect", Takes::Value),
    OptionSpec::new(Id::Disconnect, 'd', "disconnect", Takes::Nothing),
    OptionSpec::new(Id::List, 'L', "list", Takes::Nothing),
    OptionSpec::new(Id::Snapshot, 's', "snapshot", Takes::Nothing),
    OptionSpec::new(Id::LoadSnapshot, 'l', "load-snapshot", Takes::Value),
    OptionSpec::new(Id::NoCache, 'n', "nocache", Takes::Nothing),
    OptionSpec::long(Id::Cache, "cache", Takes::Value),
    OptionSpec::long(Id::Aio, "aio", Takes::Value),
    OptionSpec::long(Id::Discard, "discard", Takes::Value),
    OptionSpec::long(Id::DetectZeroes, "detect-zeroes", Takes::Value),
    OptionSpec::new(Id::Shared, 'e', "shared", Takes::Value),
    OptionSpec::new(Id::Format, 'f', "format", Takes::Value),
    OptionSpec::new(Id::Persistent, 't', "persistent", Takes::Nothing),
    OptionSpec::new(Id::Verbose, 'v', "verbose", Takes::Nothing),
    OptionSpec::long(Id::Object, "object", Takes::Value),
    OptionSpec::new(Id::ExportName, 'x', "export-name", Takes::Value),
    OptionSpec::new(Id::Description, 'D', "description", Takes::Value),
    OptionSpec::long(Id::TlsCreds, "tls-creds", Takes::Value),
    OptionSpec::long(Id::TlsHostname, "tls-hostname", Takes::Value),
    OptionSpec::long(Id::TlsAuthz, "tls-authz", Takes::Value),
    OptionSpec::long(Id::ImageOpts, "image-opts", Takes::Nothing),
    OptionSpec::new(Id::Trace, 'T', "trace", Takes::Value),
    OptionSpec::long(Id::Fork, "fork", Takes::Nothing),
    OptionSpec::long(Id::PidFile, "pid-file", Takes::Value),
    OptionSpec::long(Id::SelinuxLabel, "selinux-label", Takes::Value),
    OptionSpec::long(Id::HandshakeLimit, "handshake-limit", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

/// What the program is asked to do.
#[derive(Debug, Default, PartialEq)]
pub(super) enum Action {
    /// Serve an image.
    #[default]
    Serve,
    /// List another server's exports.
    List,
    /// Print the help.
    Help,
    /// Print the version.
    Version,
}

/// The command line, taken apart and checked.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) action: Action,
    pub(super) image: String,
    pub(super) image_opts: bool,
    pub(super) format: Option<String>,
    pub(super) offset_bytes: u64,
    pub(super) read_only: bool,
    pub(super) cache: Option<CacheMode>,
    pub(super) aio: Option<Aio>,
    pub(super) discard: Option<bool>,
    pub(super) detect_zeroes: DetectZeroes,
    pub(super) snapshot: Option<String>,
    /// Changes are thrown away.
    pub(super) temporary: bool,
    pub(super) bitmaps: Vec<String>,
    pub(super) allocation_depth: bool,
    pub(super) export_name: Option<String>,
    pub(super) description: Option<String>,
    pub(super) socket: Option<String>,
    pub(super) bind: Option<String>,
    pub(super) port: Option<String>,
    pub(super) shared: Option<usize>,
    pub(super) persistent: bool,
    pub(super) verbose: bool,
    pub(super) fork: bool,
    pub(super) pid_file: Option<String>,
    pub(super) handshake_limit: Option<Option<Duration>>,
    tls: Tls,
    selinux_label: bool,
    kernel_device: Option<KernelDevice>,
}

/// What to do with a device of the kernel's client.
#[derive(Debug)]
enum KernelDevice {
    Connect(String),
    Disconnect,
}

#[derive(Debug, Default)]
struct Tls {
    creds: Option<String>,
    hostname: Option<String>,
    authz: Option<String>,
}

fn fail<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Message(message.into()))
}

impl Arguments {
    /// Takes a command line (without the program's name) apart.
    pub(super) fn parse(words: Vec<OsString>) -> Result<Self, Failure> {
        let mut arguments = Arguments::default();
        let mut parser = Parser::new(OPTIONS, words);
        while let Some((id, value)) = parser.next_option()? {
            arguments.take(id, value.unwrap_or_default())?;
            if matches!(arguments.action, Action::Help | Action::Version) {
                return Ok(arguments);
            }
        }
        arguments.check()?;
        arguments.take_operands(parser.operands())?;
        Ok(arguments)
    }

    fn take(&mut self, id: Id, value: String) -> Result<(), Failure> {
        match id {
            Id::Help => self.action = Action::Help,
            Id::Version => self.action = Action::Version,
            Id::List => self.action = Action::List,
            Id::Bind => self.bind = Some(value),
            Id::Port => self.port = Some(value),
            Id::Socket if !value.starts_with('/') => return fail("socket path must be absolute"),
            Id::Socket => self.socket = Some(value),
            Id::ReadOnly => self.read_only = true,
            Id::AllocationDepth => self.allocation_depth = true,
            Id::Bitmap => self.bitmaps.push(value),
            Id::Connect => self.kernel_device = Some(KernelDevice::Connect(value)),
            Id::Disconnect => self.kernel_device = Some(KernelDevice::Disconnect),
            Id::LoadSnapshot => self.snapshot = Some(value),
            Id::Format => self.format = Some(value),
            Id::Persistent => self.persistent = true,
            Id::Verbose => self.verbose = true,
            Id::TlsCreds => self.tls.creds = Some(value),
            Id::TlsHostname => self.tls.hostname = Some(value),
            Id::TlsAuthz => self.tls.authz = Some(value),
            Id::ImageOpts => self.image_opts = true,
            Id::Trace => {
                if let Err(code) = crate::trace::take(&value) {
                    std::process::exit(code);
                }
            }
            Id::Fork => self.fork = true,
            Id::PidFile => self.pid_file = Some(value),
            Id::SelinuxLabel => self.selinux_label = true,
            Id::Snapshot => self.temporary = true,
            Id::Object => return crate::object::add(&value).map_err(Failure::from),
            _ => return self.take_checked(id, value),
        }
        Ok(())
    }

    /// Options whose value can be wrong.
    fn take_checked(&mut self, id: Id, value: String) -> Result<(), Failure> {
        match id {
            Id::Offset => self.offset_bytes = parse_offset(&value)?,
            Id::NoCache => self.set_cache("none")?,
            Id::Cache => self.set_cache(&value)?,
            Id::Aio => {
                let Some(aio) = Aio::parse(&value) else {
                    return fail(format!("Invalid aio mode '{value}'"));
                };
                if self.aio.replace(aio).is_some() {
                    return fail("--aio can only be specified once");
                }
            }
            Id::Discard => self.set_discard(&value)?,
            Id::DetectZeroes => match DetectZeroes::parse(&value) {
                Some(mode) => self.detect_zeroes = mode,
                None => {
                    return fail(format!(
                        "Failed to parse detect_zeroes mode: invalid parameter value: {value}"
                    ));
                }
            },
            Id::Shared => match value.parse() {
                Ok(clients) => self.shared = Some(clients),
                Err(_) => return fail(format!("Invalid shared device number '{value}'")),
            },
            Id::HandshakeLimit => match value.parse() {
                Ok(0) => self.handshake_limit = Some(None),
                Ok(seconds) => self.handshake_limit = Some(Some(Duration::from_secs(seconds))),
                Err(_) => return fail(format!("Invalid handshake limit '{value}'")),
            },
            Id::ExportName if value.len() > MAX_STRING_BYTES => {
                return fail(format!("export name '{value}' too long"));
            }
            Id::ExportName => self.export_name = Some(value),
            Id::Description if value.len() > MAX_STRING_BYTES => {
                return fail(format!("export description '{value}' too long"));
            }
            Id::Description => self.description = Some(value),
            _ => {}
        }
        Ok(())
    }

    fn set_cache(&mut self, name: &str) -> Result<(), Failure> {
        if self.cache.is_some() {
            return fail("-n and --cache can only be specified once");
        }
        match CacheMode::parse(name) {
            Some(mode) => self.cache = Some(mode),
            None => return fail(format!("Invalid cache mode `{name}'")),
        }
        Ok(())
    }

    fn set_discard(&mut self, mode: &str) -> Result<(), Failure> {
        if self.discard.is_some() {
            return fail("--discard can only be specified once");
        }
        self.discard = Some(match mode {
            "ignore" | "off" => false,
            "unmap" | "on" => true,
            _ => return fail(format!("Invalid discard mode `{mode}'")),
        });
        Ok(())
    }

    /// Combinations that make no sense.
    fn check(&self) -> Result<(), Failure> {
        if self.detect_zeroes == DetectZeroes::Unmap && self.discard != Some(true) {
            return fail(
                "setting detect-zeroes to unmap is not allowed without setting discard operation \
                 to unmap",
            );
        }
        if self.action == Action::List {
            return self.check_list();
        }
        if let Some(KernelDevice::Connect(device)) = &self.kernel_device {
            return no_kernel_device("Failed to open", device);
        }
        if self.image_opts && self.format.is_some() {
            return fail("--image-opts and -f are mutually exclusive");
        }
        if self.selinux_label {
            return fail("SELinux labels are not part of this version");
        }
        self.check_tls()
    }

    fn check_list(&self) -> Result<(), Failure> {
        let per_device = self.export_name.is_some()
            || self.description.is_some()
            || !self.bitmaps.is_empty()
            || self.allocation_depth
            || self.kernel_device.is_some()
            || self.offset_bytes > 0
            || self.temporary
            || self.snapshot.is_some();
        if per_device {
            return fail("List mode is incompatible with per-device settings");
        }
        if self.fork {
            return fail("List mode is incompatible with forking");
        }
        self.check_tls()
    }

    fn check_tls(&self) -> Result<(), Failure> {
        let listing = self.action == Action::List;
        match &self.tls {
            Tls {
                creds: Some(_),
                authz: Some(_),
                ..
            } if listing => fail("TLS authorization is incompatible with export list"),
            Tls {
                creds: Some(_),
                hostname: Some(_),
                ..
            } if !listing => fail("TLS hostname is only supported with export list"),
            Tls {
                creds: Some(id), ..
            } => {
                let checked = match listing {
                    true => tls::client(id, None).map(drop),
                    false => tls::server(id, None).map(drop),
                };
                checked.map_err(no_credentials)
            }
            Tls { authz: Some(_), .. } => fail("--tls-authz is not permitted without --tls-creds"),
            Tls {
                hostname: Some(_), ..
            } => fail("--tls-hostname is not permitted without --tls-creds"),
            _ => Ok(()),
        }
    }

    /// What secures a connection to a server that is to be listed.
    pub(super) fn client_tls(
        &self,
        address: &Address,
    ) -> Result<Option<Arc<dyn Upgrade>>, Failure> {
        let Some(id) = &self.tls.creds else {
            return Ok(None);
        };
        let hostname = self.tls.hostname.as_deref().or(address.host());
        let hostname = hostname.map(str::to_owned);
        tls::client(id, hostname).map(Some).map_err(no_credentials)
    }

    /// What secures the connections of clients.
    pub(super) fn server_tls(&self) -> Result<Option<Arc<dyn Upgrade>>, Failure> {
        let Some(id) = &self.tls.creds else {
            return Ok(None);
        };
        let authz = self.tls.authz.clone();
        tls::server(id, authz).map(Some).map_err(no_credentials)
    }

    fn take_operands(&mut self, operands: Vec<String>) -> Result<(), Failure> {
        if self.action == Action::List {
            return match operands.is_empty() {
                true => Ok(()),
                false => fail("List mode is incompatible with a file name"),
            };
        }
        let Ok([image]) = <[String; 1]>::try_from(operands) else {
            return fail(match report::is_own() {
                true => "Expecting one image file name\nTry 'vellum nbd --help' for more info",
                false => "Invalid number of arguments\nTry `qemu-nbd --help' for more information.",
            });
        };
        if let Some(KernelDevice::Disconnect) = self.kernel_device {
            return no_kernel_device("Cannot open", &image);
        }
        self.image = image;
        Ok(())
    }
}

/// Why a device of the kernel cannot be used: it is not there, or there is no code for it.
fn no_kernel_device(what: &str, device: &str) -> Result<(), Failure> {
    match std::fs::File::options().read(true).write(true).open(device) {
        Err(error) => fail(format!("{what} {device}: {}", io_text(&error))),
        Ok(_) => fail("Kernel /dev/nbdN support not available"),
    }
}

/// A plain number, as `qemu-nbd` takes it: no suffix. One with a minus wraps around, and is
/// refused for what it is then.
fn parse_offset(text: &str) -> Result<u64, Failure> {
    let digits = text.trim_start();
    let negative = digits.strip_prefix('-');
    let Ok(number) = crate::size::parse_plain(negative.unwrap_or(digits)) else {
        return fail(format!("Invalid offset '{text}'"));
    };
    let number = match negative {
        Some(_) => number.wrapping_neg(),
        None => number,
    };
    match i64::try_from(number) {
        Ok(_) => Ok(number),
        Err(_) => fail(format!(
            "Value '{}' is out of range for parameter 'offset'",
            number.cast_signed()
        )),
    }
}

fn no_credentials(error: vellum::Error) -> Failure {
    let text = vellum_options::error_text(&error);
    Failure::Message(format!("Failed to get TLS creds: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, String> {
        let words = line.split_whitespace().map(OsString::from).collect();
        Arguments::parse(words).map_err(|failure| match failure {
            Failure::Message(text) => text,
            Failure::Usage(error) => error.to_string(),
            Failure::AlreadyReported => String::new(),
        })
    }

    #[test]
    fn a_usual_command_line_is_understood() {
        let line = "-k /s -t -e 16 --cache=none --aio=io_uring --image-opts driver=raw";
        let arguments = parse(line).expect("valid");
        assert_eq!(arguments.socket.as_deref(), Some("/s"));
        assert_eq!(arguments.shared, Some(16));
        assert_eq!(arguments.cache, CacheMode::parse("none"));
        assert_eq!(arguments.aio, Some(Aio::IoUring));
        assert!(arguments.persistent && arguments.image_opts && !arguments.fork);
        assert_eq!(arguments.image, "driver=raw");
    }

    #[test]
    fn errors_are_those_of_qemu_nbd() {
        for (line, message) in [
            ("-k rel x", "socket path must be absolute"),
            ("-o 1k i", "Invalid offset '1k'"),
            ("-o 1.5 i", "Invalid offset '1.5'"),
            ("-o -1k i", "Invalid offset '-1k'"),
            (
                "-o -1 i",
                "Value '-1' is out of range for parameter 'offset'",
            ),
            ("-e x i", "Invalid shared device number 'x'"),
            ("-e -1 i", "Invalid shared device number '-1'"),
            (
                "-n --cache=none i",
                "-n and --cache can only be specified once",
            ),
            ("--cache=foo i", "Invalid cache mode `foo'"),
            ("--aio=foo i", "Invalid aio mode 'foo'"),
            ("--discard=foo i", "Invalid discard mode `foo'"),
            ("--handshake-limit=x i", "Invalid handshake limit 'x'"),
            ("-L foo", "List mode is incompatible with a file name"),
            (
                "-L -x foo",
                "List mode is incompatible with per-device settings",
            ),
            ("-L --fork", "List mode is incompatible with forking"),
            (
                "--image-opts -f raw i",
                "--image-opts and -f are mutually exclusive",
            ),
            (
                "--tls-creds=t i",
                "Failed to get TLS creds: No TLS credentials with id 't'",
            ),
            (
                "--object foo i",
                "Parameter 'qom-type' does not accept value 'foo'",
            ),
            ("-z", "invalid option -- 'z'"),
        ] {
            assert_eq!(parse(line).err().as_deref(), Some(message), "{line}");
        }
    }
}
