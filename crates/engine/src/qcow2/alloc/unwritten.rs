//! Which subclusters on disk were never written and read as zeroes.
//!
//! A large subcluster that gets its first few bytes must not hold old content
//! around them. In a cluster that was allocated fresh since the image was opened
//! there is none: nothing has to be written beside the guest's bytes, and the file
//! grows by these alone.
//!
//! Invariant: a subcluster counts as written from when its mapping first leads to
//! it, whatever the mapping says later. What is not known here may hold anything.

use std::collections::HashMap;
use std::ops::Range;

use parking_lot::{Mutex, MutexGuard};
use vellum_format::types::HostCluster;

/// Clusters that are remembered at most, in about a megabyte.
const MOST_CLUSTERS: usize = 1 << 15;

#[derive(Debug, Clone, Copy)]
struct Cluster {
    /// Subclusters that were written.
    written: u32,
    /// The cluster's refcount is durable.
    refcount_durable: bool,
}

/// What is known of clusters that were allocated fresh.
#[derive(Debug, Default)]
pub(crate) struct UnwrittenSubclusters {
    clusters: Mutex<HashMap<u64, Cluster>>,
}

impl UnwrittenSubclusters {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Cluster>> {
        self.clusters.lock()
    }

    /// Notes a cluster of which nothing but the subclusters `written` was ever
    /// written.
    pub(crate) fn note_allocated(
        &self,
        cluster: HostCluster,
        written: u32,
        refcount_durable: bool,
    ) {
        let mut clusters = self.lock();
        if clusters.len() < MOST_CLUSTERS && written != u32::MAX {
            clusters.insert(
                cluster.index(),
                Cluster {
                    written,
                    refcount_durable,
                },
            );
        }
    }

    /// Notes that subclusters of a cluster were written.
    pub(crate) fn note_written(&self, cluster: HostCluster, subclusters: u32) {
        let mut clusters = self.lock();
        if let Some(known) = clusters.get_mut(&cluster.index()) {
            known.written |= subclusters;
            if known.written == u32::MAX {
                clusters.remove(&cluster.index());
            }
        }
    }

    /// Whether none of these subclusters was ever written, and if so, whether the
    /// cluster's refcount is durable.
    pub(crate) fn find(&self, cluster: HostCluster, subclusters: u32) -> Option<bool> {
        let clusters = self.lock();
        let known = clusters.get(&cluster.index())?;
        (known.written & subclusters == 0).then_some(known.refcount_durable)
    }

    /// Forgets clusters that are going to be used for something else.
    pub(crate) fn forget(&self, range: Range<u64>) {
        let mut clusters = self.lock();
        if range.end - range.start > clusters.len() as u64 {
            clusters.retain(|cluster, _| !range.contains(cluster));
        } else {
            for cluster in range {
                clusters.remove(&cluster);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unwritten_subclusters_of_known_clusters_count_as_unwritten() {
        let unwritten = UnwrittenSubclusters::default();
        let cluster = HostCluster(7);
        assert_eq!(unwritten.find(cluster, 1), None);
        unwritten.note_allocated(cluster, 0b01, true);
        assert_eq!(unwritten.find(cluster, 0b10), Some(true));
        assert_eq!(unwritten.find(cluster, 0b11), None);
        unwritten.note_written(cluster, 0b10);
        assert_eq!(unwritten.find(cluster, 0b10), None);
        assert_eq!(unwritten.find(cluster, 0b100), Some(true));
        unwritten.forget(6..8);
        assert_eq!(unwritten.find(cluster, 0b100), None);
    }

    #[test]
    fn memory_is_bounded() {
        let unwritten = UnwrittenSubclusters::default();
        for cluster in 0..2 * MOST_CLUSTERS as u64 {
            unwritten.note_allocated(HostCluster(cluster), 1, false);
        }
        assert_eq!(unwritten.lock().len(), MOST_CLUSTERS);
        unwritten.forget(0..u64::MAX);
        assert!(unwritten.lock().is_empty());
    }
}
