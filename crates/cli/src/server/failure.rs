//! Why a server ends with an error.

use crate::getopt::{Shape, UsageError};
use crate::{hint, report};

/// Why the program ends with an error.
#[derive(Debug)]
pub enum Failure {
    /// What the user should read.
    Message(String),
    /// The command line cannot be understood.
    Usage(UsageError),
    /// The process in the background has already told the user.
    AlreadyReported,
}

impl From<vellum_daemon::Failure> for Failure {
    fn from(failure: vellum_daemon::Failure) -> Self {
        Failure::Message(failure.0)
    }
}

impl From<vellum::Error> for Failure {
    fn from(error: vellum::Error) -> Self {
        Failure::Message(report::error_text(&error))
    }
}

impl From<UsageError> for Failure {
    fn from(error: UsageError) -> Self {
        Failure::Usage(error)
    }
}

impl Failure {
    /// A failure with this text.
    pub fn message(text: impl Into<String>) -> Self {
        Failure::Message(text.into())
    }

    /// Puts text before a message; other failures stay as they are.
    pub fn with_prefix(self, prefix: impl std::fmt::Display) -> Self {
        match self {
            Failure::Message(text) => Failure::Message(format!("{prefix}: {text}")),
            other => other,
        }
    }

    /// Prints it on standard error; `options` are those of the tool, for hints.
    pub fn report(&self, options: &[Shape]) {
        match self {
            Failure::Message(text) => report::error(text),
            Failure::Usage(error) => {
                report::error(error);
                hint::about_option(error, options);
                if report::is_own() {
                    report::try_help();
                }
            }
            Failure::AlreadyReported => {}
        }
    }

    /// The exit code of a tool that has ended so; a failure is reported as by [`Failure::report`].
    pub fn exit_code(done: Result<(), Failure>, options: &[Shape]) -> i32 {
        match done {
            Ok(()) => 0,
            Err(failure) => {
                failure.report(options);
                1
            }
        }
    }
}
