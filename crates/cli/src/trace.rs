//! `--trace`: accepted, with a warning for named events, because this program has no trace
//! events.

use vellum_io::error::errno_text;

use crate::report;

/// Takes the value of `--trace` and warns of what does not exist, as QEMU does.
///
/// Patterns with `*` fit no event in silence, and a file for the output stays as it is.
pub fn take(text: &str) {
    for (index, part) in text.split(',').enumerate() {
        let pattern = match part.split_once('=') {
            Some(("enable", pattern)) => pattern,
            Some(("events", file)) => {
                require(file);
                continue;
            }
            None if index == 0 => part,
            _ => continue,
        };
        let pattern = pattern.strip_prefix('-').unwrap_or(pattern);
        if !pattern.is_empty() && !pattern.contains('*') {
            report::warning(format_args!("trace event '{pattern}' does not exist"));
        }
    }
}

/// A file of events that is not there ends the program.
fn require(file: &str) {
    let Err(error) = std::fs::File::open(file) else {
        return;
    };
    let cause = errno_text(error.raw_os_error().unwrap_or(libc::EIO));
    report::eprint_line(&format!("{}:{file}: {cause}", report::program()));
    std::process::exit(1);
}
