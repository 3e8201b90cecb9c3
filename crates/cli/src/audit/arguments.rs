//! The command line of `vellum audit`.

use std::ffi::OsString;
use std::time::Duration;

use vellum_graph::probe::is_format_name;
use vellum_images::audit::{Permission, Policy};

use crate::getopt::UsageError;
use crate::output::Output;
use crate::size;
use crate::spec::Spec;

pub const SPEC: Spec = Spec {
    name: "audit",
    about: "Tell whether an image that nobody vouches for is safe to open",
    usage: "[OPTIONS] FILENAME...\n",
    explains: "
Tells whether an image that nobody vouches for is safe to open. The image is read, never
written, and no other file is opened. It is rejected if it names other files that are not
allowed, breaks a limit, contradicts itself, is of a format that cannot be checked, or is
several formats at once. A reason that an option would take away is followed by that option.
A warning or a note is no reason: that it is encrypted, say, or an archive and no disk.
FILE#DISK is a disk in a package of a virtual machine (OVA).

Of one image --output=json prints an object, of several an array of such objects, in their
order: 'image', 'verdict' (safe, rejected, unreadable), 'findings' with 'level', 'code',
'message' and 'option' (null, or what would allow it), 'references', and what else is known.

Exit codes: 0 safe, 1 the image could not be read, 2 rejected; of several the highest.
",
    arguments: &["\
Arguments:
  -h, --help
  -f, --format FMT          the format that the image is declared to have; content that
                            looks like another one is rejected
  --allow-backing           the image may name a backing file
  --allow-data-file         the image may name an external data file
  --allow-protocols         these may be reached by a protocol, or be a json:{} description
  --within FOLDER           other files must lie below FOLDER, with all links followed
  --max-size SIZE           reject larger disks
  --max-memory SIZE         memory that checking the metadata may take (1G)
  --max-time SECONDS        when to give up, and reject (60)
  --output human|json       how to print
"],
    closing: "{examples}",
    examples: "\
vellum audit -f qcow2 upload.qcow2
  an upload that is declared as qcow2
vellum audit --allow-backing --within /srv/images overlay.qcow2
  its backing file may be any below that folder
vellum audit --output=json *.qcow2
  several, for a program
",
    exits: "\
0  safe
1  an image could not be read, or the command line not be understood
2  rejected; of several images the highest code counts
",
    ..Spec::EMPTY
};

/// The command line, taken apart.
#[derive(Debug, Default)]
pub struct Arguments {
    pub policy: Policy,
    pub output: Output,
    pub images: Vec<String>,
}

impl Arguments {
    /// Understands the command line, or says why not.
    pub fn parse(words: Vec<OsString>) -> Result<Arguments, UsageError> {
        let mut arguments = Arguments::default();
        let common = SPEC.parse(words, |name, value| arguments.take(name, value))?;
        if let Some(format) = &common.format
            && !is_format_name(format)
        {
            return Err(format!("Unknown file format '{format}'").into());
        }
        arguments.policy.format = common.format;
        arguments.output = common.output;
        arguments.images = common.operands;
        match arguments.images.is_empty() {
            true => Err("Expecting an image file name".into()),
            false => Ok(arguments),
        }
    }

    fn take(&mut self, name: &str, value: String) -> Result<(), UsageError> {
        let policy = &mut self.policy;
        match name {
            "allow-backing" => policy.allow_backing = true,
            "allow-data-file" => policy.allow_data_file = true,
            "allow-protocols" => policy.allow_protocols = true,
            "within" => policy.within = Some(value.into()),
            "max-size" => policy.max_size_bytes = Some(size_of("--max-size", &value)?),
            "max-memory" => policy.max_memory_bytes = size_of("--max-memory", &value)?,
            "max-time" => {
                let seconds = value.parse().ok();
                let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                policy.max_time =
                    time.ok_or_else(|| format!("--max-time expects seconds, not '{value}'"))?;
            }
            _ => return Err(UsageError::not_taken(name)),
        }
        Ok(())
    }
}

fn size_of(option: &str, text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|_| format!("{option} expects a size such as 20G, not '{text}'"))
}

/// The option that allows what was found.
pub fn option_for(permission: Permission) -> &'static str {
    match permission {
        Permission::Backing => "--allow-backing",
        Permission::DataFile => "--allow-data-file",
        Permission::Protocols => "--allow-protocols",
        Permission::Folder => "--within",
        Permission::Size => "--max-size",
        Permission::Memory => "--max-memory",
        Permission::Time => "--max-time",
    }
}
