//! What `--output` chooses.

use std::fmt;

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Output {
    /// For people.
    #[default]
    Human,
    /// For programs.
    Json,
}

/// A value that `--output` does not know.
#[derive(Debug)]
pub struct UnknownOutput(String);

impl fmt::Display for UnknownOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--output expects 'human' or 'json' not '{}'", self.0)
    }
}

impl Output {
    /// The value of `--output`.
    pub fn parse(name: &str) -> Result<Output, UnknownOutput> {
        match name {
            "human" => Ok(Output::Human),
            "json" => Ok(Output::Json),
            other => Err(UnknownOutput(other.to_owned())),
        }
    }
}
