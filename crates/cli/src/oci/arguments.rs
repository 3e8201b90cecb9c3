//! The command line of `vellum oci`.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::getopt::UsageError;
use crate::spec::{CommonArgs, Spec};

pub const SPEC: Spec = Spec {
    name: "oci",
    about: "Put a disk into a registry of containers, or get one from there",
    usage: "\
push [OPTIONS] DISK REGISTRY/NAME:TAG
pull [OPTIONS] REGISTRY/NAME:TAG DISK
",
    explains: "
Puts a disk into a registry of containers, or gets one from there: an image of one layer
that holds the disk as disk/disk.qcow2 or disk/disk.img, as KubeVirt's containerDisk wants
it. The disk goes and comes as it is. What comes is compared with its digests, and has its
name only when all of it is there; it is from others, so look at it with 'vellum audit'.
",
    arguments: &["\
Arguments:
  -h, --help
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
"],
    closing: "{examples}",
    examples: "\
vellum oci push disk.qcow2 registry.example.org/vms/debian:13
  an image for KubeVirt's containerDisk
vellum oci pull quay.io/containerdisks/fedora:latest disk.qcow2
  the disk of one
",
    ..Spec::EMPTY
};

/// Which way a disk goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Push,
    Pull,
}

/// The command line, taken apart.
#[derive(Debug, Default)]
pub struct Arguments {
    pub common: CommonArgs,
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
    pub fn parse(words: Vec<OsString>) -> Result<Arguments, UsageError> {
        let mut arguments = Arguments::default();
        arguments.common = SPEC.parse(words, |name, value| arguments.take(name, value))?;
        let words: Vec<&str> = arguments
            .common
            .operands
            .iter()
            .map(String::as_str)
            .collect();
        let (way, disk, image) = match words.as_slice() {
            ["push", disk, image] => (Way::Push, *disk, *image),
            ["pull", image, disk] => (Way::Pull, *disk, *image),
            ["push", ..] => return Err("Expecting push DISK REGISTRY/NAME:TAG".into()),
            ["pull", ..] => return Err("Expecting pull REGISTRY/NAME:TAG DISK".into()),
            _ => return Err("Expecting push or pull".into()),
        };
        (arguments.disk, arguments.image) = (disk.to_owned(), image.to_owned());
        arguments.way = Some(way);
        match arguments.password.is_some() && arguments.user.is_none() {
            true => Err("--password-secret needs --user".into()),
            false => Ok(arguments),
        }
    }

    fn take(&mut self, name: &str, value: String) -> Result<(), UsageError> {
        match name {
            "compression" => self.compression = Some(value),
            "path" => self.path = Some(value),
            "arch" => self.architecture = Some(value),
            "user" => self.user = Some(value),
            "password-secret" => self.password = Some(value),
            "plain-http" => self.plain_http = true,
            "ca-file" => self.authorities = Some(value.into()),
            "force" => self.force = true,
            _ => return Err(UsageError::not_taken(name)),
        }
        Ok(())
    }
}
