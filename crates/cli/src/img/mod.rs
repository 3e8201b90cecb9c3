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

use command::{Command, Outcome};

use crate::getopt::{OptionSpec, Parser, Takes};
use crate::report;

/// The work of a subcommand.
type Run = fn(Command<'_>, Vec<OsString>) -> Outcome;

/// A subcommand and what it does.
struct Subcommand {
    name: &'static str,
    about: &'static str,
    run: Run,
}

const SUBCOMMANDS: &[Subcommand] = &[
    Subcommand {
        name: "amend",
        about: "Change options of an image",
        run: amend::run,
    },
    Subcommand {
        name: "bench",
        about: "Time requests on an image",
        run: bench::run,
    },
    Subcommand {
        name: "bitmap",
        about: "Change the bitmaps of an image",
        run: bitmap::run,
    },
    Subcommand {
        name: "check",
        about: "Look for damage in an image",
        run: check::run,
    },
    Subcommand {
        name: "commit",
        about: "Write an overlay into its backing file",
        run: commit::run,
    },
    Subcommand {
        name: "compare",
        about: "Compare two images",
        run: compare::run,
    },
    Subcommand {
        name: "convert",
        about: "Copy images to a new one",
        run: convert::run,
    },
    Subcommand {
        name: "create",
        about: "Make a new image",
        run: create::run,
    },
    Subcommand {
        name: "dd",
        about: "Copy blocks of an image",
        run: dd::run,
    },
    Subcommand {
        name: "info",
        about: "Tell about an image",
        run: info::run,
    },
    Subcommand {
        name: "map",
        about: "Tell where the parts of an image lie",
        run: map::run,
    },
    Subcommand {
        name: "measure",
        about: "Tell what a copy would take",
        run: measure::run,
    },
    Subcommand {
        name: "rebase",
        about: "Change the backing file of an image",
        run: rebase::run,
    },
    Subcommand {
        name: "resize",
        about: "Change the size of an image",
        run: resize::run,
    },
    Subcommand {
        name: "snapshot",
        about: "Handle the snapshots of an image",
        run: snapshot::run,
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
    (subcommand.run)(command, args).unwrap_or_else(|failure| {
        command.tell(&failure);
        1
    })
}
