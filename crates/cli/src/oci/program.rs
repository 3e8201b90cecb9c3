//! `vellum oci`: the command.

use std::ffi::OsString;

use crate::spec;

use super::arguments::{Arguments, SPEC};
#[cfg(feature = "oci")]
use super::disks;

/// Runs the tool and returns its exit code.
pub fn main(program: &str, args: Vec<OsString>) -> i32 {
    spec::run(&SPEC, Arguments::parse(args), |arguments| {
        run(program, &arguments).map(|()| 0)
    })
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
