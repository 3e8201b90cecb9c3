//! The command line of `vellum nbd`: options as `qemu-nbd` has them, their checks, and its errors.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use vellum_graph::tls;
use vellum_io::error::io_text;
use vellum_nbd::Upgrade;
use vellum_nbd::client::Address;
use vellum_options::{Aio, CacheMode, DetectZeroes};

use crate::getopt::UsageError;
use crate::report;
use crate::server::Failure;
use crate::spec::Spec;

/// Where the server listens if nothing else is said.
pub(super) const DEFAULT_ADDRESS: &str = "0.0.0.0";
/// The port that is set aside for NBD.
pub(super) const DEFAULT_PORT: &str = "10809";

/// Longest name and description in bytes that the protocol allows.
const MAX_STRING_BYTES: usize = vellum_nbd::proto::MAX_STRING_BYTES;

pub const SPEC: Spec = Spec {
    name: "nbd",
    about: "Serve an image over NBD (qemu-nbd)",
    usage: "\
[OPTIONS] IMAGE
--list [OPTIONS]
",
    explains: "Serves a disk image to clients of the NBD protocol.\n",
    arguments: &["  -h, --help                 print this text
  -V, --version              print the version

Where to listen, and to whom:
  -k, --socket=PATH          unix socket to listen on (an absolute path)
  -p, --port=PORT            TCP port to listen on (default 10809)
  -b, --bind=ADDRESS         TCP address to listen on (default 0.0.0.0)
  -e, --shared=N             clients served at once (default 1; 0: any number)
  -t, --persistent           stay when the last client leaves
  -x, --export-name=NAME     name of the export (default: empty)
  -D, --description=TEXT     description of the export
      --handshake-limit=N    seconds a client may take to choose (default 10; 0: any)

What to show:
  -r, --read-only            refuse writes
  -o, --offset=N             leave out the first N bytes
  -A, --allocation-depth     let clients ask which layer holds a range
  -B, --bitmap=NAME          let clients ask what a dirty bitmap holds; several times

How to open the image:
  -f, --format=FORMAT        format of the image (raw, qcow2)
      --image-opts           IMAGE is a list of key=value options
  -n, --nocache              the same as --cache=none
      --cache=MODE           none, writeback (default), writethrough, directsync, unsafe
      --aio=MODE             threads, native, io_uring
      --discard=MODE         ignore, unmap
      --detect-zeroes=MODE   off, on, unmap

  -s, --snapshot             throw all changes away in the end
  -l, --load-snapshot=PARAM  show an internal snapshot: ID, NAME, or
                             snapshot.id=ID,snapshot.name=NAME

Who may come in, and how:
      --object=TYPE,id=ID    define a secret, TLS credentials (tls-creds-x509,
                             tls-creds-psk, tls-creds-anon), or who may come in
                             (authz-simple, authz-list, authz-list-file)
      --tls-creds=ID         insist on TLS with these credentials
      --tls-authz=ID         let only those in that this object allows
      --tls-hostname=NAME    with --list: the name in the server's certificate

How to run:
  -v, --verbose              tell what clients do wrong
  -T, --trace=PATTERN        write events as they happen; help lists them
      --fork                 go to the background once clients can connect
      --pid-file=PATH        write the process id to PATH

Another server:
  -L, --list                 list what the server at -k, or -b and -p, offers
"],
    hidden: "\
-c, --connect DEV
-d, --disconnect
--selinux-label LABEL
",
    order: "connect cache disconnect discard detect-zeroes description list load-snapshot socket \
            snapshot shared selinux-label tls-creds tls-hostname tls-authz trace",
    examples: "\
vellum nbd -k /run/user/1000/disk.sock -t -e 8 disk.qcow2
  for up to 8 clients at a time, until it is ended
vellum nbd -r -b 127.0.0.1 -p 10809 disk.qcow2
  for one client, read-only
vellum nbd --list -k /run/user/1000/disk.sock
  what a server has
",
    ..Spec::EMPTY
};

/// The command line, taken apart and checked.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    /// List another server's exports, and serve nothing.
    pub(super) list: bool,
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
        let common = SPEC.parse(words, |name, value| arguments.take(name, value))?;
        (arguments.format, arguments.image_opts) = (common.format, common.image_opts);
        arguments.check()?;
        arguments.take_operands(common.operands)?;
        Ok(arguments)
    }

    fn take(&mut self, name: &str, value: String) -> Result<(), Failure> {
        match name {
            "list" => self.list = true,
            "bind" => self.bind = Some(value),
            "port" => self.port = Some(value),
            "socket" if !value.starts_with('/') => return fail("socket path must be absolute"),
            "socket" => self.socket = Some(value),
            "read-only" => self.read_only = true,
            "allocation-depth" => self.allocation_depth = true,
            "bitmap" => self.bitmaps.push(value),
            "connect" => self.kernel_device = Some(KernelDevice::Connect(value)),
            "disconnect" => self.kernel_device = Some(KernelDevice::Disconnect),
            "load-snapshot" => self.snapshot = Some(value),
            "persistent" => self.persistent = true,
            "verbose" => self.verbose = true,
            "tls-creds" => self.tls.creds = Some(value),
            "tls-hostname" => self.tls.hostname = Some(value),
            "tls-authz" => self.tls.authz = Some(value),
            "trace" => {
                if let Err(code) = crate::trace::take(&value) {
                    std::process::exit(code);
                }
            }
            "fork" => self.fork = true,
            "pid-file" => self.pid_file = Some(value),
            "selinux-label" => self.selinux_label = true,
            "snapshot" => self.temporary = true,
            _ => return self.take_checked(name, value),
        }
        Ok(())
    }

    /// Options whose value can be wrong.
    fn take_checked(&mut self, name: &str, value: String) -> Result<(), Failure> {
        match name {
            "offset" => self.offset_bytes = parse_offset(&value)?,
            "nocache" => self.set_cache("none")?,
            "cache" => self.set_cache(&value)?,
            "aio" => {
                let Some(aio) = Aio::parse(&value) else {
                    return fail(format!("Invalid aio mode '{value}'"));
                };
                if self.aio.replace(aio).is_some() {
                    return fail("--aio can only be specified once");
                }
            }
            "discard" => self.set_discard(&value)?,
            "detect-zeroes" => match DetectZeroes::parse(&value) {
                Some(mode) => self.detect_zeroes = mode,
                None => {
                    return fail(format!(
                        "Failed to parse detect_zeroes mode: invalid parameter value: {value}"
                    ));
                }
            },
            "shared" => match value.parse() {
                Ok(clients) => self.shared = Some(clients),
                Err(_) => return fail(format!("Invalid shared device number '{value}'")),
            },
            "handshake-limit" => match value.parse() {
                Ok(0) => self.handshake_limit = Some(None),
                Ok(seconds) => self.handshake_limit = Some(Some(Duration::from_secs(seconds))),
                Err(_) => return fail(format!("Invalid handshake limit '{value}'")),
            },
            "export-name" if value.len() > MAX_STRING_BYTES => {
                return fail(format!("export name '{value}' too long"));
            }
            "export-name" => self.export_name = Some(value),
            "description" if value.len() > MAX_STRING_BYTES => {
                return fail(format!("export description '{value}' too long"));
            }
            "description" => self.description = Some(value),
            _ => return Err(UsageError::not_taken(name).into()),
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
        if self.list {
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
        let listing = self.list;
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
        if self.list {
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
