//! Identities of files that belong to an image.

use std::sync::Arc;

use vellum_io::{Error, ErrorKind, Result};
use vellum_storage::Storage;

/// Random bytes for the identity of a file beside an image.
pub(crate) fn random_bytes(file: &Arc<dyn Storage>) -> Result<[u8; 16]> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|error| {
        let message = format!("no random number for the file's identity: {error}");
        Error::new(ErrorKind::Io, "open", message).target(file.name())
    })?;
    Ok(id)
}
