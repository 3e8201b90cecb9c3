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

use vellum::{BlockDevice, Error};

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
