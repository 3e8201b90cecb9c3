//! [`Checksummed`]: the image's file as all other modules see it.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::checksums::{BLOCK_BYTES, REGION_BYTES, UNKNOWN};
use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::mutants::{self, Mutant};
use vellum_storage::{Storage, WriteFlags, ZeroFlags, delegate};

use super::content::{Content, NewSum, page_of, sums_in};
use super::page::{Page, blocks_around};
use super::pages::Checksums;
use crate::range_lock::Mode;

/// What is zeroed, discarded or cut at a time.
const STEP_BYTES: u64 = 64 * REGION_BYTES;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Checksummed(pub(crate) Arc<Checksums>);

/// A change of blocks, until it is dropped. Unless it has [ended](Change::end) nobody knows what
/// they hold.
struct Change<'a> {
    pages: &'a [Arc<Page>],
    blocks: Range<u64>,
    sums: Vec<NewSum>,
    is_done: bool,
}

impl Change<'_> {
    fn end(mut self) {
        self.is_done = true;
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let blocks = self.blocks.clone().step_by(BLOCK_BYTES as usize);
        for (block, new) in blocks.zip(&self.sums) {
            let sum = match self.is_done || new.is_damaged {
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
            is_done: false,
        };
        let buffers = self.file.write(offset_bytes, buffers, flags).await?;
        change.end();
        self.watch();
        Ok(buffers)
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
                is_done: false,
            };
            let len_bytes = range.end - range.start;
            self.file
                .write_zeroes(range.start, len_bytes, flags)
                .await?;
            change.end();
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
        Ok(())
    }

    async fn truncate(self: Arc<Self>, len_bytes: u64) -> Result<()> {
        let old_bytes = self.file.len_bytes()?;
        let cut = blocks_around(&(len_bytes..old_bytes.max(len_bytes)));
        let mut turns = Vec::new();
        if !cut.is_empty() {
            for blocks in steps(cut) {
                turns.push(self.forget(blocks).await?);
            }
        }
        self.file.truncate(len_bytes).await
    }

    /// Takes blocks, of which nobody is to know what they hold.
    async fn forget(self: &Arc<Self>, blocks: Range<u64>) -> Result<crate::range_lock::RangeGuard> {
        let turn = self.ranges.acquire(blocks.clone(), Mode::Exclusive).await;
        let pages = self.pages_of(&blocks).await?;
        self.open_regions(&pages).await?;
        for block in blocks.step_by(BLOCK_BYTES as usize) {
            page_of(&pages, block).set_sum(block, UNKNOWN);
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

    fn mismatch(&self, block: u64) -> Error {
        let message = format!(
            "checksum mismatch in the 4096 bytes at offset {block} of the file: the disk has changed them \
             ('vellum scrub' tells what they belong to)"
        );
        let error = Error::new(ErrorKind::Io, "read", message);
        error.target(self.file.name()).at(block).with_errno(5)
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
        .filter(|_| !mutants::is(Mutant::CompareNothing))
}

impl Storage for Checksummed {
    delegate!(
        0.file: capabilities, name, len_bytes, allocate, block_status, allocated_bytes,
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
