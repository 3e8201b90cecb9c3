//! What is wrong with an image.

use vellum::{Error, ErrorKind};

/// That the bytes are no image, or one that breaks the format's rules.
pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}
