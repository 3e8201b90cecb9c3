//! Drawing the map: where the metadata of an open image lies.

use std::sync::atomic::Ordering;

use vellum_format::l1::L1Entry;
use vellum_format::snapshot::SnapshotEntry;
use vellum_format::types::HostOffset;
use vellum_io::Result;

use super::Metadata;
use super::OverlapMap;
use crate::qcow2::header::load::{SnapshotTable, read_bytes};
use crate::qcow2::image::Image;

impl Image {
    /// Enters everything into the map that the header does not know, before a change.
    pub(crate) async fn map_metadata(&self) -> Result<()> {
        if !self.overlap.complete.load(Ordering::Acquire) {
            self.remap_metadata();
        }
        if self.overlap.checks.contains(Metadata::InactiveL2) {
            self.map_inactive_tables().await?;
        }
        Ok(())
    }

    /// Draws the map anew, after metadata was exchanged as a whole. Nobody may
    /// allocate meanwhile.
    pub(crate) fn remap_metadata(&self) {
        let map = &self.overlap;
        map.clear();
        map.add_header(&self.header());
        for index in 0..self.l1.len() {
            map.add_table(Metadata::ActiveL2, self.l1.get(index));
        }
        let (table, blocks) = {
            let table = self.allocator.refcounts.table();
            let first = table.offset.cluster(&self.geometry).index();
            let blocks = table.entries.used().iter();
            let blocks = blocks.map(|entry| entry.raw_offset());
            let blocks: Vec<u64> = blocks.collect();
            (first..first + table.clusters, blocks)
        };
        map.add(Metadata::RefcountTable, table);
        for block in blocks {
            map.add_block(HostOffset(block));
        }
        let snapshots = self.snapshot_table();
        let start = self.header().snapshots_offset;
        map.add(
            Metadata::SnapshotTable,
            map.clusters(start, snapshots.size_bytes),
        );
        for snapshot in self.sound_snapshots(&snapshots) {
            let len_bytes = u64::from(snapshot.l1_entries) * 8;
            let area = map.clusters(snapshot.l1_table_offset, len_bytes);
            map.add(Metadata::InactiveL1, area);
        }
        map.complete.store(true, Ordering::Release);
        if map.checks.contains(Metadata::InactiveL2) {
            // The next change looks for the tables of the snapshots.
            self.preparation.is_over.store(false, Ordering::Release);
        }
    }

    /// The snapshots whose L1 tables can be: others cannot be read, and could claim
    /// any part of the file.
    fn sound_snapshots<'a>(
        &self,
        table: &'a SnapshotTable,
    ) -> impl Iterator<Item = &'a SnapshotEntry> {
        let geometry = self.geometry;
        let entries = table.entries.iter();
        entries.filter(move |entry| entry.check_l1_table(&geometry).is_ok())
    }

    async fn map_inactive_tables(&self) -> Result<()> {
        let in_file = self.file.len_bytes()?;
        for snapshot in self.sound_snapshots(&self.snapshot_table()) {
            let start = snapshot.l1_table_offset.bytes();
            let len_bytes = u64::from(snapshot.l1_entries) * 8;
            let len_bytes = len_bytes.min(in_file.saturating_sub(start));
            let table = read_bytes(&self.file, start, len_bytes).await?;
            for entry in (0..table.len() / 8).filter_map(|at| L1Entry::read(&table, at)) {
                self.overlap.add_table(Metadata::InactiveL2, entry);
            }
        }
        Ok(())
    }
}

impl OverlapMap {
    /// Notes where a refcount block lies; 0: there is none.
    pub(crate) fn add_block(&self, block: HostOffset) {
        if block.bytes() != 0 {
            self.add(Metadata::RefcountBlock, self.clusters(block, 1));
        }
    }

    /// Notes where an L1 entry leads, if it leads anywhere.
    pub(crate) fn add_table(&self, kind: Metadata, entry: L1Entry) {
        if entry.raw_offset() != 0 {
            self.add(kind, self.clusters(HostOffset(entry.raw_offset()), 1));
        }
    }
}
