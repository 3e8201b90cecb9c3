//! The image tool: `qemu-img` and the subcommands of `vellum`.

mod amend;
mod bench;
mod bitmap;
mod check;
mod command;
mod commit;
mod compare;
mod convert;
mod convert_args;
mod convert_bitmaps;
mod create;
mod dd;
mod describe;
mod help;
mod human;
mod info;
mod map;
mod measure;
mod progress;
mod rebase;
mod resize;
pub mod snapshot;

use std::ffi::OsString;

use command::{Command, Failure, Outcome};

use crate::getopt::{OptionSpec, Parser, Takes};
use crate::report;

/// The work of a subcommand.
type Run = fn(Command<'_>, Vec<OsString>) -> Outcome;

/// A subcommand and what it does.
struct Subcommand {
    name: &'static str,
    about: &'static str,
    /// `None`: this version does not have it.
    run: Option<Run>,
}

const SUBCOMMANDS: &[Subcommand] = &[
    Subcommand {
        name: "amend",
        about: "Change options of an image",
        run: Some(amend::run),
    },
    Subcommand {
        name: "bench",
        about: "Time requests on an image",
        run: Some(bench::run),
    },
    Subcommand {
        name: "bitmap",
        about: "Change the bitmaps of an image",
        run: Some(bitmap::run),
    },
    Subcommand {
        name: "check",
        about: "Look for damage in an image",
        run: Some(check::run),
    },
    Subcommand {
        name: "commit",
        about: "Write an overlay into its backing file",
        run: Some(commit::run),
    },
    Subcommand {
        name: "compare",
        about: "Compare two images",
        run: Some(compare::run),
    },
    Subcommand {
        name: "convert",
        about: "Copy images to a new one",
        run: Some(convert::run),
    },
    Subcommand {
        name: "create",
        about: "Make a new image",
        run: Some(create::run),
    },
    Subcommand {
        name: "dd",
        about: "Copy blocks of an image",
        run: Some(dd::run),
    },
    Subcommand {
        name: "info",
        about: "Tell about an image",
        run: Some(info::run),
    },
    Subcommand {
        name: "map",
        about: "Tell where the parts of an image lie",
        run: Some(map::run),
    },
    Subcommand {
        name: "measure",
        about: "Tell what a copy would take",
        run: Some(measure::run),
    },
    Subcommand {
        name: "rebase",
        about: "Change the backing file of an image",
        run: Some(rebase::run),
    },
    Subcommand {
        name: "resize",
        about: "Change the size of an image",
        run: Some(resize::run),
    },
    Subcommand {
        name: "snapshot",
        about: "Handle the snapshots of an image",
        run: Some(snapshot::run),
    },
];

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Version,
    Trace,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Version, 'V', "version", Takes::Nothing),
    // QEMU's trace events do not exist here; asking for them changes nothing.
    OptionSpec::new(Opt::Trace, 'T', "trace", Takes::Value),
];

/// Runs the image tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let hint = || report::eprint_line(&format!("Try '{program} --help' for more info"));
    let mut parser = Parser::until_operand(OPTIONS, args);
    loop {
        match parser.next_option() {
            Ok(Some((Opt::Help, _))) => {
                help::tool(program);
                return 0;
            }
            Ok(Some((Opt::Version, _))) => {
                report::print(help::version(program));
                return 0;
            }
            Ok(Some((Opt::Trace, _))) => {}
            Ok(None) => break,
            Err(error) => {
                report::error(error);
                hint();
                return 1;
            }
        }
    }
    let mut operands = parser.operands().into_iter();
    let Some(name) = operands.next() else {
        report::error("Not enough arguments");
        hint();
        return 1;
    };
    let Some(subcommand) = SUBCOMMANDS
        .iter()
        .find(|subcommand| subcommand.name == name)
    else {
        report::error(format_args!("Command not found: {name}"));
        hint();
        return 1;
    };
    let args = operands.map(OsString::from).collect();
    run(program, subcommand, args)
}

fn run(program: &str, subcommand: &Subcommand, args: Vec<OsString>) -> i32 {
    let command = Command {
        program,
        name: subcommand.name,
    };
    let outcome = match subcommand.run {
        Some(run) => run(command, args),
        None => Err(Failure::Message(format!(
            "The subcommand '{}' is not part of this version",
            subcommand.name
        ))),
    };
    outcome.unwrap_or_else(|failure| {
        command.tell(&failure);
        1
    })
}
