//! Turns what the codecs say of an image's bytes into engine errors.

use vellum_format::error::{FormatError, FormatErrorKind};
use vellum_io::{Error, ErrorKind};

/// An engine error for a structure that does not decode.
pub(crate) fn bad_format(operation: &'static str, error: &FormatError) -> Error {
    let kind = match error.kind() {
        FormatErrorKind::Unsupported => ErrorKind::Unsupported,
        FormatErrorKind::Corrupt => ErrorKind::Corrupt,
        _ => ErrorKind::InvalidImage,
    };
    Error::new(kind, operation, error.message().to_owned())
}

/// As [`bad_format`], for an entry of an L1 table or the refcount table whose offset
/// means nothing: says which one it is, called `what`.
#[cold]
pub(crate) fn bad_entry(
    operation: &'static str,
    error: &FormatError,
    what: &str,
    index: u64,
) -> Error {
    let message = format!("{} ({what}: {})", error.message(), hex(index));
    match error.kind() {
        FormatErrorKind::Corrupt => corrupt(operation, message),
        _ => bad_format(operation, error),
    }
}

/// A number as C's `%#x` shows it: a zero has no prefix.
pub(crate) fn hex(number: u64) -> String {
    match number {
        0 => "0".to_owned(),
        number => format!("{number:#x}"),
    }
}

/// An engine error for metadata that contradicts itself.
pub(crate) fn corrupt(operation: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, operation, message).with_errno(5)
}
