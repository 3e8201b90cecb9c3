//! The command line of `vellum io` itself (that of a command is in `arguments`): the image, how to
//! open it, and the commands.

use std::ffi::OsString;

use vellum_options::{Aio, CacheMode, ImageSpec, OpenFlags};

use crate::getopt::{Parser, UsageError};
use crate::spec::Spec;
use crate::version::version;
use crate::{hint, report};

/// What the command line asks for.
#[derive(Debug)]
pub struct SessionOptions {
    /// The image to open first.
    pub image: Option<ImageSpec>,
    /// How to open it.
    pub flags: OpenFlags,
    /// The commands to run; without any they come from standard input.
    pub commands: Vec<String>,
    /// Buffers are misaligned.
    pub misalign: bool,
    /// Changes go to a temporary overlay.
    pub temporary: bool,
}

pub const SPEC: Spec = Spec {
    name: "io",
    about: "Read and write single requests (qemu-io)",
    usage: "[OPTIONS]... [-c STRING]... [file]\n",
    explains: "Exercises a disk image by commands\n",
    arguments: &[
        "  --object OBJECTDEF   make an object, such as a secret with a key
  --image-opts         the file is driver options, not a name
  -c, --cmd STRING     run a command; without any, read them from
                       standard input
  -f, --format FMT     the image's format; probed without it
  -r, --read-only      open read-only
  -s, --snapshot       keep changes in a temporary overlay
  -n, --nocache        bypass the page cache, as -t none
  -C, --copy-on-read   keep what is read from the backing file
  -m, --misalign       misalign buffers
  -k, --native-aio     as -i native
  -i, --aio=MODE       threads, native or io_uring
  -t, --cache=MODE     none, writeback, writethrough (the default),
                       directsync or unsafe
  -d, --discard=MODE   what discards do: unmap (the default) or ignore
  -T, --trace [[enable=]<pattern>][,events=<file>][,file=<file>]
                       write events as they happen; help lists them
  -U, --force-share    others may write meanwhile
  -h, --help           print this help
  -V, --version        print the version
",
    ],
    closing: "\nSee '{call} -c help' for information on available commands.\n",
    examples: "\
vellum io -c 'write -P 0x5a 0 1M' -c flush disk.qcow2
  a MiB of one byte, durably
vellum io -c help
  all commands
",
    ..Spec::EMPTY
};

/// Reads the command line; `Err` is the code to exit with at once.
pub fn parse(program: &str, arguments: Vec<OsString>) -> Result<SessionOptions, i32> {
    let mut reader = Reader::default();
    let mut parser = Parser::new(SPEC.options(), arguments);
    loop {
        match parser.next_option() {
            Ok(Some((name, value))) => reader.take(program, name, value)?,
            Ok(None) => break,
            Err(error) => {
                report::error(&error);
                hint::about_option(error, &SPEC.options());
                return Err(usage(program, 1));
            }
        }
    }
    let operands = parser.operands();
    if operands.len() > 1 {
        if report::is_own() {
            report::error("Expecting one image file name");
        }
        return Err(usage(program, 1));
    }
    reader.finish(operands.into_iter().next())
}

fn usage(program: &str, code: i32) -> i32 {
    // A wrong word gets the whole help of QEMU's program, which pushes the error away.
    if code != 0 && report::is_own_name(program) {
        report::try_help();
        return code;
    }
    report::print(SPEC.help(&report::call(program, "io")));
    code
}

struct Reader {
    flags: OpenFlags,
    commands: Vec<String>,
    format: Option<String>,
    image_opts: bool,
    misalign: bool,
    temporary: bool,
}

impl Default for Reader {
    fn default() -> Self {
        Reader {
            flags: default_flags(),
            commands: Vec::new(),
            format: None,
            image_opts: false,
            misalign: false,
            temporary: false,
        }
    }
}

/// Writable, each write is durable when it ends, and discards give space back.
pub fn default_flags() -> OpenFlags {
    OpenFlags {
        writable: true,
        discard: true,
        cache: WRITETHROUGH,
        ..OpenFlags::default()
    }
}

impl Reader {
    fn take(&mut self, program: &str, name: &str, value: String) -> Result<(), i32> {
        match name {
            "help" => return Err(usage(program, 0)),
            "version" => {
                report::print(version(program));
                return Err(0);
            }
            "cmd" => self.commands.push(value),
            "format" => self.format = Some(value),
            "image-opts" => self.image_opts = true,
            "misalign" => self.misalign = true,
            "trace" => crate::trace::take(&value)?,
            "object" => crate::object::add(&value).map_err(|error| report::fail(&error))?,
            "read-only" => self.flags.writable = false,
            "nocache" => self.flags.cache = NO_CACHE,
            "native-aio" => self.flags.aio = Some(Aio::Native),
            "force-share" => self.flags.force_share = true,
            "snapshot" => self.temporary = true,
            "copy-on-read" => self.flags.copy_on_read = true,
            "aio" => set_aio(&mut self.flags, &value).map_err(complain)?,
            "cache" => set_cache(&mut self.flags, &value).map_err(complain)?,
            "discard" => set_discard(&mut self.flags, &value).map_err(complain)?,
            _ => return Err(complain(UsageError::not_taken(name).to_string())),
        }
        Ok(())
    }

    fn finish(self, operand: Option<String>) -> Result<SessionOptions, i32> {
        if self.image_opts && self.format.is_some() {
            return refuse("--image-opts and -f are mutually exclusive");
        }
        let image = operand
            .map(|text| ImageSpec::from_argument(&text, self.image_opts, self.format.as_deref()))
            .transpose()
            .map_err(|error| report::fail(&error))?;
        Ok(SessionOptions {
            image,
            flags: self.flags,
            commands: self.commands,
            misalign: self.misalign,
            temporary: self.temporary,
        })
    }
}

const WRITETHROUGH: CacheMode = CacheMode {
    direct: false,
    no_flush: false,
    writethrough: true,
};
/// The cache mode of `-n`.
pub const NO_CACHE: CacheMode = CacheMode {
    direct: true,
    no_flush: false,
    writethrough: false,
};

/// Sets the cache mode by its name.
pub fn set_cache(flags: &mut OpenFlags, name: &str) -> Result<(), String> {
    flags.cache = CacheMode::parse(name).ok_or(format!("Invalid cache option: {name}"))?;
    Ok(())
}

/// Sets how requests run, by its name.
pub fn set_aio(flags: &mut OpenFlags, name: &str) -> Result<(), String> {
    flags.aio = Some(Aio::parse(name).ok_or(format!("Invalid aio option: {name}"))?);
    Ok(())
}

/// Sets what discards do, by its name.
pub fn set_discard(flags: &mut OpenFlags, name: &str) -> Result<(), String> {
    flags.discard = match name {
        "unmap" | "on" => true,
        "ignore" | "off" => false,
        _ => return Err(format!("Invalid discard option: {name}")),
    };
    Ok(())
}

fn complain(message: String) -> i32 {
    report::error(message);
    1
}

fn refuse<T>(message: &str) -> Result<T, i32> {
    Err(complain(message.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(words: &[&str]) -> Result<SessionOptions, i32> {
        parse("qemu-io", words.iter().map(OsString::from).collect())
    }

    #[test]
    fn the_defaults_are_writable_with_unmap() {
        let options = parse_words(&["disk", "-c", "read 0 1k", "-c", "q"]).unwrap();
        assert!(options.flags.writable && options.flags.discard);
        assert_eq!(options.commands, ["read 0 1k", "q"]);
        assert_eq!(options.image.unwrap().name, "disk");
    }

    #[test]
    fn modes_are_set_by_name() {
        let options = parse_words(&["-rn", "-d", "ignore", "--aio=threads", "-Um"]).unwrap();
        assert!(!options.flags.writable && !options.flags.discard && options.flags.force_share);
        assert!(options.flags.cache.direct && options.misalign);
        assert_eq!(options.flags.aio, Some(Aio::Threads));
        assert!(options.image.is_none());
    }

    #[test]
    fn wrong_words_end_the_program() {
        for words in [
            &["-t", "bad"][..],
            &["-d", "bad"],
            &["-i", "bad"],
            &["a", "b"],
            &["-x"],
            &["--image-opts", "-f", "raw", "a"],
        ] {
            assert_eq!(parse_words(words).unwrap_err(), 1, "{words:?}");
        }
        assert_eq!(parse_words(&["-h"]).unwrap_err(), 0);
    }
}
