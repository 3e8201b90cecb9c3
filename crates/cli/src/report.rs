//! What every tool prints the same way: errors, warnings and output.
//!
//! Messages carry the name the tool was called by, so that a script that looks
//! for `qemu-img: ...` finds it.

use std::fmt::Display;
use std::io::Write;
use std::sync::OnceLock;

static PROGRAM: OnceLock<String> = OnceLock::new();

/// Sets the name that messages begin with; the first call decides.
pub fn set_program(name: &str) {
    // A second call is a tool calling another one: the outer name stays.
    let _ = PROGRAM.set(name.to_owned());
}

/// The name that messages begin with.
pub fn program() -> &'static str {
    PROGRAM.get().map_or("vellum", String::as_str)
}

/// Prints `program: message` on standard error; a person at a terminal gets hints too.
pub fn error(message: impl Display) {
    let message = message.to_string();
    eprint_line(&format!("{}: {message}", program()));
    crate::hint::about(&message);
}

/// Prints `program: warning: message` on standard error.
pub fn warning(message: impl Display) {
    eprint_line(&format!("{}: warning: {message}", program()));
}

/// Prints `program: info: message` on standard error.
pub fn info(message: impl Display) {
    eprint_line(&format!("{}: info: {message}", program()));
}

/// Prints a line on standard error; nothing can be done if that fails.
pub fn eprint_line(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Prints text on standard output as it is, and ends the process if nobody
/// reads it any more.
pub fn print(text: impl Display) {
    let mut out = std::io::stdout().lock();
    if write!(out, "{text}").and_then(|()| out.flush()).is_err() {
        std::process::exit(1);
    }
}

/// Prints a line on standard output, like [`print()`].
pub fn print_line(text: impl Display) {
    print(format_args!("{text}\n"));
}

/// The text of an error as QEMU would print it after the program's name: the
/// messages from the outermost to the cause, joined by colons.
pub fn error_text(error: &vellum::Error) -> String {
    vellum_control::error_text(error)
}

/// Reports a failed operation and returns the exit code for it.
pub fn fail(error: &vellum::Error) -> i32 {
    self::error(error_text(error));
    1
}
