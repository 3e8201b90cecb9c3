//! `vellum oci`: the command.

use std::ffi::OsString;

use crate::{hint, report};

use super::arguments::{self, Arguments, options};
#[cfg(feature = "oci")]
use super::disks;

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    let arguments = match Arguments::parse(args) {
        Ok(arguments) => arguments,
        Err(message) => {
            report::error(&message);
            hint::about_option(message, &options());
            report::eprint_line(&format!("Try '{program} oci --help' for more info"));
            return 1;
        }
    };
    if arguments.help {
        report::print(arguments::help(program));
        return 0;
    }
    match run(program, &arguments) {
        Ok(()) => 0,
        Err(message) => {
            report::error(message);
            1
        }
    }
}

#[cfg(feature = "oci")]
fn run(program: &str, arguments: &Arguments) -> Result<(), String> {
    vellum_io::lane::block_on(disks::run(program, arguments))
}

#[cfg(not(feature = "oci"))]
fn run(_program: &str, arguments: &Arguments) -> Result<(), String> {
    let Arguments { way, image, .. } = arguments;
    Err(format!(
        "{way:?} of '{image}' requires a build with the feature 'oci'"
    ))
}
