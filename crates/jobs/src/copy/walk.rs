//! Which piece of a copy comes next, and what it counts.

use vellum::Result;

use super::{CopyError, CopyOptions, Observer, Shared, Step};
use crate::piece::{Content, Piece};
use crate::scan::Scan;
use crate::scope::Scope;
use crate::window::{ReorderWindow, place_of_overwrite};

impl Shared<'_> {
    /// The next piece: in the order of the source's file where that reads faster and leaves
    /// the target as it would be.
    pub(super) async fn next_in_window(
        &self,
        scan: &mut Scan<'_>,
        window: &mut ReorderWindow,
    ) -> Result<Option<Piece>, CopyError> {
        if !self.options.scope.is_of_layers() {
            return self.next_with_work(scan).await;
        }
        if let Some(piece) = window.take() {
            return Ok(Some(piece));
        }
        while window.has_room()
            && let Some(piece) = self.next_with_work(scan).await?
        {
            let source = &self.sources[piece.source];
            let place = place_of_overwrite(&**source, &**self.target, &piece).await;
            window.put(piece, place);
        }
        window.close();
        Ok(window.take())
    }

    /// The next piece of the walk that needs a request.
    async fn next_with_work(&self, scan: &mut Scan<'_>) -> Result<Option<Piece>, CopyError> {
        let chunk_bytes = self.options.chunk_bytes();
        while let Some(piece) = next_piece(scan, chunk_bytes).await? {
            self.salvage_log.unknown(scan.take_unknown());
            if self.has_work(&piece) {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    /// Whether a piece needs any request at all.
    fn has_work(&self, piece: &Piece) -> bool {
        match piece.content {
            Content::Data => true,
            Content::Zero => self.sparse.is_none() || !self.options.target_is_zero,
            Content::Backing => false,
        }
    }

    /// How many bytes of a piece count for the progress.
    pub(super) fn counted_bytes(&self, piece: &Piece) -> u64 {
        let counts = match (&self.options.scope, piece.content) {
            (Scope::Differences(_), _) | (_, Content::Data) => true,
            (_, Content::Zero) => self.sparse.is_none(),
            (_, Content::Backing) => false,
        };
        if counts { piece.len_bytes } else { 0 }
    }
}

async fn next_piece(scan: &mut Scan<'_>, chunk_bytes: u64) -> Result<Option<Piece>, CopyError> {
    let at = scan.offset_bytes();
    scan.next_piece(chunk_bytes)
        .await
        .map_err(|cause| CopyError {
            step: Step::Status,
            offset_bytes: at,
            cause,
        })
}

/// How many bytes have to be written, for the progress.
pub(super) async fn count(
    scan: &mut Scan<'_>,
    options: &CopyOptions,
    observer: &mut dyn Observer,
) -> Result<u64, CopyError> {
    let mut total_bytes = 0;
    while let Some(piece) = next_piece(scan, options.chunk_bytes()).await? {
        for unknown in scan.take_unknown() {
            observer.unknown(unknown.source_offset_bytes, &unknown.cause);
        }
        let written_zeroes = options.min_sparse_bytes.is_none() && piece.content == Content::Zero;
        if piece.content == Content::Data || written_zeroes {
            total_bytes += piece.len_bytes;
        }
    }
    Ok(total_bytes)
}
