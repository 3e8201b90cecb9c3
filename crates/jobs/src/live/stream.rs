//! [`LiveStream`]: an image in use is given what the layers below it hold.

use std::ops::Range;
use std::sync::Arc;

use vellum::nodes::CopyOnRead;
use vellum::{BlockDevice, Error, Result};

use super::parallel::{self, CopyOutcome, NextPiece, PIECE_BYTES};
use crate::copy::{CopyError, Observer, Step};
use crate::job::JobControl;

/// What is brought up.
#[derive(Debug)]
pub struct LiveStream {
    /// The image; its users go through `filter`.
    pub image: Arc<dyn BlockDevice>,
    /// Keeps copies and writes of one range apart.
    pub filter: Arc<CopyOnRead>,
    /// How many layers below the image are brought up; those below them stay what the
    /// image stands on.
    pub layers: u32,
    /// How many pieces are in flight at once.
    pub parallel: usize,
}

/// A failure of a piece.
fn failed(step: Step, offset_bytes: u64) -> impl Fn(Error) -> CopyError {
    move |cause| CopyError {
        step,
        offset_bytes,
        cause,
    }
}

impl LiveStream {
    /// Brings everything up from a byte on. Once that is so from the first one on, and durable,
    /// the image shows the same with the layers left out.
    ///
    /// # Errors
    /// What reading and writing meet, at the begin of a piece. The image shows what it did. It may
    /// be tried again.
    pub async fn run(
        &self,
        from_bytes: u64,
        control: &JobControl,
        observer: &mut dyn Observer,
    ) -> Result<CopyOutcome, CopyError> {
        let size_bytes = self.image.size_bytes();
        let mut at = from_bytes;
        let look = async || {
            if at >= size_bytes {
                return Ok(NextPiece::End);
            }
            let looked = self.look(at, size_bytes).await;
            let (range, hidden) = looked.map_err(failed(Step::Status, at))?;
            at = range.end;
            observer.progress(at, size_bytes);
            Ok(match hidden {
                true => NextPiece::Piece(range),
                false => NextPiece::Nothing,
            })
        };
        let fetch = |range: Range<u64>| {
            let start = range.start;
            let fetched = self.filter.fetch(range);
            async move { fetched.await.map_err(failed(Step::Read, start)) }
        };
        parallel::run(self.parallel, control, look, fetch).await
    }

    /// Where the piece ends that begins at a byte.
    pub fn end_of_piece(&self, start_bytes: u64) -> u64 {
        (start_bytes / PIECE_BYTES + 1) * PIECE_BYTES
    }

    /// A piece from `at` on, and whether a layer that is brought up decides what it shows.
    async fn look(&self, at: u64, size_bytes: u64) -> Result<(Range<u64>, bool)> {
        let len_bytes = size_bytes - at;
        let extent = self.image.block_status(at, len_bytes, self.layers).await?;
        let from_below = match extent.kind.is_present() {
            true => extent.depth > 0,
            // The layer below `depth` ends before, and hides what is below it there.
            false => extent.kind.is_zero() && extent.depth < self.layers,
        };
        let mut len_bytes = extent.len_bytes.clamp(1, len_bytes);
        if from_below {
            len_bytes = len_bytes.min(PIECE_BYTES - at % PIECE_BYTES);
        }
        Ok((at..at + len_bytes, from_below))
    }
}
