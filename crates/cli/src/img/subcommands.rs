//! The subcommands of `vellum` and `qemu-img`, and what each of them takes.

use std::ffi::OsString;

use crate::getopt::{OptionSpec, Parser, Shape, Takes, shapes};
use crate::version::version;
use crate::{hint, report, trace};

use super::command::{Command, Subcommand};
use super::{
    amend, bench, bitmap, check, commit, compact, compare, convert, create, dd, help, info, map,
    measure, rebase, repository, resize, scrub, seal, snapshot, transfer, verify,
};

const SUBCOMMANDS: &[Subcommand] = &[
    Subcommand {
        name: "amend",
        about: "Change options of an image",
        options: amend::options,
        run: amend::run,
    },
    Subcommand {
        name: "bench",
        about: "Time requests on an image",
        options: bench::options,
        run: bench::run,
    },
    Subcommand {
        name: "bitmap",
        about: "Change the bitmaps of an image",
        options: bitmap::options,
        run: bitmap::run,
    },
    Subcommand {
        name: "check",
        about: "Look for damage in an image",
        options: check::options,
        run: check::run,
    },
    Subcommand {
        name: "commit",
        about: "Write an overlay into its backing file",
        options: commit::options,
        run: commit::run,
    },
    Subcommand {
        name: "compare",
        about: "Compare two images",
        options: compare::options,
        run: compare::run,
    },
    Subcommand {
        name: "compact",
        about: "Make an image's file as short as what is allocated in it",
        options: compact::options,
        run: compact::run,
    },
    Subcommand {
        name: "convert",
        about: "Copy images to a new one",
        options: convert::options,
        run: convert::run,
    },
    Subcommand {
        name: "create",
        about: "Make a new image",
        options: create::options,
        run: create::run,
    },
    Subcommand {
        name: "dd",
        about: "Copy blocks of an image",
        options: dd::options,
        run: dd::run,
    },
    Subcommand {
        name: "info",
        about: "Tell about an image",
        options: info::options,
        run: info::run,
    },
    Subcommand {
        name: "map",
        about: "Tell where the parts of an image lie",
        options: map::options,
        run: map::run,
    },
    Subcommand {
        name: "measure",
        about: "Tell what a copy would take",
        options: measure::options,
        run: measure::run,
    },
    Subcommand {
        name: "open",
        about: "Make an overlay on a disk in a repository",
        options: repository::open::options,
        run: repository::open::run,
    },
    Subcommand {
        name: "pull",
        about: "Copy a disk out of a repository",
        options: repository::pull::options,
        run: repository::pull::run,
    },
    Subcommand {
        name: "push",
        about: "Put a disk into a repository",
        options: repository::push::options,
        run: repository::push::run,
    },
    Subcommand {
        name: "rebase",
        about: "Change the backing file of an image",
        options: rebase::options,
        run: rebase::run,
    },
    Subcommand {
        name: "receive",
        about: "Apply what 'send' has written to a disk",
        options: transfer::receive::options,
        run: transfer::receive::run,
    },
    Subcommand {
        name: "repo",
        about: "List, verify and clean a repository",
        options: repository::repo::options,
        run: repository::repo::run,
    },
    Subcommand {
        name: "resize",
        about: "Change the size of an image",
        options: resize::options,
        run: resize::run,
    },
    Subcommand {
        name: "scrub",
        about: "Compare an image's file with its checksums",
        options: scrub::options,
        run: scrub::run,
    },
    Subcommand {
        name: "seal",
        about: "Keep an image from being changed, and let changes be found",
        options: seal::options,
        run: seal::run,
    },
    Subcommand {
        name: "send",
        about: "Write a disk, or what has changed of one, as a stream",
        options: transfer::send::options,
        run: transfer::send::run,
    },
    Subcommand {
        name: "snapshot",
        about: "Handle the snapshots of an image",
        options: snapshot::options,
        run: snapshot::run,
    },
    Subcommand {
        name: "verify",
        about: "Compare an image with its seal",
        options: verify::options,
        run: verify::run,
    },
];

/// Subcommands that QEMU's program does not have.
const OWN: [&str; 10] = [
    "compact", "open", "pull", "push", "receive", "repo", "scrub", "seal", "send", "verify",
];

/// The subcommand of a name.
pub(crate) fn subcommand(name: &str) -> Option<&'static Subcommand> {
    SUBCOMMANDS
        .iter()
        .find(|subcommand| subcommand.name == name)
}

/// The subcommands of a program that is called so.
pub fn subcommands(is_own: bool) -> impl Iterator<Item = &'static Subcommand> {
    let all = SUBCOMMANDS.iter();
    all.filter(move |subcommand| is_own || !OWN.contains(&subcommand.name))
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Opt {
    Help,
    Version,
    Trace,
}

pub(crate) const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Version, 'V', "version", Takes::Nothing),
    OptionSpec::new(Opt::Trace, 'T', "trace", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

/// Runs the image tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let try_help = || report::eprint_line(&format!("Try '{program} --help' for more info"));
    let mut parser = Parser::until_operand(OPTIONS, args);
    loop {
        match parser.next_option() {
            Ok(Some((Opt::Help, _))) => {
                help::tool(program, subcommands(report::is_own_name(program)));
                return 0;
            }
            Ok(Some((Opt::Version, _))) => {
                report::print(version(program));
                return 0;
            }
            Ok(Some((Opt::Trace, value))) => {
                if let Err(code) = trace::take(&value.unwrap_or_default()) {
                    return code;
                }
            }
            Ok(None) => break,
            Err(error) => {
                report::error(&error);
                hint::about_option(error, &options());
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
    let Some(subcommand) = known.into_iter().find(|known| known.name == name) else {
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
    hint::know_options(&(subcommand.options)());
    (subcommand.run)(command, args).unwrap_or_else(|failure| {
        command.report(&failure);
        failure.code()
    })
}
