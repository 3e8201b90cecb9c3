//! [`Failure`]: why a part of the daemon cannot be, in words for the user, and the options that parts are described with.

use vellum_options::{Options, error_text};

use crate::qmp;

/// Why something cannot be: what the user should read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure(pub String);

pub(crate) fn message(text: impl Into<String>) -> Failure {
    Failure(text.into())
}

pub(crate) fn failure(error: vellum::Error) -> Failure {
    message(error_text(&error))
}

impl From<vellum::Error> for Failure {
    fn from(error: vellum::Error) -> Self {
        failure(error)
    }
}

/// As a command fails: hints are for people at a terminal.
impl From<Failure> for qmp::Failure {
    fn from(failure: Failure) -> Self {
        qmp::Failure::new(qmp::without_hints(&failure.0))
    }
}

/// Takes an option that must be there.
///
/// # Errors
/// If it is not, or is no text.
pub fn need(options: &mut Options, key: &str) -> Result<String, Failure> {
    let value = options.take_text(key).map_err(failure)?;
    value.ok_or_else(|| message(format!("Parameter '{key}' is missing")))
}

/// Refuses what nobody has taken.
///
/// # Errors
/// If there is such an option.
pub fn refuse_rest(options: &Options) -> Result<(), Failure> {
    match options.keys().next() {
        None => Ok(()),
        Some(key) => {
            let key = key.split('.').next().unwrap_or(key);
            Err(message(format!("Parameter '{key}' is unexpected")))
        }
    }
}
