//! Whether everything is counted that something leads to: a cluster that is not would be
//! taken for a gap, and overwritten.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::l1::L1Entry;
use vellum_format::l2::{L2Entry, Mapping};
use vellum_format::types::{GuestOffset, HostCluster, HostOffset};
use vellum_io::{Error, ErrorKind, Result};

use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::bad_format;

impl Image {
    /// Refuses an image whose header, or whose tables that this leads to, are not counted.
    pub(super) async fn check_metadata_counted(&self) -> Result<()> {
        let cluster = self.geometry.cluster_size_bytes();
        let mut places = self.movable_metadata()?;
        places.push((HostOffset::ZERO, cluster));
        for block in self.counting_blocks()?.into_iter().flatten() {
            places.push((block, cluster));
        }
        for (start, len_bytes) in places.into_iter().filter(|(_, len_bytes)| *len_bytes > 0) {
            let first = start.cluster(&self.geometry).index();
            let end = first + self.geometry.clusters_for(len_bytes);
            self.refuse_uncounted(first..end, "metadata").await?;
        }
        Ok(())
    }

    /// Refuses what L1 entry `index` of the disk, or of a snapshot, leads to, where any of it is not counted.
    pub(super) async fn check_table_counted(self: &Arc<Self>, index: u64) -> Result<()> {
        let start = index * self.geometry.bytes_per_l2_table();
        let end = start.saturating_add(self.geometry.bytes_per_l2_table());
        // What is dropped meanwhile stays counted.
        let reading = self.read_epochs.enter();
        if index < self.l1.len() && self.mapper().place(GuestOffset(start))?.is_some() {
            let table = self.l1.get(index);
            self.refuse_uncounted(self.table_cluster(table)?, "an L2 table")
                .await?;
            let mut at = start;
            while at < end.min(self.size_bytes()) {
                let mapping = self.mapping(GuestOffset(at)).await?;
                self.check_mapping_counted(&mapping).await?;
                at += self.geometry.cluster_size_bytes();
            }
        }
        drop(reading);
        // What one that is deleted meanwhile led to need not be counted any more.
        let _one = self.resizing.lock().await;
        for (_, table) in self.snapshot_l1_entries(index).await? {
            // The disk's own tables were looked at.
            let is_active =
                index < self.l1.len() && self.l1.get(index).raw_offset() == table.raw_offset();
            if !is_active {
                self.check_snapshot_table_counted(table).await?;
            }
        }
        Ok(())
    }

    async fn check_snapshot_table_counted(&self, table: L1Entry) -> Result<()> {
        let clusters = self.table_cluster(table)?;
        if clusters.is_empty() {
            return Ok(());
        }
        let cluster = self.geometry.cluster_size_bytes();
        let at = clusters.start * cluster;
        self.refuse_uncounted(clusters, "an L2 table").await?;
        let content = read_bytes(&self.file, at, cluster).await?;
        for index in 0..self.geometry.l2_entries() as usize {
            let entry = L2Entry::read(&content, index, &self.geometry).unwrap_or_default();
            let mapping = entry.decode(&self.geometry);
            let mapping = mapping.map_err(|e| bad_format("compact", &e))?;
            self.check_mapping_counted(&mapping).await?;
        }
        Ok(())
    }

    /// The cluster of an L2 table; none, if there is none.
    fn table_cluster(&self, entry: L1Entry) -> Result<Range<u64>> {
        let table = entry.decode(&self.geometry);
        let table = table.map_err(|e| bad_format("compact", &e))?;
        Ok(table.map_or(0..0, |table| {
            let first = table.cluster(&self.geometry).index();
            first..first + 1
        }))
    }

    async fn check_mapping_counted(&self, mapping: &Mapping) -> Result<()> {
        let cluster = self.geometry.cluster_size_bytes();
        let bytes = match mapping {
            Mapping::Compressed(data) => data.host_offset.bytes()..data.end().bytes(),
            _ => match mapping.host() {
                Some(host) => host.bytes()..host.bytes() + cluster,
                None => return Ok(()),
            },
        };
        let clusters = bytes.start / cluster..bytes.end.div_ceil(cluster);
        self.refuse_uncounted(clusters, "data").await
    }

    async fn refuse_uncounted(&self, clusters: Range<u64>, what: &str) -> Result<()> {
        for cluster in clusters {
            if self.refcount(HostCluster(cluster)).await? == 0 {
                let message = format!(
                    "cluster {cluster}, which holds {what}, is not counted: 'vellum check -r all' first"
                );
                return Err(self.name_error(Error::new(
                    ErrorKind::InvalidImage,
                    "compact",
                    message,
                )));
            }
        }
        Ok(())
    }
}
