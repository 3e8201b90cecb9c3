//! The options that many subcommands have in common, and the loop that reads a command line.
//!
//! A subcommand lists its options in a table of its own, in which [`Opt::QUIET`] and the like
//! stand for the common ones, and is asked only for the others.

use std::ffi::OsString;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_options::ImageSpec;

use super::command::{Command, Failure, check_object, image_spec, one_name};
use crate::getopt::{OptionSpec, Takes};
use crate::output::Output;

/// An option of a subcommand whose own options are `T`.
#[derive(Debug, Clone, Copy)]
pub enum Opt<T> {
    Common(Common),
    Own(T),
}

/// An option that has the same meaning in every subcommand.
#[derive(Debug, Clone, Copy)]
pub enum Common {
    Help,
    Quiet,
    Progress,
    Format,
    ImageOpts,
    Output,
    ForceShare,
    Object,
}

impl<T> Opt<T> {
    pub const HELP: OptionSpec<Self> =
        OptionSpec::new(Opt::Common(Common::Help), 'h', "help", Takes::Nothing);
    pub const QUIET: OptionSpec<Self> =
        OptionSpec::new(Opt::Common(Common::Quiet), 'q', "quiet", Takes::Nothing);
    pub const PROGRESS: OptionSpec<Self> = OptionSpec::new(
        Opt::Common(Common::Progress),
        'p',
        "progress",
        Takes::Nothing,
    );
    pub const FORMAT: OptionSpec<Self> =
        OptionSpec::new(Opt::Common(Common::Format), 'f', "format", Takes::Value);
    pub const IMAGE_OPTS: OptionSpec<Self> =
        OptionSpec::long(Opt::Common(Common::ImageOpts), "image-opts", Takes::Nothing);
    pub const OUTPUT: OptionSpec<Self> =
        OptionSpec::long(Opt::Common(Common::Output), "output", Takes::Value);
    pub const FORCE_SHARE: OptionSpec<Self> = OptionSpec::new(
        Opt::Common(Common::ForceShare),
        'U',
        "force-share",
        Takes::Nothing,
    );
    pub const OBJECT: OptionSpec<Self> =
        OptionSpec::long(Opt::Common(Common::Object), "object", Takes::Value);

    /// An option of the subcommand's own with a letter and a long name.
    pub const fn own(id: T, short: char, long: &'static str, takes: Takes) -> OptionSpec<Self> {
        OptionSpec::new(Opt::Own(id), short, long, takes)
    }

    /// An option of the subcommand's own with a long name only.
    pub const fn own_long(id: T, long: &'static str, takes: Takes) -> OptionSpec<Self> {
        OptionSpec::long(Opt::Own(id), long, takes)
    }
}

/// The values of the common options, and the operands.
#[derive(Debug, Default)]
pub struct CommonArgs {
    /// `-q`
    pub quiet: bool,
    /// `-p`
    pub progress: bool,
    /// `-f`
    pub format: Option<String>,
    /// `--image-opts`
    pub image_opts: bool,
    /// `--output`
    pub output: Output,
    /// `-U`
    pub force_share: bool,
    /// The words that are no options.
    pub operands: Vec<String>,
}

impl CommonArgs {
    fn take(&mut self, option: Common, value: String) -> Result<(), Failure> {
        match option {
            // `parse` has stopped.
            Common::Help => {}
            Common::Quiet => self.quiet = true,
            Common::Progress => self.progress = true,
            Common::Format => self.format = Some(value),
            Common::ImageOpts => self.image_opts = true,
            Common::Output => self.output = Output::parse(&value)?,
            Common::ForceShare => self.force_share = true,
            Common::Object => check_object(&value)?,
        }
        Ok(())
    }

    /// The image called `name`, with the format and in the form that the options say.
    pub fn image(&self, name: &str) -> Result<ImageSpec, Failure> {
        image_spec(name, self.image_opts, self.format.as_deref())
    }

    /// The image of a subcommand that takes one file name and nothing else.
    pub fn one_image(&self) -> Result<ImageSpec, Failure> {
        self.image(one_name(&self.operands)?)
    }
}

/// Reads the words behind a subcommand's name. Each option of the subcommand's own goes to
/// `take` with its value, or with an empty text if it takes none.
///
/// `None`: the help is asked for.
pub fn parse<T: Copy>(
    command: Command<'_>,
    options: &'static [OptionSpec<Opt<T>>],
    words: Vec<OsString>,
    mut take: impl FnMut(T, String) -> Result<(), Failure>,
) -> Result<Option<CommonArgs>, Failure> {
    let mut common = CommonArgs::default();
    let mut parser = command.parser(options, words);
    while let Some((option, value)) = parser.next_option()? {
        let value = value.unwrap_or_default();
        match option {
            Opt::Common(Common::Help) => return Ok(None),
            Opt::Common(option) => common.take(option, value)?,
            Opt::Own(option) => take(option, value)?,
        }
    }
    common.operands = parser.operands();
    Ok(Some(common))
}

/// Returns a disk's layers, from the image down its backing files.
pub fn layers(top: &Arc<dyn BlockDevice>) -> impl Iterator<Item = Arc<dyn BlockDevice>> + use<> {
    std::iter::successors(Some(top.clone()), |layer| layer.backing())
}
