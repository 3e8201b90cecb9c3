//! `--help` and `--version`.

use vellum_graph::driver_names;

use super::command::{Command, Outcome, Subcommand};
use super::help_texts;
use crate::manual::pages;
use crate::report;
use crate::version::version;

/// What the options before a subcommand mean.
pub const OPTIONS_HELP: &str = "\
  -h, --help           print this help
  -V, --version        print the version
  -T, --trace TRACE    write events as they happen; help lists them
";

/// Prints the help of the whole tool.
pub fn tool(program: &str, subcommands: impl Iterator<Item = &'static Subcommand>) {
    let is_own = report::is_own_name(program);
    let mut text = version(program);
    text.push_str(&format!(
        "{}.  Usage:\n\n  {program} [standard options] COMMAND [--help | command options]\n\n\
         Standard options:\n  \
         -h, --help\n     print this help\n  \
         -V, --version\n     print the version\n  \
         -T,--trace TRACE\n     specify tracing options:\n        \
         [[enable=]<pattern>][,events=<file>][,file=<file>]\n\n\
         Recognized commands (run {program} COMMAND --help for command-specific help):\n\n",
        if is_own {
            "Disk images"
        } else {
            "QEMU disk image utility"
        },
    ));
    for subcommand in subcommands {
        // The short name is that of a tool of our own; see below.
        let name = match subcommand.name {
            "bench" if is_own => "img bench",
            name => name,
        };
        text.push_str(&format!("  {name} - {}\n", subcommand.about));
    }
    if is_own {
        text.push_str(
            "\nOther tools:\n\n  \
             audit - Tell whether an image that nobody vouches for is safe to open\n  \
             bench - Show what the choices of an image cost on this machine\n  \
             completions - Print completions for bash, zsh or fish\n  \
             daemon - Serve the images that options describe (qemu-storage-daemon)\n  \
             help - Print the help of a command, or what 'config' may say\n  \
             inspect - Show what is in an image, and what could be better\n  \
             install-links - Make links by the names of QEMU's programs\n  \
             io - Read and write single requests (qemu-io)\n  \
             man - Write manual pages into a folder\n  \
             mount - Show the disk in an image as a regular file\n  \
             nbd - Serve an image over NBD (qemu-nbd)\n  \
             oci - Put a disk into a registry of containers, or get one from there\n  \
             serve - Serve a disk over NBD, vhost-user and as a file, and print how to use it\n",
        );
    }
    text.push_str(&format!(
        "\nSupported image formats:\n\n{}\n",
        wrapped(&driver_names(), LINE_CHARS)
    ));
    report::print(text);
}

/// How long a line of names may be.
const LINE_CHARS: usize = 75;

/// Names in indented lines.
fn wrapped(names: &[&str], limit: usize) -> String {
    let mut text = String::new();
    let mut line = String::from(" ");
    for name in names {
        if line.len() + 1 + name.len() > limit {
            text.push_str(&format!("{line}\n"));
            line = String::from(" ");
        }
        line.push_str(&format!(" {name}"));
    }
    text + &line + "\n"
}

/// Prints the help of a subcommand.
pub fn subcommand(command: Command<'_>) -> Outcome {
    let about = command.subcommand.about;
    let Some(help) = help_texts::of(command.subcommand.name) else {
        return Ok(0);
    };
    let mut text = format!(
        "Usage:\n{about}.  Usage:\n\n  {} {} {}\n\nArguments:\n  -h, --help\n     print this help\n",
        command.program,
        command.typed(),
        help.usage
    );
    for (argument, meaning) in help.arguments {
        text.push_str(&format!("  {argument}\n"));
        let lines = meaning.lines().map(|line| format!("     {line}\n"));
        text.extend(lines);
    }
    let examples = match report::is_own_name(command.program) {
        true => pages::examples(command.typed()),
        // Scripts compare the helps of QEMU's programs.
        false => String::new(),
    };
    report::print(format_args!("{text}{}{examples}\n", help.closing));
    Ok(0)
}

/// What follows a subcommand's name.
pub fn usage_of(name: &str) -> Option<&'static str> {
    help_texts::of(name).map(|help| help.usage)
}

/// What the arguments of a subcommand mean, each in a line.
pub fn options_of(name: &str) -> String {
    let arguments = help_texts::of(name).map_or(&[][..], |help| help.arguments);
    let line = |(argument, meaning): &(&str, &str)| {
        let meaning = meaning.split_whitespace().collect::<Vec<_>>().join(" ");
        format!("  {argument}  {meaning}\n")
    };
    arguments.iter().map(line).collect()
}
