//! Changing refcounts, many at a time.
//!
//! Counts of clusters that lie side by side are changed slice by slice, each with
//! one look into the cache.

use std::ops::Range;
use std::sync::atomic::Ordering;

use vellum_format::refcount;
use vellum_format::types::HostCluster;
use vellum_io::{Error, Result};

use super::refcounts::Refcounts;
use crate::qcow2::integrity::errors::corrupt;

/// What lowering the counts of a part of one slice came to.
#[derive(Debug, Default)]
pub(crate) struct Lowered {
    /// Clusters whose counts went down; the first of them is the first of the run.
    pub(crate) clusters: u64,
    /// Those of them that nobody uses any more.
    pub(crate) freed: Vec<Range<u64>>,
    /// The next cluster's count is zero already.
    underflow: bool,
}

impl Lowered {
    fn note_freed(&mut self, cluster: u64) {
        match self.freed.last_mut() {
            Some(last) if last.end == cluster => last.end += 1,
            _ => self.freed.push(cluster..cluster + 1),
        }
    }
}

impl Refcounts {
    /// Lowers the counts of those clusters of a run by one that lie in the slice of
    /// its first one.
    ///
    /// # Errors
    /// `Corrupt` if the first count is zero already; whatever reading reports. No
    /// count has changed then.
    pub(crate) async fn lower_in_slice(&self, run: Range<u64>) -> Result<Lowered> {
        let order = self.geometry.refcount_order;
        loop {
            let Some(place) = self.place(HostCluster(run.start))? else {
                return Err(underflow(run.start));
            };
            let left_in_slice = self.entries_per_slice() - place.index as u64;
            let count = (run.end - run.start).min(left_in_slice);
            let lowered = self.change(place.key, |block| {
                let mut lowered = Lowered::default();
                for cluster in run.start..run.start + count {
                    let index = place.index + (cluster - run.start) as usize;
                    let Some(new) = refcount::get(block, order, index).checked_sub(1) else {
                        lowered.underflow = true;
                        break;
                    };
                    let fits = refcount::set(block, order, index, new);
                    debug_assert!(fits, "a lower count fits");
                    lowered.clusters += 1;
                    if new == 0 {
                        // Before anybody can see that it is free.
                        self.overlap.forget(cluster);
                        lowered.note_freed(cluster);
                    }
                }
                lowered
            });
            match lowered {
                None => self.load(place.key).await?,
                Some(lowered) if lowered.underflow && lowered.clusters == 0 => {
                    return Err(underflow(run.start));
                }
                Some(lowered) => {
                    self.lowered.fetch_add(lowered.clusters, Ordering::Relaxed);
                    return Ok(lowered);
                }
            }
        }
    }

    /// Raises the count of a cluster in use, and returns it; `None`, with nothing
    /// changed: it cannot be as high.
    ///
    /// # Errors
    /// `Corrupt` if nothing counts the cluster; whatever reading reports.
    pub(crate) async fn raise(&self, cluster: HostCluster, by: u64) -> Result<Option<u64>> {
        let order = self.geometry.refcount_order;
        loop {
            let Some(place) = self.place(cluster)? else {
                return Err(underflow(cluster.index()));
            };
            let raised = self.change(place.key, |block| {
                let new = refcount::get(block, order, place.index).checked_add(by)?;
                refcount::set(block, order, place.index, new).then_some(new)
            });
            match raised {
                None => self.load(place.key).await?,
                Some(raised) => return Ok(raised),
            }
        }
    }

    /// The runs of clusters of `run`, in the slice of its first one, whose counts are
    /// exactly one; and where that slice ends.
    pub(crate) async fn owned_in_slice(&self, run: Range<u64>) -> Result<(Vec<Range<u64>>, u64)> {
        let order = self.geometry.refcount_order;
        loop {
            let Some(place) = self.place(HostCluster(run.start))? else {
                let next = self.geometry.refcount_block_entries();
                return Ok((Vec::new(), (run.start / next + 1) * next));
            };
            let end = run.start + self.entries_per_slice() - place.index as u64;
            let count = run.end.min(end) - run.start;
            let owned = self.cache.with(place.key, |block| {
                let mut owned: Vec<Range<u64>> = Vec::new();
                for cluster in run.start..run.start + count {
                    let index = place.index + (cluster - run.start) as usize;
                    if refcount::get(block, order, index) != 1 {
                        continue;
                    }
                    match owned.last_mut() {
                        Some(last) if last.end == cluster => last.end += 1,
                        _ => owned.push(cluster..cluster + 1),
                    }
                }
                owned
            });
            match owned {
                None => self.load(place.key).await?,
                Some(owned) => return Ok((owned, end)),
            }
        }
    }
}

fn underflow(cluster: u64) -> Error {
    let message = format!("the refcount of cluster {cluster} is zero already");
    corrupt("refcount", message)
}
