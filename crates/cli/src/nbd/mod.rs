//! Not built yet.

use std::ffi::OsString;

/// Runs the tool and returns its exit code.
pub fn main(_program: &str, _args: Vec<OsString>) -> i32 {
    crate::report::error("this tool is not part of this version");
    1
}
