//! A tool as `clap` describes it: for completions and manuals only, nothing is parsed by it.

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, Command, ValueHint};

use super::complete::{CACHE_MODES, FORMATS};
use super::read::{self, Explained};
use super::tools::Tool;
use crate::getopt::{Shape, Takes};

/// The description of a tool with its subcommands.
pub fn command(tool: &Tool) -> Command {
    let explained = read::options(&tool.help, &tool.options);
    let arguments = tool.options.iter().enumerate().map(|(number, shape)| {
        let names = read::names(shape);
        let about = explained
            .iter()
            .find(|option| names.iter().any(|name| option.names.contains(name)));
        argument(number, shape, about)
    });
    let mut command = Command::new(tool.name.clone())
        .about(tool.about.clone())
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_flag(true)
        .disable_version_flag(true)
        .disable_help_subcommand(true)
        .args(arguments);
    if !tool.explains.is_empty() {
        command = command.long_about(tool.explains.clone());
    }
    if tool.subcommands.is_empty() {
        return command.arg(
            Arg::new("operands")
                .value_name("FILENAME")
                .value_hint(ValueHint::FilePath)
                .num_args(0..)
                .help("Images, and what else the usage says"),
        );
    }
    command.subcommands(tool.subcommands.iter().map(self::command))
}

fn argument(number: usize, shape: &Shape, about: Option<&Explained>) -> Arg {
    let mut argument = Arg::new(format!("option{number}")).action(ArgAction::SetTrue);
    if let Some(letter) = shape.short {
        argument = argument.short(letter);
    }
    if let Some(name) = shape.long {
        argument = argument.long(name);
    }
    if let Some(about) = about {
        argument = argument.help(about.about.clone());
    }
    if shape.takes == Takes::Nothing {
        return argument;
    }
    let value = about.and_then(|about| about.value.clone());
    let value = value.unwrap_or_else(|| "VALUE".to_owned());
    argument = argument.action(ArgAction::Append);
    if shape.takes == Takes::Maybe {
        argument = argument.num_args(0..=1).require_equals(true);
    }
    match value.as_str() {
        "FMT" | "FORMAT" => argument = argument.value_parser(PossibleValuesParser::new(FORMATS)),
        "MODE" if shape.long.is_some_and(|name| name.contains("cache")) => {
            argument = argument.value_parser(PossibleValuesParser::new(CACHE_MODES));
        }
        choice if choice.contains('|') => {
            let values: Vec<String> = choice.split('|').map(str::to_owned).collect();
            argument = argument.value_parser(PossibleValuesParser::new(values));
        }
        name if names_a_folder(name) => argument = argument.value_hint(ValueHint::DirPath),
        name if names_a_file(name) => argument = argument.value_hint(ValueHint::FilePath),
        _ => {}
    }
    argument.value_name(value)
}

fn names_a_folder(value: &str) -> bool {
    matches!(value, "FOLDER" | "DIR" | "DIRECTORY")
}

/// Whether a word that stands for a value stands for a file.
pub fn names_a_file(value: &str) -> bool {
    let starts = ["PATH", "IMAGE", "BASE", "SOCKET"];
    value.contains("FILE") || starts.iter().any(|word| value.starts_with(word))
}
