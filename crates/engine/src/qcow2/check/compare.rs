//! Compares the refcounts on disk with the references.

use super::counts::CHUNK_CLUSTERS;
use super::findings::Findings;
use super::outcome::Outcome;
use super::report::{FindingKind, Fix};
use super::source::Image;
use crate::qcow2::integrity::errors::hex;

impl Outcome {
    /// Reports each cluster whose refcount is not the number of its references, and
    /// whether `fix` puts that right. Says whether a cluster in use is counted as free.
    pub(super) fn compare(&self, image: &Image, fix: Option<Fix>, findings: &mut Findings) -> bool {
        let clusters = self.tally.clusters;
        let mut any_lost = false;
        if fix.is_none() {
            self.report_unaligned(image, findings);
        }
        for first in (0..clusters).step_by(CHUNK_CLUSTERS as usize) {
            if self.chunk_is_same(first) {
                continue;
            }
            for cluster in first..clusters.min(first + CHUNK_CLUSTERS) {
                any_lost |= self.compare_cluster(cluster, fix, findings);
            }
        }
        any_lost
    }

    /// Reports once that refcount blocks are not aligned, if there are such.
    fn report_unaligned(&self, image: &Image, findings: &mut Findings) {
        let clusters = self.tally.clusters;
        let Some((number, offset)) = self.stored.first_unaligned(image, clusters) else {
            return;
        };
        let number = hex(number);
        findings.note(|| {
            format!(
                "qcow2: Image is corrupt: Refblock offset {offset:#x} unaligned (reftable index: \
                 {number}); further non-fatal corruption events will be suppressed"
            )
        });
    }

    /// Whether a quick look tells that the chunk which begins at `first` is right.
    pub(super) fn chunk_is_same(&self, first: u64) -> bool {
        let counts = self.stored.counts();
        counts.chunk_is_same(&self.tally.references, first) && self.stored.all_readable()
    }

    /// The refcount of a cluster and its references; a count that cannot be read is
    /// taken as right.
    pub(super) fn pair(&self, cluster: u64) -> (u64, u64) {
        let reference = self.tally.references.get(cluster);
        (self.stored.get(cluster).unwrap_or(reference), reference)
    }

    fn compare_cluster(&self, cluster: u64, fix: Option<Fix>, findings: &mut Findings) -> bool {
        let reference = self.tally.references.get(cluster);
        let Some(refcount) = self.stored.get(cluster) else {
            findings.report(FindingKind::CheckError, 1, || {
                format!("Can't get refcount for cluster {cluster}: Input/output error")
            });
            return false;
        };
        if refcount == reference {
            return false;
        }
        let what = || format!("cluster {cluster} refcount={refcount} reference={reference}");
        match (refcount < reference, fix) {
            (true, _) if refcount == 0 => {
                findings.corruption(|| format!("ERROR {}", what()));
                return true;
            }
            (true, fix) => findings.corruption_or_repair(fix == Some(Fix::All), what),
            (false, None) => {
                findings.report(FindingKind::Leak, 1, || format!("Leaked {}", what()));
            }
            (false, Some(_)) => {
                findings.report.leaks_fixed += 1;
                findings.repair(|| format!("Repairing {}", what()));
            }
        }
        false
    }

    /// The last cluster that is used or counted as used; 0 if there is none.
    pub(super) fn highest_cluster(&self) -> u64 {
        let mut end = self.tally.clusters;
        loop {
            let last = self
                .stored
                .counts()
                .last_used(end)
                .max(self.tally.references.last_used(end));
            match last {
                Some(cluster) if !self.stored.is_readable(cluster) => end = cluster,
                last => return last.unwrap_or(0),
            }
        }
    }
}
