//! Turns what the codecs say of an image's bytes into engine errors.

use vellum_format::error::{FormatError, FormatErrorKind};
use vellum_storage::{Error, ErrorKind};

/// An engine error for a structure that does not decode.
pub(crate) fn bad_format(operation: &'static str, error: &FormatError) -> Error {
    let kind = match error.kind() {
        FormatErrorKind::Unsupported => ErrorKind::Unsupported,
        FormatErrorKind::Corrupt => ErrorKind::Corrupt,
        _ => ErrorKind::InvalidImage,
    };
    Error::new(kind, operation, error.message().to_owned())
}

/// An engine error for metadata that contradicts itself.
pub(crate) fn corrupt(operation: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, operation, message).with_errno(5)
}
