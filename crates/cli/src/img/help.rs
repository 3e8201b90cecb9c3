//! `--help` and `--version`.

use vellum_graph::driver_names;

use super::command::{Command, Subcommand};
use crate::report;
use crate::spec::{HELP_ROW, Spec};
use crate::version::version;

/// Prints the help of the whole tool.
pub fn tool(
    program: &str,
    subcommands: impl Iterator<Item = &'static Subcommand>,
    others: &[&'static Spec],
) {
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
        let name = match subcommand.spec.name {
            "bench" if is_own => "img bench",
            name => name,
        };
        text.push_str(&format!("  {name} - {}\n", subcommand.spec.about));
    }
    if is_own {
        let others = others.iter().map(|spec| (spec.name, spec.about));
        let help = (
            "help",
            "Print the help of a command, or what 'config' may say",
        );
        let mut others: Vec<_> = others.chain([help]).collect();
        others.sort_unstable();
        text.push_str("\nOther tools:\n\n");
        for (name, about) in others {
            text.push_str(&format!("  {name} - {about}\n"));
        }
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
pub fn subcommand(command: Command<'_>) {
    let spec = &command.subcommand.spec;
    let mut text = format!(
        "Usage:\n{}.  Usage:\n\n  {} {} {}\n\nArguments:\n",
        spec.about,
        command.program,
        command.typed(),
        spec.usage
    );
    for row in [HELP_ROW].iter().chain(spec.arguments) {
        let names = row.trim_start();
        let indent = &row[..row.len() - names.len()];
        let (names, meaning) = names.split_once("  ").unwrap_or((names, ""));
        text.push_str(&format!("  {indent}{names}\n"));
        for line in meaning.lines() {
            // Lines after the first are indented to go on.
            let line = line.strip_prefix("        ").unwrap_or(line);
            text.push_str(&format!("     {line}\n"));
        }
    }
    let examples = match report::is_own_name(command.program) {
        true => spec.examples_text(),
        // Scripts compare the helps of QEMU's programs.
        false => String::new(),
    };
    report::print(format_args!("{text}{}{examples}\n", spec.closing));
}
