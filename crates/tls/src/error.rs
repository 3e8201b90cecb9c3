//! The errors of this crate: all name one operation and one errno.

use vellum_io::{Error, ErrorKind};

/// The operation that every error here names.
const OPERATION: &str = vellum_nbd::client::handshake::TLS_OPERATION;

pub(crate) fn error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Protocol, OPERATION, message).with_errno(libc::EINVAL)
}
