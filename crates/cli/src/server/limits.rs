//! What the system allows the program.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets the program have as many files open as its user may: every disk takes one or more. Where
/// that fails, what cannot be opened later says so.
pub fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let _ = setrlimit(Resource::Nofile, raised);
}
