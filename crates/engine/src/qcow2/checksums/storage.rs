//! [`Checksummed`]: the image's file as all other modules see it.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::checksums::{BLOCK_BYTES, DAMAGED, REGION_BYTES, UNKNOWN, sum_of};
use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::{BlockStatus, Storage, StorageExtent, WriteFlags, ZeroFlags, delegate};

use super::content::{Content, NewSum, ZERO_SUM, page_of, sums_in};
use super::page::{Page, blocks_around, regions_of};
use super::pages::{Checksums, Pages};
use crate::qcow2::header::load::read_bytes;
use vellum_io::range_lock::{Mode, RangeGuard};

/// What is zeroed, discarded or cut at a time.
const STEP_BYTES: u64 = 64 * REGION_BYTES;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Checksummed(pub(crate) Arc<Checksums>);

/// A change of blocks. Unless it has ended when it is dropped nobody knows what they hold.
struct Change<'a> {
    pages: &'a [Arc<Page>],
    blocks: Range<u64>,
    /// What becomes of each block's sum.
    sums: Vec<NewSum>,
}

impl Change<'_> {
    fn offsets(&self) -> impl Iterator<Item = u64> + use<> {
        self.blocks.clone().step_by(BLOCK_BYTES as usize)
    }

    /// All of it was done.
    fn end(mut self) {
        for (block, new) in self.offsets().zip(std::mem::take(&mut self.sums)) {
            page_of(self.pages, block).set_sum(block, new.sum);
        }
    }

    /// It has failed, and any part of it may have happened. What others have in a block of which it
    /// was going to change a part stays readable, if that is as it was.
    async fn fail(mut self, file: &Arc<dyn Storage>, error: &Error) {
        let mut after = Vec::new();
        for (block, new) in self.offsets().zip(&self.sums) {
            let old = page_of(self.pages, block).sum(block);
            // Such requests are refused before anything is done.
            if old == UNKNOWN || error.kind() == ErrorKind::Unsupported {
                after.push(old);
                continue;
            }
            let bytes = read_bytes(file, block, BLOCK_BYTES).await;
            after.push(match bytes {
                Ok(bytes) => match sum_of([&bytes[..]]) {
                    sum if sum == new.sum || sum == old || new.leaves_the_rest(&bytes) => sum,
                    // Changed by the disk.
                    _ => DAMAGED,
                },
                Err(_) if new.is_damaged || old == DAMAGED => DAMAGED,
                // Others than those of the request may be fine.
                Err(_) => UNKNOWN,
            });
        }
        for (block, sum) in self.offsets().zip(after) {
            page_of(self.pages, block).set_sum(block, sum);
        }
        self.sums.clear();
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        for (block, new) in self.offsets().zip(&self.sums) {
            let sum = match new.is_damaged {
                true => new.sum,
                false => UNKNOWN,
            };
            page_of(self.pages, block).set_sum(block, sum);
        }
    }
}

fn steps(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let starts = std::iter::successors(Some(range.start), |at| {
        Some((at / STEP_BYTES + 1).saturating_mul(STEP_BYTES))
    });
    let end = range.end;
    let starts = starts.take_while(move |at| *at < end);
    starts.map(move |at| at..end.min((at / STEP_BYTES + 1).saturating_mul(STEP_BYTES)))
}

impl Checksums {
    async fn write(
        self: Arc<Self>,
        offset_bytes: u64,
        buffers: Buffers,
        flags: WriteFlags,
    ) -> Result<Buffers> {
        let range = offset_bytes..offset_bytes + total_len(&buffers);
        let blocks = blocks_around(&range);
        let _turn = self.ranges.acquire(blocks.clone(), Mode::Exclusive).await;
        let pages = self.pages_of(&blocks).await?;
        self.open_regions(&pages).await?;
        let content = Content::Bytes(&buffers);
        let sums = self.sums_after(&range, content, &pages).await?;
        let change = Change {
            pages: &pages,
            blocks,
            sums,
        };
        let written = self.file.write(offset_bytes, buffers, flags).await;
        match &written {
            Ok(_) => change.end(),
            Err(error) => change.fail(&self.file, error).await,
        }
        self.watch();
        written
    }

    async fn write_zeroes(self: Arc<Self>, range: Range<u64>, flags: ZeroFlags) -> Result<()> {
        for range in steps(range) {
            let blocks = blocks_around(&range);
            let _turn = self.ranges.acquire(blocks.clone(), Mode::Exclusive).await;
            let pages = self.pages_of(&blocks).await?;
            self.open_regions(&pages).await?;
            let sums = self.sums_after(&range, Content::Zeroes, &pages).await?;
            let change = Change {
                pages: &pages,
                blocks,
                sums,
            };
            let len_bytes = range.end - range.start;
            let zeroed = self.file.write_zeroes(range.start, len_bytes, flags);
            match zeroed.await {
                Ok(()) => change.end(),
                Err(error) => {
                    change.fail(&self.file, &error).await;
                    return Err(error);
                }
            }
        }
        self.watch();
        Ok(())
    }

    async fn discard(self: Arc<Self>, range: Range<u64>) -> Result<()> {
        for range in steps(range) {
            let _turn = self.forget(blocks_around(&range)).await?;
            self.file
                .discard(range.start, range.end - range.start)
                .await?;
        }
        self.watch();
        Ok(())
    }

    async fn truncate(self: Arc<Self>, len_bytes: u64) -> Result<()> {
        // As if the rest of the last block became zeroes.
        let whole = len_bytes.next_multiple_of(BLOCK_BYTES);
        let blocks = blocks_around(&(len_bytes..whole));
        let mut turns = vec![self.ranges.acquire(blocks.clone(), Mode::Exclusive).await];
        let pages = self.pages_of(&blocks).await?;
        self.open_regions(&pages).await?;
        let cut = len_bytes..whole;
        let sums = self.sums_after(&cut, Content::Zeroes, &pages).await?;
        let old_bytes = self.file.len_bytes()?.next_multiple_of(BLOCK_BYTES);
        for blocks in steps(whole..old_bytes.max(whole)) {
            turns.push(self.forget(blocks).await?);
        }
        let change = Change {
            pages: &pages,
            blocks,
            sums,
        };
        let truncated = self.file.truncate(len_bytes).await;
        match &truncated {
            Ok(()) => change.end(),
            Err(error) => change.fail(&self.file, error).await,
        }
        self.watch();
        truncated
    }

    /// Takes blocks, of which nobody is to know what they hold.
    async fn forget(self: &Arc<Self>, blocks: Range<u64>) -> Result<RangeGuard> {
        let turn = self.ranges.acquire(blocks.clone(), Mode::Exclusive).await;
        let mut pages = Pages::new();
        let mut next = blocks.start;
        // What has no sums now gets none before this is over.
        while next < blocks.end {
            let regions = regions_of(&(next..blocks.end));
            let Some(region) = self.first_with_sums(regions).await? else {
                break;
            };
            next = blocks.end.min((region + 1) * REGION_BYTES);
            pages.extend(self.pages_of(&(next - 1..next)).await?);
        }
        self.open_regions(&pages).await?;
        for page in pages.iter().filter(|page| !page.is_blank()) {
            let region = page.bytes();
            let some = blocks.start.max(region.start)..blocks.end.min(region.end);
            for block in some.step_by(BLOCK_BYTES as usize) {
                page.set_sum(block, UNKNOWN);
            }
        }
        Ok(turn)
    }

    async fn read(self: Arc<Self>, offset_bytes: u64, buffers: Buffers) -> Result<Buffers> {
        let range = offset_bytes..offset_bytes + total_len(&buffers);
        let blocks = blocks_around(&range);
        let pages = self.pages_of(&blocks).await?;
        if pages.iter().all(|page| page.is_blank()) {
            return self.file.read(offset_bytes, buffers).await;
        }
        let (buffers, bad) = self.read_and_compare(&range, buffers, &pages).await?;
        if bad.is_none() {
            return Ok(buffers);
        }
        // A change beside this looks like damage until it is over.
        let _turn = self.ranges.acquire(blocks, Mode::Shared).await;
        match self.read_and_compare(&range, buffers, &pages).await? {
            (buffers, None) => Ok(buffers),
            (_, Some(block)) => Err(self.mismatch(block)),
        }
    }

    /// What the file says, but for zeroes where there should be something else: a disk may lose
    /// blocks so that they are a hole, and only a read compares.
    async fn block_status(
        self: Arc<Self>,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<StorageExtent> {
        let found = self.file.block_status(offset_bytes, len_bytes).await?;
        if !found.status.is_zero() || len_bytes == 0 {
            return Ok(found);
        }
        let regions = regions_of(&(offset_bytes..offset_bytes + found.len_bytes));
        let with_sums = self.first_with_sums(regions).await?;
        let without_bytes = with_sums.map_or(found.len_bytes, |region| {
            (region * REGION_BYTES).saturating_sub(offset_bytes)
        });
        if without_bytes > 0 {
            return Ok(StorageExtent {
                status: found.status,
                len_bytes: without_bytes.min(found.len_bytes),
            });
        }
        let range = offset_bytes..offset_bytes + found.len_bytes.min(STEP_BYTES);
        let blocks = blocks_around(&range);
        let pages = self.pages_of(&blocks).await?;
        let is_lost = |block: &u64| {
            let page = page_of(&pages, *block);
            !page.is_blank() && ![UNKNOWN, *ZERO_SUM].contains(&page.sum(*block))
        };
        let mut offsets = blocks.step_by(BLOCK_BYTES as usize);
        let (status, end) = match offsets.find(is_lost) {
            None => (found.status, range.end),
            Some(block) if block > offset_bytes => (found.status, block),
            Some(block) => (BlockStatus::Data, block + BLOCK_BYTES),
        };
        Ok(StorageExtent {
            status,
            len_bytes: end.min(range.end) - offset_bytes,
        })
    }

    fn mismatch(&self, block: u64) -> Error {
        let cause = match self.may_repair() {
            true => "the disk has changed them",
            false => {
                "the disk has changed them, or another program has: the file was modified since Vellum closed it, or it \
                 was not closed (checksums=off reads what is there)"
            }
        };
        let message = format!(
            "checksum mismatch in the 4096 bytes at offset {block} of the file: {cause}; 'vellum scrub' tells what \
             they belong to"
        );
        let error = Error::new(ErrorKind::ChecksumMismatch, "read", message);
        error.target(self.file.name()).at(block)
    }

    /// Reads a range, and the first block that has not its sum.
    async fn read_and_compare(
        &self,
        range: &Range<u64>,
        mut buffers: Buffers,
        pages: &[Arc<Page>],
    ) -> Result<(Buffers, Option<u64>)> {
        let blocks = blocks_around(range);
        if blocks == *range {
            let buffers = self.file.read(range.start, buffers).await?;
            let bad = first_bad(&blocks, &buffers, pages);
            return Ok((buffers, bad));
        }
        let whole = Buffer::for_read((blocks.end - blocks.start) as usize);
        let whole = self.file.read(blocks.start, Buffers::from_iter([whole]));
        let whole = whole.await?;
        let bad = first_bad(&blocks, &whole, pages);
        let mut at = (range.start - blocks.start) as usize;
        for buffer in &mut buffers {
            let len = buffer.len();
            buffer.copy_from_slice(&whole[0][at..at + len]);
            at += len;
        }
        Ok((buffers, bad))
    }
}

/// The first of some blocks that has not its sum, in `buffers`.
pub(super) fn first_bad(
    blocks: &Range<u64>,
    buffers: &Buffers,
    pages: &[Arc<Page>],
) -> Option<u64> {
    let offsets = blocks.clone().step_by(BLOCK_BYTES as usize);
    let mut sums = offsets.zip(sums_in(buffers));
    let bad = sums.find(|&(block, sum)| {
        let known = page_of(pages, block).sum(block);
        known != UNKNOWN && known != sum
    });
    bad.map(|(block, _)| block)
}

impl Storage for Checksummed {
    delegate!(
        0.file: capabilities, name, len_bytes, modified_at, allocate, allocated_bytes, free_bytes,
        event_listener,
    );

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        if total_len(&buffers) == 0 {
            return self.0.file.read(offset_bytes, buffers);
        }
        Io::start(self.0.clone().read(offset_bytes, buffers))
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        if total_len(&buffers) == 0 {
            return self.0.file.write(offset_bytes, buffers, flags);
        }
        Io::start(self.0.clone().write(offset_bytes, buffers, flags))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let range = offset_bytes..offset_bytes + len_bytes;
        Io::start(self.0.clone().write_zeroes(range, flags))
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let range = offset_bytes..offset_bytes + len_bytes;
        Io::start(self.0.clone().discard(range))
    }

    fn flush(&self) -> Io<()> {
        let flushed = self.0.file.flush();
        let checksums = self.0.clone();
        Io::start(async move { checksums.believe(flushed.await) })
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        Io::start(self.0.clone().block_status(offset_bytes, len_bytes))
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        match self.0.file.len_bytes() {
            Ok(now_bytes) if len_bytes >= now_bytes => self.0.file.truncate(len_bytes),
            _ => Io::start(self.0.clone().truncate(len_bytes)),
        }
    }

    fn close(&self) -> Io<()> {
        Io::start(self.0.clone().close())
    }
}
