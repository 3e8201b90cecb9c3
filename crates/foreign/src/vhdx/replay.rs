//! What an interrupted writer left in the log is done again.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_storage::ZeroFlags;

use super::header::Header;
use super::invalid;
use super::log::{Entry, Log, Update};
use super::writer::Writer;
use crate::fields;

const MIB: u64 = 1 << 20;
/// A log that has to be read is read into memory; Hyper-V and QEMU make logs of 1 MiB.
const MAX_LOG_BYTES: u32 = 64 << 20;

/// What is done where there is something in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnLog {
    Replay,
    /// Nothing may be written.
    Refuse,
    /// For those who are going to look at the image again, after a replay.
    Ignore,
}

/// Replays the log, if there is something in it; `true` if that was done.
///
/// # Errors
/// [`ErrorKind::PermissionDenied`], in QEMU's words, where it would have to be and nothing may be written.
pub(super) async fn replay(
    file: &Arc<dyn Storage>,
    writer: &mut Writer,
    on_log: OnLog,
) -> Result<bool> {
    let header = writer.header().clone();
    check_log(&header)?;
    if header.log.is_nil() || header.log_len_bytes == 0 {
        return Ok(false);
    }
    if header.log_len_bytes > MAX_LOG_BYTES {
        let message = "the VHDX image has a log of more than 64 MiB that may have to be replayed";
        return Err(Error::new(ErrorKind::Unsupported, "open", message));
    }
    let len_bytes = header.log_len_bytes as usize;
    let bytes = fields::read_at(&**file, header.log_offset_bytes, len_bytes).await?;
    let log = Log::new(&bytes, header.log);
    // A writer that was cut off before its first entry leaves none; QEMU opens such an image, too.
    let Some(sequence) = log.active() else {
        return Ok(false);
    };
    match on_log {
        OnLog::Replay => {}
        OnLog::Refuse => return Err(needs_replay(file.name())),
        OnLog::Ignore => return Ok(false),
    }
    for entry in sequence.into_iter().filter_map(|at| log.entry(at)) {
        apply(file, entry).await?;
    }
    fields::barrier(&**file).await?;
    writer.forget_log().await?;
    Ok(true)
}

/// What has to hold of a log, used or not.
fn check_log(header: &Header) -> Result<()> {
    let offset_bytes = header.log_offset_bytes;
    let end = offset_bytes.checked_add(header.log_len_bytes.into());
    let is_placed = offset_bytes >= MIB
        && offset_bytes.is_multiple_of(MIB)
        && end.is_some_and(|end| end <= i64::MAX as u64);
    let is_readable = header.log.is_nil() || u64::from(header.log_len_bytes).is_multiple_of(MIB);
    match is_placed && is_readable && header.log_version == 0 {
        true => Ok(()),
        false => Err(invalid("the VHDX headers lead to no log that can be read")),
    }
}

fn needs_replay(name: &str) -> Error {
    let message = format!(
        "VHDX image file '{name}' opened read-only, but contains a log that needs to be replayed\n\
         To replay the log, run:\nqemu-img check -r all '{name}'"
    );
    Error::new(ErrorKind::PermissionDenied, "open", message)
}

/// Does what an entry says. Its updates lie inside the file, or what the entry says that it is to become.
async fn apply(file: &Arc<dyn Storage>, entry: Entry) -> Result<()> {
    let now_bytes = file.len_bytes()?;
    if entry.header.flushed_file_bytes > now_bytes {
        return Err(invalid("the VHDX image is shorter than its log says"));
    }
    let end_bytes = now_bytes.max(entry.header.last_file_bytes);
    for update in &entry.updates {
        let (offset_bytes, len_bytes) = match update {
            Update::Data {
                offset_bytes,
                content,
            } => (*offset_bytes, content.len() as u64),
            Update::Zero {
                offset_bytes,
                len_bytes,
            } => (*offset_bytes, *len_bytes),
        };
        let end = offset_bytes.checked_add(len_bytes);
        if end.is_none_or(|end| end > end_bytes) {
            return Err(invalid("the VHDX log leads beyond the image"));
        }
    }
    for update in entry.updates {
        match update {
            Update::Data {
                offset_bytes,
                content,
            } => {
                fields::write_at(&**file, offset_bytes, &content).await?;
            }
            Update::Zero {
                offset_bytes,
                len_bytes,
            } => {
                file.write_zeroes(offset_bytes, len_bytes, ZeroFlags::default())
                    .await?;
            }
        }
    }
    let last_bytes = entry.header.last_file_bytes.checked_next_multiple_of(MIB);
    let last_bytes = last_bytes
        .filter(|last| *last <= i64::MAX as u64)
        .unwrap_or(0);
    match file.len_bytes()? < last_bytes && file.capabilities().growable {
        true => file.truncate(last_bytes).await,
        false => Ok(()),
    }
}
