//! What snapshots use, in new places.
//!
//! A cluster that a snapshot uses is never written, so it can be copied while guests go on. Every
//! entry that leads to it is then changed where it is: the copy holds the same bytes, so each of
//! these may be on disk without the others. All of them are in the L2 tables with the same index of
//! their L1 tables, the disk's and those of snapshots; if these are not as many as the cluster is
//! counted, something else leads there, and it stays.
//!
//! Invariants:
//! - No snapshot is made, applied or deleted meanwhile (`resizing` is held), and none is open
//!   as a device of its own, which would have what it looked up before.
//! - A copy is counted as often as the original, durably, before an entry leads to it; the
//!   original's count falls only after all entries that led there are durable.
//! - A table that a snapshot shares is changed on disk alone, and forgotten in memory after that.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use vellum_format::l1::L1Entry;
use vellum_format::l2::{L2Entry, Mapping};
use vellum_format::types::{GuestOffset, HostCluster, HostOffset};
use vellum_io::range_lock::Mode;
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::{Storage, WriteFlags};

use super::data::at_place;
use crate::qcow2::commit::write_order::{DropReason, DroppedRun, WriteOrder};
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::bad_format;

/// What is copied before entries are changed, if that is a whole cluster.
const CHUNK_BYTES: u64 = 4 << 20;
/// Memory for tables with the same L1 index: where there are more of them, what they lead to stays.
const MOST_TABLE_BYTES: u64 = 64 << 20;
/// What a disk writes as a whole.
const SECTOR_BYTES: usize = 512;

/// Where a walk through what snapshots use has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SharedPlace {
    l1_index: u64,
    /// The next entry of its L2 tables.
    entry: u64,
}

/// What moving a part of it came to.
pub(super) struct SharedMoved {
    pub(super) bytes: u64,
    /// `None`: that was all of it, or there is no room for more.
    pub(super) next: Option<SharedPlace>,
    pub(super) had_room: bool,
}

/// An L2 table that snapshots use.
pub(super) struct SharedTable {
    pub(super) place: HostOffset,
    pub(super) content: Buffer,
    /// Where the L1 entries of snapshots that lead to it lie.
    pub(super) l1_entries: Vec<HostOffset>,
    /// The disk uses it too.
    pub(super) by_disk: bool,
}

impl SharedTable {
    /// L1 entries that lead to it.
    pub(super) fn uses(&self) -> u64 {
        self.l1_entries.len() as u64 + u64::from(self.by_disk)
    }
}

/// A cluster with a copy.
#[derive(Debug, Clone, Copy)]
struct Copied {
    old: HostOffset,
    new: HostOffset,
    /// Entries that lead to the old one.
    references: u64,
}

impl Image {
    /// Moves a part of what snapshots use and what lies above the limit.
    pub(super) async fn move_shared(
        self: &Arc<Self>,
        at: SharedPlace,
        limit: HostCluster,
    ) -> Result<SharedMoved> {
        let _one = self.resizing.lock().await;
        let over = |had_room| SharedMoved {
            bytes: 0,
            next: None,
            had_room,
        };
        let snapshots = self.snapshot_table();
        let longest = snapshots.entries.iter().map(|entry| entry.l1_entries).max();
        if at.l1_index >= longest.unwrap_or(0).into() || self.views.are_open() {
            return Ok(over(true));
        }
        let next_table = SharedPlace {
            l1_index: at.l1_index + 1,
            entry: 0,
        };
        let Some(mut tables) = self.shared_tables(at.l1_index).await? else {
            return Ok(SharedMoved {
                next: Some(next_table),
                ..over(true)
            });
        };
        let (entries, found) = self.shared_above(&tables, at.entry, limit)?;
        let next = match entries.end < self.geometry.l2_entries() {
            true => SharedPlace {
                entry: entries.end,
                ..at
            },
            false => next_table,
        };
        let mut bytes = 0;
        let mut had_room = true;
        if !found.is_empty() {
            let (copied, room) = self.copy_shared(&found, limit).await?;
            had_room = room;
            bytes = self
                .lead_to_copies(at.l1_index, entries, &mut tables, copied)
                .await?;
        }
        if had_room && next.l1_index > at.l1_index {
            (bytes, had_room) = match self.move_shared_tables(at.l1_index, tables, limit).await? {
                Some(more) => (bytes + more, true),
                None => (bytes, false),
            };
        }
        Ok(SharedMoved {
            bytes,
            next: had_room.then_some(next),
            had_room,
        })
    }

    /// The entries with an index of the L1 tables of snapshots, and where they lie.
    pub(super) async fn snapshot_l1_entries(
        &self,
        index: u64,
    ) -> Result<Vec<(HostOffset, L1Entry)>> {
        let mut found = Vec::new();
        for snapshot in &self.snapshot_table().entries {
            if index >= snapshot.l1_entries.into() {
                continue;
            }
            let at = HostOffset(snapshot.l1_table_offset.bytes() + index * 8);
            let raw = read_bytes(&self.file, at.bytes(), 8).await?;
            found.push((at, L1Entry::read(&raw, 0).unwrap_or_default()));
        }
        Ok(found)
    }

    /// The L2 tables that snapshots use at an index of their L1 tables; `None`: none, or too many.
    async fn shared_tables(&self, index: u64) -> Result<Option<Vec<SharedTable>>> {
        let mut places: BTreeMap<HostOffset, Vec<HostOffset>> = BTreeMap::new();
        for (at, entry) in self.snapshot_l1_entries(index).await? {
            let table = entry.decode(&self.geometry);
            if let Some(table) = table.map_err(|e| bad_format("compact", &e))? {
                places.entry(table).or_default().push(at);
            }
        }
        let table_bytes = self.geometry.cluster_size_bytes();
        if places.is_empty() || places.len() as u64 * table_bytes > MOST_TABLE_BYTES {
            return Ok(None);
        }
        let mut tables = Vec::with_capacity(places.len());
        for (place, l1_entries) in places {
            tables.push(SharedTable {
                content: read_bytes(&self.file, place.bytes(), table_bytes).await?,
                by_disk: false,
                place,
                l1_entries,
            });
        }
        Ok(Some(tables))
    }

    /// The first clusters above the limit that entries from `first` on lead to, and the entries that
    /// were looked at.
    fn shared_above(
        &self,
        tables: &[SharedTable],
        first: u64,
        limit: HostCluster,
    ) -> Result<(Range<u64>, Vec<HostOffset>)> {
        let cluster = self.geometry.cluster_size_bytes();
        let most = (CHUNK_BYTES / cluster).max(1) as usize;
        let mut found = Vec::new();
        let mut entry = first;
        while entry < self.geometry.l2_entries() && found.len() < most {
            for table in tables {
                let host = self.entry_of(table, entry)?.1.host();
                let above = host.filter(|host| host.bytes() >= limit.index() * cluster);
                if let Some(host) = above
                    && !found.contains(&host)
                {
                    found.push(host);
                }
            }
            entry += 1;
        }
        Ok((first..entry, found))
    }

    fn entry_of(&self, table: &SharedTable, index: u64) -> Result<(L2Entry, Mapping)> {
        let entry = L2Entry::read(&table.content, index as usize, &self.geometry);
        let entry = entry.unwrap_or_default();
        let mapping = entry.decode(&self.geometry);
        Ok((entry, mapping.map_err(|e| bad_format("compact", &e))?))
    }

    /// Copies clusters that nobody writes below the limit, as many as there is room for.
    async fn copy_shared(
        &self,
        found: &[HostOffset],
        limit: HostCluster,
    ) -> Result<(Vec<Copied>, bool)> {
        let mut copied = Vec::with_capacity(found.len());
        for &old in found {
            self.begin_allocation().await?;
            let Some(new) = self.allocator.allocate_below(limit, 1).await? else {
                return Ok((copied, false));
            };
            let first = new.start.cluster(&self.geometry).index();
            self.unwritten.forget(first..first + 1);
            let done = copy_cluster(
                &self.data,
                old,
                new.start,
                self.geometry.cluster_size_bytes(),
            );
            let done = done.await;
            self.free_unless(&done, Some(new)).await;
            if let Err(error) = done {
                self.give_back_copies(&copied).await;
                return Err(error);
            }
            copied.push(Copied {
                old,
                new: new.start,
                references: 0,
            });
        }
        Ok((copied, true))
    }

    /// Gives back copies that nothing leads to. If even that fails they are leaked.
    async fn give_back_copies(&self, copies: &[Copied]) {
        for copy in copies {
            let cluster = copy.new.cluster(&self.geometry);
            drop(self.allocator.release(cluster, 1).await);
        }
    }

    /// Changes the entries that lead to clusters to lead to their copies. Tells how many bytes
    /// were moved so.
    async fn lead_to_copies(
        self: &Arc<Self>,
        l1_index: u64,
        entries: Range<u64>,
        tables: &mut [SharedTable],
        copied: Vec<Copied>,
    ) -> Result<u64> {
        let cluster = self.geometry.cluster_size_bytes();
        let first = l1_index * self.geometry.bytes_per_l2_table();
        let guest = first + entries.start * cluster..first + entries.end * cluster;
        // Whoever changes the disk's own entries, or makes its own of a table, waits.
        let _entries = self.guest_ranges.acquire(guest, Mode::Exclusive).await;
        let _table = self
            .l1_entries
            .acquire(l1_index..l1_index + 1, Mode::Exclusive)
            .await;
        let own = self.find_users(l1_index, tables)?;
        let mut copies: BTreeMap<HostOffset, Copied> =
            copied.iter().map(|copy| (copy.old, *copy)).collect();
        self.count_references(first, &entries, tables, own, &mut copies)
            .await?;
        let mut unused = Vec::new();
        for copy in copied {
            if !self.count_copy(copies.get(&copy.old)).await? {
                copies.remove(&copy.old);
                unused.push(copy);
            }
        }
        self.give_back_copies(&unused).await;
        // Rule 1: copies and their counts are durable before anything leads there.
        self.commit().await?;
        for table in tables.iter_mut() {
            self.change_entries(table, &entries, &copies).await?;
        }
        if own {
            self.change_own(first, &entries, &copies).await?;
        }
        self.commit().await?;
        for copy in copies.values() {
            self.drop_often(copy.old, copy.references, DropReason::Snapshot);
        }
        Ok(copies.len() as u64 * cluster)
    }

    /// Finds out which table the disk shares; says whether it has one of its own there.
    pub(super) fn find_users(&self, l1_index: u64, tables: &mut [SharedTable]) -> Result<bool> {
        if l1_index >= self.l1.len() {
            return Ok(false);
        }
        let active = self.l1.get(l1_index).decode(&self.geometry);
        let active = active.map_err(|e| bad_format("compact", &e))?;
        for table in tables.iter_mut() {
            table.by_disk = Some(table.place) == active;
        }
        Ok(active.is_some() && !tables.iter().any(|table| table.by_disk))
    }

    async fn count_references(
        &self,
        first: u64,
        entries: &Range<u64>,
        tables: &[SharedTable],
        own: bool,
        copies: &mut BTreeMap<HostOffset, Copied>,
    ) -> Result<()> {
        let mut count = |host: Option<HostOffset>, by: u64| {
            if let Some(copy) = host.and_then(|host| copies.get_mut(&host)) {
                copy.references += by;
            }
        };
        for entry in entries.clone() {
            for table in tables {
                count(self.entry_of(table, entry)?.1.host(), table.uses());
            }
            if own {
                let guest = first + entry * self.geometry.cluster_size_bytes();
                count(self.mapping(GuestOffset(guest)).await?.host(), 1);
            }
        }
        Ok(())
    }

    /// Counts a copy as often as the original; `false`: not everything is known that leads there.
    async fn count_copy(&self, copy: Option<&Copied>) -> Result<bool> {
        let Some(copy) = copy else {
            return Ok(false);
        };
        let old = copy.old.cluster(&self.geometry);
        if self.refcount(old).await? != copy.references {
            return Ok(false);
        }
        let new = copy.new.cluster(&self.geometry);
        let more = copy.references - 1;
        let raised = self.allocator.refcounts.raise(new, more).await?;
        Ok(raised.is_some())
    }

    /// Changes the entries of a table that lead to originals, on disk.
    async fn change_entries(
        &self,
        table: &mut SharedTable,
        entries: &Range<u64>,
        copies: &BTreeMap<HostOffset, Copied>,
    ) -> Result<()> {
        let mut changed: Option<Range<u64>> = None;
        for index in entries.clone() {
            let (_, mapping) = self.entry_of(table, index)?;
            let Some(copy) = mapping.host().and_then(|host| copies.get(&host)) else {
                continue;
            };
            let new = at_place(&mapping, copy.new).encode(&self.geometry);
            let written = new.write(&mut table.content, index as usize, &self.geometry);
            debug_assert!(written, "the entry was read from there");
            let start = changed.map_or(index, |changed| changed.start);
            changed = Some(start..index + 1);
        }
        let Some(changed) = changed else {
            return Ok(());
        };
        let entry_bytes = self.geometry.l2_entry_size_bytes();
        let start = (changed.start * entry_bytes) as usize / SECTOR_BYTES * SECTOR_BYTES;
        let end = ((changed.end * entry_bytes) as usize).next_multiple_of(SECTOR_BYTES);
        let bytes = Buffer::copy_of(&table.content[start..end.min(table.content.len())]);
        let at = table.place.bytes() + start as u64;
        let buffers = Buffers::from_iter([bytes]);
        self.file.write(at, buffers, WriteFlags::default()).await?;
        self.forget_slices(table.place);
        Ok(())
    }

    /// Changes the entries of the disk's own table that lead to originals.
    async fn change_own(
        &self,
        first: u64,
        entries: &Range<u64>,
        copies: &BTreeMap<HostOffset, Copied>,
    ) -> Result<()> {
        for entry in entries.clone() {
            let guest = GuestOffset(first + entry * self.geometry.cluster_size_bytes());
            let mapping = self.mapping(guest).await?;
            if let Some(copy) = mapping.host().and_then(|host| copies.get(&host)) {
                let new = at_place(&mapping, copy.new);
                self.set_mapping(guest, new, WriteOrder::AfterBarrier)
                    .await?;
            }
        }
        Ok(())
    }

    /// Notes a cluster as dropped by so many.
    pub(super) fn drop_often(&self, host: HostOffset, times: u64, reason: DropReason) {
        let start = host.cluster(&self.geometry);
        self.unwritten.forget(start.index()..start.index() + 1);
        for _ in 0..times {
            self.commits.defer_free(DroppedRun {
                start,
                count: 1,
                reason,
                freeable: 0,
            });
        }
    }
}

async fn copy_cluster(
    data: &Arc<dyn Storage>,
    from: HostOffset,
    to: HostOffset,
    len_bytes: u64,
) -> Result<()> {
    let buffer = Buffers::from_iter([Buffer::for_read(len_bytes as usize)]);
    let bytes = data.read(from.bytes(), buffer).await?;
    data.write(to.bytes(), bytes, WriteFlags::default())
        .await
        .map(drop)
}
