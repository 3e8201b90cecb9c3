//! The command line of `vellum serve`. Options that `vellum nbd` and `vellum mount` have too are
//! written as there.

use std::ffi::OsString;

use vellum_export::vhost_user_blk::{Options as VhostUserOptions, SERIAL_BYTES};

use crate::server::{ABOUT_ROWS, Failure, IMAGE_ROWS, ServedImage};
use crate::spec::Spec;

pub const SPEC: Spec = Spec {
    name: "serve",
    about: "Serve a disk over NBD, vhost-user and as a file, and print how to use it",
    usage: "[OPTIONS] IMAGE\n",
    explains: "\
Serves the disk in an image in one or several ways at once, until a signal comes, and prints
what to type to use it.
",
    arguments: &[
        ABOUT_ROWS,
        "
Where the disk is to be had (at least one):
      --nbd=SOCKET           for clients of the NBD protocol, at a unix socket
      --vhost-user=SOCKET    for a virtual machine monitor on this host, which shares the
                             guest's memory (QEMU, cloud-hypervisor, Firecracker)
      --fuse=FILE            as a regular file that exists already (its own content is
                             hidden meanwhile)

More about these:
  -x, --export-name=NAME     name of the NBD export (default: empty)
  -e, --shared=N             NBD clients served at once (default 100; 0: any number)
      --queues=N             queues of the vhost-user disk (default 1)
      --serial=TEXT          its serial number, as the guest sees it
      --allow-other          let other users use FILE, as far as its mode says

What to show:
  -r, --read-only            refuse writes
",
        IMAGE_ROWS,
        "  -q, --quiet                do not print what to type
      --fork                 go to the background once the disk is to be had
      --pid-file=PATH        write the process id to PATH
",
    ],
    closing: "{examples}",
    examples: "\
vellum serve --vhost-user vm.sock --queues 4 disk.qcow2
  for a virtual machine with four processors
vellum serve -r --nbd disk.sock --fuse disk disk.qcow2
  for many readers, and as the file 'disk', which must exist
vellum serve --fork --pid-file vm.pid --nbd vm.sock -l before-upgrade disk.qcow2
  as it was at a snapshot, in the background; kill $(cat vm.pid) ends it
",
    exits: "\
0  ended by a signal, or unmounted
1  an error, which is told
",
    ..Spec::EMPTY
};

/// The command line, taken apart and checked.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) image: ServedImage,
    /// Sockets and the file by which the disk is to be had: at least one.
    pub(super) nbd: Option<String>,
    pub(super) vhost_user: Option<String>,
    pub(super) fuse: Option<String>,
    pub(super) export_name: String,
    /// How many NBD clients are served at once; 0: any number.
    pub(super) shared: Option<usize>,
    pub(super) queues: Option<u16>,
    pub(super) serial: Option<String>,
    pub(super) allow_other: bool,
}

fn fail<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Message(message.into()))
}

impl Arguments {
    /// Takes a command line (without the program's name) apart.
    pub(super) fn parse(words: Vec<OsString>) -> Result<Self, Failure> {
        let mut arguments = Arguments::default();
        let common = SPEC.parse(words, |name, value| arguments.take(name, value))?;
        let [image] = common.operands.as_slice() else {
            return fail("Expecting one image file name\nTry 'vellum serve --help' for more info");
        };
        arguments.image.name.clone_from(image);
        arguments.image.common = common;
        arguments.check()?;
        Ok(arguments)
    }

    fn take(&mut self, name: &str, value: String) -> Result<(), Failure> {
        match name {
            "nbd" => self.nbd = Some(value),
            "export-name" => self.export_name = value,
            "shared" => self.shared = Some(number(&value, "--shared")?),
            "vhost-user" => self.vhost_user = Some(value),
            "queues" => self.queues = Some(number(&value, "--queues")?),
            "serial" => self.serial = Some(value),
            "fuse" => self.fuse = Some(value),
            "allow-other" => self.allow_other = true,
            _ => return self.image.take(name, value),
        }
        Ok(())
    }

    /// Combinations that make no sense.
    fn check(&mut self) -> Result<(), Failure> {
        if self.nbd.is_none() && self.vhost_user.is_none() && self.fuse.is_none() {
            return fail(
                "Nothing says where the disk is to be had: --nbd SOCKET, --vhost-user SOCKET or \
                 --fuse FILE",
            );
        }
        self.image.check()?;
        let (nbd, vhost_user) = (
            ("--nbd", self.nbd.is_some()),
            ("--vhost-user", self.vhost_user.is_some()),
        );
        for (is_given, name, (needed, is_there)) in [
            (self.shared.is_some(), "--shared", nbd),
            (!self.export_name.is_empty(), "--export-name", nbd),
            (self.queues.is_some(), "--queues", vhost_user),
            (self.serial.is_some(), "--serial", vhost_user),
            (
                self.allow_other,
                "--allow-other",
                ("--fuse", self.fuse.is_some()),
            ),
        ] {
            if is_given && !is_there {
                return fail(format!("{name} is of no use without {needed}"));
            }
        }
        let most = VhostUserOptions::MAX_QUEUES;
        if self.queues.is_some_and(|count| count == 0 || count > most) {
            return fail(format!("--queues takes a number from 1 to {most}"));
        }
        if self
            .serial
            .as_ref()
            .is_some_and(|text| text.len() > SERIAL_BYTES)
        {
            return fail(format!("--serial takes at most {SERIAL_BYTES} bytes"));
        }
        Ok(())
    }
}

fn number<T: std::str::FromStr>(text: &str, name: &str) -> Result<T, Failure> {
    text.parse()
        .map_err(|_| Failure::message(format!("Invalid value '{text}' for {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, String> {
        let words = line.split_whitespace().map(OsString::from).collect();
        Arguments::parse(words).map_err(|failure| match failure {
            Failure::Message(text) => text,
            other => format!("{other:?}"),
        })
    }

    #[test]
    fn a_usual_command_line_is_understood() {
        let line = "--nbd n.sock --vhost-user v.sock --queues 4 --fuse disk a.qcow2";
        let arguments = parse(line).expect("valid");
        assert_eq!(arguments.image.name, "a.qcow2");
        assert_eq!(arguments.queues, Some(4));
        let image = arguments.image;
        assert!(!image.read_only && !image.keep_space && arguments.shared.is_none());
        assert!(
            parse("-l one --fuse disk a")
                .expect("valid")
                .image
                .read_only
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (line, message) in [
            (
                "a",
                "Nothing says where the disk is to be had: --nbd SOCKET, --vhost-user SOCKET or \
                 --fuse FILE",
            ),
            (
                "--nbd s --queues 2 a",
                "--queues is of no use without --vhost-user",
            ),
            ("--fuse f -e 2 a", "--shared is of no use without --nbd"),
            (
                "--nbd s --allow-other a",
                "--allow-other is of no use without --fuse",
            ),
            (
                "--vhost-user s --queues 65 a",
                "--queues takes a number from 1 to 64",
            ),
            (
                "--vhost-user s --queues x a",
                "Invalid value 'x' for --queues",
            ),
            (
                "--nbd s --image-opts -f raw a",
                "--image-opts and -f are mutually exclusive",
            ),
        ] {
            assert_eq!(parse(line).err().as_deref(), Some(message), "{line}");
        }
        assert!(parse("--nbd s").is_err());
    }
}
