//! Metadata that lies high in the file, in new places further down: the tables that the header
//! leads to, the L1 tables of snapshots, and all refcount blocks (for `compact`).

use std::sync::Arc;

use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::{ErrorKind, Result};

use super::exchange::Change;
use super::places::Places;
use crate::qcow2::commit::write_order::DropReason;
use crate::qcow2::create::write::region;
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;

impl Image {
    /// Moves metadata below a cluster of the file, if any lies above it: all of it that can be
    /// moved with one exchange. Tells how many bytes that are; where there is no room, none.
    ///
    /// Users wait meanwhile, as they do for a snapshot.
    pub(crate) async fn move_metadata(self: &Arc<Self>, limit: HostCluster) -> Result<u64> {
        if !self.has_metadata_above(limit)? {
            return Ok(0);
        }
        // What is changed is not what the log's records are of, but the exchange ends commits.
        let _suspension = self.suspend_log().await?;
        let mut moved_bytes = 0;
        let moved = async {
            if !self.has_metadata_above(limit)? {
                return Ok(());
            }
            let mut places = Places::below(limit);
            let planned = self.plan_move(&mut places).await;
            moved_bytes = self
                .movable_metadata()?
                .iter()
                .map(|(_, bytes)| bytes)
                .sum();
            self.carry_out(planned, places).await
        };
        match self.exclusively("compact", moved).await {
            Ok(()) => Ok(moved_bytes),
            Err(error) if error.kind() == ErrorKind::NoSpace => Ok(0),
            Err(error) => Err(error),
        }
    }

    fn has_metadata_above(&self, limit: HostCluster) -> Result<bool> {
        let limit_bytes = limit.index() * self.geometry.cluster_size_bytes();
        let ends_above = |&(start, len_bytes): &(HostOffset, u64)| {
            len_bytes > 0 && start.bytes() + len_bytes > limit_bytes
        };
        Ok(self.movable_metadata()?.iter().any(ends_above))
    }

    /// What an exchange moves: where it lies, and how many bytes it has.
    pub(crate) fn movable_metadata(&self) -> Result<Vec<(HostOffset, u64)>> {
        let cluster = self.geometry.cluster_size_bytes();
        let header = self.header();
        let snapshots = self.snapshot_table();
        let mut places = vec![
            (self.l1.offset(), self.l1.len() * 8),
            (
                header.snapshots_offset,
                match snapshots.entries.is_empty() {
                    true => 0,
                    false => snapshots.size_bytes,
                },
            ),
        ];
        let tables = snapshots.entries.iter();
        places.extend(tables.map(|entry| (entry.l1_table_offset, u64::from(entry.l1_entries) * 8)));
        let (table, clusters) = {
            let table = self.allocator.refcounts.table();
            (table.offset, table.clusters)
        };
        places.push((table, clusters * cluster));
        for (index, block) in (0..).zip(self.counting_blocks()?) {
            // One that lies where what it counts begins goes with that, when the file is cut.
            let first = index * self.geometry.bytes_per_refcount_block();
            let elsewhere = block.filter(|block| block.bytes() != first || index == 0);
            places.extend(elsewhere.map(|block| (block, cluster)));
        }
        Ok(places)
    }

    async fn plan_move(&self, places: &mut Places) -> Result<Change> {
        let mut change = self.no_change(DropReason::Other)?;
        change.moves = true;
        let cluster = self.geometry.cluster_size_bytes();
        for entry in &mut change.entries {
            let len_bytes = u64::from(entry.l1_entries) * 8;
            if len_bytes == 0 {
                continue;
            }
            let old = entry.l1_table_offset;
            let clusters = self.geometry.clusters_for(len_bytes);
            let table = read_bytes(&self.file, old.bytes(), len_bytes).await?;
            let new = places.run(self, clusters).await?;
            let end = new.bytes() + clusters * cluster;
            region(&self.file, new.bytes()..end, |at, bytes| {
                let rest = table.get(at as usize..).unwrap_or(&[]);
                let there = rest.len().min(bytes.len());
                bytes[..there].copy_from_slice(&rest[..there]);
                bytes[there..].fill(0);
            })
            .await?;
            entry.l1_table_offset = new;
            change.metadata.push((self.clusters_at(old, len_bytes), -1));
        }
        Ok(change)
    }
}
