//! Finds the free clusters that an image has when it is opened.
//!
//! A small image is scanned before the first cluster is taken from beyond its end,
//! lowest first. On a large one that would take too long: clusters come from beyond
//! the end at first, and the scan goes on in the background.

use std::ops::Range;

use vellum_format::refcount;
use vellum_format::types::HostCluster;
use vellum_io::Result;

use super::allocator::{Allocator, Blocker, State};
use crate::qcow2::header::load::read_bytes;

/// An image with more slices of refcounts is scanned in the background.
const EAGER_SLICES: u64 = 16;
/// Refcounts that are read in one step of the background.
const STEP_BYTES: u64 = 64 << 10;
/// Steps that are made one after the other.
const STEPS_AT_ONCE: u64 = 8;
/// Clusters that are handed out before the next steps.
const CLUSTERS_BETWEEN: u64 = 64;

/// How far the scan has come: free clusters below `left` are in the index.
#[derive(Debug)]
pub(crate) struct Scan {
    /// Clusters that were not looked at yet.
    pub(super) left: Range<u64>,
    eager: bool,
    steps_left: u64,
    rest_until: u64,
}

impl Scan {
    /// A scan of all clusters below `end`.
    pub(crate) fn new(end: u64, entries_per_slice: u64) -> Self {
        Scan {
            left: 0..end,
            eager: end <= EAGER_SLICES * entries_per_slice,
            steps_left: STEPS_AT_ONCE,
            rest_until: 0,
        }
    }

    /// Whether clusters below the lowest known free extent must be looked at
    /// before anything is allocated.
    pub(crate) fn is_due(&self, lowest: Option<Range<u64>>) -> bool {
        self.eager
            && !self.left.is_empty()
            && lowest.is_none_or(|free| self.left.start <= free.start)
    }

    /// Lets the scan visit clusters again that the index has forgotten.
    pub(crate) fn look_again(&mut self, clusters: Range<u64>) {
        self.left = self.left.start.min(clusters.start)..self.left.end.max(clusters.end);
    }

    /// Forgets everything from cluster `end` on, where the file was cut.
    pub(crate) fn shrink(&mut self, end: u64) {
        self.left = self.left.start.min(end)..self.left.end.min(end);
    }

    /// Whether the background should take a step, now that so many clusters were
    /// handed out.
    pub(crate) fn wants_step(&mut self, handed_out: u64) -> bool {
        if self.eager || self.left.is_empty() || handed_out < self.rest_until {
            return false;
        }
        self.steps_left -= 1;
        if self.steps_left == 0 {
            self.steps_left = STEPS_AT_ONCE;
            self.rest_until = handed_out + CLUSTERS_BETWEEN;
        }
        true
    }
}

impl State {
    /// Enters what a look at `seen` has found.
    fn note_scanned(&mut self, seen: Range<u64>, free: Vec<Range<u64>>) {
        if self.scan.left.start == seen.start {
            self.scan.left.start = seen.end;
        }
        for clusters in free {
            self.insert_free(clusters);
            self.room.note_change();
        }
    }
}

impl Allocator {
    /// Looks at one slice of refcounts in memory.
    pub(crate) fn scan_slice(&self, state: &mut State) -> Result<Option<Blocker>> {
        let first = state.scan.left.start;
        let Some(place) = self.refcounts.place(HostCluster(first))? else {
            self.skip_missing_block(state, first);
            return Ok(None);
        };
        let count = self.refcounts.entries_per_slice() - place.index as u64;
        let seen = first..(first + count).min(state.scan.left.end);
        let order = self.refcounts.geometry.refcount_order;
        let free = self.refcounts.cache.with(place.key, |counts| {
            unused(counts, order, place.index, seen.clone())
        });
        let Some(free) = free else {
            return Ok(Some(Blocker::Load(place.key)));
        };
        state.note_scanned(seen, free);
        Ok(None)
    }

    /// A range without a refcount block is free.
    fn skip_missing_block(&self, state: &mut State, first: u64) {
        let entries = self.refcounts.geometry.refcount_block_entries();
        let end = ((first / entries + 1) * entries).min(state.scan.left.end);
        state.note_scanned(first..end, vec![first..end]);
    }

    /// Looks at the refcounts that were not looked at yet, until the index is full: for whatever is found then,
    /// something is forgotten that would have to be looked for again.
    ///
    /// # Errors
    /// When refcounts cannot be read.
    pub(crate) async fn scan_rest(&self) -> Result<()> {
        loop {
            let left = self.state().scan.left.clone();
            if left.is_empty() {
                return Ok(());
            }
            self.scan_on().await?;
            if self.state().scan.left.start <= left.start {
                return Ok(());
            }
        }
    }

    /// Looks at a few more refcounts, on disk: a scan must not push others out of
    /// the cache. What it sees may be out of date, as the index may be.
    pub(crate) async fn scan_on(&self) -> Result<()> {
        let (first, end) = {
            let state = self.state();
            (state.scan.left.start, state.scan.left.end)
        };
        if first >= end {
            return Ok(());
        }
        let Some(place) = self.refcounts.place(HostCluster(first))? else {
            self.skip_missing_block(&mut self.state(), first);
            return Ok(());
        };
        let geometry = &self.refcounts.geometry;
        let order = geometry.refcount_order;
        let block_bytes = geometry.cluster_size_bytes();
        let in_block = place.key % block_bytes;
        let len_bytes = STEP_BYTES.min(block_bytes - in_block);
        let counts = read_bytes(&self.refcounts.file, place.key, len_bytes).await?;
        let count = ((len_bytes * 8) >> order) - place.index as u64;
        let seen = first..(first + count).min(end);
        let free = unused(&counts, order, place.index, seen.clone());
        self.state().note_scanned(seen, free);
        Ok(())
    }
}

/// The runs of clusters with a count of zero; the count of the first of `clusters`
/// is number `index`.
fn unused(counts: &[u8], order: u32, index: usize, clusters: Range<u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for (at, cluster) in clusters.enumerate() {
        if refcount::get(counts, order, index + at) != 0 {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.end == cluster => run.end += 1,
            _ => runs.push(cluster..cluster + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_runs_are_found() {
        let counts = [0, 0, 1, 0, 2, 0, 0];
        assert_eq!(unused(&counts, 3, 1, 11..17), [11..12, 13..14, 15..17]);
    }

    #[test]
    fn the_background_rests_between_steps() {
        let mut scan = Scan::new(1 << 20, 2048);
        let steps = (0..100).filter(|_| scan.wants_step(0)).count() as u64;
        assert_eq!(steps, STEPS_AT_ONCE);
        assert!(scan.wants_step(CLUSTERS_BETWEEN));
        assert!(!scan.is_due(None), "a large image does not wait for it");
        assert!(Scan::new(2048, 2048).is_due(None));
    }
}
