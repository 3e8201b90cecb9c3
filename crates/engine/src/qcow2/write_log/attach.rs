//! Taking a write log into use, and ending that.

use std::sync::Arc;

use vellum_format::extension::{Extension, kind};
use vellum_format::features::{Autoclear, Incompatible};
use vellum_format::header::Header;
use vellum_format::write_log::{
    BLOCK_BYTES, GENERATIONS_END, LogId, MAX_LEN_BYTES, MAX_NAME_LEN_BYTES, MIN_LEN_BYTES,
    NUMBERS_END, Superblock, WriteLogExtension,
};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};
use vellum_storage::{Storage, WriteFlags};

use super::inside;
use super::log::{LogParts, WriteLog, write_superblock};
use super::options::{Place, WriteLogOptions};
use super::replay::{read_log, read_superblock, tell_what_to_do};
use crate::gate::{FileRequest, Gate};
use crate::luks::GuestEncryption;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::bad_format;
use crate::qcow2::options::{Backing, OpenOptions, OpenPurpose};
use crate::qcow2::random_id::random_bytes;

const DEFAULT_LEN_BYTES: u64 = 256 << 20;
pub(super) const NO_ROOM: &str = "cannot make room for the write log";
/// The write buffer gets so much of the log's length: when it is full, and the guest waits for room
/// in it, the log still has some.
const BUFFER_SHARE: u64 = 4;
/// What is zeroed at a time when a log is made.
const ZEROED_AT_ONCE_BYTES: u64 = 1 << 20;
/// What the numbers of a log that is taken into use are below: more than any log gets to.
const USABLE_NUMBERS_END: u64 = NUMBERS_END / 2;
/// The same for generations.
const USABLE_GENERATIONS_END: u64 = GENERATIONS_END / 2;
/// Whose log it is once its image does not need it any more.
const NOBODY: LogId = LogId([0; 16]);

pub(super) fn refuse(kind: ErrorKind, what: &str, message: impl Into<String>) -> Error {
    Error::new(kind, "open write log", message).target(what.to_owned())
}

/// Brings back what the image's log holds, if that counts, and takes the log of the options
/// into use.
///
/// # Errors
/// When a log that counts cannot be had or is damaged, and when that of the options is refused.
pub(in crate::qcow2) async fn open(
    image: &Arc<Image>,
    gate: &dyn Gate,
    options: &OpenOptions,
) -> Result<()> {
    if !matches!(
        options.purpose,
        OpenPurpose::GuestData | OpenPurpose::Locked
    ) || options.snapshot.is_some()
    {
        return Ok(());
    }
    if image.read_only && matches!(image.encryption, GuestEncryption::Locked) {
        // Nobody can read what the log holds, nor what the image holds.
        return Ok(());
    }
    if image
        .header()
        .incompatible
        .contains(Incompatible::WRITE_LOG)
    {
        recover(image, gate, options).await?;
    }
    if image.read_only {
        return Ok(());
    }
    let held = image.header().write_log_inside();
    if let Some(log) = &options.write_log {
        leave_named(image, gate, log).await?;
    }
    match options.write_log.as_ref().map(|log| (&log.place, log)) {
        Some((Place::Inside, log)) => inside::attach(image, log.len_bytes, held).await?,
        other => {
            if let Some(held) = held {
                inside::give_up_held(image, &held).await?;
            }
            let Some((Place::File { storage, name }, log)) = other else {
                return Ok(());
            };
            attach_file(image, storage, name, log).await?;
        }
    }
    if let Some(log) = image.write_log.get() {
        let budget_bytes = match options.data_cache_size_bytes {
            None => log.len_bytes / BUFFER_SHARE,
            Some(_) => 0,
        };
        image.write_buffer.defer(budget_bytes as usize);
    }
    Ok(())
}

/// Brings back what the image's log holds.
async fn recover(image: &Arc<Image>, gate: &dyn Gate, options: &OpenOptions) -> Result<()> {
    let extension = extension_of(image)?;
    let lacks_backing =
        matches!(options.backing, Backing::None) && image.header().backing_file.is_some();
    if lacks_backing && !image.read_only {
        // What a write leaves of a cluster is copied from there.
        let message = "the image's last writes are in its write log, and cannot be brought back \
                       without its backing file";
        return Err(refuse(ErrorKind::InvalidArgument, &image.name, message));
    }
    let file = match &extension.file_name() {
        Some(_) => live_log(image, gate, options, &extension).await?,
        None => inside::holding_writes(image).await?,
    };
    let (batches, base_bytes) = batches_of(image, &file)?;
    let (superblock, replay) = read_log(&file, (&batches, base_bytes), &extension).await?;
    if image.read_only {
        return image.overlay_replay(&replay).await;
    }
    image.replay(replay).await.map_err(tell_what_to_do)?;
    if extension.file_name().is_none() {
        return Ok(());
    }
    // Else it would stay this image's, which may name another from now on; where it cannot be
    // written it stays so.
    drop(disown(&file, superblock).await);
    Ok(())
}

/// Makes the file that the header names as its log nobody's, if it is not the one that the options
/// take into use: the header names another one from now on, and nobody could use that file again. It
/// holds nothing that the image needs; where it cannot be had or written it stays as it is.
async fn leave_named(image: &Image, gate: &dyn Gate, next: &WriteLogOptions) -> Result<()> {
    let Ok(extension) = extension_of(image) else {
        return Ok(());
    };
    let Some(name) = extension.file_name() else {
        return Ok(());
    };
    if let Place::File { storage, .. } = &next.place
        && let Some(found) = read_superblock(storage).await?
        && found.id == extension.id
    {
        return Ok(());
    }
    let request = FileRequest::for_part(&image.name, name, true);
    let Ok(file) = gate.open_write_log(request).await else {
        return Ok(());
    };
    if let Ok(Some(old)) = read_superblock(&file).await
        && [extension.id, NOBODY].contains(&old.id)
    {
        // Rule W7: a crash must not bring the bit back, and find nobody's log.
        image
            .change_incompatible(|bits| bits.without(Incompatible::WRITE_LOG))
            .await?;
        drop(disown(&file, old).await);
    }
    Ok(())
}

/// The log that the image names; the file of the options is taken for it only if it is that one,
/// for it may be another log that the image gets from now on.
async fn live_log(
    image: &Image,
    gate: &dyn Gate,
    options: &OpenOptions,
    extension: &WriteLogExtension,
) -> Result<Arc<dyn Storage>> {
    if let Some(log) = &options.write_log
        && let Place::File { storage, .. } = &log.place
        && let Some(found) = read_superblock(storage).await?
        && found.id == extension.id
    {
        return Ok(storage.clone());
    }
    let request = FileRequest::for_part(&image.name, &extension.name, !image.read_only);
    let opened = gate.open_write_log(request).await;
    opened.map_err(|error| {
        if options.write_log.is_some() {
            let message = "journal= names another file than the write log that holds the image's \
                           last writes, and that one cannot be opened (name it, or give the writes \
                           up with `vellum check -r drop-log`)";
            return error.context("open", message);
        }
        let message = "the image's last writes are in its write log, which cannot be opened \
                       (name the right file with journal=, or give the writes up with `vellum check \
                       -r drop-log`)";
        error.context("open", message)
    })
}

pub(super) fn extension_of(image: &Image) -> Result<WriteLogExtension> {
    let header = image.header();
    let Some(data) = header.unknown_extension(kind::WRITE_LOG) else {
        let message = "the image has a write log, and does not say where";
        return Err(refuse(ErrorKind::InvalidImage, &image.name, message));
    };
    WriteLogExtension::decode(data)
        .map_err(|error| image.name_error(bad_format("open write log", &error)))
}

/// What batches are written to and read from, and the offset of the log's first byte there:
/// the guest's bytes are encrypted in the log if they are in the image.
pub(super) fn batches_of(
    image: &Image,
    file: &Arc<dyn Storage>,
) -> Result<(Arc<dyn Storage>, u64)> {
    match &image.encryption {
        GuestEncryption::None => Ok((file.clone(), 0)),
        GuestEncryption::Luks { plain, .. } => Ok(plain.beside(file.clone())),
        GuestEncryption::Locked => {
            let message = "the write log of an encrypted image cannot be read without its key";
            Err(refuse(ErrorKind::InvalidArgument, &image.name, message))
        }
        GuestEncryption::Legacy(_) => {
            let message =
                "images with the old AES encryption have no write log; convert it to LUKS";
            Err(refuse(ErrorKind::Unsupported, &image.name, message))
        }
    }
}

/// Refuses an image that cannot have a log.
pub(super) fn check_version(image: &Image) -> Result<()> {
    if image.geometry.version < 3 {
        let message = "a write log needs qcow2 version 3 (vellum amend -o compat=1.1)";
        return Err(refuse(ErrorKind::InvalidArgument, &image.name, message));
    }
    Ok(())
}

pub(super) fn check_len(len_bytes: u64, name: &str) -> Result<()> {
    if (MIN_LEN_BYTES..=MAX_LEN_BYTES).contains(&len_bytes) && len_bytes.is_multiple_of(BLOCK_BYTES)
    {
        return Ok(());
    }
    let message = format!(
        "the size of the write log must be a multiple of {BLOCK_BYTES} between {MIN_LEN_BYTES} \
         and {MAX_LEN_BYTES}"
    );
    Err(refuse(ErrorKind::InvalidArgument, name, message))
}

/// The length of a new log that the user gives none for: what fits into a storage of fixed length,
/// such as a block device.
fn default_len_bytes(file: &Arc<dyn Storage>) -> Result<u64> {
    if file.capabilities().growable {
        return Ok(DEFAULT_LEN_BYTES);
    }
    let whole_blocks = file.len_bytes()? / BLOCK_BYTES * BLOCK_BYTES;
    Ok(whole_blocks.min(DEFAULT_LEN_BYTES))
}

/// Takes a log in a file into use.
async fn attach_file(
    image: &Arc<Image>,
    file: &Arc<dyn Storage>,
    name: &str,
    options: &WriteLogOptions,
) -> Result<()> {
    check_version(image)?;
    if !(1..=MAX_NAME_LEN_BYTES).contains(&name.len()) || name.starts_with('\0') {
        let message =
            format!("the name of the write log must have 1 to {MAX_NAME_LEN_BYTES} bytes");
        return Err(refuse(ErrorKind::InvalidArgument, &image.name, message));
    }
    batches_of(image, file)?;
    let old = claimable(image, file).await?;
    let len_bytes = match options.len_bytes.or(old.map(|old| old.len_bytes)) {
        Some(len_bytes) => len_bytes,
        None => default_len_bytes(file)?,
    };
    check_len(len_bytes, file.name())?;
    let written = old.map_or(0, |old| old.len_bytes).min(file.len_bytes()?);
    let prepared = preallocate(file, written, len_bytes).await;
    prepared.map_err(|error| error.context("open write log", NO_ROOM))?;
    // Rule W7: each use has an identity of its own, so that an older copy of image or log does not
    // match; and in this order, so that a crash in between leaves a file that may be claimed.
    let old = match old {
        Some(old) => {
            if old.id != NOBODY {
                // The header is without the bit, but a close whose last flush failed may have left that
                // in memory only: a crash would bring the bit back, and find nobody's log.
                image
                    .change_incompatible(|bits| bits.without(Incompatible::WRITE_LOG))
                    .await?;
            }
            // Also where it is nobody's already: a process that was killed may have left that in the page
            // cache only.
            Some(disown(file, old).await?)
        }
        None => None,
    };
    let extension = WriteLogExtension {
        id: LogId(random_bytes(file)?),
        name: name.as_bytes().to_vec(),
    };
    name_log(image, &extension).await?;
    use_log(image, file, &extension, (len_bytes, old)).await?;
    if old.is_some_and(|old| old.len_bytes > len_bytes) {
        // Space that nobody uses any more; a device keeps its length.
        drop(file.truncate(len_bytes).await);
    }
    Ok(())
}

/// Writes down durably that a log is the image's from now on.
pub(super) async fn name_log(image: &Arc<Image>, extension: &WriteLogExtension) -> Result<()> {
    let data = extension.encode();
    let named = Extension::Unknown {
        kind: kind::WRITE_LOG,
        data,
    };
    let is_inside = extension.inside().is_some();
    image
        .update_header(|header| {
            header.set_extension(named);
            if is_inside {
                header.autoclear = header.autoclear.with(Autoclear::WRITE_LOG_INSIDE);
            }
        })
        .await
}

/// Begins to use a log that is the image's.
pub(super) async fn use_log(
    image: &Arc<Image>,
    file: &Arc<dyn Storage>,
    extension: &WriteLogExtension,
    (len_bytes, old): (u64, Option<Superblock>),
) -> Result<()> {
    let parts = LogParts {
        file: file.clone(),
        batches: batches_of(image, file)?,
        inside: extension.inside(),
        id: extension.id,
        len_bytes,
        old,
        cluster_bytes: image.geometry.cluster_size_bytes(),
    };
    // Rule W1: no append makes durable what the guest reads of it.
    image.sync_what_was_read().await?;
    let log = WriteLog::new(parts);
    log.begin().await?;
    let attached = image.write_log.set(Box::new(log));
    debug_assert!(attached.is_ok(), "an image is opened once");
    Ok(())
}

/// Says durably that a log is nobody's; it holds nothing that its image lacks.
async fn disown(file: &Arc<dyn Storage>, old: Superblock) -> Result<Superblock> {
    let disowned = Superblock {
        id: NOBODY,
        generation: old.generation + 1,
        ..old
    };
    write_superblock(file, &disowned).await?;
    Ok(disowned)
}

/// Whether a log has got too far to be taken into use once more.
pub(super) fn is_used_up(old: &Superblock) -> bool {
    let mut numbers = [old.start_sequence, old.start_batch].into_iter();
    numbers.any(|number| number >= USABLE_NUMBERS_END) || old.generation >= USABLE_GENERATIONS_END
}

/// The superblock of a file that may become this image's log.
async fn claimable(image: &Image, file: &Arc<dyn Storage>) -> Result<Option<Superblock>> {
    if let Some(old) = read_superblock(file).await? {
        let ours = extension_of(image).is_ok_and(|extension| extension.id == old.id);
        if is_used_up(&old) {
            let message = "the numbers of this write log are used up; delete it";
            return Err(refuse(ErrorKind::Unsupported, file.name(), message));
        }
        if ours || old.id == NOBODY {
            return Ok(Some(old));
        }
        let message =
            "this is the write log of another image, which may need it; if not, delete it";
        return Err(refuse(ErrorKind::InvalidArgument, file.name(), message));
    }
    let first = vellum_format::write_log::RING_START_BYTES.min(file.len_bytes()?);
    let start = crate::qcow2::read_bytes(file, 0, first).await?;
    match start.iter().all(|byte| *byte == 0) {
        true => Ok(None),
        false => {
            let message = "the file holds something else than a write log; it is not overwritten";
            Err(refuse(ErrorKind::InvalidArgument, file.name(), message))
        }
    }
}

/// Writes the bytes of a log from `at` on once, so that later writes allocate nothing.
pub(super) async fn preallocate(
    file: &Arc<dyn Storage>,
    mut at: u64,
    len_bytes: u64,
) -> Result<()> {
    if at >= len_bytes {
        return Ok(());
    }
    while at < len_bytes {
        let piece = ZEROED_AT_ONCE_BYTES.min(len_bytes - at);
        let zeroes = Buffers::from_iter([Buffer::zeroed(piece as usize)]);
        file.write(at, zeroes, WriteFlags::default()).await?;
        at += piece;
    }
    file.flush().await
}

impl Image {
    /// Ends the use of the log for good, before the image is closed.
    ///
    /// # Errors
    /// When the image cannot be committed or its header be written: then the log stays, for
    /// the next opening.
    pub(crate) async fn detach_log(self: &Arc<Self>) -> Result<()> {
        let Some(log) = self.write_log.get() else {
            return Ok(());
        };
        if let Some(suspension) = self.suspend_log().await? {
            // The image is about to be closed.
            suspension.keep();
        }
        // Rule W7: in this order.
        if log.state().failure.is_none() {
            match &log.inside {
                Some(place) => self.give_up_log_clusters(place).await?,
                None => {
                    log.leave(NOBODY).await?;
                    self.update_header(Header::forget_write_log).await?;
                }
            }
        }
        log.file.close().await
    }
}
