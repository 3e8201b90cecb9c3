//! The table of snapshots and the size of the disk, as an image in use has them.

use std::sync::Arc;

use crate::qcow2::header::load::SnapshotTable;
use crate::qcow2::image::Image;

impl Image {
    /// The snapshots as they are now.
    pub(crate) fn snapshot_table(&self) -> Arc<SnapshotTable> {
        self.snapshots.lock().clone()
    }

    pub(super) fn set_snapshot_table(&self, table: SnapshotTable) {
        *self.snapshots.lock() = Arc::new(table);
    }

    /// Changes the size that everybody sees; the header has it.
    pub(super) fn set_size(&self, size_bytes: u64) {
        self.size.set(size_bytes);
        let options = *self.cache_options.lock();
        // The caches stay as they are if the options do not fit the new size.
        drop(self.set_cache_sizes(&options));
    }
}
