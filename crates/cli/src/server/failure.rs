//! Why a server ends with an error.

use crate::getopt::UsageError;
use crate::spec::Spec;
use crate::version::version;
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
        match error {
            UsageError::Object(message) => Failure::Message(message),
            error => Failure::Usage(error),
        }
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

    /// Prints it on standard error, or the help or the version if that was asked for; `spec` is the tool's.
    ///
    /// Returns the exit code.
    pub fn report(&self, spec: &Spec) -> i32 {
        match self {
            Failure::Message(text) => report::error(text),
            Failure::Usage(UsageError::Help) => {
                let call = report::call(report::program(), spec.name);
                report::print(spec.help(&call));
                return 0;
            }
            Failure::Usage(UsageError::Version) => {
                report::print(version(report::program()));
                return 0;
            }
            Failure::Usage(error) => {
                report::error(error);
                hint::about_option(error, &spec.options());
                if report::is_own() {
                    report::try_help();
                }
            }
            Failure::AlreadyReported => {}
        }
        1
    }

    /// The exit code of a tool that has ended so; a failure is reported as by [`Failure::report`].
    pub fn exit_code(done: Result<(), Failure>, spec: &Spec) -> i32 {
        done.map_or_else(|failure| failure.report(spec), |()| 0)
    }
}
