//! Leaving bitmaps behind that everybody may trust.

use std::collections::BTreeSet;
use std::sync::Arc;

use vellum_format::bitmap::{BitmapCluster, BitmapFlags};
use vellum_format::features::Autoclear;
use vellum_format::types::HostOffset;
use vellum_io::{Buffer, ErrorKind, Result};

use super::crash_consistent::is_consistent;
use super::state::Table;
use super::store::{Content, NewClusters, content};
use super::track::{entries_for, point_at};
use crate::qcow2::image::Image;
use vellum_io::range_lock::Mode;

impl Image {
    /// Whether the close has bitmaps to heal, also of an image that nobody has changed.
    pub(crate) fn has_crash_consistent_bitmaps(&self) -> bool {
        self.header()
            .autoclear
            .contains(Autoclear::CRASH_CONSISTENT_BITMAPS)
    }

    /// Writes the exact bits of all bitmaps, and says that none is in use any more but
    /// those that are lost. The guest's data is durable already. A bitmap that a crash
    /// has left in use, and which is crash-consistent, is healed by this too.
    pub(crate) async fn close_bitmaps(self: &Arc<Self>) -> Result<()> {
        if !self.bitmaps.is_tracking() && !self.has_crash_consistent_bitmaps() {
            return Ok(());
        }
        self.begin_change("close").await?;
        // What still runs either has its bits set by now, or fails.
        let _all = self
            .guest_ranges
            .acquire(0..u64::MAX, Mode::Exclusive)
            .await;
        self.bitmaps.close();
        let mut layout = self.bitmaps.layout.lock().await;
        for (number, table) in layout.iter_mut().enumerate() {
            self.write_exact(number, table).await?;
        }
        self.end_bitmap_use().await?;
        self.clear_crash_consistent().await
    }

    /// Writes the exact bits of a bitmap over those that hold more.
    async fn write_exact(&self, number: usize, table: &mut Table) -> Result<()> {
        let mut bytes = Buffer::zeroed(self.geometry.cluster_size_bytes() as usize);
        let mut changed = BTreeSet::new();
        let mut dropped = Vec::new();
        for index in std::mem::take(&mut table.coarse) {
            let found = {
                let live = self.bitmaps.live();
                content(&live.bitmaps[number].dirty, index as u64, &mut bytes)
            };
            let old = table.clusters[index];
            let new = match found {
                Content::Zeros => BitmapCluster::Zeros,
                Content::Ones => BitmapCluster::Ones,
                Content::Mixed => match self.rewrite_bits(old, &bytes).await? {
                    Some(new) => new,
                    None => continue,
                },
            };
            if new == old {
                continue;
            }
            if let BitmapCluster::Stored(host) = old {
                dropped.push((host.cluster(&self.geometry).index(), 1));
            }
            table.clusters[index] = new;
            changed.insert(index);
        }
        if !changed.is_empty() {
            self.allocator.refcounts.write_back().await?;
            self.file.flush().await?;
            self.write_table_entries(table, &changed).await?;
        }
        self.file.flush().await?;
        self.drop_clusters(dropped);
        Ok(())
    }

    /// Writes a cluster of bits where it is, or to a new place. `None`: there is no
    /// room, and it stays as dirty as it was.
    async fn rewrite_bits(
        &self,
        old: BitmapCluster,
        bytes: &[u8],
    ) -> Result<Option<BitmapCluster>> {
        let BitmapCluster::Stored(host) = old else {
            return match self.write_new_bits(bytes).await {
                Ok(host) => Ok(Some(BitmapCluster::Stored(host))),
                Err(error) if error.kind() == ErrorKind::NoSpace => Ok(None),
                Err(error) => Err(error),
            };
        };
        self.write_bytes(host.bytes(), Buffer::copy_of(bytes))
            .await?;
        Ok(Some(old))
    }

    /// Writes bits to a new cluster, which is given back if that fails.
    async fn write_new_bits(&self, bytes: &[u8]) -> Result<HostOffset> {
        let mut new = NewClusters::default();
        let host = self.allocate_run(1, &mut new).await?;
        let written = self.write_bytes(host.bytes(), Buffer::copy_of(bytes)).await;
        if written.is_err() {
            self.give_back_new(new).await;
        }
        written.map(|()| host)
    }

    /// Takes the flag "in use" from all crash-consistent bitmaps, with tables that fit the
    /// device.
    async fn end_bitmap_use(&self) -> Result<()> {
        let header = self.header();
        let mut entries = self.bitmap_entries().await?;
        let mut new = NewClusters::default();
        let (mut flags, mut old) = (false, Vec::new());
        for entry in &mut entries {
            let in_use = entry.flags.contains(BitmapFlags::IN_USE);
            if !in_use || !is_consistent(&header, entry) {
                continue;
            }
            entry.flags = entry.flags.without(BitmapFlags::IN_USE);
            flags = true;
            let size_bytes = self.size_bytes();
            let empty = super::dirty::Dirty::new(entry.granularity_bits, size_bytes);
            if u64::from(entry.table_entries) != entries_for(self, &empty) {
                let (dirty, table) = self.load_bitmap(entry, size_bytes).await?;
                old.push(table);
                point_at(entry, &self.store_bits(&dirty, &mut new).await?);
            }
        }
        if old.is_empty() {
            return match flags {
                true => self.rewrite_flags(&entries).await,
                false => Ok(()),
            };
        }
        self.replace_directory(&entries, new).await?;
        old.iter()
            .for_each(|table| self.drop_table_of_bitmap(table));
        Ok(())
    }
}
