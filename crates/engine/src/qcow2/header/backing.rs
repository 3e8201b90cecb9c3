//! Another backing file for an image that is in use.

use std::sync::Arc;

use vellum_format::extension::{Extension, kind};
use vellum_format::features::Autoclear;
use vellum_format::header::Header;
use vellum_format::limits;
use vellum_io::{Error, ErrorKind, Io, Result};
use vellum_storage::mutants::{self, Mutant};

use crate::qcow2::device::Qcow2;
use crate::qcow2::image::Image;

/// A backing file as an image names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingName {
    /// The name: a path, relative to the image unless it begins with `/`, or a name with
    /// a protocol.
    pub name: String,
    /// The format. Without one whoever opens the image has to guess, which is dangerous
    /// for raw files.
    pub format: Option<String>,
}

impl Qcow2 {
    /// Makes the image name another backing file, or none, once everything written so
    /// far is durable. A power cut leaves the old name or the new one.
    ///
    /// Nothing is copied: it is up to the caller that the image shows with the new
    /// backing file what it is to show (a safe rebase writes the differences before).
    /// The device in use keeps the backing file that it was opened with.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for names that are too long (1023 bytes; 15 for the
    /// format) and for images with a raw data file, which cannot have a backing file;
    /// [`ErrorKind::NoSpace`] if the first cluster has no room for the name;
    /// [`ErrorKind::ReadOnly`].
    pub fn set_backing_file(&self, backing: Option<BackingName>) -> Io<()> {
        self.change(move |image| async move { image.set_backing_file(backing).await })
    }
}

fn refuse(message: &str) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        "change the backing file",
        message,
    )
    .with_errno(EINVAL)
}

impl Image {
    async fn set_backing_file(self: Arc<Self>, backing: Option<BackingName>) -> Result<()> {
        self.begin_change("change the backing file").await?;
        check(&self.header(), backing.as_ref())?;
        // Nothing of the image depends on it, but a caller that has copied data does.
        if !mutants::is(Mutant::RenameUnflushed) {
            self.write_back_all().await?;
            self.commit().await?;
        }
        self.update_header(|header| rename(header, backing)).await
    }
}

fn check(header: &Header, backing: Option<&BackingName>) -> Result<()> {
    let Some(BackingName { name, format }) = backing else {
        return Ok(());
    };
    let format_len = format.as_ref().map_or(0, String::len);
    let longest = limits::MAX_BACKING_FILE_LEN_BYTES as usize;
    let is_raw = header.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA);
    if is_raw || name.is_empty() || name.len() > longest || format_len > MAX_FORMAT_LEN_BYTES {
        return Err(refuse("Invalid argument"));
    }
    Ok(())
}

fn rename(header: &mut Header, backing: Option<BackingName>) {
    let (name, format) = match backing {
        Some(BackingName { name, format }) => (Some(name), format),
        None => (None, None),
    };
    header.backing_file = name.map(String::into_bytes);
    match format.filter(|format| !format.is_empty()) {
        Some(format) => header.set_extension(Extension::BackingFormat(format.into_bytes())),
        None => header.remove_extension(kind::BACKING_FORMAT),
    }
}

const MAX_FORMAT_LEN_BYTES: usize = 15;
const EINVAL: i32 = 22;
