//! The command line of `vellum oci`: options, help and usage errors. `mod` parses it once; `manual`
//! and the completions read the same table of options.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::getopt::{OptionSpec, Parser, Shape, Takes, shapes};
use crate::manual::pages::examples;
use crate::report;

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Quiet,
    Format,
    Compression,
    Path,
    Architecture,
    User,
    Password,
    PlainHttp,
    Authorities,
    Force,
    Object,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Quiet, 'q', "quiet", Takes::Nothing),
    OptionSpec::new(Opt::Format, 'f', "format", Takes::Value),
    OptionSpec::long(Opt::Compression, "compression", Takes::Value),
    OptionSpec::long(Opt::Path, "path", Takes::Value),
    OptionSpec::long(Opt::Architecture, "arch", Takes::Value),
    OptionSpec::long(Opt::User, "user", Takes::Value),
    OptionSpec::long(Opt::Password, "password-secret", Takes::Value),
    OptionSpec::long(Opt::PlainHttp, "plain-http", Takes::Nothing),
    OptionSpec::long(Opt::Authorities, "ca-file", Takes::Value),
    OptionSpec::long(Opt::Force, "force", Takes::Nothing),
    OptionSpec::long(Opt::Object, "object", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

/// What the options mean.
pub const HELP: &str = "\
  -q, --quiet               print errors only
  -f, --format FMT          the format of the disk (push)
  --compression none|gzip|zstd  how the layer is packed (push; gzip)
  --path PATH               the disk's path in the image (pull; the first file in disk/)
  --arch ARCH               the machine that the image is for: amd64, arm64 (this one's)
  --user NAME               who asks the registry
  --password-secret ID      the secret object that holds the password
  --plain-http              speak without TLS, with a registry on this machine
  --ca-file FILE            certificates (PEM) that are trusted beside the system's
  --force                   replace a DISK that is there (pull)
  --object DEFINITION       an object such as a secret
";

/// What the tool is for, in its help and manual.
pub const EXPLAINS: &str = "\
Puts a disk into a registry of containers, or gets one from there: an image of one layer
that holds the disk as disk/disk.qcow2 or disk/disk.img, as KubeVirt's containerDisk wants
it. The disk goes and comes as it is. What comes is compared with its digests, and has its
name only when all of it is there; it is from others, so look at it with 'vellum audit'.
";

/// Which way a disk goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Push,
    Pull,
}

/// The command line, taken apart.
#[derive(Debug, Default)]
pub struct Arguments {
    pub help: bool,
    pub quiet: bool,
    pub format: Option<String>,
    pub compression: Option<String>,
    pub path: Option<String>,
    pub architecture: Option<String>,
    pub user: Option<String>,
    pub password: Option<String>,
    pub plain_http: bool,
    pub authorities: Option<PathBuf>,
    pub force: bool,
    pub way: Option<Way>,
    pub disk: String,
    pub image: String,
}

impl Arguments {
    /// Understands the command line, or says why not.
    pub fn parse(words: Vec<OsString>) -> Result<Arguments, String> {
        let mut arguments = Arguments::default();
        let mut parser = Parser::new(OPTIONS, words);
        while let Some((option, value)) = parser.next_option().map_err(|e| e.to_string())? {
            arguments.take(option, value.unwrap_or_default())?;
        }
        let operands = parser.operands();
        let words: Vec<&str> = operands.iter().map(String::as_str).collect();
        let (way, disk, image) = match words.as_slice() {
            ["push", disk, image] => (Way::Push, *disk, *image),
            ["pull", image, disk] => (Way::Pull, *disk, *image),
            _ if arguments.help => return Ok(arguments),
            ["push", ..] => return Err("Expecting push DISK REGISTRY/NAME:TAG".into()),
            ["pull", ..] => return Err("Expecting pull REGISTRY/NAME:TAG DISK".into()),
            _ => return Err("Expecting push or pull".into()),
        };
        arguments.way = Some(way);
        arguments.disk = disk.to_owned();
        arguments.image = image.to_owned();
        match arguments.password.is_some() && arguments.user.is_none() {
            true => Err("--password-secret needs --user".into()),
            false => Ok(arguments),
        }
    }

    fn take(&mut self, option: Opt, value: String) -> Result<(), String> {
        match option {
            Opt::Help => self.help = true,
            Opt::Quiet => self.quiet = true,
            Opt::Format => self.format = Some(value),
            Opt::Compression => self.compression = Some(value),
            Opt::Path => self.path = Some(value),
            Opt::Architecture => self.architecture = Some(value),
            Opt::User => self.user = Some(value),
            Opt::Password => self.password = Some(value),
            Opt::PlainHttp => self.plain_http = true,
            Opt::Authorities => self.authorities = Some(value.into()),
            Opt::Force => self.force = true,
            Opt::Object => {
                crate::object::add(&value).map_err(|error| report::error_text(&error))?;
            }
        }
        Ok(())
    }
}

/// What `--help` prints.
pub fn help(program: &str) -> String {
    let examples = examples("oci");
    format!(
        "Usage: {program} oci push [OPTIONS] DISK REGISTRY/NAME:TAG\n       {program} oci pull \
         [OPTIONS] REGISTRY/NAME:TAG DISK\n\n{EXPLAINS}\nArguments:\n  -h, --help\n{HELP}{examples}"
    )
}
