//! The command line of `vellum inspect`.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::getopt::UsageError;
use crate::spec::{CommonArgs, Spec};

pub const SPEC: Spec = Spec {
    name: "inspect",
    about: "Show what is in an image, and what could be better",
    usage: "[OPTIONS] FILENAME\n",
    explains: "
Shows what is in an image: what is mapped and how, what lies where in the file, what the
metadata, the snapshots and the images below take, what an L2 cache needs to cover it, and
what could be done better. Nothing is changed.
",
    arguments: &["\
Arguments:
  -h, --help
  -q, --quiet               show no progress
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  -U, --force-share         share the image with writers
  --no-check                do not look for damage and lost clusters
  --output human|json       how to print
  --html FILE               write a page with pictures as well
  --object DEFINITION       an object such as a secret
"],
    closing: "{examples}",
    examples: "\
vellum inspect disk.qcow2
  what is in it, and what could be better
vellum inspect --html page.html disk.qcow2
  the same with pictures
",
    ..Spec::EMPTY
};

/// The command line, taken apart.
#[derive(Debug, Default)]
pub struct Arguments {
    pub common: CommonArgs,
    pub no_check: bool,
    pub html: Option<PathBuf>,
    pub image: String,
}

impl Arguments {
    /// Understands the command line, or says why not.
    pub fn parse(words: Vec<OsString>) -> Result<Arguments, UsageError> {
        let mut arguments = Arguments::default();
        arguments.common = SPEC.parse(words, |name, value| {
            match name {
                "no-check" => arguments.no_check = true,
                "html" => arguments.html = Some(value.into()),
                _ => return Err(UsageError::not_taken(name)),
            }
            Ok(())
        })?;
        match arguments.common.operands.as_slice() {
            [image] => arguments.image.clone_from(image),
            _ => return Err("Expecting one image file name".into()),
        }
        Ok(arguments)
    }
}
