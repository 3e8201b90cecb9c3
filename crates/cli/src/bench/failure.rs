//! The errors of `vellum bench`, which end it without a result: messages, usage errors, and an
//! interruption by the user.

use std::fmt;
use std::path::Path;

use vellum_io::error::io_text;

use crate::getopt::UsageError;
use crate::report;

/// Why there is no result.
#[derive(Debug)]
pub enum Failure {
    Message(String),
    /// The command line cannot be understood.
    Usage(String),
    /// The user has interrupted the program (Ctrl-C).
    Interrupted,
}

impl Failure {
    pub fn message<T>(text: impl Into<String>) -> Result<T, Failure> {
        Err(Failure::Message(text.into()))
    }

    pub fn usage<T>(text: impl Into<String>) -> Result<T, Failure> {
        Err(Failure::Usage(text.into()))
    }

    pub fn io<T>(verb: &str, path: &Path, error: &std::io::Error) -> Result<T, Failure> {
        let text = io_text(error);
        Failure::message(format!("Cannot {verb} '{}': {text}", path.display()))
    }

    pub fn open(name: &str, error: &vellum::Error) -> Failure {
        let text = report::error_text(error);
        Failure::Message(format!("Could not open '{name}': {text}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Message(text) | Failure::Usage(text) => f.write_str(text),
            Failure::Interrupted => f.write_str("interrupted"),
        }
    }
}

impl From<UsageError> for Failure {
    fn from(error: UsageError) -> Failure {
        Failure::Usage(error.to_string())
    }
}

impl From<vellum::Error> for Failure {
    fn from(error: vellum::Error) -> Failure {
        Failure::Message(report::error_text(&error))
    }
}
