//! The subcommands of `vellum` and `qemu-img`, and the options before them.

use std::ffi::OsString;

use crate::getopt::Parser;
use crate::spec::Spec;
use crate::version::version;
use crate::{hint, report, trace};

use super::command::{Command, Failure, Subcommand};
use super::{
    amend, bench, bitmap, check, commit, compact, compare, convert, create, dd, help, info, map,
    measure, rebase, repository, resize, scrub, seal, snapshot, transfer, verify,
};

const SUBCOMMANDS: &[&Subcommand] = &[
    &amend::AMEND,
    &bench::BENCH,
    &bitmap::BITMAP,
    &check::CHECK,
    &commit::COMMIT,
    &compare::COMPARE,
    &compact::COMPACT,
    &convert::CONVERT,
    &create::CREATE,
    &dd::DD,
    &info::INFO,
    &map::MAP,
    &measure::MEASURE,
    &repository::open::OPEN,
    &repository::pull::PULL,
    &repository::push::PUSH,
    &rebase::REBASE,
    &transfer::receive::RECEIVE,
    &repository::repo::REPO,
    &resize::RESIZE,
    &scrub::SCRUB,
    &seal::SEAL,
    &transfer::send::SEND,
    &snapshot::SNAPSHOT,
    &verify::VERIFY,
];

/// Subcommands that QEMU's program does not have.
const OWN: [&str; 10] = [
    "compact", "open", "pull", "push", "receive", "repo", "scrub", "seal", "send", "verify",
];

/// The subcommands of a program that is called so.
pub fn subcommands(is_own: bool) -> impl Iterator<Item = &'static Subcommand> {
    let all = SUBCOMMANDS.iter().copied();
    all.filter(move |subcommand| is_own || !OWN.contains(&subcommand.spec.name))
}

/// What stands before the subcommands.
pub const SPEC: Spec = Spec {
    name: "vellum",
    about: "Make, change, copy and look at disk images",
    usage: "\
[-h] [-V] COMMAND [--help | OPTIONS]
help [COMMAND | config]
",
    arguments: &["\
  -h, --help           print this help
  -V, --version        print the version
  -T, --trace TRACE    write events as they happen; help lists them
"],
    examples: "\
vellum create -f qcow2 disk.qcow2 20G
  a new disk
vellum info disk.qcow2
  what it is
vellum help convert
  how to copy it
",
    exits: "\
0  done
1  an error, which is told
2 and more  see the page of the command: check, compare, audit, verify
",
    ..Spec::EMPTY
};

/// Runs the image tool and returns its exit code; `others` are the tools beside it, which the help lists.
pub fn main(program: &str, args: Vec<OsString>, others: &[&'static Spec]) -> i32 {
    let try_help = || report::eprint_line(&format!("Try '{program} --help' for more info"));
    let mut parser = Parser::until_operand(SPEC.options(), args);
    loop {
        match parser.next_option() {
            Ok(Some(("help", _))) => {
                help::tool(program, subcommands(report::is_own_name(program)), others);
                return 0;
            }
            Ok(Some(("trace", value))) => {
                if let Err(code) = trace::take(&value) {
                    return code;
                }
            }
            Ok(Some(_)) => {
                report::print(version(program));
                return 0;
            }
            Ok(None) => break,
            Err(error) => {
                report::error(&error);
                hint::about_option(error, &SPEC.options());
                try_help();
                return 1;
            }
        }
    }
    let mut operands = parser.operands().into_iter();
    let Some(name) = operands.next() else {
        match report::is_own_name(program) {
            true => report::error("Expecting a command"),
            false => report::error("Not enough arguments"),
        }
        try_help();
        return 1;
    };
    let known = subcommands(report::is_own_name(program));
    let Some(subcommand) = known.into_iter().find(|known| known.spec.name == name) else {
        report::error(format_args!("Command not found: {name}"));
        hint::about_subcommand(&name);
        try_help();
        return 1;
    };
    let args = operands.map(OsString::from).collect();
    run(program, subcommand, args)
}

pub(crate) fn run(program: &str, subcommand: &'static Subcommand, args: Vec<OsString>) -> i32 {
    let command = Command {
        program,
        subcommand,
    };
    report::set_command(command.typed());
    hint::know_options(&subcommand.spec.options());
    (subcommand.run)(command, args).unwrap_or_else(|failure| {
        match failure {
            Failure::Help => help::subcommand(command),
            _ => command.report(&failure),
        }
        failure.code()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each option that is listed is taken: what comes of it is its value's, and the help ends all of them.
    #[test]
    fn every_option_is_taken() {
        for subcommand in SUBCOMMANDS {
            let command = Command {
                program: "vellum",
                subcommand,
            };
            for option in subcommand.spec.options() {
                let name = option.names().last().unwrap();
                let value = option.value.map(|_| "1");
                let words = [Some(name.as_str()), value, Some("--help")];
                let words = words.into_iter().flatten().map(OsString::from).collect();
                let failure = (subcommand.run)(command, words).unwrap_err();
                let is_refused = matches!(failure, Failure::Option(_));
                assert!(!is_refused, "{} {name}: {failure:?}", subcommand.spec.name);
            }
        }
    }
}
