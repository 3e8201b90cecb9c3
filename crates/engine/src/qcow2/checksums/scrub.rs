//! A scrub: everything is compared, and what has no sum gets one.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::checksums::{BLOCK_BYTES, REGION_BYTES, UNKNOWN, regions_in, sum_of};
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::WriteFlags;

use super::content::{page_of, sums_in};
use super::page::{Page, regions_of};
use super::pages::Checksums;
use vellum_io::range_lock::Mode;

/// What is read at a time; a region is a multiple of it.
pub(super) const STEP_BYTES: u64 = 1 << 20;
/// Damaged ranges that are told one by one.
const MOST_RANGES: usize = 10_000;
const _: () = assert!(REGION_BYTES.is_multiple_of(STEP_BYTES));

/// What a scrub has found.
#[derive(Debug, Default)]
pub(super) struct Scrubbed {
    pub(super) read_bytes: u64,
    /// Bytes of the image's file that were compared.
    pub(super) compared_bytes: u64,
    /// Bytes that had no checksum and have one now.
    pub(super) new_bytes: u64,
    pub(super) damaged_bytes: u64,
    /// Ranges of the image's file, in bytes, that have changed on disk: the first of them.
    pub(super) damaged: Vec<Range<u64>>,
}

impl Scrubbed {
    fn note_damaged(&mut self, block: u64) {
        self.damaged_bytes += BLOCK_BYTES;
        let is_full = self.damaged.len() >= MOST_RANGES;
        match self.damaged.last_mut() {
            Some(last) if last.end == block => last.end += BLOCK_BYTES,
            _ if is_full => {}
            _ => self.damaged.push(block..block + BLOCK_BYTES),
        }
    }
}

impl Checksums {
    /// Where the file ends, or what has sums: the disk may have lost its end.
    pub(super) fn len_bytes(&self) -> Result<u64> {
        let covered = regions_in(self.sums.0.len_bytes()?) * REGION_BYTES;
        Ok(self.file.len_bytes()?.max(covered))
    }

    /// Where a scrub goes on that has come to `start`: behind a hole, if one begins there that has no
    /// checksums, and else there.
    pub(super) async fn skip_hole(&self, start: u64) -> Result<u64> {
        let len_bytes = self.len_bytes()?;
        if start >= self.file.len_bytes()? {
            return Ok(start);
        }
        let hole = self.file.block_status(start, len_bytes - start).await?;
        if !hole.status.is_zero() {
            return Ok(start);
        }
        let mut end = start + hole.len_bytes;
        let with_sums = self.first_with_sums(regions_of(&(start..end))).await?;
        if let Some(region) = with_sums {
            end = end.min(region * REGION_BYTES);
        }
        // The rest of it is looked at with what follows.
        Ok(match end >= len_bytes {
            true => end,
            false => start.max(end / STEP_BYTES * STEP_BYTES),
        })
    }

    /// Scrubs the step of the file that begins at `start`; `adds`: what has no sum gets one.
    pub(super) async fn scrub_step(
        self: &Arc<Self>,
        start: u64,
        adds: bool,
        found: &mut Scrubbed,
    ) -> Result<()> {
        let end = (start + STEP_BYTES).min(self.len_bytes()?);
        let end = end.next_multiple_of(BLOCK_BYTES);
        if start >= end {
            return Ok(());
        }
        let blocks = start..end;
        let _turn = self.ranges.acquire(blocks.clone(), Mode::Exclusive).await;
        let pages = self.pages_of(&blocks).await?;
        let len_bytes = end - start;
        let offsets = || blocks.clone().step_by(BLOCK_BYTES as usize);
        let is_known = |block| page_of(&pages, block).sum(block) != UNKNOWN;
        if !offsets().any(is_known) {
            let status = self.file.block_status(start, len_bytes).await?;
            if status.status.is_zero() && status.len_bytes >= len_bytes {
                return Ok(());
            }
        }
        let buffer = Buffers::from_iter([Buffer::for_read(len_bytes as usize)]);
        let bytes = self.file.read(start, buffer).await?;
        found.read_bytes += len_bytes;
        let file_bytes = self.file.len_bytes()?;
        let mut new = Vec::new();
        for (block, sum) in offsets().zip(sums_in(&bytes)) {
            match page_of(&pages, block).sum(block) {
                UNKNOWN if block < file_bytes => new.push((block, sum)),
                UNKNOWN => {}
                known => {
                    found.compared_bytes += BLOCK_BYTES;
                    if known != sum {
                        found.note_damaged(block);
                    }
                }
            }
        }
        if adds && !new.is_empty() {
            self.add(&pages, new, found).await?;
            self.watch();
        }
        Ok(())
    }

    async fn add(
        &self,
        pages: &[Arc<Page>],
        new: Vec<(u64, u32)>,
        found: &mut Scrubbed,
    ) -> Result<()> {
        self.open_regions(pages).await?;
        for (block, sum) in new {
            page_of(pages, block).set_sum(block, sum);
            found.new_bytes += BLOCK_BYTES;
        }
        Ok(())
    }

    /// Writes bytes to blocks that have changed on disk, if they are what these had; whether all
    /// were, and are durable now.
    pub(super) async fn repair_blocks(
        self: &Arc<Self>,
        blocks: impl IntoIterator<Item = (u64, Buffer)>,
    ) -> Result<bool> {
        let mut all = true;
        for (block, bytes) in blocks {
            all &= self.repair_block(block, bytes).await?;
        }
        self.believe(self.file.flush().await)?;
        Ok(all)
    }

    async fn repair_block(self: &Arc<Self>, block: u64, bytes: Buffer) -> Result<bool> {
        let blocks = block..block + BLOCK_BYTES;
        let _turn = self.ranges.acquire(blocks.clone(), Mode::Exclusive).await;
        let pages = self.pages_of(&blocks).await?;
        // The guest may have written something else meanwhile.
        if page_of(&pages, block).sum(block) != sum_of([&bytes[..]]) {
            return Ok(false);
        }
        let buffers = Buffers::from_iter([bytes]);
        // The sum stays, whatever a crash leaves of this: so the region stays settled.
        let written = self.file.write(block, buffers, WriteFlags::default());
        written.await.map(|_| true)
    }

    /// The checksum of a block.
    pub(super) async fn sum(self: &Arc<Self>, block: u64) -> Result<u32> {
        let pages = self.pages_of(&(block..block + BLOCK_BYTES)).await?;
        Ok(page_of(&pages, block).sum(block))
    }
}
