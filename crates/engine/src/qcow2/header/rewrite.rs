//! Rewriting the header with its extensions and names, so that a crash leaves the
//! old header or the new one.
//!
//! A disk tears no sector, so whoever changes one sector only has nothing to do. A
//! header that reaches into further sectors is *switched* by its first one: that
//! says where the extensions end and where the backing file's name lies. What the
//! first sector of the old header leads to is not touched before the switch. Where
//! old and new header would have to share further sectors, there are two switches:
//! the first to a *detour*, the new header with its extensions and names behind
//! everything that either header needs, and a long list of feature names before
//! them as a bridge; the second to the new header where it belongs.
//!
//! ```text
//! old      | fields, extensions ...      ... name |
//! detour   | fields, bridge ................................ extensions, name |
//! new      | fields, extensions ...              ... name |
//! ```
//!
//! Invariants:
//! - Each stage is durable before the next begins.
//! - The disk knows best: what changes a header begins with what is on disk, and
//!   everybody else who writes header fields is kept out meanwhile.

use std::sync::Arc;

use vellum_format::extension::{Extension, FeatureName, default_feature_names, feature_type, kind};
use vellum_format::features::{Autoclear, Incompatible};
use vellum_format::header::{Purpose, field, first_cluster_size_bytes};
use vellum_format::{FormatError, FormatErrorKind, Header};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};
use vellum_storage::{Storage, WriteFlags};

use super::load::read_bytes;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::bad_format;

/// What a disk writes as a whole.
const SECTOR_BYTES: usize = 512;
/// Type and length of an extension.
const EXTENSION_PREFIX_BYTES: usize = 8;
/// In a smaller first cluster the names of features would take the room of others.
const LEAST_CLUSTER_FOR_NAMES_BYTES: u64 = 4097;

/// Bytes to be written at an offset.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    offset_bytes: usize,
    bytes: Vec<u8>,
}

/// Changes the header in `file`, which nobody else writes; returns the new one.
///
/// # Errors
/// When the old header cannot be read, `change` refuses, the new one does not fit
/// its cluster, or a write fails.
pub(crate) async fn rewrite_header(
    file: &Arc<dyn Storage>,
    change: impl FnOnce(&mut Header) -> Result<()>,
) -> Result<Header> {
    let broken = |error: &FormatError| bad_format("write header", error).target(file.name());
    let prefix = read_bytes(file, 0, SECTOR_BYTES as u64).await?;
    let cluster_bytes = first_cluster_size_bytes(&prefix).map_err(|error| broken(&error))?;
    let old = read_bytes(file, 0, cluster_bytes).await?;
    let mut header = Header::decode_for(&old, Purpose::Use).map_err(|error| broken(&error))?;
    change(&mut header)?;
    refresh_feature_names(&mut header);
    // Rule 3: the first sector switches from the old header to the new one.
    for stage in stages(&old, &header).map_err(|error| refused(&error).target(file.name()))? {
        let bytes = Buffers::from_iter([Buffer::copy_of(&stage.bytes)]);
        let at = stage.offset_bytes as u64;
        file.write(at, bytes, WriteFlags::default()).await?;
        file.flush().await?;
    }
    Ok(header)
}

fn refused(error: &FormatError) -> Error {
    const ENOSPC: i32 = 28;
    const EINVAL: i32 = 22;
    let (errno, reason) = match error.kind() {
        FormatErrorKind::NoSpace => (ENOSPC, "No space left on device"),
        _ => (EINVAL, "Invalid argument"),
    };
    let message = format!("Failed to update the image header: {reason}");
    Error::new(ErrorKind::InvalidArgument, "write header", message).with_errno(errno)
}

/// A header of version 3 names the features that are known, where there is room.
pub(crate) fn refresh_feature_names(header: &mut Header) {
    let has_room = header.geometry().cluster_size_bytes() >= LEAST_CLUSTER_FOR_NAMES_BYTES;
    header.remove_extension(kind::FEATURE_NAMES);
    if header.version < 3 || !has_room {
        return;
    }
    let names = Extension::FeatureNames(feature_names(header));
    // Where it finds a feature that it does not know, QEMU looks for the names as if the image were not
    // encrypted, and stops at the place of the LUKS header.
    let is_luks = |extension: &Extension| extension.kind() == kind::CRYPTO_HEADER;
    let luks_at = header.extensions.iter().position(is_luks);
    match luks_at.filter(|_| has_write_log(header)) {
        Some(at) => header.extensions.insert(at, names),
        None => header.set_extension(names),
    }
}

/// Whether the header has what leads to a write log, for which other programs refuse the image.
fn has_write_log(header: &Header) -> bool {
    let mut kinds = header.extensions.iter().map(Extension::kind);
    kinds.any(|kind| kind == kind::WRITE_LOG)
}

/// QEMU's names, and those of what only Vellum knows where it is there.
fn feature_names(header: &Header) -> Vec<FeatureName> {
    let mut names = default_feature_names();
    if has_write_log(header) {
        // What other programs call the bit that they refuse the image for.
        let bit = Incompatible::WRITE_LOG.bits().trailing_zeros() as u8;
        let name = "Vellum's write log";
        names.push(FeatureName::new(feature_type::INCOMPATIBLE, bit, name));
    }
    let autoclear = [
        (Autoclear::WRITE_LOG_INSIDE, "write log inside"),
        (Autoclear::CHECKSUMS, "checksums"),
        (Autoclear::SEALED, "sealed"),
    ];
    for (feature, name) in autoclear {
        if header.autoclear.contains(feature) {
            let bit = feature.bits().trailing_zeros() as u8;
            names.push(FeatureName::new(feature_type::AUTOCLEAR, bit, name));
        }
    }
    names
}

/// The writes that replace the header in `old`, the first cluster.
fn stages(old: &[u8], header: &Header) -> std::result::Result<Vec<Piece>, FormatError> {
    let old_end = end_of_header(old);
    let encoded = header.encode()?;
    let new_end = encoded.len();
    // What lies behind it is to be zeroes.
    let mut new = encoded;
    let len = new_end.max(old_end).next_multiple_of(SECTOR_BYTES);
    new.resize(len.min(old.len()), 0);
    let differing: Vec<usize> = (0..new.len())
        .step_by(SECTOR_BYTES)
        .filter(|&at| sector(&new, at) != sector(old, at))
        .collect();
    if let [] | [_] = differing[..] {
        return Ok(differing
            .iter()
            .map(|&at| piece(&new, at..at + SECTOR_BYTES))
            .collect());
    }
    if new_end <= SECTOR_BYTES {
        return Ok(vec![
            piece(&new, 0..SECTOR_BYTES),
            piece(&new, SECTOR_BYTES..new.len()),
        ]);
    }
    if old_end <= SECTOR_BYTES {
        return Ok(vec![
            piece(&new, SECTOR_BYTES..new.len()),
            piece(&new, 0..SECTOR_BYTES),
        ]);
    }
    let Some(detour) = detour(header, new.len(), old.len())? else {
        // A cluster so small and so full has no room for both; QEMU's way.
        return Ok(vec![piece(&new, 0..new.len())]);
    };
    Ok(vec![
        piece(&detour, new.len()..detour.len()),
        piece(&detour, 0..SECTOR_BYTES),
        piece(&new, SECTOR_BYTES..new.len()),
        piece(&new, 0..SECTOR_BYTES),
        Piece {
            offset_bytes: new.len(),
            bytes: vec![0; detour.len() - new.len()],
        },
    ])
}

/// The header with everything but its fields from `start` on, if the cluster has room.
fn detour(
    header: &Header,
    start: usize,
    cluster_bytes: usize,
) -> std::result::Result<Option<Vec<u8>>, FormatError> {
    let mut header = header.clone();
    header.remove_extension(kind::FEATURE_NAMES);
    let bridge_start = header.header_len_bytes() as usize + EXTENSION_PREFIX_BYTES;
    let bridge = Extension::Unknown {
        kind: kind::FEATURE_NAMES,
        data: vec![0; start - bridge_start],
    };
    header.extensions.insert(0, bridge);
    match header.encode() {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == FormatErrorKind::NoSpace => {
            debug_assert!(start <= cluster_bytes);
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn sector(bytes: &[u8], at: usize) -> &[u8] {
    bytes
        .get(at..(at + SECTOR_BYTES).min(bytes.len()))
        .unwrap_or(&[])
}

fn piece(bytes: &[u8], range: std::ops::Range<usize>) -> Piece {
    let end = range.end.min(bytes.len());
    Piece {
        offset_bytes: range.start,
        bytes: bytes.get(range.start..end).unwrap_or(&[]).to_vec(),
    }
}

fn be32(bytes: &[u8], at: usize) -> usize {
    let raw = bytes.get(at..at + 4).and_then(|raw| raw.try_into().ok());
    raw.map_or(0, u32::from_be_bytes) as usize
}

/// Where the extensions and the backing file's name end. The header was decoded, so
/// that they are inside the cluster.
fn end_of_header(cluster: &[u8]) -> usize {
    let mut at = match be32(cluster, field::VERSION) {
        0..3 => vellum_format::limits::HEADER_LEN_V2_BYTES as usize,
        _ => be32(cluster, field::HEADER_LENGTH),
    };
    // The upper half is zero: the name lies in the first cluster.
    let name = be32(cluster, field::BACKING_FILE_OFFSET + 4);
    let name_end = match name {
        0 => 0,
        name => name + be32(cluster, field::BACKING_FILE_SIZE),
    };
    let end = if name == 0 { cluster.len() } else { name };
    while at + EXTENSION_PREFIX_BYTES <= end {
        let len = be32(cluster, at + 4);
        let is_last = be32(cluster, at) == kind::END as usize;
        at += EXTENSION_PREFIX_BYTES;
        if is_last {
            break;
        }
        at = at.saturating_add(len.next_multiple_of(8));
    }
    at.max(name_end).min(cluster.len())
}

impl Image {
    /// Changes the header with its extensions and names; a crash leaves the old one
    /// or the new one. The features that the geometry depends on must stay.
    ///
    /// Not to be called while the end of the file is held.
    ///
    /// # Errors
    /// When the new header does not fit its cluster, or it cannot be written: after
    /// a failed write no more changes are accepted.
    pub(crate) async fn update_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let _one = self.header.lock_for_writing().await;
        // The refcount table moves without asking for that.
        let _table = self.allocator.growing.lock().await;
        let rewritten = rewrite_header(&self.file, |header| {
            change(header);
            Ok(())
        });
        let header = rewritten.await.inspect_err(|error| {
            if error.kind() != ErrorKind::InvalidArgument {
                self.stop_changes(error.clone());
            }
        })?;
        self.overlap.note_directory(&header);
        self.change_header(|current| *current = header);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
