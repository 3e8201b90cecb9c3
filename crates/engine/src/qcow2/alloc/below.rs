//! Clusters in a certain place: below a limit, for whoever makes the file shorter (`compact`), or
//! free ones that take room of the host, for whoever returns that (`commit/room.rs`).
//!
//! They do not come from the reserve: that is filled ahead, and from wherever there is room. While
//! somebody compacts, everybody else's clusters come from the lowest free ones, too.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::Result;

use super::allocator::{Allocation, Allocator, Attempt, Blocker, State};

/// While this is there, clusters are handed out from the lowest free ones on, even where what was
/// asked for could lie in one piece higher up.
#[derive(Debug)]
pub(crate) struct LowestFirst(Arc<Allocator>);

impl Drop for LowestFirst {
    fn drop(&mut self) {
        self.0.state().lowest_first -= 1;
    }
}

impl Allocator {
    /// Has clusters handed out from the lowest free ones on, and gives back those that were counted
    /// ahead: they may lie anywhere.
    ///
    /// # Errors
    /// When a count is zero already.
    pub(crate) async fn begin_lowest_first(self: &Arc<Self>) -> Result<LowestFirst> {
        self.state().lowest_first += 1;
        let begun = LowestFirst(self.clone());
        self.empty_reserve().await?;
        Ok(begun)
    }

    /// Allocates between one and `want` clusters side by side that all lie below cluster `limit`,
    /// which is inside the file. `None`: none is free there.
    ///
    /// # Errors
    /// When the refcounts cannot be read.
    pub(crate) async fn allocate_below(
        self: &Arc<Self>,
        limit: HostCluster,
        want: u64,
    ) -> Result<Option<Allocation>> {
        self.allocate_by(|allocator| allocator.attempt_below(limit.index(), want))
            .await
    }

    /// As [`Allocator::allocate_below`], of `count` clusters side by side, not fewer.
    pub(crate) async fn allocate_run_below(
        self: &Arc<Self>,
        limit: HostCluster,
        count: u64,
    ) -> Result<Option<Allocation>> {
        self.allocate_by(|allocator| allocator.attempt_run_below(limit.index(), count))
            .await
    }

    /// Allocates `count` clusters side by side, of the free ones that are known. `None`: there is no
    /// such run.
    ///
    /// # Errors
    /// When the refcounts cannot be read.
    pub(crate) async fn allocate_known_run(
        self: &Arc<Self>,
        count: u64,
    ) -> Result<Option<Allocation>> {
        loop {
            let limit = {
                let state = self.state();
                state.tail.min(state.room.limit())
            };
            match self.attempt_run_below(limit, count)? {
                None | Some(Attempt::Blocked(Blocker::Scan)) => return Ok(None),
                Some(Attempt::Blocked(obstacle)) => self.resolve(obstacle).await?,
                Some(Attempt::Done(allocation)) => {
                    self.emit_refcounts_raised().await;
                    return Ok(Some(allocation));
                }
            }
        }
    }

    /// Allocates free clusters among `clusters` that lie side by side, as far as they are known.
    /// `None`: none of them is.
    ///
    /// # Errors
    /// When the refcounts cannot be read.
    pub(crate) async fn allocate_among(
        self: &Arc<Self>,
        clusters: Range<u64>,
    ) -> Result<Option<Allocation>> {
        let want = clusters.end - clusters.start;
        self.allocate_by(|allocator| allocator.take_among(&mut allocator.state(), &clusters, want))
            .await
    }

    async fn allocate_by(
        self: &Arc<Self>,
        attempt: impl Fn(&Self) -> Result<Option<Attempt>>,
    ) -> Result<Option<Allocation>> {
        loop {
            match attempt(self)? {
                None => return Ok(None),
                Some(Attempt::Done(allocation)) => {
                    self.emit_refcounts_raised().await;
                    return Ok(Some(allocation));
                }
                Some(Attempt::Blocked(obstacle)) => self.resolve(obstacle).await?,
            }
        }
    }

    fn attempt_below(&self, limit: u64, want: u64) -> Result<Option<Attempt>> {
        let mut state = self.state();
        match self.take_among(&mut state, &(0..limit), want)? {
            None => Ok(unseen_below(&state, limit)),
            taken => Ok(taken),
        }
    }

    /// Takes up to `want` free clusters side by side, the lowest known ones among `clusters`.
    fn take_among(
        &self,
        state: &mut State,
        clusters: &Range<u64>,
        want: u64,
    ) -> Result<Option<Attempt>> {
        while let Some(extent) = state.free.first_in(clusters) {
            let known = extent.start.max(clusters.start)..extent.end.min(clusters.end);
            let (run, slice) = match self.find(known.start, want)? {
                Ok(found) => found,
                Err(obstacle) => return Ok(Some(Attempt::Blocked(obstacle))),
            };
            let run = run.start..run.end.min(known.end);
            // What was passed over is in use, whatever the index says.
            state.free.remove(known.start..slice.end.min(run.start));
            if run.start < run.end {
                return self.take_below(state, run, slice.key).map(Some);
            }
        }
        Ok(None)
    }

    fn attempt_run_below(&self, limit: u64, count: u64) -> Result<Option<Attempt>> {
        let mut state = self.state();
        let mut found = None;
        for extent in state.free.iter().take_while(|extent| extent.start < limit) {
            let end = extent.end.min(limit);
            let mut at = extent.start;
            while at + count <= end && found.is_none() {
                match self.find(at, count)? {
                    Err(obstacle) => return Ok(Some(Attempt::Blocked(obstacle))),
                    Ok((run, slice)) if run.end - run.start == count && run.end <= end => {
                        found = Some((run, slice.key));
                    }
                    Ok((run, _)) => at = run.end,
                }
            }
        }
        match found {
            Some((run, key)) => self.take_below(&mut state, run, key).map(Some),
            None => Ok(unseen_below(&state, limit)),
        }
    }

    /// Takes clusters that are free, of the slice of refcounts with this key.
    fn take_below(&self, state: &mut State, clusters: Range<u64>, key: u64) -> Result<Attempt> {
        if !self.count_once(&clusters)? {
            return Ok(Attempt::Blocked(Blocker::Load(key)));
        }
        state.free.remove(clusters.clone());
        Ok(Attempt::Done(Allocation {
            start: HostOffset(clusters.start * self.cluster_bytes()),
            clusters: clusters.end - clusters.start,
            reads_as_zeroes: false,
            refcount_durable: false,
        }))
    }
}

/// What must be looked at before it is certain that nothing is free below `limit`.
fn unseen_below(state: &State, limit: u64) -> Option<Attempt> {
    let unseen = state.scan.left.start < state.scan.left.end.min(limit);
    (unseen && !state.free.is_crowded()).then_some(Attempt::Blocked(Blocker::Scan))
}
