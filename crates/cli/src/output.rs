//! What `--output` chooses.

use crate::getopt::UsageError;

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Output {
    /// For people.
    #[default]
    Human,
    /// For programs.
    Json,
}

impl Output {
    /// The value of `--output`.
    pub fn parse(name: &str) -> Result<Output, UsageError> {
        match name {
            "human" => Ok(Output::Human),
            "json" => Ok(Output::Json),
            other => Err(UsageError::Wrong(format!(
                "--output expects 'human' or 'json' not '{other}'"
            ))),
        }
    }
}
