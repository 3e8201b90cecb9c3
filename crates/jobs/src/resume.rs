//! A copy that can be interrupted and gone on with.
//!
//! The copy is made in pieces. After each the target is flushed, and only then it is told
//! how far everything is in its place, durably. Whoever comes with the same sources and the
//! same target later begins there ([`CopyOptions::start_bytes`]).
//!
//! Invariant: behind that place the target holds what an interrupted copy wrote there, in
//! full, in part, or not at all. The sources are the same, so each byte of it is either what
//! will be written again, or still zero as in the new target. Writing it once more gives the
//! same content as an uninterrupted copy.

use std::sync::Arc;

use vellum::{BlockDevice, Buffer, Error};

use crate::copy::{CopyError, CopyOptions, Observer, copy};

/// Why a copy in pieces has ended.
#[derive(Debug)]
pub enum PieceError<E> {
    /// A piece could not be copied.
    Copy(CopyError),
    /// It could not be made durable.
    Flush(Error),
    /// The one who is told how far it is wants it to end.
    Told(E),
}

/// Places that are looked at by [`is_in_place`], and bytes of each.
const SAMPLES: u64 = 256;
const SAMPLE_BYTES: u64 = 4096;

/// Whether `target` has what `sources`, laid end to end, have before `end_bytes`, as far as samples all
/// over it tell: somebody may have written another image over it since it was copied.
///
/// # Errors
/// What reading meets.
pub async fn is_in_place(
    sources: &[Arc<dyn BlockDevice>],
    target: &Arc<dyn BlockDevice>,
    end_bytes: u64,
) -> Result<bool, Error> {
    let step_bytes = (end_bytes / SAMPLES).next_multiple_of(SAMPLE_BYTES);
    let step_bytes = step_bytes.max(SAMPLE_BYTES);
    let mut start_bytes = 0;
    for source in sources {
        let end = source
            .size_bytes()
            .min(end_bytes.saturating_sub(start_bytes));
        for step in (0..end).step_by(step_bytes as usize) {
            let in_step = step_bytes.min(end - step);
            // Zeroes tell less than the data that may follow them.
            let first = source.block_status(step, in_step, u32::MAX).await?;
            let at = match first.kind.is_zero() && first.len_bytes < in_step {
                true => step + first.len_bytes,
                false => step,
            };
            let len = SAMPLE_BYTES.min(end - at) as usize;
            let one = source.read(at, Buffer::for_read(len)).await?;
            let other = target.read(start_bytes + at, Buffer::for_read(len)).await?;
            if one[..] != other[..] {
                return Ok(false);
            }
        }
        start_bytes += source.size_bytes();
    }
    Ok(true)
}

/// Copies as [`copy()`] with `options`, in pieces of `piece_bytes`, a multiple of 2 MiB.
/// Tells `done` after each up to where in the target all is in its place, durably.
///
/// # Errors
/// If a piece cannot be copied or made durable, or `done` fails.
pub async fn copy_in_pieces<E>(
    sources: &[Arc<dyn BlockDevice>],
    target: &Arc<dyn BlockDevice>,
    options: &CopyOptions,
    piece_bytes: u64,
    observer: &mut dyn Observer,
    mut done: impl FnMut(u64) -> Result<(), E>,
) -> Result<(), PieceError<E>> {
    let end_bytes = options.len_bytes.unwrap_or_else(|| target.size_bytes());
    let mut at = options.start_bytes;
    while at < end_bytes {
        let end = end_bytes.min(at + piece_bytes);
        let piece = CopyOptions {
            start_bytes: at,
            len_bytes: Some(end),
            ..options.clone()
        };
        let copied = copy(sources, target, &piece, observer).await;
        copied.map_err(PieceError::Copy)?;
        target.flush().await.map_err(PieceError::Flush)?;
        done(end).map_err(PieceError::Told)?;
        at = end;
    }
    Ok(())
}
