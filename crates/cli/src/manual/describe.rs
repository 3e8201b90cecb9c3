//! A tool as `clap` describes it: for completions and manuals only, nothing is parsed by it.

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, Command, ValueHint};

use super::complete::{CACHE_MODES, FORMATS};
use super::tools::Tool;
use crate::getopt::OptionSpec;

/// The description of a tool with its subcommands.
pub fn command(tool: &Tool) -> Command {
    let arguments = tool.options.iter().map(argument);
    let mut command = Command::new(tool.name)
        .about(tool.spec.about)
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_flag(true)
        .disable_version_flag(true)
        .disable_help_subcommand(true)
        .args(arguments);
    if !tool.spec.explains.is_empty() {
        command = command.long_about(tool.spec.explains.trim());
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

fn argument(option: &OptionSpec) -> Arg {
    let mut argument = Arg::new(option.id).action(ArgAction::SetTrue);
    if let Some(letter) = option.short {
        argument = argument.short(letter);
    }
    if let Some(name) = option.long {
        argument = argument.long(name);
    }
    if !option.about.is_empty() {
        argument = argument.help(option.about.clone());
    }
    let Some(value) = option.value else {
        return argument;
    };
    argument = argument.action(ArgAction::Append);
    match value {
        "FMT" | "FORMAT" => argument = argument.value_parser(PossibleValuesParser::new(FORMATS)),
        "MODE" if option.id.contains("cache") => {
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
