//! Gives checksums up; whether an image has some.

use std::sync::Arc;

use vellum_format::extension::kind;
use vellum_format::features::Autoclear;
use vellum_format::header::{Header, Purpose};
use vellum_format::write_log::WriteLogExtension;
use vellum_io::Result;
use vellum_storage::Storage;

use super::sums_file::SumsFile;
use crate::qcow2::header::autoclear::write_autoclear;
use crate::qcow2::header::load;

/// The checksums that an image has.
pub(super) fn extension_of(header: &Header) -> Option<WriteLogExtension> {
    WriteLogExtension::decode(header.unknown_extension(kind::CHECKSUMS)?).ok()
}

/// Whether the image has checksums that count.
pub(crate) fn has_checksums(header: &Header) -> bool {
    header.autoclear.contains(Autoclear::CHECKSUMS)
}

/// The name of the file with the checksums of an image that has some.
pub fn name_of_checksums(header: &Header) -> Option<String> {
    let extension = extension_of(header).filter(|_| has_checksums(header))?;
    Some(String::from_utf8_lossy(&extension.name).into_owned())
}

/// Whether the file `sums` has the checksums of the image with a header, whether they count or not:
/// by their identity, which no other image has but a copy of this one.
///
/// # Errors
/// If the file cannot be read, or its version is not known.
pub async fn are_checksums_of(sums: &Arc<dyn Storage>, header: &Header) -> Result<bool> {
    let Some(extension) = extension_of(header) else {
        return Ok(false);
    };
    let found = SumsFile(sums.clone()).superblock().await?;
    Ok(found.is_some_and(|found| found.is_of(extension.id)))
}

/// Takes the checksums off the image in `file`, durably, and says whether it had some: for who
/// is going to change the file past them (rule C3). A seal, which vouches for the header with its
/// checksums, goes with them.
///
/// # Errors
/// If the header cannot be read or written.
pub async fn forget(file: &Arc<dyn Storage>) -> Result<bool> {
    // As for a check: what cannot be used otherwise may be repaired.
    let header = load::header(file, Purpose::Check).await?;
    if !has_checksums(&header) {
        return Ok(false);
    }
    // The name stays, and says which file may be taken again.
    let gone = Autoclear::CHECKSUMS | Autoclear::SEALED;
    write_autoclear(&**file, header.autoclear.without(gone)).await?;
    Ok(true)
}
