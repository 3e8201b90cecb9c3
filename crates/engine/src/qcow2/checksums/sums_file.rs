//! [`SumsFile`]: the file with the sums; see `vellum_format::checksums`.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::checksums::{
    ENTRY_BYTES, Entry, PAGE_BYTES, PAGES_PER_GROUP, Superblock, decode_page, encode_page,
    entry_offset_bytes, page_offset_bytes, regions_in,
};
use vellum_io::{Buffer, Buffers, Error, Result, finish_all};
use vellum_storage::{Storage, WriteFlags};

use super::page::Page;
use crate::qcow2::header::load::read_bytes;

/// Writes at the same time, at most.
const MAX_WRITES: usize = 32;

#[derive(Debug)]
pub(super) struct SumsFile(pub(super) Arc<dyn Storage>);

impl SumsFile {
    /// The superblock, if there is one.
    ///
    /// # Errors
    /// When it cannot be read, or has a version that is not known.
    pub(super) async fn superblock(&self) -> Result<Option<Superblock>> {
        let page = self.read(0, PAGE_BYTES).await?;
        let decoded = Superblock::decode(&page);
        decoded.map_err(|error| {
            let error = crate::qcow2::integrity::errors::bad_format("open checksums", &error);
            error.target(self.0.name())
        })
    }

    /// The first of some regions of which sums count, or whose entry is damaged.
    pub(super) async fn first_settled(&self, regions: Range<u64>) -> Result<Option<u64>> {
        let end = regions.end.min(regions_in(self.0.len_bytes()?));
        let mut next = regions.start;
        while next < end {
            // Entries of a group lie together.
            let group_end = end.min((next / PAGES_PER_GROUP + 1) * PAGES_PER_GROUP);
            let len_bytes = (group_end - next) * ENTRY_BYTES;
            let entries = self.read(entry_offset_bytes(next), len_bytes).await?;
            let open = Entry::Open.encode();
            let mut entries = entries.as_chunks::<{ ENTRY_BYTES as usize }>().0.iter();
            if let Some(at) = entries.position(|entry| *entry != open) {
                return Ok(Some(next + at as u64));
            }
            next = group_end;
        }
        Ok(None)
    }

    /// Writes the entries of open regions again as they are, durably: what a flush that failed was for
    /// may be read here and not be on the disk, which would have older sums count there.
    pub(super) async fn open_again(&self) -> Result<()> {
        let regions = regions_in(self.0.len_bytes()?);
        let open = Entry::Open.encode();
        let mut has_open = false;
        for first in (0..regions).step_by(PAGES_PER_GROUP as usize) {
            let count = (regions - first).min(PAGES_PER_GROUP);
            let at_bytes = entry_offset_bytes(first);
            let entries = self.read(at_bytes, count * ENTRY_BYTES).await?;
            let mut each = entries.as_chunks::<{ ENTRY_BYTES as usize }>().0.iter();
            if each.any(|entry| *entry == open) {
                self.write(at_bytes, entries.to_vec()).await?;
                has_open = true;
            }
        }
        match has_open {
            true => self.flush().await,
            false => Ok(()),
        }
    }

    /// Says of an error which file it is of: not the image's, which may lie elsewhere.
    fn named(&self, operation: &'static str, error: Error) -> Error {
        let what = match operation {
            "read" => "read",
            "flush" => "made durable",
            _ => "written",
        };
        let name = self.0.name();
        error.context(
            operation,
            format!("The checksums in '{name}' cannot be {what}"),
        )
    }

    async fn read(&self, at_bytes: u64, len_bytes: u64) -> Result<Buffer> {
        let read = read_bytes(&self.0, at_bytes, len_bytes).await;
        read.map_err(|error| self.named("read", error))
    }

    /// Makes durable what has been written.
    pub(super) async fn flush(&self) -> Result<()> {
        let flushed = self.0.flush().await;
        flushed.map_err(|error| self.named("flush", error))
    }

    /// Empties the file, durably, for checksums of `id`; their superblock is not there yet.
    pub(super) async fn clear(&self) -> Result<()> {
        let cut = self.0.truncate(0).await;
        cut.map_err(|error| self.named("write", error))?;
        self.flush().await
    }

    /// Writes the superblock, durably.
    pub(super) async fn begin(&self, superblock: Superblock) -> Result<()> {
        self.write(0, superblock.encode()).await?;
        self.flush().await
    }

    async fn write(&self, at_bytes: u64, bytes: Vec<u8>) -> Result<()> {
        let buffers = Buffers::from_iter([Buffer::copy_of(&bytes)]);
        let written = self.0.write(at_bytes, buffers, WriteFlags::default());
        let written = written.await.map(drop);
        written.map_err(|error| self.named("write", error))
    }

    /// Reads what counts of a region; whether its page is damaged, and nothing does.
    pub(super) async fn load(&self, page: &Page) -> Result<bool> {
        let at = entry_offset_bytes(page.region);
        let raw = self.read(at, ENTRY_BYTES).await?;
        let entry = raw
            .first_chunk()
            .map_or(Entry::Open, |raw| Entry::decode(*raw));
        if entry == Entry::Open {
            return Ok(false);
        }
        page.set_settled(true);
        let at = page_offset_bytes(page.region);
        let bytes = self.read(at, PAGE_BYTES).await?;
        if Entry::settled(&bytes) != entry {
            return Ok(true);
        }
        page.fill(decode_page(&bytes));
        Ok(false)
    }

    /// Writes the entries of regions.
    pub(super) async fn write_entries(
        &self,
        entries: impl IntoIterator<Item = (u64, Entry)>,
    ) -> Result<()> {
        let writes = entries
            .into_iter()
            .map(|(region, entry)| self.write(entry_offset_bytes(region), entry.encode().to_vec()));
        finish_all(MAX_WRITES, writes).await.map(drop)
    }

    /// Writes the sums of regions; the entries that vouch for them.
    pub(super) async fn write_pages(&self, pages: &[Arc<Page>]) -> Result<Vec<(u64, Entry)>> {
        let writes = pages.iter().map(|page| async {
            let bytes = encode_page(page.sums());
            let entry = Entry::settled(&bytes);
            self.write(page_offset_bytes(page.region), bytes).await?;
            Ok((page.region, entry))
        });
        finish_all(MAX_WRITES, writes).await
    }
}
