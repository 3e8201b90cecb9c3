//! [`Space`]: where the next block goes, and the footer behind it.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};

use super::footer::{Footer, LEN_BYTES};
use super::header::UNALLOCATED;
use super::image::is_footer;
use crate::fields;

/// The footer is put so far behind the last block, that not every new one has to wait for it.
const AHEAD_BYTES: u64 = 16 << 20;

/// See the module's head.
#[derive(Debug)]
pub(super) struct Space {
    footer: Footer,
    bitmap_bytes: u64,
    block_bytes: u64,
    /// Where the next block goes.
    free_bytes: u64,
    /// Where the last footer lies, durably: blocks end before it.
    footer_bytes: u64,
    /// From there on the file had nothing when it was opened.
    fresh_bytes: u64,
    /// There may be unused space before the footer.
    has_grown: bool,
}

/// A place for a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewPlace {
    pub offset_bytes: u64,
    /// Nothing was ever written where the block's bytes go.
    pub is_fresh: bool,
}

impl Space {
    /// That of an image whose last block ends at `free_bytes`.
    pub(super) async fn new(
        file: &dyn Storage,
        footer: Footer,
        free_bytes: u64,
        bitmap_bytes: u64,
        block_bytes: u64,
    ) -> Result<Space> {
        let file_bytes = file.len_bytes()?;
        let last_bytes = file_bytes.saturating_sub(LEN_BYTES as u64);
        // A file without a footer at its end gets one before anything else.
        let footer_bytes = match last_bytes >= free_bytes && is_footer(file, last_bytes).await? {
            true => last_bytes,
            false => free_bytes,
        };
        Ok(Space {
            footer,
            bitmap_bytes,
            block_bytes,
            free_bytes,
            footer_bytes,
            fresh_bytes: file_bytes,
            has_grown: false,
        })
    }

    /// Takes space for a block, before the last footer or with another one behind it, and writes its bitmap: the
    /// block is going to be written whole.
    pub(super) async fn take(&mut self, file: &Arc<dyn Storage>) -> Result<NewPlace> {
        let whole_bytes = self.bitmap_bytes + self.block_bytes;
        let start = self.free_bytes;
        let end = start + whole_bytes;
        if start / 512 >= u64::from(UNALLOCATED) {
            let message = "the VHD image cannot become larger";
            return Err(Error::new(ErrorKind::NoSpace, "write", message).target(file.name()));
        }
        if end > self.footer_bytes {
            let blocks = (AHEAD_BYTES / whole_bytes).max(1);
            let footer_bytes = start + blocks * whole_bytes;
            fields::write_at(&**file, footer_bytes, self.footer.bytes()).await?;
            fields::barrier(&**file).await?;
            self.footer_bytes = footer_bytes;
            self.has_grown = true;
        }
        let bitmap = vec![0xff; self.bitmap_bytes as usize];
        fields::write_at(&**file, start, &bitmap).await?;
        self.free_bytes = end;
        Ok(NewPlace {
            offset_bytes: start,
            // The footers that were written since are all where a bitmap goes, if there are bitmaps.
            is_fresh: self.bitmap_bytes > 0 && start + self.bitmap_bytes >= self.fresh_bytes,
        })
    }

    /// Cuts the file off behind the last block and a footer. Everything else is durable.
    pub(super) async fn end(&mut self, file: &Arc<dyn Storage>) -> Result<()> {
        if !self.has_grown || !file.capabilities().growable {
            return Ok(());
        }
        if self.footer_bytes > self.free_bytes {
            fields::write_at(&**file, self.free_bytes, self.footer.bytes()).await?;
            fields::barrier(&**file).await?;
            self.footer_bytes = self.free_bytes;
        }
        file.truncate(self.footer_bytes + LEN_BYTES as u64).await?;
        self.has_grown = false;
        Ok(())
    }
}
