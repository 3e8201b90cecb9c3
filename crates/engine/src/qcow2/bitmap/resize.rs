//! Bitmaps of an image that gets another size.
//!
//! While the size changes every bitmap is in use, also those that do not record writes:
//! only then a table may be too short or too long for the device. Growth makes the
//! tables longer before the header tells the new size, shrinking makes them shorter
//! after. What comes into being is dirty in the enabled ones.

use std::ops::Range;

use vellum_format::bitmap::BitmapFlags;
use vellum_io::{ErrorKind, Result};

use super::change::inconsistent;
use super::crash_consistent::is_consistent;
use super::state::Table;
use super::store::NewClusters;
use super::track::point_at;
use crate::qcow2::image::Image;

const ENOTSUP: i32 = 95;

impl Image {
    /// Makes the bitmaps ready for another size.
    ///
    /// # Errors
    /// If the content of one is lost, as QEMU has it.
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
        self.set_crash_consistent(&entries).await?;
        for entry in &mut entries {
            entry.flags = entry.flags.with(BitmapFlags::IN_USE);
        }
        self.rewrite_flags(&entries).await?;
        match new_bytes > old_bytes {
            true => {
                self.rewrite_bitmaps(&mut layout, new_bytes, old_bytes..new_bytes)
                    .await
            }
            false => Ok(()),
        }
    }

    /// Makes the bitmaps fit the size that the device has now, however the resize ended.
    pub(crate) async fn bitmaps_after_resize(&self) -> Result<()> {
        if self.header().bitmaps().is_none() {
            return Ok(());
        }
        let mut layout = self.bitmaps.layout.lock().await;
        let size_bytes = self.size.visible_bytes();
        self.rewrite_bitmaps(&mut layout, size_bytes, 0..0).await?;
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
