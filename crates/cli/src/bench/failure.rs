//! The errors of `vellum bench`, which end it without a result: messages, and an interruption by the user.

use std::path::Path;

use vellum_io::error::io_text;

use crate::report;

/// Why there is no result.
#[derive(Debug)]
pub enum Failure {
    Message(String),
    /// The user has interrupted the program (Ctrl-C).
    Interrupted,
}

impl Failure {
    pub fn message<T>(text: impl Into<String>) -> Result<T, Failure> {
        Err(Failure::Message(text.into()))
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

impl From<vellum::Error> for Failure {
    fn from(error: vellum::Error) -> Failure {
        Failure::Message(report::error_text(&error))
    }
}
