//! The command line of `vellum inspect`: options, help and usage errors. `mod` parses it once;
//! `manual` and the completions read the same tables of options.

use std::ffi::OsString;
use std::path::PathBuf;

use vellum_options::ImageSpec;

use crate::getopt::{OptionSpec, Parser, Shape, Takes, shapes};
use crate::manual::pages::examples;
use crate::output::Output;
use crate::report;

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Format,
    ImageOpts,
    ForceShare,
    NoCheck,
    Quiet,
    Output,
    Html,
    Object,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Quiet, 'q', "quiet", Takes::Nothing),
    OptionSpec::new(Opt::Format, 'f', "format", Takes::Value),
    OptionSpec::long(Opt::ImageOpts, "image-opts", Takes::Nothing),
    OptionSpec::new(Opt::ForceShare, 'U', "force-share", Takes::Nothing),
    OptionSpec::long(Opt::NoCheck, "no-check", Takes::Nothing),
    OptionSpec::long(Opt::Output, "output", Takes::Value),
    OptionSpec::long(Opt::Html, "html", Takes::Value),
    OptionSpec::long(Opt::Object, "object", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

/// How the tool is called.
const USAGE: &str = "[OPTIONS] FILENAME";

/// What the options mean.
pub const HELP: &str = "\
  -q, --quiet               show no progress
  -f, --format FMT          the format of the image
  --image-opts              FILENAME is a list of options
  -U, --force-share         share the image with writers
  --no-check                do not look for damage and lost clusters
  --output human|json       how to print
  --html FILE               write a page with pictures as well
  --object DEFINITION       an object such as a secret
";

/// What the tool is for, in its help and manual.
pub const EXPLAINS: &str = "\
Shows what is in an image: what is mapped and how, what lies where in the file, what the
metadata, the snapshots and the images below take, what an L2 cache needs to cover it, and
what could be done better. Nothing is changed.
";

/// The command line, taken apart.
#[derive(Debug, Default)]
pub struct Arguments {
    pub help: bool,
    pub quiet: bool,
    pub format: Option<String>,
    pub image_opts: bool,
    pub force_share: bool,
    pub no_check: bool,
    pub output: Output,
    pub html: Option<PathBuf>,
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
        match <[String; 1]>::try_from(parser.operands()) {
            Ok([image]) => arguments.image = image,
            Err(_) if arguments.help => {}
            Err(_) => return Err("Expecting one image file name".into()),
        }
        Ok(arguments)
    }

    fn take(&mut self, option: Opt, value: String) -> Result<(), String> {
        match option {
            Opt::Help => self.help = true,
            Opt::Quiet => self.quiet = true,
            Opt::Format => self.format = Some(value),
            Opt::ImageOpts => self.image_opts = true,
            Opt::ForceShare => self.force_share = true,
            Opt::NoCheck => self.no_check = true,
            Opt::Output => self.output = Output::parse(&value).map_err(|e| e.to_string())?,
            Opt::Html => self.html = Some(value.into()),
            Opt::Object => {
                crate::object::add(&value).map_err(|error| report::error_text(&error))?;
            }
        }
        Ok(())
    }

    /// The image that is meant.
    pub fn spec(&self) -> vellum::Result<ImageSpec> {
        ImageSpec::from_argument(&self.image, self.image_opts, self.format.as_deref())
    }
}

/// What `--help` prints.
pub fn help(program: &str) -> String {
    let examples = examples("inspect");
    format!(
        "Usage: {program} inspect {USAGE}\n\n{EXPLAINS}\nArguments:\n  -h, --help\n{HELP}{examples}"
    )
}
