//! The specification of a command: one table from which its parser, its help, its manual page and the completions
//! are made. Every tool has one beside the code that takes its options.
//!
//! An option is a row of text, written as the help shows it ([`crate::option_rows`]).
//!
//! Invariant: the code takes every option that is listed (a test asks all commands for all of theirs), and
//! [`UsageError::not_taken`] refuses what it forgot.

use std::ffi::OsString;

use vellum_options::ImageSpec;

use crate::getopt::{OptionSpec, Parser, UsageError};
use crate::option_rows::{join, options_in};
use crate::output::Output;
use crate::report;

/// What a command takes, and all that is told of it.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub name: &'static str,
    /// What it does, in a line.
    pub about: &'static str,
    /// The same at length.
    pub explains: &'static str,
    /// What follows the name, a line for each way to call it; lines that begin with a space go on. What follows two
    /// spaces in a line is for the help alone.
    pub usage: &'static str,
    /// Rows of options and operands, in the order of the help.
    pub arguments: &'static [&'static str],
    /// Options that no help tells of: second names, and what is for scripts alone.
    pub hidden: &'static str,
    /// Names of options in QEMU's order, where that of the help differs: it shows in "option '--t' is ambiguous".
    pub order: &'static str,
    /// What else there is to know. A tool's may hold `{call}`, how it is called, and `{examples}`.
    pub closing: &'static str,
    /// Command lines, each followed by an indented line that says what it does.
    pub examples: &'static str,
    /// Exit codes, each followed by what it means.
    pub exits: &'static str,
}

/// What most commands say with their exit codes.
const USUAL_EXITS: &str = "0  done\n1  an error, which is told\n";
/// What `-h` is, where the rows do not say it.
pub const HELP_ROW: &str = "-h, --help  print this help";

impl Spec {
    /// A command that takes and tells nothing.
    pub const EMPTY: Spec = Spec {
        name: "",
        about: "",
        explains: "",
        usage: "",
        arguments: &[],
        hidden: "",
        order: "",
        closing: "",
        examples: "",
        exits: USUAL_EXITS,
    };

    /// The options, those that are told of first.
    pub fn options(&self) -> Vec<OptionSpec> {
        let mut options: Vec<OptionSpec> = Vec::new();
        let rows = self.arguments.iter().chain([&self.hidden]);
        for option in rows.flat_map(|text| options_in(text)) {
            match options.iter_mut().find(|other| other.id == option.id) {
                // One that is told of twice has both explanations.
                Some(other) => other.about = join(&other.about, &option.about),
                None => options.push(option),
            }
        }
        match options.iter_mut().find(|option| option.id == "help") {
            Some(help) if help.about.is_empty() => help.about = "print this help".to_owned(),
            None if !self.arguments.is_empty() => drop(options.splice(..0, options_in(HELP_ROW))),
            _ => {}
        }
        if !self.order.is_empty() {
            let place = |id| self.order.split_whitespace().position(|name| name == id);
            options.sort_by_key(|option| place(option.id).unwrap_or(usize::MAX));
        }
        options
    }

    /// The ways to call it, each on one line.
    pub fn calls(&self) -> Vec<String> {
        let mut calls: Vec<String> = Vec::new();
        for line in self.usage.lines() {
            match calls.last_mut() {
                Some(last) if line.starts_with(' ') => *last = join(last, line.trim()),
                _ => calls.push(line.split("  ").next().unwrap_or_default().to_owned()),
            }
        }
        calls
    }

    /// Command lines, and what they do.
    pub fn examples(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let mut lines = self.examples.lines();
        std::iter::from_fn(move || Some((lines.next()?, lines.next()?.trim_start())))
    }

    /// Exit codes, and what they mean.
    pub fn exits(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.exits.lines().filter_map(|line| line.split_once("  "))
    }

    /// The examples as a help shows them.
    pub fn examples_text(&self) -> String {
        let lines: String = self
            .examples()
            .map(|(line, about)| format!("  {line}\n     {about}\n"))
            .collect();
        match lines.is_empty() {
            true => lines,
            false => format!("\nExamples:\n{lines}"),
        }
    }

    /// What `--help` prints of a tool that is called so.
    pub fn help(&self, call: &str) -> String {
        let usage: Vec<String> = self
            .usage
            .lines()
            .map(|line| format!("{call} {line}"))
            .collect();
        format!(
            "Usage: {}\n{}\n{}{}",
            usage.join("\n  or:  "),
            self.explains,
            self.arguments.concat(),
            self.closing
                .replace("{call}", call)
                .replace("{examples}", &self.examples_text())
        )
    }

    /// Prints the help of a tool that takes no options if the words ask for it, and says whether they do.
    pub fn gives_help(&self, words: &[OsString]) -> bool {
        let is_asked = words.iter().any(|word| word == "-h" || word == "--help");
        if is_asked {
            let (name, usage) = (self.name, self.usage);
            report::print(format_args!(
                "{}  Usage:\n\n  vellum {name} {usage}{}",
                self.explains, self.closing
            ));
        }
        is_asked
    }

    /// Reads the words behind the command's name. Each option goes to `take` with its value, or with an empty text if
    /// it takes none, but for those that mean the same everywhere ([`CommonArgs`]).
    ///
    /// # Errors
    /// [`UsageError::Help`] and [`UsageError::Version`] as soon as either is asked for.
    pub fn parse<E: From<UsageError>>(
        &self,
        words: Vec<OsString>,
        mut take: impl FnMut(&'static str, String) -> Result<(), E>,
    ) -> Result<CommonArgs, E> {
        let mut common = CommonArgs::default();
        let mut parser = Parser::new(self.options(), words);
        while let Some((name, value)) = parser.next_option()? {
            if let Some((name, value)) = common.take(name, value)? {
                take(name, value)?;
            }
        }
        common.operands = parser.operands();
        Ok(common)
    }
}

/// The values of the options that mean the same in every command that has them, and the operands.
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
    /// Takes a common option; another one comes back.
    fn take(
        &mut self,
        name: &'static str,
        value: String,
    ) -> Result<Option<(&'static str, String)>, UsageError> {
        match name {
            "help" => return Err(UsageError::Help),
            "version" => return Err(UsageError::Version),
            "quiet" => self.quiet = true,
            "progress" => self.progress = true,
            "format" => self.format = Some(value),
            "image-opts" => self.image_opts = true,
            "output" => self.output = Output::parse(&value)?,
            "force-share" => self.force_share = true,
            "object" => crate::object::add(&value)
                .map_err(|error| UsageError::Object(report::error_text(&error)))?,
            _ => return Ok(Some((name, value))),
        }
        Ok(None)
    }

    /// The image called `name`, with the format and in the form that the options say.
    ///
    /// # Errors
    /// A name that cannot be one.
    pub fn spec(&self, name: &str) -> vellum::Result<ImageSpec> {
        ImageSpec::from_argument(name, self.image_opts, self.format.as_deref())
    }
}

/// Runs a tool: prints the help, or what is wrong with the command line, or why `run` fails, and returns the exit
/// code.
pub fn run<A>(
    spec: &Spec,
    parsed: Result<A, UsageError>,
    run: impl FnOnce(A) -> Result<i32, String>,
) -> i32 {
    match parsed.map(run) {
        Ok(Ok(code)) => return code,
        Ok(Err(message)) => report::error(message),
        Err(UsageError::Help) => {
            let call = report::call(report::program(), spec.name);
            report::print(spec.help(&call));
            return 0;
        }
        Err(error) => {
            report::error(&error);
            crate::hint::about_option(error, &spec.options());
            report::try_help();
        }
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_twice_is_one() {
        const SPEC: Spec = Spec {
            arguments: &["-f, --format FMT  the format", "-f, --format X  again"],
            usage: "[-f FMT]  for the help\n        [-b]\n--list",
            examples: "x -f raw\n  raw\n",
            ..Spec::EMPTY
        };
        let options = SPEC.options();
        assert_eq!(options.len(), 2);
        assert_eq!(options[1].about, "the format again");
        assert_eq!(SPEC.calls(), ["[-f FMT] [-b]", "--list"]);
        assert_eq!(SPEC.examples().collect::<Vec<_>>(), [("x -f raw", "raw")]);
    }
}
