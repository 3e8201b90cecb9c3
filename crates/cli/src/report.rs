//! Printing that is the same in every tool: errors, warnings and output. It uses no other module
//! of the program but [`terminal`]; `main` registers what gives hints.
//!
//! Messages carry the name the tool was called by, so that a script that looks
//! for `qemu-img: ...` finds it. Under our own name the command stands there too:
//! `vellum convert: ...`.
//!
//! Invariant: no error, warning or info steers a terminal. Names in them may come from an image,
//! of a backing file or a write log, and whoever made that image chose them.

use std::fmt::Display;
use std::io::Write;
use std::sync::OnceLock;

use vellum_options::filename::{self, without_passwords};

use crate::terminal;

static PROGRAM: OnceLock<String> = OnceLock::new();

/// Gives a person at a terminal hints about an error.
static HINTER: OnceLock<fn(&str)> = OnceLock::new();

/// How bad a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Something was not done.
    Error,
    /// Somebody should look.
    Warning,
    /// It is told.
    Info,
}

/// Takes messages in the place of standard error.
static LOG: OnceLock<fn(Level, &str)> = OnceLock::new();

/// Sets what takes messages in the place of standard error; the first call decides.
pub fn set_log(log: fn(Level, &str)) {
    let _ = LOG.set(log);
}

/// Whether a message went to the log.
fn is_logged(level: Level, message: &str) -> bool {
    let log = LOG.get();
    log.is_some_and(|log| {
        log(level, message);
        true
    })
}

/// Sets what is called with every error after it was printed; the first call decides.
pub fn set_hinter(hinter: fn(&str)) {
    let _ = HINTER.set(hinter);
}

/// Sets the name that messages begin with; the first call decides.
pub fn set_program(name: &str) {
    // A second call is a tool calling another one: the outer name stays.
    let _ = PROGRAM.set(name.to_owned());
}

/// The name that the program was called by.
pub fn program() -> &'static str {
    PROGRAM.get().map_or("vellum", String::as_str)
}

static COMMAND: OnceLock<String> = OnceLock::new();

/// Sets the command that is being run, as it stands after the program's name; the first
/// call decides. Under the name of one of QEMU's programs that name says everything.
pub fn set_command(name: &str) {
    if is_own() {
        let _ = COMMAND.set(name.to_owned());
    }
}

/// Whether the program was called by a name of ours, not by that of one of QEMU's.
pub fn is_own() -> bool {
    is_own_name(program())
}

/// Whether a name that a program was called by is none of QEMU's.
pub fn is_own_name(program: &str) -> bool {
    !program.starts_with("qemu-")
}

/// A command as it is typed: `qemu-nbd`, or `vellum nbd`.
pub fn call(program: &str, command: &str) -> String {
    match is_own_name(program) {
        true => format!("{program} {command}"),
        false => program.to_owned(),
    }
}

/// What messages begin with: the program, and under our own name the command.
fn message_prefix() -> String {
    match COMMAND.get() {
        Some(command) => format!("{} {command}", program()),
        None => program().to_owned(),
    }
}

/// Tells how to get help on the command that is being run.
pub fn try_help() {
    eprint_line(&format!("Try '{} --help' for more info", message_prefix()));
}

/// A message without what it says twice in a row at its beginning, as QEMU's do:
/// `Could not open 'x': Could not open 'x': No such file or directory`.
fn without_repetition(message: &str) -> &str {
    let mut ends = message
        .match_indices(": ")
        .map(|(at, colon)| at + colon.len());
    let doubled = ends.find(|&end| message[end..].starts_with(&message[..end]));
    doubled.map_or(message, |end| &message[end..])
}

/// Prints `program: message` on standard error; a person at a terminal gets hints too.
pub fn error(message: impl Display) {
    let message = message.to_string();
    if is_logged(Level::Error, &message) {
        return;
    }
    let shown = match is_own() {
        true => without_repetition(&message),
        false => &message,
    };
    let shown = terminal::harmless_lines(shown);
    eprint_line(&format!("{}: {shown}", message_prefix()));
    if let Some(hinter) = HINTER.get() {
        hinter(&message);
    }
}

/// Prints `program: warning: message` on standard error.
pub fn warning(message: impl Display) {
    let message = message.to_string();
    if is_logged(Level::Warning, &message) {
        return;
    }
    let message = terminal::harmless_lines(&message);
    eprint_line(&format!("{}: warning: {message}", message_prefix()));
}

/// Prints `program: place: warning: message` on standard error; `place` is what it is about.
pub fn warning_at(place: impl Display, message: impl Display) {
    if is_logged(Level::Warning, &format!("{place}: {message}")) {
        return;
    }
    let text = format!("{place}: warning: {message}");
    eprint_line(&format!(
        "{}: {}",
        message_prefix(),
        terminal::harmless_lines(&text)
    ));
}

/// Prints `program:place: message` on standard error; `place` is a file, or a line of one.
pub fn line_of_file(place: impl Display, message: impl Display) {
    let text = terminal::harmless(&format!("{place}: {message}"));
    eprint_line(&format!("{}:{text}", program()));
}

/// Prints `program: info: message` on standard error.
pub fn info(message: impl Display) {
    let message = message.to_string();
    if is_logged(Level::Info, &message) {
        return;
    }
    let message = terminal::harmless_lines(&message);
    eprint_line(&format!("{}: info: {message}", message_prefix()));
}

/// Prints a line on standard error; nothing can be done if that fails.
pub fn eprint_line(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{}", without_passwords(line));
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
    vellum_options::error_text(error)
}

/// Says more of an error than QEMU's words for it do, if it is of bytes that the disk has changed, of a
/// disk in a repository, or of a server that has the image: which these are, why, and what to do. To be
/// called beside what reports the error.
pub fn about_cause(error: &vellum::Error) {
    let is_of_repository = error.operation() == vellum_repository::READ_DISK;
    if error.kind() == vellum::ErrorKind::ChecksumMismatch || is_of_repository {
        let name = error.target_name().unwrap_or_default();
        return warning(format_args!("'{name}': {}", error_text(error)));
    }
    let causes = std::iter::successors(Some(error), |error| {
        std::error::Error::source(*error)?.downcast_ref()
    });
    if let Some((name, cause)) = causes.filter_map(of_server).last() {
        warning(format_args!("'{name}': {}", error_text(cause)));
    }
}

/// The name of a file on another machine, and the error, if it is of one and says more than a number does.
fn of_server(error: &vellum::Error) -> Option<(&str, &vellum::Error)> {
    let name = error.target_name()?;
    let says_more = error.message() != vellum_io::error::errno_text(error.errno());
    (says_more && filename::is_on_server(name)).then_some((name, error))
}

/// Reports a failed operation and returns the exit code for it.
pub fn fail(error: &vellum::Error) -> i32 {
    self::error(error_text(error));
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_twice_in_a_row() {
        for (message, shown) in [
            (
                "Could not open 'x': Could not open 'x': gone",
                "Could not open 'x': gone",
            ),
            ("a: b: a: b: c", "a: b: c"),
            ("Could not open 'x': gone", "Could not open 'x': gone"),
            (
                "x: Could not create 'x': gone",
                "x: Could not create 'x': gone",
            ),
            ("", ""),
        ] {
            assert_eq!(without_repetition(message), shown);
        }
    }

    #[test]
    fn more_is_said_of_servers_than_numbers() {
        let error = vellum::Error::new(vellum::ErrorKind::Changed, "read", "it has changed");
        assert!(of_server(&error).is_none());
        assert!(of_server(&error.target("s3://b/k")).is_some());
        let number = vellum::Error::from_errno("read", 5).target("s3://b/k");
        assert!(of_server(&number).is_none());
    }

    #[test]
    fn commands_are_called_by_what_was_typed() {
        assert_eq!(call("vellum", "nbd"), "vellum nbd");
        assert_eq!(call("qemu-nbd", "nbd"), "qemu-nbd");
    }
}
