//! Why something cannot be read.

use std::{fmt, io};

/// The result of an operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something cannot be read.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The disk cannot be read there.
    Io(io::Error),
    /// A structure says what cannot be.
    Damaged {
        /// What it is.
        structure: &'static str,
        /// Where it is, in bytes from the start of the volume, or its number where its name
        /// says so.
        at: u64,
    },
    /// It is made in a way that is not known here.
    Unsupported(String),
    /// There is no such file.
    NotFound,
    /// It is no directory.
    NotADirectory,
    /// It is a directory.
    IsADirectory,
    /// It is of another kind than what is asked for.
    WrongKind,
}

impl Error {
    pub(crate) fn damaged(structure: &'static str, at: u64) -> Error {
        Error::Damaged { structure, at }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        Error::Io(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(error) => write!(f, "the disk cannot be read: {error}"),
            Error::Damaged { structure, at } => write!(f, "damaged: {structure} at {at:#x}"),
            Error::Unsupported(what) => write!(f, "not supported: {what}"),
            Error::NotFound => f.write_str("no such file"),
            Error::NotADirectory => f.write_str("not a directory"),
            Error::IsADirectory => f.write_str("a directory"),
            Error::WrongKind => f.write_str("a file of another kind"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io(error) => Some(error),
            _ => None,
        }
    }
}
