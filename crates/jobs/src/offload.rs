//! Copies without the program's memory: those that the kernel makes from file to file
//! (`convert -C`), and blocks that source and target share.

use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::storage::StorageIdentity;
use vellum::{BlockDevice, Storage};

use crate::piece::Piece;

/// Copies a piece from one of the sources to a raw target without moving it through
/// the program's memory, and says whether that was done. Where it was not, the target
/// may hold a part of it.
pub(crate) async fn copy_range(
    sources: &[Arc<dyn BlockDevice>],
    target: &Arc<dyn BlockDevice>,
    piece: &Piece,
) -> bool {
    let Some((to, to_start)) = target.bytes_in() else {
        return false;
    };
    let mut done = 0;
    while done < piece.len_bytes {
        let source = &sources[piece.source];
        let at = piece.source_offset_bytes + done;
        let Some((from, from_bytes, len_bytes)) = locate(source, at, piece.len_bytes - done).await
        else {
            return false;
        };
        let to_bytes = to_start + piece.offset_bytes + done;
        let copied = to.copy_range(&*from, from_bytes, to_bytes, len_bytes);
        if copied.await.is_err() {
            return false;
        }
        done += len_bytes;
    }
    true
}

/// Has the target share the blocks of a piece that lies somewhere as it is, and says
/// whether that was done. Where it was not, the target may hold a part of it.
pub(crate) async fn share_blocks(
    sources: &[Arc<dyn BlockDevice>],
    target: &Arc<dyn BlockDevice>,
    piece: &Piece,
) -> bool {
    let mut done = 0;
    while done < piece.len_bytes {
        let source = &sources[piece.source];
        let at = piece.source_offset_bytes + done;
        let Some((from, from_bytes, len_bytes)) = locate(source, at, piece.len_bytes - done).await
        else {
            return false;
        };
        let shared = target.write_shared(piece.offset_bytes + done, len_bytes, from, from_bytes);
        if shared.await.is_err() {
            return false;
        }
        done += len_bytes;
    }
    true
}

/// Where the first bytes of a range of a device lie as they are: the storage, the
/// offset there, and how many of them lie side by side.
async fn locate(
    device: &Arc<dyn BlockDevice>,
    offset_bytes: u64,
    len_bytes: u64,
) -> Option<(Arc<dyn Storage>, u64, u64)> {
    if let Some((storage, start)) = device.bytes_in() {
        let rest = device.size_bytes().checked_sub(offset_bytes)?;
        return Some((storage, start + offset_bytes, len_bytes.min(rest)));
    }
    let extent = device.block_status(offset_bytes, len_bytes, u32::MAX);
    let extent = extent.await.ok()?;
    let host = extent
        .host
        .filter(|_| extent.kind.is_data() && !extent.kind.is_compressed())?;
    let mut layer = device.clone();
    for _ in 0..extent.depth {
        layer = layer.backing()?;
    }
    let storage = match layer.as_qcow2() {
        // Bytes that nobody has compared with the seal are not passed on.
        Some(image) if image.verifies_reads() => return None,
        Some(image) => image.data_storage(),
        None => layer.storage()?,
    };
    let here = StorageIdentity::of(&*storage) == host.identity;
    here.then_some((storage, host.offset_bytes, extent.len_bytes))
}
