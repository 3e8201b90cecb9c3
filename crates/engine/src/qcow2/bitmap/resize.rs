//! Bitmaps of an image that gets another size.
//!
//! While the size changes every bitmap is in use, also those that do not record writes:
//! only then a table may be too short or too long for the device. Growth writes longer
//! tables before the header tells the new size. Shrinking makes them shorter after, where
//! they are: that cannot fail for want of room when the size has changed already. What
//! comes into being is dirty in the enabled ones.

use std::ops::Range;

use vellum_format::bitmap::{BitmapCluster, BitmapFlags};
use vellum_io::buffer::is_zero;
use vellum_io::{Error, ErrorKind, Result};

use super::change::inconsistent;
use super::crash_consistent::is_consistent;
use super::dirty::Dirty;
use super::state::Table;
use super::store::NewClusters;
use super::track::{entries_for, point_at};
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;

const ENOTSUP: i32 = 95;

impl Image {
    /// Makes the bitmaps ready for another size.
    ///
    /// # Errors
    /// If the content of one is lost, as QEMU has it; if the device is to have no bytes.
    pub(crate) async fn bitmaps_before_resize(&self, new_bytes: u64) -> Result<()> {
        if self.header().bitmaps().is_none() {
            return Ok(());
        }
        let mut layout = self.bitmaps.layout.lock().await;
        let old_bytes = self.size.visible_bytes();
        let mut entries = self.bitmap_entries().await?;
        let header = self.header();
        if let Some(entry) = entries.iter().find(|entry| !is_consistent(&header, entry)) {
            let error = inconsistent(&entry.name_text());
            return Err(error.with_errno(ENOTSUP));
        }
        if let Some(entry) = entries.first().filter(|_| new_bytes == 0) {
            // QEMU opens no image with the bitmap of a disk without bytes.
            let message = format!(
                "Cannot resize to 0 bytes: the image has the persistent bitmap '{}'. Remove its bitmaps first",
                entry.name_text()
            );
            return Err(Error::new(ErrorKind::Unsupported, "resize", message).with_errno(ENOTSUP));
        }
        self.set_crash_consistent(&entries).await?;
        for entry in &mut entries {
            entry.flags = entry.flags.with(BitmapFlags::IN_USE);
        }
        self.rewrite_flags(&entries).await?;
        if new_bytes <= old_bytes {
            return Ok(());
        }
        let grown = self
            .rewrite_bitmaps(&mut layout, new_bytes, old_bytes..new_bytes)
            .await;
        if grown.is_err() {
            // They are as they were; if that cannot be said they are lost, as after a crash.
            drop(self.end_use_of_bitmaps().await);
        }
        grown
    }

    /// Makes the bitmaps fit the size that the device has now, however the resize ended.
    pub(crate) async fn bitmaps_after_resize(&self) -> Result<()> {
        if self.header().bitmaps().is_none() {
            return Ok(());
        }
        let mut layout = self.bitmaps.layout.lock().await;
        let size_bytes = self.size.visible_bytes();
        self.shorten_bitmaps(&mut layout, size_bytes).await?;
        self.end_use_of_bitmaps().await
    }

    /// Says of bitmaps that record nothing that nobody changes them any more.
    async fn end_use_of_bitmaps(&self) -> Result<()> {
        let mut entries = self.bitmap_entries().await?;
        for entry in &mut entries {
            if !entry.flags.contains(BitmapFlags::AUTO) {
                entry.flags = entry.flags.without(BitmapFlags::IN_USE);
            }
        }
        self.rewrite_flags(&entries).await?;
        match self.bitmaps.is_tracking() {
            true => Ok(()),
            false => self.clear_crash_consistent().await,
        }
    }

    /// Has the tables of all bitmaps end where those of a device of this size do, which is none larger.
    async fn shorten_bitmaps(&self, layout: &mut Vec<Table>, size_bytes: u64) -> Result<()> {
        let mut entries = self.bitmap_entries().await?;
        // Bits do not change from here on: whoever wants one set waits for the layout.
        let old_bytes = self.bitmaps.live().covered.size_bytes();
        let mut tracked = self.bitmaps.uncover(old_bytes).bitmaps.clone();
        let mut tables = layout.clone();
        let mut dropped = Vec::new();
        for entry in &mut entries {
            let number = tracked.iter().position(|bitmap| bitmap.name == entry.name);
            let mut table = match number {
                Some(number) => tables[number].clone(),
                None => self.load_bitmap(entry, size_bytes).await?.1,
            };
            if number.is_none() && !self.owns_table(&table).await? {
                // Somebody else's data may be there. A table that is too long is not trusted any more.
                continue;
            }
            let empty = Dirty::new(entry.granularity_bits, size_bytes);
            dropped.extend(table.shorten(entries_for(self, &empty), &self.geometry));
            self.clear_beyond(&table, empty.bits().len()).await?;
            point_at(entry, &table);
            if let Some(number) = number {
                tracked[number].set_size(size_bytes);
                tables[number] = table;
            }
        }
        self.rewrite_flags(&entries).await?;
        *layout = tables;
        self.bitmaps.live().bitmaps = tracked;
        drop(self.bitmaps.uncover(size_bytes));
        self.drop_clusters(dropped);
        Ok(())
    }

    /// Clears what the last cluster of a table's bits has beyond the last bit: QEMU would count it.
    async fn clear_beyond(&self, table: &Table, bits: u64) -> Result<()> {
        let cluster_bits = self.geometry.cluster_size_bytes() * 8;
        let (last, inside) = (bits / cluster_bits, bits % cluster_bits);
        let Some(BitmapCluster::Stored(host)) = table.clusters.get(last as usize) else {
            return Ok(());
        };
        let len_bytes = self.geometry.cluster_size_bytes();
        let mut bytes = read_bytes(&self.file, host.bytes(), len_bytes).await?;
        let (first, kept) = ((inside / 8) as usize, inside % 8);
        let beyond = (bytes[first] >> kept, &bytes[first + 1..]);
        if beyond.0 == 0 && is_zero(beyond.1) {
            return Ok(());
        }
        bytes[first] &= (1 << kept) - 1;
        bytes[first + 1..].fill(0);
        self.write_bytes(host.bytes(), bytes).await
    }

    /// Writes all bitmaps for another size to new places, with `dirty` dirty in the
    /// enabled ones.
    pub(super) async fn rewrite_bitmaps(
        &self,
        layout: &mut Vec<Table>,
        size_bytes: u64,
        dirty: Range<u64>,
    ) -> Result<()> {
        let mut entries = self.bitmap_entries().await?;
        // Bits do not change from here on: whoever wants one set waits for the layout.
        let old_bytes = self.bitmaps.live().covered.size_bytes();
        let mut tracked = self.bitmaps.uncover(old_bytes).bitmaps.clone();
        let mut new = NewClusters::default();
        let mut dropped = Vec::new();
        let mut tables = layout.clone();
        for entry in &mut entries {
            let number = tracked.iter().position(|bitmap| bitmap.name == entry.name);
            let (table, old) = match number {
                Some(number) => {
                    let bitmap = &mut tracked[number];
                    bitmap.set_size(size_bytes);
                    bitmap.dirty.mark(&dirty);
                    let mut table = self.store_bits(&bitmap.on_disk(), &mut new).await?;
                    if bitmap.is_coarse() {
                        table.coarse.extend(0..table.clusters.len());
                    }
                    let old = std::mem::replace(&mut tables[number], table.clone());
                    (table, old)
                }
                None => {
                    // Bits beyond the end of a longer table are nobody's.
                    let known = size_bytes.min(self.header().guest_size_bytes());
                    let (mut bits, old) = self.load_bitmap(entry, known).await?;
                    bits.set_size(size_bytes);
                    (self.store_bits(&bits, &mut new).await?, old)
                }
            };
            point_at(entry, &table);
            dropped.push(old);
        }
        self.replace_directory(&entries, new)
            .await
            .map_err(|error| match error.kind() {
                ErrorKind::NoSpace => error.context("resize", "no room for the bitmaps"),
                _ => error,
            })?;
        *layout = tables;
        self.bitmaps.live().bitmaps = tracked;
        drop(self.bitmaps.uncover(size_bytes));
        dropped
            .iter()
            .for_each(|table| self.drop_table_of_bitmap(table));
        Ok(())
    }
}
