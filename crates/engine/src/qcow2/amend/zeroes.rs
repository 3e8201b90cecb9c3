//! Turning zero clusters into what version 2 can say: clusters that are not
//! allocated, where nothing lies behind them, or clusters full of zeroes.
//!
//! All L2 tables are gone through, those of snapshots too. A table that several L1
//! tables share is changed once, in place: what it maps reads as before. A cluster of
//! a table that is referred to R times has R references through it. Refcounts do not
//! tell R: after a crash they may be too high, and a cluster that seems to be used
//! through this table alone may be a snapshot's too. So references are counted.
//!
//! Invariants:
//! - Before a table is written, the zeroes and the refcounts that it leads to are
//!   durable; before a refcount falls, the table is.
//! - A cluster that is referred to from elsewhere too is not overwritten.

use std::collections::BTreeMap;
use std::sync::Arc;

use vellum_format::l2::{L2Entry, Mapping};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::WriteFlags;

use super::downgrade::{l1_tables, l2_tables, read_table};
use super::progress::Progress;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::{bad_format, corrupt};

/// Bytes of tables that are made durable together.
const BATCH_BYTES: u64 = 4 << 20;
/// Tables whose references are counted at a time.
const MOST_COUNTED_TABLES: usize = 1 << 20;

/// Expands every zero cluster of an image that nobody else uses.
pub(super) async fn expand(image: &Arc<Image>, progress: &Progress) -> Result<()> {
    let mut expansion = Expansion {
        image,
        tables: Vec::new(),
        dropped: Vec::new(),
    };
    let l1_tables = l1_tables(image, &image.header()).await?;
    let total = l1_tables.iter().map(|(_, entries)| entries).sum();
    let (mut visited, mut from) = (0, Some(0));
    while let Some(start) = from {
        let mut counts = Counts::new(start, MOST_COUNTED_TABLES);
        for &l1 in &l1_tables {
            let tables = l2_tables(image, l1).await?;
            for (guest, table) in guest_starts(image).zip(tables) {
                if let Some(table) = table {
                    counts.add(table, guest);
                }
            }
        }
        for &l1 in &l1_tables {
            for table in l2_tables(image, l1).await? {
                let place = table.map_or(0, HostOffset::bytes);
                if !counts.is_about(place) {
                    continue;
                }
                if let Some(shared) = counts.tables.remove(&place) {
                    expansion.expand_table(HostOffset(place), shared).await?;
                }
                visited += 1;
                progress.report(visited, total);
            }
        }
        from = counts.rest;
    }
    expansion.write_batch().await
}

/// Where the L2 tables of an L1 table begin in the guest.
fn guest_starts(image: &Image) -> impl Iterator<Item = u64> + use<> {
    (0..).step_by(image.geometry.bytes_per_l2_table() as usize)
}

/// An L2 table. All L1 tables have it in the same place.
#[derive(Debug, Clone, Copy)]
struct Shared {
    references: u64,
    /// The guest offset that its first entry maps.
    guest_start: u64,
}

/// How often the L2 tables from some place on are referred to: the first so many of
/// them, in the order of their places.
struct Counts {
    start: u64,
    most: usize,
    tables: BTreeMap<u64, Shared>,
    /// Where the first one lies for which there was no room.
    rest: Option<u64>,
}

impl Counts {
    fn new(start: u64, most: usize) -> Self {
        Counts {
            start,
            most,
            tables: BTreeMap::new(),
            rest: None,
        }
    }

    /// Whether a table that lies there is one of them, if there is room.
    fn is_about(&self, place: u64) -> bool {
        place >= self.start && self.rest.is_none_or(|rest| place < rest)
    }

    fn add(&mut self, table: HostOffset, guest_start: u64) {
        let place = table.bytes();
        if !self.is_about(place) {
            return;
        }
        let first = Shared {
            references: 0,
            guest_start,
        };
        self.tables.entry(place).or_insert(first).references += 1;
        if self.tables.len() > self.most {
            self.rest = self.tables.pop_last().map(|(last, _)| last);
        }
    }
}

struct Expansion<'a> {
    image: &'a Arc<Image>,
    /// Changed tables that are not written yet.
    tables: Vec<(HostOffset, Buffer)>,
    /// Clusters that these tables have dropped, and how many references each.
    dropped: Vec<(HostCluster, u64)>,
}

impl Expansion<'_> {
    async fn expand_table(&mut self, table: HostOffset, shared: Shared) -> Result<()> {
        let Shared {
            references,
            guest_start,
        } = shared;
        let image = self.image;
        let geometry = &image.geometry;
        let mut bytes = read_table(image, table).await?;
        let mut changed = false;
        for index in 0..geometry.l2_entries() as usize {
            let Some(entry) = L2Entry::read(&bytes, index, geometry) else {
                break;
            };
            let mapping = entry.decode(geometry);
            let Mapping::Zero { host, .. } = mapping.map_err(|e| bad_format("amend", &e))? else {
                continue;
            };
            let guest = guest_start + index as u64 * geometry.cluster_size_bytes();
            let expanded = self.expand_cluster(guest, host, references).await?;
            let written = expanded.encode(geometry).write(&mut bytes, index, geometry);
            debug_assert!(written, "it was read there");
            changed = true;
        }
        if changed {
            self.tables.push((table, bytes));
        }
        if self.tables.len() as u64 * geometry.cluster_size_bytes() >= BATCH_BYTES {
            self.write_batch().await?;
        }
        Ok(())
    }

    /// The mapping of a zero cluster that has a place at `host`, or none.
    async fn expand_cluster(
        &mut self,
        guest: u64,
        host: Option<HostOffset>,
        references: u64,
    ) -> Result<Mapping> {
        let image = self.image;
        let copied = references == 1;
        let place = match host {
            None => None,
            Some(host) => {
                let cluster = host.cluster(&image.geometry);
                let own = image.refcount(cluster).await? == references;
                if !own {
                    self.dropped.push((cluster, references));
                }
                own.then_some(host)
            }
        };
        if let Some(host) = place {
            self.fill_with_zeroes(guest, host).await?;
            return Ok(Mapping::Data { host, copied });
        }
        if image.backing.is_none() {
            return Ok(Mapping::Unallocated);
        }
        let new = image.allocate_for_data(1, None).await?;
        let cluster = new.start.cluster(&image.geometry);
        let refcounts = &image.allocator.refcounts;
        if refcounts.raise(cluster, references - 1).await?.is_none() {
            let message = format!("an L2 table has {references} references, more than are counted");
            return Err(corrupt("amend", message));
        }
        if !image.reads_as_zeroes(&new)? {
            self.fill_with_zeroes(guest, new.start).await?;
        }
        Ok(Mapping::Data {
            host: new.start,
            copied,
        })
    }

    async fn fill_with_zeroes(&self, guest: u64, host: HostOffset) -> Result<()> {
        let len_bytes = self.image.geometry.cluster_size_bytes();
        self.image.zero_data(guest, host.bytes(), len_bytes).await
    }

    /// Writes the changed tables, and then lowers the refcounts of what they dropped.
    async fn write_batch(&mut self) -> Result<()> {
        if self.tables.is_empty() {
            return Ok(());
        }
        let file = &self.image.file;
        self.image.allocator.refcounts.write_back().await?;
        file.flush().await?;
        for (table, bytes) in self.tables.drain(..) {
            let buffers = Buffers::from_iter([bytes]);
            file.write(table.bytes(), buffers, WriteFlags::default())
                .await?;
        }
        file.flush().await?;
        for (cluster, references) in std::mem::take(&mut self.dropped) {
            for _ in 0..references {
                self.image.allocator.release(cluster, 1).await?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_counted_in_parts_and_each_once() {
        let all = [7, 3, 9, 3, 1, 9, 9, 5];
        let mut seen = Vec::new();
        let mut from = Some(0);
        while let Some(start) = from {
            let mut counts = Counts::new(start, 2);
            all.iter()
                .for_each(|&table| counts.add(HostOffset(table), 100 * table));
            assert!(counts.tables.len() <= 2);
            let shared = |(table, shared): (u64, Shared)| {
                assert_eq!(shared.guest_start, 100 * table);
                (table, shared.references)
            };
            seen.extend(counts.tables.into_iter().map(shared));
            from = counts.rest;
        }
        assert_eq!(seen, [(1, 1), (3, 2), (5, 1), (7, 1), (9, 3)]);
    }
}
