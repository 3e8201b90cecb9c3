//! Key slots of an encrypted image: `encrypt.*`.

use vellum_format::Header;
use vellum_format::crypto::CryptMethod;
use vellum_io::{ErrorKind, Result};

use super::work::Work;
use super::work::refuse;
use crate::luks::KeyChange;

/// Whether an image has key slots.
pub(crate) fn check(header: &Header) -> Result<()> {
    match header.crypt_method {
        CryptMethod::None => {
            let message = "Can't amend encryption options - encryption not present";
            Err(refuse(ErrorKind::InvalidArgument, message))
        }
        CryptMethod::Luks => Ok(()),
        _ => {
            let message = "Only LUKS encryption options can be amended";
            Err(refuse(ErrorKind::Unsupported, message))
        }
    }
}

/// Changes the key slots of an image that has some.
pub(super) async fn change(work: &Work, change: KeyChange) -> Result<()> {
    let header = work.header().await?;
    work.closed.change_keys(&header, change).await.map(drop)
}
