//! Zeroes and discards.

use std::ops::Range;

use vellum::{Buffer, Result, ZeroRequest};
use vellum_io::range_lock::Mode;
use vellum_storage::ZeroFlags;

use super::core::Core;
use super::plan::Spot;
use crate::layout::{Layout, Place};

/// Zeroes that have to be written out are written in pieces of this size.
const PIECE_BYTES: u64 = 1 << 20;

impl<L: Layout> Core<L> {
    pub(super) async fn write_zeroes(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        request: ZeroRequest,
    ) -> Result<()> {
        let end = offset_bytes + len_bytes;
        if len_bytes > 0 {
            self.begin_changes().await?;
        }
        let mut at = offset_bytes;
        while at < end {
            if let Some(empty_bytes) = self.zero_run_at(at, end).await? {
                at += empty_bytes;
                continue;
            }
            let block = self.block_at(at);
            let piece = at..end.min(block.end);
            at = piece.end;
            let held = self.ranges.acquire(block.clone(), Mode::Exclusive).await;
            self.zero_in_block(&block, piece, request).await?;
            drop(held);
            self.commit_if_much().await?;
        }
        match request.fua {
            true => self.commit().await,
            false => Ok(()),
        }
    }

    /// The length of the run at `at` if it is zeroes already: a disk may have very many such blocks, which need
    /// no turn each.
    async fn zero_run_at(&self, at: u64, end: u64) -> Result<Option<u64>> {
        let run = self.run_at(at, end - at).await?;
        Ok(self.is_zero(run.place).then_some(run.len_bytes))
    }

    /// Whether what is at a place reads as zeroes, as far as that tells.
    fn is_zero(&self, place: Place) -> bool {
        match place {
            Place::Zero => true,
            Place::Absent => self.backing.is_none(),
            Place::Data { .. } | Place::Compressed => false,
        }
    }

    /// Makes a part of a block, which is held, read as zeroes.
    async fn zero_in_block(
        &self,
        block: &Range<u64>,
        piece: Range<u64>,
        request: ZeroRequest,
    ) -> Result<()> {
        let shows_backing = self.backing.is_some();
        if piece == *block {
            let zero_bytes = self.zero_run_at(block.start, block.end).await?;
            if zero_bytes == Some(block.end - block.start) {
                return Ok(());
            }
            let zeroed = self
                .layout
                .zero(block.start, shows_backing, request.may_unmap)
                .await?;
            if zeroed {
                self.inflated.forget(block.start);
                return Ok(());
            }
            if self.layout.compresses_writes() && !request.no_fallback {
                let zeroes = vec![0; (block.end - block.start) as usize];
                self.layout.write_compressed(block.start, &zeroes).await?;
                self.inflated.forget(block.start);
                return Ok(());
            }
        }
        let mut at = piece.start;
        while at < piece.end {
            let run = self.run_at(at, piece.end - at).await?;
            let len_bytes = self.zero_run(at, run.len_bytes, run.place, request).await?;
            at += len_bytes;
        }
        Ok(())
    }

    /// Zeroes of a run that its entry cannot tell; gives how much was done.
    async fn zero_run(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        place: Place,
        request: ZeroRequest,
    ) -> Result<u64> {
        match place {
            place if self.is_zero(place) => Ok(len_bytes),
            Place::Data {
                file,
                offset_bytes: host_bytes,
            } => {
                let flags = ZeroFlags {
                    may_unmap: request.may_unmap,
                    no_fallback: request.no_fallback,
                    fua: false,
                };
                let spot = Spot {
                    file,
                    host_bytes,
                    guest_bytes: offset_bytes,
                };
                let zeroed = self.request(spot, |file, at| file.write_zeroes(at, len_bytes, flags));
                zeroed.await.map(|()| len_bytes)
            }
            Place::Zero | Place::Absent | Place::Compressed => {
                if request.no_fallback {
                    return Err(self.error(
                        vellum::ErrorKind::Unsupported,
                        "write zeroes",
                        "the format has no entry for zeroes",
                    ));
                }
                let len_bytes = len_bytes.min(PIECE_BYTES);
                let zeroes = Buffer::zeroed(len_bytes as usize);
                self.write_held(offset_bytes, zeroes).await?;
                Ok(len_bytes)
            }
        }
    }

    /// Whole blocks whose format has a way are given back; the rest stays as it is.
    pub(super) async fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        if !self.layout.can_discard() {
            return Ok(());
        }
        let end = offset_bytes + len_bytes;
        let mut at = offset_bytes;
        while at < end {
            let run = self.run_at(at, end - at).await?;
            if matches!(run.place, Place::Absent | Place::Zero) {
                at += run.len_bytes;
                continue;
            }
            let block = self.block_at(at);
            let is_whole = at == block.start && block.end <= end;
            at = block.end;
            if !is_whole {
                continue;
            }
            let held = self.ranges.acquire(block.clone(), Mode::Exclusive).await;
            let run = self.run_at(block.start, 1).await?;
            if !matches!(run.place, Place::Absent | Place::Zero) {
                self.begin_changes().await?;
                if self
                    .layout
                    .discard(block.start, self.backing.is_some())
                    .await?
                {
                    self.inflated.forget(block.start);
                }
            }
            drop(held);
            self.commit_if_much().await?;
        }
        Ok(())
    }
}
