//! `vellum nbd`, and `qemu-nbd`: the command.

use std::ffi::OsString;

use crate::getopt::UsageError;
use crate::report;
use crate::server::Failure;
use crate::version::version;

use super::arguments::{Arguments, SPEC};
use super::{list, serve};

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let done = Arguments::parse(args).and_then(|arguments| match arguments.list {
        true => list::list(&arguments),
        false => serve::serve(arguments),
    });
    if let Err(Failure::Usage(UsageError::Version)) = done {
        // qemu-nbd leaves out the word that the other programs have.
        report::print(version(program).replace(" version ", " "));
        return 0;
    }
    let is_usage = matches!(&done, Err(Failure::Usage(error)) if *error != UsageError::Help);
    let code = Failure::exit_code(done, &SPEC);
    if is_usage && !report::is_own() {
        report::error("Try `qemu-nbd --help' for more information.");
    }
    code
}
