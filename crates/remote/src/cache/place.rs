//! Where the blocks of one version are on this host, and claims on them.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use vellum_io::{Buffer, Buffers, Error, Result};
use vellum_storage::file::{FileOptions, FileStorage, Locks};
use vellum_storage::lock::ranges;
use vellum_storage::{Storage, WriteFlags};

use super::directory::Files;
use super::layout::{ABSENT, BLOCK_BYTES, ENTRY_BYTES, Entry, Identity, entries_of, entry_of};

/// Which blocks have the hashes that their entries say.
fn are_whole(entries: &[Entry], bytes: &[u8]) -> impl Iterator<Item = bool> {
    let blocks = entries.iter().zip(bytes.chunks(BLOCK_BYTES as usize));
    blocks.map(|(entry, block)| *entry != ABSENT && entry_of(block) == *entry)
}

/// The data and the index of a version.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) identity: Identity,
    pub(super) data: Arc<dyn Storage>,
    pub(super) index: Arc<dyn Storage>,
    /// What claims are made on: the index. Storages that are nobody else's have none.
    claims: Option<File>,
    /// The index opened once more: claims on it exclude those of this same process, too.
    alone: Option<File>,
}

impl Place {
    pub(super) fn of_files(identity: Identity, files: Files) -> Result<Self> {
        // Claims keep processes apart; locks of images would keep others out.
        let options = FileOptions::default().locks(Locks::Unlocked);
        let stem = identity.stem();
        let failed = |error| Error::from_io("open", &error);
        let claims = files.index.try_clone().map_err(failed)?;
        let again = format!("/proc/self/fd/{}", claims.as_raw_fd());
        let alone = File::options().read(true).write(true).open(again);
        let alone = alone.map_err(failed)?;
        let open = |file: File, kind| {
            FileStorage::from_descriptor(file.into(), format!("{stem}.{kind}"), &options)
        };
        Ok(Place {
            data: open(files.data, "data")?,
            index: open(files.index, "index")?,
            identity,
            claims: Some(claims),
            alone: Some(alone),
        })
    }

    /// One that nobody shares, for tests.
    pub(super) fn of_storages(
        identity: Identity,
        data: Arc<dyn Storage>,
        index: Arc<dyn Storage>,
    ) -> Self {
        Place {
            identity,
            data,
            index,
            claims: None,
            alone: None,
        }
    }

    /// The file that claims are made on.
    pub(super) fn claims(&self) -> Option<&File> {
        self.claims.as_ref()
    }

    pub(super) fn try_claim(&self, entries: &Range<u64>) -> Result<bool> {
        let claims = self.claims.as_ref();
        claims.map_or(Ok(true), |file| ranges::try_claim(file, entries))
    }

    /// Claims entries of which nobody has any, not even another task of this process.
    pub(super) fn try_claim_alone(&self, entries: &Range<u64>) -> Result<bool> {
        let alone = self.alone.as_ref();
        alone.map_or(Ok(true), |file| ranges::try_claim(file, entries))
    }

    pub(super) fn release_alone(&self, entries: &Range<u64>) {
        if let Some(file) = &self.alone {
            ranges::release(file, entries);
        }
    }

    pub(super) fn release(&self, entries: &Range<u64>) {
        if let Some(file) = &self.claims {
            ranges::release(file, entries);
        }
    }

    /// The entries of blocks.
    pub(super) async fn entries(&self, blocks: &Range<u64>) -> Result<Vec<Entry>> {
        let entries = entries_of(blocks);
        let buffer = Buffer::for_read((entries.end - entries.start) as usize);
        let read = self.index.read(entries.start, Buffers::from_iter([buffer]));
        let read = Buffer::join_all(read.await?);
        let (entries, _) = read.as_chunks::<{ ENTRY_BYTES as usize }>();
        Ok(entries.to_vec())
    }

    /// Which of some blocks are there and whole: their bytes have the hashes that the entries say.
    pub(super) async fn whole_blocks(&self, blocks: &Range<u64>) -> Result<Vec<bool>> {
        let entries = self.entries(blocks).await?;
        if entries.iter().all(|entry| *entry == ABSENT) {
            return Ok(vec![false; entries.len()]);
        }
        let bytes = self.read(blocks).await?;
        Ok(are_whole(&entries, &bytes).collect())
    }

    /// The bytes of some blocks, if all of them are there and whole.
    pub(super) async fn read_whole(&self, blocks: &Range<u64>) -> Result<Option<Buffer>> {
        let entries = self.entries(blocks).await?;
        let bytes = self.read(blocks).await?;
        let is_whole = are_whole(&entries, &bytes).all(|is_whole| is_whole);
        Ok(is_whole.then_some(bytes))
    }

    fn len_bytes(&self, blocks: &Range<u64>) -> usize {
        let end = (blocks.end * BLOCK_BYTES).min(self.identity.len_bytes);
        (end - blocks.start * BLOCK_BYTES) as usize
    }

    async fn read(&self, blocks: &Range<u64>) -> Result<Buffer> {
        let buffer = Buffer::for_read(self.len_bytes(blocks));
        let start = blocks.start * BLOCK_BYTES;
        let read = self.data.read(start, Buffers::from_iter([buffer])).await?;
        Ok(Buffer::join_all(read))
    }

    /// Reads blocks from somewhere else.
    pub(super) async fn read_from(
        &self,
        below: &dyn Storage,
        blocks: &Range<u64>,
    ) -> Result<Buffer> {
        let buffer = Buffer::for_read(self.len_bytes(blocks));
        let start = blocks.start * BLOCK_BYTES;
        let read = below.read(start, Buffers::from_iter([buffer])).await?;
        Ok(Buffer::join_all(read))
    }

    /// Puts blocks in their place. Under a claim on their entries.
    pub(super) async fn store(&self, blocks: &Range<u64>, bytes: Buffer) -> Result<()> {
        let entries: Vec<u8> = bytes
            .chunks(BLOCK_BYTES as usize)
            .flat_map(entry_of)
            .collect();
        let start = blocks.start * BLOCK_BYTES;
        let flags = WriteFlags::default();
        let bytes = Buffers::from_iter([bytes]);
        self.data.write(start, bytes, flags).await?;
        let entries = Buffers::from_iter([Buffer::copy_of(&entries)]);
        let at = entries_of(blocks).start;
        self.index.write(at, entries, flags).await?;
        Ok(())
    }
}
