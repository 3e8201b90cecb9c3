//! Bitmaps that lie high in the file, in new places further down (for `compact`).

use std::sync::Arc;

use vellum_format::types::HostCluster;
use vellum_io::Result;

use super::crash_consistent::is_consistent;
use crate::qcow2::image::Image;

impl Image {
    /// Writes all bitmaps to new places, the lowest free ones, if anything of them lies at or above a cluster
    /// of the file. Tells how many bytes these were. Bitmaps whose content is lost stay where they are,
    /// and all others with them.
    ///
    /// Users wait meanwhile, as they do where a bitmap is cleared.
    pub(crate) async fn move_bitmaps(self: &Arc<Self>, limit: HostCluster) -> Result<u64> {
        if self.bitmap_bytes_above(limit).await? == 0 {
            return Ok(0);
        }
        let _suspension = self.suspend_log().await?;
        let mut quiet = self.quiesce().await?;
        let header = self.header();
        let entries = self.bitmap_entries().await?;
        if entries.iter().any(|entry| !is_consistent(&header, entry)) {
            return Ok(0);
        }
        let moved_bytes = self.bitmap_bytes_above(limit).await?;
        let size_bytes = self.size.visible_bytes();
        self.rewrite_bitmaps(&mut quiet.layout, size_bytes, 0..0)
            .await?;
        Ok(moved_bytes)
    }

    async fn bitmap_bytes_above(&self, limit: HostCluster) -> Result<u64> {
        let Some(directory) = self.header().bitmaps() else {
            return Ok(0);
        };
        let first = directory.directory_offset.cluster(&self.geometry).index();
        let count = self.geometry.clusters_for(directory.directory_size_bytes);
        let mut runs = vec![(first, count)];
        for entry in self.bitmap_entries().await? {
            // Of no bits: only where they lie.
            let (_, table) = self.load_bitmap(&entry, 0).await?;
            runs.extend(table.host_clusters(&self.geometry));
        }
        let above = runs.iter().map(|&(first, count)| {
            let end = first + count;
            end - first.max(limit.index()).min(end)
        });
        Ok(above.sum::<u64>() * self.geometry.cluster_size_bytes())
    }
}
