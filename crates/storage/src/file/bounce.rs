//! Requests that take several steps where direct I/O wants whole blocks: through a copy, or
//! after others have ended.

use super::File;
use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Result, align};

impl File {
    /// Reads through an aligned copy.
    pub(super) async fn read_bounced(
        &self,
        offset_bytes: u64,
        mut buffers: Buffers,
    ) -> Result<Buffers> {
        let len_bytes = total_len(&buffers);
        let around = self.alignment.around(offset_bytes, len_bytes);
        let copy = self.read_range(around.clone()).await?;
        let skip = (offset_bytes - around.start) as usize;
        align::scatter(&copy[skip..], &mut buffers);
        Ok(buffers)
    }

    pub(super) async fn read_range(&self, range: std::ops::Range<u64>) -> Result<Buffer> {
        let buffer = Buffer::for_read((range.end - range.start) as usize);
        self.read(range.start, Buffers::from_buf([buffer]))
            .into_single()
            .await
    }

    /// Writes what the kernel takes as it is, where others may have to end first.
    pub(super) async fn write_in_turn(
        &self,
        offset_bytes: u64,
        buffers: Buffers,
        durable: bool,
    ) -> Result<Buffers> {
        let len_bytes = total_len(&buffers);
        let _held = self
            .ranges
            .lock_for_write(self.alignment, offset_bytes, len_bytes)
            .await;
        if !self.shares_errors(durable) {
            return self.write(offset_bytes, buffers, durable).await;
        }
        // First into the page cache: a full disk is met by that alone. If the write that is durable met it,
        // nobody could tell it from a failed sync, after which nothing of the file is believed any more.
        let buffers = self.write(offset_bytes, buffers, false).await?;
        let buffers = self.write(offset_bytes, buffers, durable).await?;
        self.descriptor.accept_sync("write", 0).await?;
        Ok(buffers)
    }

    /// Writes through an aligned copy, whose first and last block are read first
    /// where the request covers only a part of them.
    pub(super) async fn write_bounced(
        &self,
        offset_bytes: u64,
        buffers: Buffers,
        durable: bool,
    ) -> Result<Buffers> {
        let len_bytes = total_len(&buffers);
        let around = self.alignment.around(offset_bytes, len_bytes);
        let end = offset_bytes + len_bytes;
        let mut copy = Buffer::for_read((around.end - around.start) as usize);
        let _held = self
            .ranges
            .lock_for_write(self.alignment, offset_bytes, len_bytes)
            .await;
        let unit = u64::from(self.alignment.request_bytes);
        if offset_bytes > around.start {
            let block = self.read_range(around.start..around.start + unit).await?;
            copy[..block.len()].copy_from_slice(&block);
        }
        let last_is_read = offset_bytes > around.start && around.end - around.start == unit;
        if end < around.end && !last_is_read {
            let block = self.read_range(around.end - unit..around.end).await?;
            let at = copy.len() - block.len();
            copy[at..].copy_from_slice(&block);
        }
        let skip = (offset_bytes - around.start) as usize;
        align::gather(&buffers, &mut copy[skip..skip + len_bytes as usize]);
        self.write_blocks(around.start, end, copy, durable).await?;
        Ok(buffers)
    }
}
