//! Compares the refcounts on disk with the references.

use super::counts::CHUNK_CLUSTERS;
use super::{FindingKind, Findings, Outcome};

impl Outcome {
    /// Reports each cluster whose refcount is not the number of its references.
    pub(super) fn compare(&self, findings: &mut Findings) {
        for first in (0..self.clusters).step_by(CHUNK_CLUSTERS as usize) {
            let same = self.stored.counts().chunk_is_same(&self.references, first);
            if same && self.stored.all_readable() {
                continue;
            }
            for cluster in first..self.clusters.min(first + CHUNK_CLUSTERS) {
                self.compare_cluster(cluster, findings);
            }
        }
    }

    fn compare_cluster(&self, cluster: u64, findings: &mut Findings) {
        let reference = self.references.get(cluster);
        match self.stored.get(cluster) {
            None => findings.report(FindingKind::CheckError, 1, || {
                format!("Can't get refcount for cluster {cluster}: Input/output error")
            }),
            Some(refcount) if refcount < reference => findings.corruption(|| {
                format!("ERROR cluster {cluster} refcount={refcount} reference={reference}")
            }),
            Some(refcount) if refcount > reference => {
                findings.report(FindingKind::Leak, 1, || {
                    format!("Leaked cluster {cluster} refcount={refcount} reference={reference}")
                });
            }
            Some(_) => {}
        }
    }

    /// The last cluster that is used or counted as used; 0 if there is none.
    pub(super) fn highest_cluster(&self) -> u64 {
        let mut end = self.clusters;
        loop {
            let last = self
                .stored
                .counts()
                .last_used(end)
                .max(self.references.last_used(end));
            match last {
                Some(cluster) if !self.stored.is_readable(cluster) => end = cluster,
                last => return last.unwrap_or(0),
            }
        }
    }
}
