//! Gives a seal up.

use std::sync::Arc;

use vellum_format::extension::kind;
use vellum_format::features::Autoclear;
use vellum_format::header::Purpose;
use vellum_io::Result;
use vellum_storage::Storage;

use super::area::{Sealed, is_sealed};
use crate::qcow2::checksums::forget::forget as forget_checksums;
use crate::qcow2::header::load;
use crate::qcow2::header::rewrite::rewrite_header;

/// Takes the seal off the image in `file`, which nobody else uses, and says whether there was
/// one. Its checksums go as well, if it has any.
///
/// # Errors
/// If the header cannot be read or written; the image is sealed or unsealed then.
pub async fn unseal(file: &Arc<dyn Storage>) -> Result<bool> {
    let Some(sealed) = Sealing::read(file).await? else {
        return Ok(false);
    };
    // Rule C3: what follows goes past them. The seal ends to count with the same write.
    forget_checksums(file).await?;
    sealed.take_off(file).await
}

/// As [`unseal`], of a file that keeps its checksums. The header stops vouching for it durably before anything else happens; its space is
/// given back where it ends the file.
///
/// # Errors
/// If the header cannot be read or written; the image is sealed or unsealed then.
pub(crate) async fn take_seal_off(file: &Arc<dyn Storage>) -> Result<bool> {
    match Sealing::read(file).await? {
        Some(sealed) => sealed.take_off(file).await,
        None => Ok(false),
    }
}

/// What a sealed image's header leads to, if a seal can be read there: where a damaged header leads to
/// is not cut off.
struct Sealing(Option<Sealed>);

impl Sealing {
    /// Reads it before it is gone; `None` where the image is not sealed.
    async fn read(file: &Arc<dyn Storage>) -> Result<Option<Sealing>> {
        let header = load::header(file, Purpose::Use).await?;
        match is_sealed(&header) {
            true => Ok(Some(Sealing(Sealed::read(file, &header).await.ok()))),
            false => Ok(None),
        }
    }

    async fn take_off(self, file: &Arc<dyn Storage>) -> Result<bool> {
        rewrite_header(file, |header| {
            header.remove_extension(kind::SEAL);
            header.autoclear = header.autoclear.without(Autoclear::SEALED);
            Ok(())
        })
        .await?;
        if let Some(sealed) = self.0 {
            cut_off(file, &sealed).await?;
        }
        Ok(true)
    }
}

/// Ends the file where the seal began, if it ends with the seal.
async fn cut_off(file: &Arc<dyn Storage>, sealed: &Sealed) -> Result<()> {
    let start = sealed.pointer.offset_bytes;
    let end = start + sealed.pointer.length_bytes;
    if file.capabilities().growable && file.len_bytes()? == end {
        file.truncate(start).await?;
    }
    Ok(())
}
