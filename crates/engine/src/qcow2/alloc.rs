//! Allocation of host clusters.
//!
//! The search goes upward from the lowest cluster that may be unused; freed
//! clusters pull that mark down again. Everything below the mark is in use.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vellum_format::limits::HOST_OFFSET_END;
use vellum_format::types::{HostCluster, HostOffset};
use vellum_storage::{Error, ErrorKind, Result};

use super::fault::corrupt;
use super::refcounts::Refcounts;

/// A run of newly allocated clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocation {
    /// Host offset of the first cluster.
    pub(crate) start: HostOffset,
    /// Number of clusters.
    pub(crate) clusters: u64,
    /// The clusters lie beyond everything ever written: they read as zeroes.
    pub(crate) fresh: bool,
}

#[derive(Debug)]
pub(super) struct State {
    /// No cluster below this one is unused.
    lowest: u64,
    /// Everything from here on was never written, in bytes.
    end_bytes: u64,
    /// Clusters were handed out beyond the end of the file.
    grown: bool,
}

impl State {
    fn note_end(&mut self, end_bytes: u64) {
        self.grown |= end_bytes > self.end_bytes;
        self.end_bytes = self.end_bytes.max(end_bytes);
    }
}

enum Attempt {
    Done(Allocation),
    Load(u64),
    NoBlock(HostCluster),
}

/// Hands out host clusters.
#[derive(Debug)]
pub(crate) struct Allocator {
    pub(crate) refcounts: Refcounts,
    /// One request at a time makes new refcount blocks.
    pub(crate) growing: async_lock::Mutex<()>,
    state: Mutex<State>,
    zero_init: bool,
    /// Clusters of the header, the L1 table and the snapshot table: a refcount of
    /// zero there is damage, not room.
    reserved: Mutex<Vec<Range<u64>>>,
}

impl Allocator {
    /// An allocator over `refcounts` for a file of `file_len_bytes`; `zero_init`:
    /// what lies beyond the end of the file reads as zeroes.
    pub(crate) fn new(
        refcounts: Refcounts,
        file_len_bytes: u64,
        zero_init: bool,
        reserved: Vec<Range<u64>>,
    ) -> Self {
        let state = Mutex::new(State {
            lowest: 0,
            end_bytes: file_len_bytes,
            grown: false,
        });
        Allocator {
            refcounts,
            growing: async_lock::Mutex::new(()),
            state,
            zero_init,
            reserved: Mutex::new(reserved),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates between one and `want` clusters that lie side by side, each with
    /// a refcount of one.
    ///
    /// # Errors
    /// When the refcounts cannot be read, or the format's limits are reached.
    pub(crate) async fn allocate(&self, want: u64) -> Result<Allocation> {
        loop {
            match self.attempt(want.max(1))? {
                Attempt::Done(allocation) => return Ok(allocation),
                Attempt::Load(key) => self.refcounts.load(key).await?,
                Attempt::NoBlock(cluster) => self.add_refcount_block(cluster).await?,
            }
        }
    }

    fn attempt(&self, want: u64) -> Result<Attempt> {
        let mut state = self.lock();
        let geometry = &self.refcounts.geometry;
        let per_slice = self.refcounts.entries_per_slice();
        loop {
            let cluster = HostCluster(state.lowest);
            check_limit(cluster, geometry.cluster_size_bytes())?;
            let Some(place) = self.refcounts.place(cluster)? else {
                return Ok(Attempt::NoBlock(cluster));
            };
            let Some(run) = self.refcounts.find_unused(place.key, place.index, want) else {
                return Ok(Attempt::Load(place.key));
            };
            let slice_start = state.lowest - place.index as u64;
            if run.is_empty() {
                state.lowest = slice_start + per_slice;
                continue;
            }
            let clusters = slice_start + run.start as u64..slice_start + run.end as u64;
            self.refuse_reserved(&clusters)?;
            if !self.refcounts.take(place.key, run.clone()) {
                return Ok(Attempt::Load(place.key));
            }
            state.lowest = clusters.end;
            return Ok(Attempt::Done(self.place(&mut state, clusters)));
        }
    }

    fn refuse_reserved(&self, clusters: &Range<u64>) -> Result<()> {
        let cluster_bytes = self.refcounts.geometry.cluster_size_bytes();
        let bytes = clusters.start * cluster_bytes..clusters.end * cluster_bytes;
        let hit = |r: &Range<u64>| r.start < clusters.end && clusters.start < r.end;
        let counted = self.refcounts.table().overlaps(&bytes, cluster_bytes);
        let reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        if !counted && !reserved.iter().any(hit) {
            return Ok(());
        }
        drop(reserved);
        let start = clusters.start;
        let message = format!("the refcount of metadata in clusters from {start} on is zero");
        Err(corrupt("allocate", message))
    }

    fn place(&self, state: &mut State, run: Range<u64>) -> Allocation {
        let cluster_bytes = self.refcounts.geometry.cluster_size_bytes();
        let start_bytes = run.start * cluster_bytes;
        let clusters = run.end - run.start;
        let fresh = self.zero_init && start_bytes >= state.end_bytes;
        state.note_end(run.end * cluster_bytes);
        Allocation {
            start: HostOffset(start_bytes),
            clusters,
            fresh,
        }
    }

    /// Notes that everything below `end_bytes` may have been written.
    pub(crate) fn note_end(&self, end_bytes: u64) {
        self.lock().note_end(end_bytes);
    }

    /// The first cluster beyond everything that was ever used.
    pub(super) fn end_cluster(&self) -> u64 {
        let cluster_bytes = self.refcounts.geometry.cluster_size_bytes();
        self.lock().end_bytes.div_ceil(cluster_bytes)
    }

    /// Notes that the file was cut at `end_bytes`. Nothing beyond it may be in use,
    /// or come into use meanwhile.
    pub(crate) fn note_cut(&self, end_bytes: u64) {
        let mut state = self.lock();
        state.end_bytes = end_bytes;
        state.grown = false;
    }

    /// Notes that metadata that was at clusters `old` has moved to `new`.
    pub(crate) fn move_reserved(&self, old: Range<u64>, new: Range<u64>) {
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.retain(|range| *range != old);
        reserved.push(new);
    }

    /// Where the file should end since clusters were added to it, in bytes.
    pub(crate) fn grown_end_bytes(&self) -> Option<u64> {
        let state = self.lock();
        state.grown.then_some(state.end_bytes)
    }

    /// Lowers the counts of a run of clusters that no durable mapping and no
    /// request uses any more; returns those that are unused now.
    pub(crate) async fn release(&self, start: HostCluster, count: u64) -> Result<Vec<HostCluster>> {
        let unused = self.refcounts.release(start, count).await?;
        if let Some(first) = unused.iter().min() {
            let mut state = self.lock();
            state.lowest = state.lowest.min(first.index());
        }
        Ok(unused)
    }
}

pub(super) fn check_limit(cluster: HostCluster, cluster_bytes: u64) -> Result<()> {
    if cluster.index() < HOST_OFFSET_END / cluster_bytes {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::NoSpace,
        "allocate",
        "the image has reached the format's largest size",
    )
    .with_errno(27))
}
