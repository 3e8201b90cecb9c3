//! Random identities of images.

use vellum::{Error, ErrorKind, Result};

/// A random UUID (version 4, RFC 9562), its bytes in the order in which it is written.
///
/// # Errors
/// [`ErrorKind::Io`] where the system has no random numbers.
pub(crate) fn random_id() -> Result<[u8; 16]> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|error| {
        let message = format!("no random number for the image's identity: {error}");
        Error::new(ErrorKind::Io, "create", message)
    })?;
    id[6] = id[6] & 0x0f | 0x40;
    id[8] = id[8] & 0x3f | 0x80;
    Ok(id)
}
