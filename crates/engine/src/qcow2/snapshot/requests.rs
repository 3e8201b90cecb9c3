//! What each request makes of the image: its tables and counts afterwards.

use std::sync::Arc;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use vellum_format::l1::L1Entry;
use vellum_format::limits;
use vellum_format::snapshot::SnapshotEntry;
use vellum_format::types::HostOffset;
use vellum_io::{Buffer, Error, ErrorKind, Result};

use super::exchange::Change;
use super::new_snapshot::NewSnapshot;
use super::places::Places;
use super::references::{Deltas, SomeClusters, set_flags};
use super::select::{SnapshotSelector, find, next_id};
use crate::qcow2::commit::write_order::DropReason;
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;
use crate::qcow2::info::{SnapshotInfo, snapshot_info};
use crate::qcow2::integrity::errors::{bad_format, corrupt};

const EEXIST: i32 = 17;
const EBUSY: i32 = 16;
const EFBIG: i32 = 27;
const ENOTSUP: i32 = 95;

/// An L2 table of the active L1 table whose flags may have to change.
struct Table {
    /// Its L1 index.
    index: usize,
    /// Where it lies.
    old: HostOffset,
    /// Where it lies afterwards: in another place if its flags change.
    now: HostOffset,
}

impl Table {
    fn moves(&self) -> bool {
        self.now != self.old
    }
}

fn refuse(kind: ErrorKind, message: &str, errno: i32) -> Error {
    Error::new(kind, "snapshot", message).with_errno(errno)
}

impl Image {
    /// Takes a snapshot.
    pub(super) async fn create_snapshot(
        self: &Arc<Self>,
        new: NewSnapshot,
    ) -> Result<SnapshotInfo> {
        let made = async {
            let mut places = Places::default();
            let planned = self.plan_creation(new, &mut places).await;
            self.carry_out(planned, places).await
        };
        self.exclusively("snapshot", made).await?;
        let table = self.snapshot_table();
        let made = table.entries.last();
        let made = made.ok_or_else(|| corrupt("snapshot", "the new snapshot has gone"))?;
        Ok(snapshot_info(made, self.size.visible_bytes()))
    }

    /// Makes the disk what it was.
    pub(super) async fn apply_snapshot(self: &Arc<Self>, which: &SnapshotSelector) -> Result<()> {
        let applied = async {
            let mut places = Places::default();
            let planned = self.plan_application(which, &mut places).await;
            self.carry_out(planned, places).await
        };
        self.exclusively("snapshot", applied).await
    }

    /// Deletes a snapshot.
    pub(super) async fn delete_snapshot(self: &Arc<Self>, which: &SnapshotSelector) -> Result<()> {
        let deleted = async {
            let mut places = Places::default();
            let planned = self.plan_deletion(which, &mut places).await;
            self.carry_out(planned, places).await
        };
        self.exclusively("snapshot", deleted).await
    }

    pub(super) async fn carry_out(
        self: &Arc<Self>,
        planned: Result<Change>,
        places: Places,
    ) -> Result<()> {
        match planned {
            Ok(change) => self.exchange(change, places).await,
            Err(error) => {
                places.give_back(self).await;
                Err(error)
            }
        }
    }

    /// A change that changes nothing yet.
    pub(super) fn no_change(&self, reason: DropReason) -> Result<Change> {
        if self.has_external_data() {
            let message = "Operation not supported";
            return Err(refuse(ErrorKind::Unsupported, message, ENOTSUP));
        }
        Ok(Change {
            active: (0..self.l1.len()).map(|index| self.l1.get(index)).collect(),
            more: Vec::new(),
            fewer: Vec::new(),
            references: None,
            metadata: Vec::new(),
            entries: self.snapshot_table().entries.clone(),
            taken: None,
            size_bytes: self.size.visible_bytes(),
            left: Vec::new(),
            reason,
            moves: false,
        })
    }

    async fn plan_creation(&self, new: NewSnapshot, places: &mut Places) -> Result<Change> {
        let mut change = self.no_change(DropReason::Other)?;
        let entry = self.new_entry(new, &change)?;
        let mut taken = change.active.clone();
        if entry.vm_state_size_bytes > 0 {
            for table in self.take_vm_state(&mut change)? {
                taken[table.index] = L1Entry::new(table.old, false);
            }
        }
        change.entries.push(entry);
        let mut tables = self.tables_of(&change.active)?;
        change.references = self.clear_flags(&mut tables, &[], places).await?;
        for table in &tables {
            change.active[table.index] = L1Entry::new(table.now, false);
            taken[table.index] = change.active[table.index];
            change.more.push(table.now);
            change.count(self, table.now, 1);
            if table.moves() {
                change.leave(self, table.old);
            }
        }
        change.taken = Some(taken);
        Ok(change)
    }

    /// Takes the tables of the VM state away from the disk. Their counts stay.
    fn take_vm_state(&self, change: &mut Change) -> Result<Vec<Table>> {
        let first = self.vm_state_index() as usize;
        let mut tables = self.tables_of(&change.active)?;
        tables.retain(|table| table.index >= first);
        for table in &tables {
            change.active[table.index] = L1Entry::UNALLOCATED;
            change.left.push(table.old);
        }
        Ok(tables)
    }

    fn new_entry(&self, new: NewSnapshot, change: &Change) -> Result<SnapshotEntry> {
        if change.entries.len() >= limits::MAX_SNAPSHOTS as usize {
            return Err(refuse(ErrorKind::InvalidArgument, "File too large", EFBIG));
        }
        let id = new.id.unwrap_or_else(|| next_id(&change.entries));
        if SnapshotSelector::Id(id.clone())
            .find(&change.entries)
            .is_some()
        {
            return Err(refuse(ErrorKind::InvalidArgument, "File exists", EEXIST));
        }
        Ok(SnapshotEntry {
            id: id.into_bytes(),
            name: new.name.into_bytes(),
            date_seconds: new.date_seconds,
            date_nanoseconds: new.date_nanoseconds,
            vm_clock_nanoseconds: new.vm_clock_nanoseconds,
            icount: new.icount,
            vm_state_size_bytes: new.vm_state_size_bytes,
            disk_size_bytes: Some(change.size_bytes),
            ..SnapshotEntry::default()
        })
    }

    async fn plan_application(
        &self,
        which: &SnapshotSelector,
        places: &mut Places,
    ) -> Result<Change> {
        if self.header().bitmaps().is_some_and(|all| all.count > 0) {
            let message = "Device has active dirty bitmaps";
            return Err(refuse(ErrorKind::InvalidArgument, message, EBUSY));
        }
        let mut change = self.no_change(DropReason::Snapshot)?;
        let (_, entry) = find(&change.entries, which)?;
        let mut snapshot = self.read_snapshot_l1(entry).await?;
        change.size_bytes = entry.disk_size_bytes.unwrap_or(change.size_bytes);
        let needed = self.geometry.l1_entries_for(change.size_bytes);
        let len = snapshot.len().max(change.active.len()).max(needed as usize);
        if len as u64 * 8 > limits::MAX_L1_SIZE_BYTES || change.size_bytes > limits::MAX_SIZE_BYTES
        {
            let message = "the size of the snapshot is beyond the format's limits";
            return Err(refuse(ErrorKind::InvalidImage, message, EFBIG));
        }
        snapshot.resize(len, L1Entry::UNALLOCATED);
        change.active.resize(len, L1Entry::UNALLOCATED);
        let same = |a: &L1Entry, b: &L1Entry| a.l2_offset() == b.l2_offset();
        let pairs = snapshot.iter().zip(&change.active);
        let differs: Vec<bool> = pairs.map(|(new, old)| !same(new, old)).collect();
        for table in self.tables_of(&change.active)? {
            if differs[table.index] {
                change.fewer.push(table.old);
                change.leave(self, table.old);
            }
        }
        let mut tables = self.tables_of(&snapshot)?;
        tables.retain(|table| differs[table.index]);
        for (index, entry) in change.active.iter_mut().enumerate() {
            *entry = snapshot[index].with_copied(false);
        }
        change.references = self.clear_flags(&mut tables, &change.fewer, places).await?;
        for table in &tables {
            change.more.push(table.now);
            // A table with other flags is the active one's own.
            match table.moves() {
                true => change.active[table.index] = L1Entry::new(table.now, true),
                false => change.count(self, table.old, 1),
            }
        }
        Ok(change)
    }

    async fn plan_deletion(&self, which: &SnapshotSelector, places: &mut Places) -> Result<Change> {
        let mut change = self.no_change(DropReason::Snapshot)?;
        let (index, _) = find(&change.entries, which)?;
        let entry = change.entries.remove(index);
        let snapshot = self.read_snapshot_l1(&entry).await?;
        let l1 = self.clusters_at(entry.l1_table_offset, u64::from(entry.l1_entries) * 8);
        change.metadata.push((l1, -1));
        let deleted = self.tables_of(&snapshot)?;
        for table in &deleted {
            change.fewer.push(table.old);
            change.count(self, table.old, -1);
        }
        let mut tables = Vec::new();
        for table in self.tables_of(&change.active)? {
            let other = snapshot
                .get(table.index)
                .and_then(|entry| entry.l2_offset());
            let entry = &mut change.active[table.index];
            // One that both have is the active one's own once the snapshot is gone,
            // unless another snapshot has it too.
            if other == Some(table.old) && self.count_of(table.old).await? == 2 {
                *entry = entry.with_copied(true);
            }
            // Also one that others seem to have: a crash may have left its count too high,
            // but not the counts of what it leads to.
            if other.is_some() {
                tables.push(table);
            }
        }
        self.update_copied_flags_by_window(&mut change, &mut tables, places)
            .await?;
        for table in tables.iter().filter(|table| table.moves()) {
            change.active[table.index] = L1Entry::new(table.now, true);
            change.leave(self, table.old);
        }
        Ok(change)
    }

    /// Gives entries of L2 tables the flags that the counts after a change ask for.
    async fn update_copied_flags_by_window(
        &self,
        change: &mut Change,
        tables: &mut [Table],
        places: &mut Places,
    ) -> Result<()> {
        if tables.is_empty() {
            return Ok(());
        }
        let geometry = &self.geometry;
        let per_block = geometry.refcount_block_entries();
        self.allocator.refcounts.write_back().await?;
        let blocks = self.counting_blocks()?;
        for window in self.windows(blocks.len() as u64) {
            let deltas = self.references(change, window.clone()).await?;
            let first = window.start / per_block;
            let inside = first as usize..(window.end / per_block) as usize;
            let counts = self.read_blocks(&blocks[inside]).await?;
            let mut own = SomeClusters::none_of(deltas.clusters());
            for (block, index) in counts.iter().zip(first..) {
                if let Some(block) = block {
                    own.add_own(&deltas, block, index * per_block, geometry);
                }
            }
            let is_counted: Vec<bool> = counts.iter().map(Option::is_some).collect();
            drop(counts);
            let is_own = |cluster: u64| {
                let block = (cluster / per_block).checked_sub(first)?;
                let counted = *is_counted.get(block as usize)?;
                counted.then(|| own.contain(cluster))
            };
            self.update_copied_flags(tables, places, is_own, |_| Ok(()))
                .await?;
            change.references = Some(deltas);
        }
        Ok(())
    }

    async fn read_blocks(&self, blocks: &[Option<HostOffset>]) -> Result<Vec<Option<Buffer>>> {
        let reads = blocks.iter().map(|block| async move {
            match block {
                Some(block) => self.read_table(*block).await.map(Some),
                None => Ok(None),
            }
        });
        let mut reads = stream::iter(reads).buffered(self.tables_at_once());
        let mut found = Vec::with_capacity(blocks.len());
        while let Some(block) = reads.next().await {
            found.push(block?);
        }
        Ok(found)
    }

    /// Clears the COPIED flags of L2 tables, which are referred to once more. If one
    /// window has room for all counts, also says what that, and one reference less to
    /// what the tables of `fewer` lead to, changes in them.
    async fn clear_flags(
        &self,
        tables: &mut [Table],
        fewer: &[HostOffset],
        places: &mut Places,
    ) -> Result<Option<Deltas>> {
        let blocks = self.counting_blocks()?.len() as u64;
        let mut windows = self.windows(blocks);
        let (Some(only), None) = (windows.next(), windows.next()) else {
            let cleared = self.update_copied_flags(tables, places, |_| Some(false), |_| Ok(()));
            return cleared.await.map(|()| None);
        };
        let mut references = self.no_references(only)?;
        let add = |table: &[u8]| references.add(table, 1);
        self.update_copied_flags(tables, places, |_| Some(false), add)
            .await?;
        let mut reads = stream::iter(fewer.iter().map(|table| self.read_table(*table)))
            .buffered(self.tables_at_once());
        while let Some(table) = reads.next().await {
            references.add(&table?, -1)?;
        }
        references.finish().map(Some)
    }

    /// Gives the entries of L2 tables the COPIED flags that `copied` says of their
    /// clusters, and shows each table to `seen`. A table that this changes is written to
    /// a new place.
    async fn update_copied_flags(
        &self,
        tables: &mut [Table],
        places: &mut Places,
        copied: impl Fn(u64) -> Option<bool>,
        mut seen: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        for tables in tables.chunks_mut(self.tables_at_once()) {
            let offsets: Vec<HostOffset> = tables.iter().map(|table| table.now).collect();
            let mut reads = stream::iter(offsets.into_iter().map(|table| self.read_table(table)))
                .buffered(self.tables_at_once());
            let mut changed = Vec::new();
            for table in &mut *tables {
                let Some(mut content) = reads.try_next().await? else {
                    break;
                };
                seen(&content)?;
                if set_flags(&mut content, &self.geometry, &copied) {
                    changed.push((table, content));
                }
            }
            self.write_changed(changed, places).await?;
        }
        Ok(())
    }

    /// Writes changed tables to new places, unless they have such.
    async fn write_changed(
        &self,
        changed: Vec<(&mut Table, Buffer)>,
        places: &mut Places,
    ) -> Result<()> {
        let staying = changed.iter().filter(|(table, _)| !table.moves()).count();
        let mut new = Vec::with_capacity(staying);
        places.many(self, staying as u64, &mut new).await?;
        let mut new = new.into_iter();
        let mut writes = Vec::with_capacity(changed.len());
        for (table, content) in changed {
            if !table.moves()
                && let Some(place) = new.next()
            {
                table.now = place;
                // The cluster may have been a table before.
                self.forget_slices(place);
            }
            writes.push((table.now, content));
        }
        self.write_tables(writes).await
    }

    /// The L2 tables of an L1 table.
    fn tables_of(&self, l1: &[L1Entry]) -> Result<Vec<Table>> {
        let mut tables = Vec::new();
        for (index, entry) in l1.iter().enumerate() {
            let table = entry
                .decode(&self.geometry)
                .map_err(|e| bad_format("snapshot", &e))?;
            tables.extend(table.map(|old| Table {
                index,
                old,
                now: old,
            }));
        }
        Ok(tables)
    }

    async fn read_snapshot_l1(&self, entry: &SnapshotEntry) -> Result<Vec<L1Entry>> {
        entry
            .check_l1_table(&self.geometry)
            .map_err(|e| bad_format("snapshot", &e))?;
        let len_bytes = u64::from(entry.l1_entries) * 8;
        let bytes = read_bytes(&self.file, entry.l1_table_offset.bytes(), len_bytes).await?;
        let entries = 0..entry.l1_entries as usize;
        Ok(entries
            .map(|index| L1Entry::read(&bytes, index).unwrap_or_default())
            .collect())
    }
}

impl Change {
    /// Notes a change of the count of an L2 table's cluster.
    fn count(&mut self, image: &Image, table: HostOffset, by: i32) {
        let clusters = image.clusters_at(table, 1);
        self.metadata.push((clusters, by));
    }

    /// Notes that the active table leads to an L2 table no more.
    fn leave(&mut self, image: &Image, table: HostOffset) {
        self.count(image, table, -1);
        self.left.push(table);
    }
}
