//! The command line of `vellum mount`. Options that `vellum nbd` has too are written as there.

use std::ffi::OsString;

use vellum_export::fuse::Transport;

use crate::server::{ABOUT_ROWS, Failure, IMAGE_ROWS, ServedImage};
use crate::spec::Spec;

pub const SPEC: Spec = Spec {
    name: "mount",
    about: "Show the disk in an image as a regular file",
    usage: "[OPTIONS] IMAGE FILE\n",
    explains: "\
Shows the disk in an image as FILE, a regular file that exists already (its own content is
hidden meanwhile), until FILE is unmounted or a signal comes.  Needs /dev/fuse, and
fusermount3 for those who are not root.
",
    arguments: &[
        ABOUT_ROWS,
        "
What to show, and to whom:
  -r, --read-only            refuse writes
      --growable             writes beyond the end make the disk longer, and its size may
                             be set
      --allow-other          let other users in, as far as the mode of FILE says
",
        IMAGE_ROWS,
        "      --io-uring=MODE        have requests come over io_uring: on, off, auto (default:
                             where the kernel has that switched on)
      --fork                 go to the background once FILE is there
      --pid-file=PATH        write the process id to PATH
",
    ],
    examples: "\
vellum mount --fork disk.qcow2 disk
  the disk in an image as the file 'disk', which must exist; 'umount disk' ends it
vellum mount -r -l before-upgrade disk.qcow2 disk
  as it was at a snapshot
",
    exits: "\
0  unmounted, or ended by a signal
1  an error, which is told
",
    ..Spec::EMPTY
};

/// The command line, taken apart and checked.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) image: ServedImage,
    pub(super) mountpoint: String,
    pub(super) growable: bool,
    pub(super) allow_other: bool,
    /// How requests come from the kernel.
    pub(super) transport: Transport,
}

fn fail<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Message(message.into()))
}

impl Arguments {
    /// Takes a command line (without the program's name) apart.
    pub(super) fn parse(words: Vec<OsString>) -> Result<Self, Failure> {
        let mut arguments = Arguments::default();
        let common = SPEC.parse(words, |name, value| arguments.take(name, value))?;
        arguments.image.common = common;
        arguments.image.check()?;
        if arguments.image.read_only && arguments.growable {
            return fail("--growable is of no use where nothing can be written");
        }
        let [image, mountpoint] = arguments.image.common.operands.as_slice() else {
            return fail(
                "Expecting an image and the file that it is to appear as\nTry 'vellum mount \
                 --help' for more info",
            );
        };
        arguments.mountpoint.clone_from(mountpoint);
        arguments.image.name = image.clone();
        Ok(arguments)
    }

    fn take(&mut self, name: &str, value: String) -> Result<(), Failure> {
        match name {
            "growable" => self.growable = true,
            "allow-other" => self.allow_other = true,
            "io-uring" => {
                self.transport = match value.as_str() {
                    "auto" => Transport::Auto,
                    "off" => Transport::Device,
                    "on" => Transport::IoUring,
                    _ => return fail(format!("Invalid io-uring mode '{value}'")),
                }
            }
            _ => return self.image.take(name, value),
        }
        Ok(())
    }
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
        let arguments = parse("--growable -f qcow2 disk.qcow2 disk").expect("valid");
        assert_eq!(arguments.image.name, "disk.qcow2");
        assert_eq!(arguments.mountpoint, "disk");
        let image = arguments.image;
        assert!(arguments.growable && !image.read_only && !image.keep_space);
        assert!(parse("-l one a b").expect("valid").image.read_only);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (line, message) in [
            (
                "--image-opts -f raw a b",
                "--image-opts and -f are mutually exclusive",
            ),
            (
                "-r --growable a b",
                "--growable is of no use where nothing can be written",
            ),
            ("--io-uring=yes a b", "Invalid io-uring mode 'yes'"),
            ("--cache=foo a b", "Invalid cache mode `foo'"),
            ("--aio=foo a b", "Invalid aio mode 'foo'"),
            ("--discard=foo a b", "Invalid discard mode `foo'"),
        ] {
            assert_eq!(parse(line).err().as_deref(), Some(message), "{line}");
        }
        assert!(parse("only-one").is_err());
    }
}
