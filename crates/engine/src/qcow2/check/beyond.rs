//! [`Beyond`]: what points behind the end of the file. Such entries read as zeroes, and a
//! repair that makes the file longer must not put anything there.

use std::ops::Range;

use super::counts::Counts;
use super::source::Image;

/// So much of what lies behind the end is known, beside as much as the file is long: far
/// more than a repair takes.
const KNOWN_BYTES: u64 = 128 << 20;

/// References to clusters behind the end of a file.
#[derive(Debug)]
pub(super) struct Beyond {
    counts: Counts,
    /// Up to this cluster the others count these references as well.
    taken_over: u64,
    /// From this cluster on nobody knows what is referred to.
    known_end: u64,
    /// Clusters that may still be counted: hostile tables can lead here over and over.
    left: u64,
}

impl Beyond {
    pub(super) fn new(image: &Image) -> Self {
        let clusters = image.file_clusters();
        let known = clusters + image.geometry.clusters_for(KNOWN_BYTES);
        Beyond {
            counts: Counts::default(),
            taken_over: clusters,
            known_end: clusters + known,
            left: 4 * known,
        }
    }

    /// Counts `times` references to clusters of which some lie behind the end. What is
    /// too much to be counted ends what is known.
    pub(super) fn add(&mut self, clusters: Range<u64>, times: u64) {
        let first = clusters.start.max(self.taken_over);
        let clusters = first..clusters.end.min(self.known_end).max(first);
        match self.left.checked_sub(clusters.end - clusters.start) {
            Some(left) => self.left = left,
            None => {
                self.known_end = first;
                return;
            }
        }
        self.counts.add_run(clusters, times, u64::MAX, |_, _| {});
    }

    /// Whether all that points at a cluster is known.
    pub(super) fn is_known(&self, cluster: u64) -> bool {
        cluster < self.taken_over.max(self.known_end)
    }

    /// Whether nothing points at a cluster, behind the end.
    pub(super) fn is_free(&self, cluster: u64) -> bool {
        self.is_known(cluster) && self.counts.get(cluster) == 0
    }

    /// The last cluster below `end_cluster` that something points at behind the end.
    pub(super) fn last_used(&self, end_cluster: u64) -> Option<u64> {
        let last = self.counts.last_used(end_cluster);
        last.filter(|&cluster| cluster >= self.taken_over)
    }

    /// Hands the references to clusters below `end_cluster` over, each with its number,
    /// for the file is going to have these clusters.
    pub(super) fn take_over(&mut self, end_cluster: u64, mut each: impl FnMut(u64, u64)) {
        for cluster in self.taken_over..end_cluster {
            match self.counts.get(cluster) {
                0 => {}
                count => each(cluster, count),
            }
        }
        self.taken_over = self.taken_over.max(end_cluster);
    }
}
