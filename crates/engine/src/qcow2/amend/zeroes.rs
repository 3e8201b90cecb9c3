//! Turning zero clusters into what version 2 can say: clusters that are not
//! allocated, where nothing lies behind them, or clusters full of zeroes.
//!
//! All L2 tables are gone through, those of snapshots too. A table that several L1
//! tables share is changed once, in place: what it maps reads as before, and on
//! further visits it holds no zero cluster any more. A cluster of a table that is
//! referred to R times has R references through it.
//!
//! Invariants:
//! - Before a table is written, the zeroes and the refcounts that it leads to are
//!   durable; before a refcount falls, the table is.
//! - A cluster that is referred to from elsewhere too is not overwritten.

use std::collections::HashSet;
use std::sync::Arc;

use vellum_format::l2::{L2Entry, Mapping};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_storage::{Buffer, Buffers, Result, WriteFlags, ZeroFlags};

use super::downgrade::{l1_tables, l2_tables, read_table};
use super::progress::Progress;
use crate::qcow2::fault::bad_format;
use crate::qcow2::image::Image;

/// Bytes of tables that are made durable together.
const BATCH_BYTES: u64 = 4 << 20;
/// Shared tables that are remembered, so that each is read only once.
const MOST_REMEMBERED_TABLES: usize = 1 << 20;

/// Expands every zero cluster of an image that nobody else uses.
pub(super) async fn expand(image: &Arc<Image>, progress: &Progress) -> Result<()> {
    let mut expansion = Expansion {
        image,
        seen: HashSet::new(),
        tables: Vec::new(),
        dropped: Vec::new(),
    };
    let l1_tables = l1_tables(image, &image.header()).await?;
    let total = l1_tables.iter().map(|(_, entries)| entries).sum();
    let mut visited = 0;
    for l1 in l1_tables {
        for table in l2_tables(image, l1).await? {
            if let Some(table) = table {
                expansion.expand_table(table).await?;
            }
            visited += 1;
            progress.report(visited, total);
        }
    }
    expansion.write_batch().await
}

struct Expansion<'a> {
    image: &'a Arc<Image>,
    /// Shared tables that are done.
    seen: HashSet<u64>,
    /// Changed tables that are not written yet.
    tables: Vec<(HostOffset, Buffer)>,
    /// Clusters that these tables have dropped, and how many references each.
    dropped: Vec<(HostCluster, u64)>,
}

impl Expansion<'_> {
    async fn expand_table(&mut self, table: HostOffset) -> Result<()> {
        if self.seen.contains(&table.bytes()) {
            return Ok(());
        }
        let image = self.image;
        let geometry = &image.geometry;
        let references = image.refcount(table.cluster(geometry)).await?;
        if references > 1 && self.seen.len() < MOST_REMEMBERED_TABLES {
            self.seen.insert(table.bytes());
        }
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
            let expanded = self.expand_cluster(host, references).await?;
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
            self.fill_with_zeroes(host).await?;
            return Ok(Mapping::Data { host, copied });
        }
        if image.backing.is_none() {
            return Ok(Mapping::Unallocated);
        }
        let new = image.allocate(1).await?;
        let cluster = new.start.cluster(&image.geometry);
        let refcounts = &image.allocator.refcounts;
        let raised = refcounts.raise(cluster, references - 1).await?;
        debug_assert!(raised.is_some(), "the table's own count fits the width");
        if !image.is_blank(&new)? {
            self.fill_with_zeroes(new.start).await?;
        }
        Ok(Mapping::Data {
            host: new.start,
            copied,
        })
    }

    async fn fill_with_zeroes(&self, host: HostOffset) -> Result<()> {
        let len_bytes = self.image.geometry.cluster_size_bytes();
        let flags = ZeroFlags::default();
        self.image
            .data
            .write_zeroes(host.bytes(), len_bytes, flags)
            .await
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
