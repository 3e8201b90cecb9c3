//! Writes: in place, or to blocks that are made for them.

use super::core::Core;
use super::plan::{Owner, Plan, Spot};
use crate::layout::{Layout, NewBlock, Place};
use std::ops::Range;
use vellum::{Buffer, ErrorKind, RequestFlags, Result};
use vellum_io::range_lock::Mode;

/// Blocks up to this size are written in one piece with what is around the guest's bytes.
const ONE_PIECE_BYTES: u64 = 64 << 10;

/// As [`ONE_PIECE_BYTES`] where the block holds something already.
const ONE_COPY_BYTES: u64 = 1 << 20;

/// What is written at the end of a new block that is not written whole, so that the file has all of it.
const LAST_BYTES: u64 = 512;

impl<L: Layout> Core<L> {
    pub(super) async fn write(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Result<Buffer> {
        if buffer.is_empty() {
            return Ok(buffer);
        }
        if self.layout.compresses_writes() {
            return self.write_compressed(offset_bytes, buffer, flags).await;
        }
        self.begin_changes().await?;
        let range = offset_bytes..offset_bytes + buffer.len() as u64;
        let shared = self.ranges.acquire(range.clone(), Mode::Shared).await;
        let buffer = match self.all_data(range.clone()).await? {
            Some(runs) => {
                let written = self.write_in_place(runs, buffer).await;
                drop(shared);
                written?
            }
            None => {
                // Rule 9: nobody waits for a range while it holds another one.
                drop(shared);
                let held = self.hold_blocks(&range).await;
                let written = self.write_held(offset_bytes, buffer).await;
                drop(held);
                self.commit_if_much().await?;
                written?
            }
        };
        if flags.fua {
            self.commit().await?;
        }
        Ok(buffer)
    }

    /// Keeps all others away from the blocks that a range touches.
    async fn hold_blocks(&self, range: &Range<u64>) -> impl Drop + use<L> {
        let last = range.end.saturating_sub(1).max(range.start);
        let blocks = self.block_at(range.start).start..self.block_at(last).end;
        self.ranges.acquire(blocks, Mode::Exclusive).await
    }

    /// The runs of a range that is data everywhere, with their lengths in bytes.
    async fn all_data(&self, range: Range<u64>) -> Result<Option<Vec<(Spot, u64)>>> {
        let mut runs = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let run = self.run_at(at, range.end - at).await?;
            let Some(spot) = Spot::of(run.place, at) else {
                return Ok(None);
            };
            runs.push((spot, run.len_bytes));
            at += run.len_bytes;
        }
        Ok(Some(runs))
    }

    async fn write_in_place(&self, runs: Vec<(Spot, u64)>, mut buffer: Buffer) -> Result<Buffer> {
        let mut plan = Plan::default();
        for (spot, len_bytes) in runs {
            plan.add(spot, buffer.split_to(len_bytes as usize), Owner::Guest);
        }
        self.carry_out(plan).await
    }

    /// Writes to blocks that are held exclusive.
    pub(super) async fn write_held(&self, offset_bytes: u64, buffer: Buffer) -> Result<Buffer> {
        let mut plan = Plan::default();
        let planned = self.plan_write(&mut plan, offset_bytes, buffer).await;
        let links = std::mem::take(&mut plan.links);
        let written = match planned {
            Ok(()) => self.carry_out(plan).await,
            Err(error) => Err(error),
        };
        let written = written.inspect_err(|_| {
            links
                .iter()
                .for_each(|(block, new)| self.layout.give_back(*block, *new));
        })?;
        for (block, new) in links {
            self.layout.link(block, new)?;
            self.inflated.forget(block);
        }
        Ok(written)
    }

    async fn plan_write(
        &self,
        plan: &mut Plan,
        offset_bytes: u64,
        mut buffer: Buffer,
    ) -> Result<()> {
        let end = offset_bytes + buffer.len() as u64;
        let mut at = offset_bytes;
        while at < end {
            let run = self.run_at(at, end - at).await?;
            if let Some(spot) = Spot::of(run.place, at)
                && let Some(data_end) = self.whole_blocks(at, at + run.len_bytes, end)
            {
                let piece = buffer.split_to((data_end - at) as usize);
                plan.add(spot, piece, Owner::Guest);
                at = data_end;
                continue;
            }
            let piece_end = end.min(self.block_at(at).end);
            let piece = buffer.split_to((piece_end - at) as usize);
            self.plan_block(plan, at, piece).await?;
            at = piece_end;
        }
        Ok(())
    }

    /// Where data from `at` to `data_end` ends for a write to `end` that may not leave a part of a block
    /// to be made anew; `None` if no block is data as far as the write goes.
    fn whole_blocks(&self, at: u64, data_end: u64, end: u64) -> Option<u64> {
        if data_end >= end {
            return Some(end);
        }
        let boundary = self.block_at(data_end).start;
        (boundary > at).then_some(boundary)
    }

    /// Makes a block for a piece of it that begins at `at`.
    async fn plan_block(&self, plan: &mut Plan, at: u64, piece: Buffer) -> Result<()> {
        let block = self.block_at(at);
        let block_bytes = self.layout.block_bytes();
        let piece_end = at + piece.len() as u64;
        let (head, tail) = (block.start..at, piece_end..block.end);
        let has_old =
            self.holds_bytes(head.clone()).await? || self.holds_bytes(tail.clone()).await?;
        let new = self.layout.allocate(block.start).await;
        let new = new.inspect_err(|error| self.note_failed_barrier(error))?;
        plan.links.push((block.start, new));
        let spot = |guest: u64| Spot::in_new(&new, block.start, guest);
        let beyond_bytes = block_bytes - (block.end - block.start);
        let most = if has_old {
            ONE_COPY_BYTES
        } else {
            ONE_PIECE_BYTES
        };
        if block_bytes <= most {
            let before = self.content(head, has_old).await?;
            let after = self.content(tail, has_old).await?;
            plan.add(spot(block.start), before, Owner::Around);
            plan.add(spot(at), piece, Owner::Guest);
            plan.add(spot(piece_end), after, Owner::Around);
            let zeroes = Buffer::zeroed(beyond_bytes as usize);
            plan.add(spot(block.end), zeroes, Owner::Around);
            return Ok(());
        }
        plan.add(spot(at), piece, Owner::Guest);
        if has_old {
            plan.copy(spot(block.start), at - block.start);
            plan.copy(spot(piece_end), block.end - piece_end);
            plan.zero(spot(block.end), beyond_bytes);
            return Ok(());
        }
        let before_bytes = at - block.start;
        let after_bytes = block.end - piece_end + beyond_bytes;
        plan_zeroes(
            plan,
            &new,
            (spot(block.start), before_bytes),
            (spot(piece_end), after_bytes),
        );
        Ok(())
    }

    async fn content(&self, guest: Range<u64>, has_old: bool) -> Result<Buffer> {
        let len_bytes = (guest.end - guest.start) as usize;
        match has_old && len_bytes > 0 {
            true => self.read(guest.start, Buffer::for_read(len_bytes)).await,
            false => Ok(Buffer::zeroed(len_bytes)),
        }
    }

    /// Whether a range holds anything but zeroes, as far as entries tell.
    async fn holds_bytes(&self, range: Range<u64>) -> Result<bool> {
        let mut at = range.start;
        while at < range.end {
            let run = self.run_at(at, range.end - at).await?;
            let backing = self.backing.as_ref();
            match run.place {
                Place::Zero => {}
                Place::Absent if backing.is_none_or(|backing| backing.size_bytes() <= at) => {}
                _ => return Ok(true),
            }
            at += run.len_bytes;
        }
        Ok(false)
    }

    pub(super) async fn write_compressed(
        &self,
        offset_bytes: u64,
        mut buffer: Buffer,
        flags: RequestFlags,
    ) -> Result<Buffer> {
        let range = offset_bytes..offset_bytes + buffer.len() as u64;
        let ends_well = range.end == self.layout.size_bytes()
            || range.end.is_multiple_of(self.layout.block_bytes());
        if !range.start.is_multiple_of(self.layout.block_bytes()) || !ends_well {
            let message = "compressed writes are made of whole clusters";
            let error = self.error(ErrorKind::InvalidArgument, "write compressed", message);
            return Err(error.at(offset_bytes));
        }
        self.begin_changes().await?;
        let held = self.hold_blocks(&range).await;
        let mut written = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let block = self.block_at(at);
            let piece = buffer.split_to((block.end - at) as usize);
            let stored = self.layout.write_compressed(at, &piece).await?;
            self.inflated.forget(at);
            written.push(match stored {
                Some(true) => piece,
                Some(false) => self.write_held(at, piece).await?,
                None => {
                    let message = "the format has no compressed clusters";
                    return Err(self.error(ErrorKind::Unsupported, "write compressed", message));
                }
            });
            at = block.end;
        }
        drop(held);
        self.commit_if_much().await?;
        if flags.fua {
            self.commit().await?;
        }
        Ok(Buffer::join_all(written))
    }
}

/// Zeroes around a piece: where the file has none by itself, or just so that it ends where the block does.
fn plan_zeroes(plan: &mut Plan, new: &NewBlock, before: (Spot, u64), after: (Spot, u64)) {
    let (after_spot, after_bytes) = after;
    if !new.reads_as_zeroes {
        plan.zero(before.0, before.1);
        plan.zero(after_spot, after_bytes);
        return;
    }
    let last_bytes = LAST_BYTES.min(after_bytes);
    let zeroes = Buffer::zeroed(last_bytes as usize);
    plan.add(
        after_spot.plus(after_bytes - last_bytes),
        zeroes,
        Owner::Around,
    );
}
