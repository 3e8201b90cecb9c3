//! [`SumsFile`]: the file with the sums; see `vellum_format::checksums`.

use std::sync::Arc;

use vellum_format::checksums::{
    ENTRY_BYTES, Entry, PAGE_BYTES, Superblock, decode_page, encode_page, entry_offset_bytes,
    page_offset_bytes,
};
use vellum_io::{Buffer, Buffers, Result, finish_all};
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
        let page = read_bytes(&self.0, 0, PAGE_BYTES).await?;
        let decoded = Superblock::decode(&page);
        decoded.map_err(|error| {
            let error = crate::qcow2::integrity::errors::bad_format("open checksums", &error);
            error.target(self.0.name())
        })
    }

    /// Empties the file, durably, for checksums of `id`; their superblock is not there yet.
    pub(super) async fn clear(&self) -> Result<()> {
        self.0.truncate(0).await?;
        self.0.flush().await
    }

    /// Writes the superblock, durably.
    pub(super) async fn begin(&self, superblock: Superblock) -> Result<()> {
        self.write(0, superblock.encode()).await?;
        self.0.flush().await
    }

    async fn write(&self, at_bytes: u64, bytes: Vec<u8>) -> Result<()> {
        let buffers = Buffers::from_iter([Buffer::copy_of(&bytes)]);
        let written = self.0.write(at_bytes, buffers, WriteFlags::default());
        written.await.map(drop)
    }

    /// Reads what counts of a region; whether its page is damaged, and nothing does.
    pub(super) async fn load(&self, page: &Page) -> Result<bool> {
        let at = entry_offset_bytes(page.region);
        let raw = read_bytes(&self.0, at, ENTRY_BYTES).await?;
        let entry = raw
            .first_chunk()
            .map_or(Entry::Open, |raw| Entry::decode(*raw));
        if entry == Entry::Open {
            return Ok(false);
        }
        page.set_settled(true);
        let bytes = read_bytes(&self.0, page_offset_bytes(page.region), PAGE_BYTES).await?;
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
