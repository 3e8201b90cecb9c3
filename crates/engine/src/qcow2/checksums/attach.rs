//! Begins to keep checksums, and finds those of an image.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_format::checksums::{PAGE_BYTES, Superblock};
use vellum_format::extension::{Extension, kind};
use vellum_format::features::Autoclear;
use vellum_format::header::{Header, Purpose};
use vellum_format::write_log::{LogId, MAX_NAME_LEN_BYTES, WriteLogExtension};
use vellum_io::{Error, ErrorKind, Result};
use vellum_storage::Storage;

use super::forget::{extension_of, forget, has_checksums};
use super::options::ChecksumOptions;
use super::pages::{Checksums, Trust};
use super::storage::Checksummed;
use super::sums_file::SumsFile;
use crate::gate::{FileRequest, Gate};
use crate::qcow2::header::autoclear::write_autoclear;
use crate::qcow2::header::load::{self, read_bytes};
use crate::qcow2::header::rewrite::rewrite_header;
use crate::qcow2::options::{OpenOptions, OpenPurpose};
use crate::qcow2::random_id::random_bytes;
use crate::qcow2::seal::unseal::take_seal_off;

fn refuse(kind: ErrorKind, what: &str, message: impl Into<String>) -> Error {
    Error::new(kind, "open checksums", message).target(what.to_owned())
}

/// Checksums that are kept by an image that is being opened.
pub(in crate::qcow2) struct Attached {
    pub(in crate::qcow2) checksums: Arc<Checksums>,
    /// They were made for this opening.
    made: Option<Made>,
}

/// What there was before checksums were made.
struct Made {
    /// Those that the image named, which did not count.
    named: Option<WriteLogExtension>,
    /// Those are in the same file.
    was_ours: bool,
}

/// The checksums with which the image is to see its file: those that it has, if they are wanted;
/// new ones, if there are to be some. The header may have changed.
///
/// # Errors
/// When checksums that count cannot be had, and when those of the options are refused.
pub(in crate::qcow2) async fn open(
    file: &Arc<dyn Storage>,
    gate: &dyn Gate,
    header: &mut Header,
    options: &OpenOptions,
) -> Result<Option<Attached>> {
    let writes = options.accepts_changes();
    match (&options.checksums, has_checksums(header)) {
        (None, false) => return Ok(None),
        // Forgotten before anything else is written.
        (Some(ChecksumOptions::GiveUp), _) => return Ok(None),
        (Some(ChecksumOptions::Keep { .. }), false) if !writes => return Ok(None),
        _ => {}
    }
    let looks_only = matches!(options.purpose, OpenPurpose::Metadata | OpenPurpose::Check);
    if !writes && looks_only {
        return Ok(None);
    }
    // Before anything is written.
    let modified_at = file.modified_at()?;
    let (sums, extension, is_as_left, made) = match has_checksums(header) {
        true => {
            let (sums, extension, found) = existing(file, gate, header, options).await?;
            // A time that is unknown equals no other.
            let is_as_left = modified_at.is_some() && modified_at == found.left_at;
            (sums, Some(extension), is_as_left, None)
        }
        false => {
            let (sums, made) = make(file, header, options).await?;
            // All sums will be of what this opening writes.
            (sums, None, true, Some(made))
        }
    };
    let trust = Trust { writes, is_as_left };
    let checksums = Checksums::new(file.clone(), sums, trust, options.messages.clone());
    let attached = Attached { checksums, made };
    let begun = attached.begin(extension.filter(|_| writes)).await;
    match begun {
        Ok(read) => *header = read,
        Err(error) => {
            attached.undo(&error).await;
            return Err(error);
        }
    }
    Ok(Some(attached))
}

impl Attached {
    /// The image's file as the image is to see it.
    pub(in crate::qcow2) fn file(&self) -> Arc<dyn Storage> {
        Arc::new(Checksummed(self.checksums.clone()))
    }

    /// Gives checksums that are there another identity, if `extension` names them; the header then.
    async fn begin(&self, extension: Option<WriteLogExtension>) -> Result<Header> {
        let (file, checksums) = (self.file(), &self.checksums);
        if let Some(extension) = extension {
            checksums.sums.open_again().await?;
            // The new identity changes the header that a seal vouches for.
            take_seal_off(&file).await?;
            rename(&file, &checksums.sums, extension).await?;
            // A copy that is made now holds what this image does.
            checksums.has_changed.store(false, Ordering::Relaxed);
        }
        // Also of an image that is only read: what was seen until now was not compared.
        load::header(&file, Purpose::Use).await
    }

    /// The image could not be opened, for a reason: checksums that were there are left as by a close,
    /// and of those that were made nothing is left. Neither file is closed.
    pub(in crate::qcow2) async fn undo(self, reason: &Error) {
        let checksums = &self.checksums;
        // Whoever opens the image is told the reason. What fails here is left as by a crash.
        drop(match &self.made {
            None if checksums.writes => checksums.end_use().await,
            None => Ok(()),
            Some(made) => {
                // Nobody settles anything from now on.
                let settling = checksums.settling.lock().await;
                drop(checksums.failed.set(reason.clone()));
                drop(settling);
                unmake(&checksums.file, &checksums.sums, made).await
            }
        });
    }
}

/// Takes new checksums off an image again. In this order: what a crash leaves in between is a file
/// that an image may take.
async fn unmake(file: &Arc<dyn Storage>, sums: &SumsFile, made: &Made) -> Result<()> {
    forget(file).await?;
    if made.was_ours {
        return Ok(());
    }
    sums.clear().await?;
    match made.named.clone() {
        Some(extension) => name_in_header(file, extension).await,
        None => {
            let unnamed = rewrite_header(file, |header| {
                header.remove_extension(kind::CHECKSUMS);
                Ok(())
            });
            unnamed.await.map(drop)
        }
    }
}

/// The checksums that the image names.
async fn existing(
    file: &Arc<dyn Storage>,
    gate: &dyn Gate,
    header: &Header,
    options: &OpenOptions,
) -> Result<(SumsFile, WriteLogExtension, Superblock)> {
    let Some(extension) = extension_of(header) else {
        let message =
            "the image has checksums, and does not say where (checksums=off gives them up)";
        return Err(refuse(ErrorKind::InvalidImage, file.name(), message));
    };
    let storage = match &options.checksums {
        Some(ChecksumOptions::Keep { storage, .. }) => storage.clone(),
        _ => {
            let writes = options.accepts_changes();
            let request = FileRequest::for_part(file.name(), &extension.name, writes);
            let opened = gate.open_checksums(request).await;
            opened.map_err(|error| {
                let message = "the image has checksums, which cannot be opened (name the right file \
                               with checksums=, or give them up with checksums=off)";
                error.context("open", message)
            })?
        }
    };
    let sums = SumsFile(storage);
    let found = sums.superblock().await?;
    let Some(found) = found.filter(|found| found.is_of(extension.id)) else {
        let message = "these are not the checksums of the image (name the right file with checksums=, or \
                       give them up with checksums=off)";
        return Err(refuse(ErrorKind::InvalidImage, sums.0.name(), message));
    };
    Ok((sums, extension, found))
}

/// Gives image and checksums, by which `file` is seen, a new identity, durably, so that a copy of the image is not taken for
/// the one that they are of. What a killed program has opened is durably open afterwards.
async fn rename(
    file: &Arc<dyn Storage>,
    sums: &SumsFile,
    extension: WriteLogExtension,
) -> Result<()> {
    if let Some(found) = sums.superblock().await?
        && let Some(other) = found.other_than(extension.id)
    {
        // This was broken off, and the superblock is about to lose the identity that the disk may
        // still have. What is read here need not be on the disk either: a flush that has failed is
        // not made good by the next one, but by another write.
        sums.begin(found).await?;
        // There and back: what is in the header already would not be written.
        for id in [other, extension.id] {
            let name = extension.name.clone();
            name_in_header(file, WriteLogExtension { id, name }).await?;
        }
    }
    let id = LogId(random_bytes(&sums.0)?);
    let renaming = Superblock {
        id,
        previous: Some(extension.id),
        left_at: None,
    };
    sums.begin(renaming).await?;
    let extension = WriteLogExtension { id, ..extension };
    name_in_header(file, extension).await?;
    let previous = None;
    sums.begin(Superblock {
        previous,
        ..renaming
    })
    .await
}

/// As [`rename`], when an image is closed whose checksums have changed: a copy that was made of it in
/// the meantime does not belong to them any more. A crash anywhere in between leaves image and
/// checksums with identities that agree.
///
/// # Errors
/// When the header or the superblock cannot be read or written: they agree then, too.
pub(super) async fn rename_at_close(checksums: &Arc<Checksums>) -> Result<()> {
    if !checksums.has_changed.load(Ordering::Relaxed) {
        return Ok(());
    }
    let file: Arc<dyn Storage> = Arc::new(Checksummed(checksums.clone()));
    let header = load::header(&file, Purpose::Use).await?;
    // A seal vouches for the header as it is.
    let is_sealed = header.autoclear.contains(Autoclear::SEALED);
    match extension_of(&header).filter(|_| has_checksums(&header) && !is_sealed) {
        Some(extension) => rename(&file, &checksums.sums, extension).await,
        None => Ok(()),
    }
}

async fn name_in_header(file: &Arc<dyn Storage>, extension: WriteLogExtension) -> Result<()> {
    let extension = Extension::Unknown {
        kind: kind::CHECKSUMS,
        data: extension.encode(),
    };
    let renamed = rewrite_header(file, |header| {
        header.set_extension(extension);
        Ok(())
    });
    renamed.await.map(drop)
}

/// Makes checksums for an image that has none, durably: none is known yet.
async fn make(
    file: &Arc<dyn Storage>,
    header: &Header,
    options: &OpenOptions,
) -> Result<(SumsFile, Made)> {
    let Some(ChecksumOptions::Keep { storage, name }) = &options.checksums else {
        let message = "no file was given for the checksums";
        return Err(refuse(ErrorKind::InvalidArgument, file.name(), message));
    };
    if header.version < 3 {
        let message = "checksums need qcow2 version 3 (vellum amend -o compat=1.1)";
        return Err(refuse(ErrorKind::InvalidArgument, file.name(), message));
    }
    if header.geometry().external_data {
        let message =
            "checksums cover the image's file, and this image has its data in another one";
        return Err(refuse(ErrorKind::Unsupported, file.name(), message));
    }
    if !(1..=MAX_NAME_LEN_BYTES).contains(&name.len()) {
        let message =
            format!("the name of the checksums must have 1 to {MAX_NAME_LEN_BYTES} bytes");
        return Err(refuse(ErrorKind::InvalidArgument, file.name(), message));
    }
    let sums = SumsFile(storage.clone());
    let found = sums.superblock().await?;
    let was_ours = found.is_some_and(|found| {
        extension_of(header).is_some_and(|extension| found.is_of(extension.id))
    });
    if !was_ours && !is_blank(storage).await? {
        let message = match found {
            Some(_) => format!(
                "'{}' holds the checksums of another image; if that is gone, delete the file, or name \
                 another one with checksums=PATH",
                storage.name()
            ),
            None => format!(
                "'{}' holds something else than checksums; it is not overwritten",
                storage.name()
            ),
        };
        return Err(refuse(ErrorKind::InvalidArgument, storage.name(), message));
    }
    let id = LogId(random_bytes(storage)?);
    // Rule 13: the bit may be gone in the page cache only, and these sums be the ones that it vouches for.
    write_autoclear(&**file, header.autoclear).await?;
    // A seal vouches for the header as it is.
    take_seal_off(file).await?;
    // In this order: what a crash leaves in between is a file that this image may take, and sums
    // that do not count.
    sums.clear().await?;
    let extension = WriteLogExtension {
        id,
        name: name.clone().into_bytes(),
    };
    name_in_header(file, extension).await?;
    sums.begin(Superblock {
        id,
        previous: None,
        left_at: None,
    })
    .await?;
    rewrite_header(file, |header| {
        header.autoclear = header.autoclear.with(Autoclear::CHECKSUMS);
        Ok(())
    })
    .await?;
    let named = extension_of(header);
    Ok((sums, Made { named, was_ours }))
}

/// Whether a file holds nothing, or what a crash may have left of a superblock.
async fn is_blank(storage: &Arc<dyn Storage>) -> Result<bool> {
    let len_bytes = storage.len_bytes()?;
    Ok(len_bytes <= PAGE_BYTES && read_bytes(storage, 0, len_bytes).await?.is_zero())
}
