//! [`Tally`]: the references to clusters, as they are found.

use std::sync::Arc;

use super::areas::Areas;
use super::beyond::Beyond;
use super::counts::{Counts, SharedCounts};
use super::findings::Findings;
use super::source::Image;

/// References to the clusters of a file.
pub(super) struct Tally {
    pub(super) references: Counts,
    /// Where `references` are while several threads count.
    shared: Option<Arc<SharedCounts>>,
    /// Clusters to compare: those of the file, and one more if it is used in part.
    pub(super) clusters: u64,
    max_refcount: u64,
    /// What points behind the end of the file, and is not among `references`.
    beyond: Beyond,
    has_grown: bool,
    /// Metadata other than L2 tables.
    pub(super) areas: Areas,
}

impl Tally {
    pub(super) fn new(image: &Image) -> Self {
        Tally {
            references: Counts::default(),
            shared: None,
            clusters: image.file_clusters(),
            max_refcount: image.geometry.max_refcount(),
            beyond: Beyond::new(image),
            has_grown: false,
            areas: Areas::default(),
        }
    }

    /// Has several threads count references, until [`Tally::take_back`].
    pub(super) fn share(&mut self) -> Arc<SharedCounts> {
        // One cluster behind the file may be used in part.
        let counts = SharedCounts::new(std::mem::take(&mut self.references), self.clusters + 1);
        let counts = Arc::new(counts);
        self.shared = Some(counts.clone());
        counts
    }

    /// Takes back what several threads have counted; none of them counts any more.
    pub(super) fn take_back(&mut self) {
        if let Some(shared) = self.shared.take() {
            self.references = shared.take();
        }
    }

    /// Counts one reference to each cluster of a range that holds metadata.
    pub(super) fn add_area(
        &mut self,
        image: &Image,
        findings: &mut Findings,
        offset: u64,
        size: u64,
    ) {
        self.add(image, findings, offset, size, 1);
        let end = offset.saturating_add(size).min(image.len_bytes());
        if offset < end {
            self.areas
                .add(image.cluster_of(offset)..image.cluster_of(end - 1) + 1);
        }
    }

    /// Counts `times` references to each cluster of a range.
    pub(super) fn add(
        &mut self,
        image: &Image,
        findings: &mut Findings,
        offset: u64,
        size: u64,
        times: u64,
    ) {
        if size == 0 {
            return;
        }
        let end = offset.saturating_add(size);
        // The last cluster of a file may be there in part.
        if end.saturating_sub(image.len_bytes()) >= image.geometry.cluster_size_bytes() {
            findings.corruptions(times, || {
                format!(
                    "ERROR: counting reference for region exceeding the end of the file by one \
                     cluster or more: offset {offset:#x} size {size:#x}"
                )
            });
            let clusters = image.cluster_of(offset)..image.cluster_of(end - 1) + 1;
            return self.beyond.add(clusters, times);
        }
        let clusters = image.cluster_of(offset)..image.cluster_of(end - 1) + 1;
        self.clusters = self.clusters.max(clusters.end);
        let overflow = |cluster, by| report_overflow(findings, image.offset_of(cluster), by);
        let max = self.max_refcount;
        match &self.shared {
            Some(shared) => shared.add_run(clusters, times, max, overflow),
            None => self.references.add_run(clusters, times, max, overflow),
        }
    }

    /// Whether nothing refers to a cluster, in the file or behind its end.
    pub(super) fn is_free(&self, cluster: u64) -> bool {
        self.references.get(cluster) == 0 && self.beyond.is_free(cluster)
    }

    /// Whether all references to a cluster are known.
    pub(super) fn is_known(&self, cluster: u64) -> bool {
        self.beyond.is_known(cluster)
    }

    /// Whether the file has got clusters that something pointed at behind its end.
    pub(super) fn has_grown(&self) -> bool {
        self.has_grown
    }

    /// The last cluster below `end_cluster` that something points at behind the end of
    /// the file.
    pub(super) fn last_beyond(&self, end_cluster: u64) -> Option<u64> {
        self.beyond.last_used(end_cluster)
    }

    /// The file has, or is going to have, so many clusters: what points at those is counted.
    pub(super) fn grow(&mut self, clusters: u64) {
        let (references, max) = (&mut self.references, self.max_refcount);
        let mut any = false;
        self.beyond.take_over(clusters, |cluster, count| {
            any = true;
            let sum = references.get(cluster).saturating_add(count);
            references.set(cluster, sum.min(max));
        });
        self.has_grown |= any;
        self.clusters = self.clusters.max(clusters);
    }
}

/// Reports that a cluster has `times` more references than can be counted.
#[cold]
pub(super) fn report_overflow(findings: &mut Findings, offset: u64, times: u64) {
    findings.corruptions(times, || {
        format!(
            "ERROR: overflow cluster offset={offset:#x}\n\
             Use qemu-img amend to increase the refcount entry width or qemu-img convert to \
             create a clean copy if the image cannot be opened for writing"
        )
    });
}
