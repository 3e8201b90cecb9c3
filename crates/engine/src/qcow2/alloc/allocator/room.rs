//! Where room runs out: which clusters may still be handed out.
//!
//! A storage of fixed length (a device, an NBD export) holds so many clusters, and none beyond them
//! is handed out. A storage that grows reports that it is full when something is written: from then
//! on clusters are handed out from the lowest free ones on, one at a time, and one that could not
//! be written is left out until the request that met the end has tried all others.
//!
//! Freed clusters are preferred over the end of the file. Those that still wait for a commit are not
//! free yet: while they wait the file may grow, but only by a fraction of what is in use
//! ([`Allocator::wants_frees`]).
//!
//! Invariant: [`Blocker::Full`] means that no cluster below the limit is free and known, none is set
//! aside, and none is left to be looked at.

use std::ops::Range;
use std::sync::atomic::Ordering;

use vellum_io::{Error, Result};
use vellum_storage::mutants::{self, Mutant};

use super::{Allocation, Allocator, Blocker, MOST_FREE_EXTENTS, State};
use crate::qcow2::alloc::free_index::FreeIndex;
use crate::qcow2::alloc::refcounts::Refcounts;

/// After the storage has reported that it is full, so many clusters are handed out one at a time.
const SHORT_FOR_CLUSTERS: u64 = 64;
/// A thirty-second of the clusters in use, and so many bytes, may lie unused below the end of the file
/// while they wait for a commit, are set aside, or are too short for what is wanted in one piece.
const SLACK_SHARE: u64 = 32;
const SLACK_BYTES: u64 = 256 << 10;

const ALLOCATE: &str = "allocate";
const ENOSPC: i32 = 28;

/// The error of a request for which no cluster is free.
pub(super) fn full() -> Error {
    Error::from_errno(ALLOCATE, ENOSPC)
}

/// Whether a request failed because no cluster is free, before anything was written.
pub(crate) fn is_full(error: &Error) -> bool {
    error.operation() == ALLOCATE
}

/// How many clusters a storage holds: `u64::MAX` if it grows.
pub(super) fn limit_of(refcounts: &Refcounts) -> Result<u64> {
    if refcounts.file.capabilities().growable {
        return Ok(u64::MAX);
    }
    let len_bytes = refcounts.file.len_bytes()?;
    Ok(len_bytes / refcounts.geometry.cluster_size_bytes())
}

/// See the module's head.
#[derive(Debug)]
pub(in crate::qcow2::alloc) struct Room {
    limit: u64,
    /// Free clusters that could not be written.
    roomless: FreeIndex,
    /// The storage is full until so many clusters have been handed out.
    short_until: u64,
    /// Counts whatever may help a request that found no room.
    changes: u64,
}

impl Room {
    pub(super) fn new(limit: u64) -> Room {
        Room {
            limit,
            roomless: FreeIndex::new(MOST_FREE_EXTENTS),
            short_until: 0,
            changes: 0,
        }
    }

    /// The cluster behind the last one that the storage holds.
    pub(in crate::qcow2::alloc) fn limit(&self) -> u64 {
        self.limit
    }

    /// How many clusters may be taken in one piece.
    pub(super) fn most_at_once(&self, handed_out: u64, want: u64) -> u64 {
        match handed_out < self.short_until {
            true => 1,
            false => want,
        }
    }

    pub(in crate::qcow2::alloc) fn note_change(&mut self) {
        self.changes += 1;
    }
}

/// Whether clusters may come from the end of the file.
pub(super) enum Tail {
    Usable,
    /// More clusters are free now.
    Retry,
    Blocked(Blocker),
}

impl State {
    /// Whether the storage has reported a lack of room a moment ago.
    pub(in crate::qcow2::alloc) fn is_short(&self) -> bool {
        self.handed_out < self.room.short_until
    }

    /// Adds clusters whose counts are zero to the free ones.
    pub(in crate::qcow2::alloc) fn insert_free(&mut self, clusters: Range<u64>) {
        if let Some(forgotten) = self.free.insert(clusters) {
            self.scan.look_again(forgotten);
            // The scan may hand these clusters out again, so no window over them can promise zeroes.
            self.close_streams();
        }
    }

    /// Gives back what is set aside for sequential writers.
    pub(in crate::qcow2::alloc) fn close_streams(&mut self) {
        for clusters in self.streams.close_all() {
            self.insert_free(clusters);
            self.room.note_change();
        }
    }

    /// Leaves free clusters out for which the storage has no room.
    fn leave_out(&mut self, clusters: Range<u64>) {
        self.free.remove(clusters.clone());
        if let Some(forgotten) = self.room.roomless.insert(clusters) {
            self.insert_free(forgotten);
        }
    }

    fn restore_roomless(&mut self) {
        for clusters in self.room.roomless.drain() {
            self.insert_free(clusters);
        }
    }
}

impl Allocator {
    /// Notes that the mapping has dropped clusters which become free at the next commit, or, with a
    /// negative number, that they are free now.
    pub(crate) fn note_pending_frees(&self, clusters: i64) {
        self.pending_frees
            .fetch_add(clusters as u64, Ordering::Relaxed);
    }

    fn pending_frees(&self) -> u64 {
        self.pending_frees.load(Ordering::Relaxed)
    }

    /// How many clusters may lie unused below the end of the file.
    pub(in crate::qcow2::alloc) fn slack_clusters(&self, state: &State) -> u64 {
        let unused = state.free.clusters()
            + state.room.roomless.clusters()
            + state.reserve.clusters()
            + state.streams.clusters()
            + self.pending_frees();
        let used = state.tail.saturating_sub(unused);
        used / SLACK_SHARE + SLACK_BYTES / self.cluster_bytes()
    }

    /// Whether a request for `want` clusters should commit what the mapping has dropped first: else
    /// the file would grow though enough clusters are about to be free.
    pub(crate) fn wants_frees(&self, want: u64) -> bool {
        let pending = self.pending_frees();
        if pending == 0 {
            return false;
        }
        let state = self.state();
        state.free.clusters() < want && !self.may_grow(&state, 0)
    }

    /// Whether the file may grow by `clusters` that are not used at once: else more would lie unused
    /// below its end than may.
    pub(in crate::qcow2::alloc) fn may_grow(&self, state: &State, clusters: u64) -> bool {
        let unused = self.pending_frees() + state.streams.clusters() + state.free.clusters();
        unused + clusters <= self.slack_clusters(state)
    }

    /// The free extent that a request for `want` clusters takes its clusters from.
    pub(super) fn free_extent(&self, state: &State, want: u64) -> Option<Range<u64>> {
        let lowest_first = state.lowest_first > 0 || state.is_short() || !self.may_grow(state, 0);
        let extent = match lowest_first || state.tail >= state.room.limit {
            true => state.free.first(),
            false => state.free.first_for(want, self.slack_clusters(state) / 2),
        }?;
        let extent = extent.start..extent.end.min(state.room.limit);
        (!extent.is_empty()).then_some(extent)
    }

    /// Whether clusters may come from the end of the file, now that no known free extent fits.
    pub(super) fn look_at_tail(&self, state: &mut State) -> Result<Tail> {
        let next = state.tail.saturating_add(1);
        let is_full = !self.ends_inside(state, next)?;
        if !is_full && !state.is_short() {
            return Ok(Tail::Usable);
        }
        if state.streams.clusters() > 0 && !mutants::is(Mutant::KeepReserve) {
            state.close_streams();
            return Ok(Tail::Retry);
        }
        if !state.scan.left.is_empty() {
            return Ok(Tail::Blocked(Blocker::Scan));
        }
        let has_failed_there = state.room.roomless.end() == Some(state.tail);
        match is_full || has_failed_there {
            true => Ok(Tail::Blocked(Blocker::Full)),
            false => Ok(Tail::Usable),
        }
    }

    /// Ends what a lack of room has changed, once enough clusters found room.
    pub(super) fn look_for_recovery(&self, state: &mut State) {
        if !state.is_short() && state.room.roomless.clusters() > 0 {
            state.restore_roomless();
        }
    }

    /// Refuses clusters that do not all lie before the end of a storage of fixed length.
    pub(in crate::qcow2::alloc) fn check_inside(&self, end: u64) -> Result<()> {
        match self.ends_inside(&mut self.state(), end)? {
            true => Ok(()),
            false => Err(full()),
        }
    }

    /// Whether clusters up to `end` lie inside the storage: a device may have grown.
    fn ends_inside(&self, state: &mut State, end: u64) -> Result<bool> {
        if end > state.room.limit {
            state.room.limit = limit_of(&self.refcounts)?;
        }
        Ok(end <= state.room.limit)
    }

    /// Returns what was counted or set aside ahead to the free clusters.
    ///
    /// # Errors
    /// When a count is zero already.
    pub(crate) async fn return_reserves(&self) -> Result<()> {
        if mutants::is(Mutant::KeepReserve) {
            return Ok(());
        }
        self.empty_reserve().await
    }

    /// Changes whenever a request that found no room may find some.
    pub(crate) fn room_changes(&self) -> u64 {
        self.state().room.changes
    }

    /// Whether the storage has a fixed length, or was full a moment ago.
    pub(crate) fn is_scarce(&self) -> bool {
        let state = self.state();
        state.room.limit != u64::MAX || state.is_short()
    }

    /// Ends a search for room that has failed: the next one begins with all free clusters. Returns
    /// whether some had been left out.
    pub(crate) fn end_room_search(&self) -> bool {
        let mut state = self.state();
        let was_left_out = state.room.roomless.clusters() > 0;
        state.restore_roomless();
        was_left_out
    }

    /// As [`Allocator::release`], for new clusters that could not be written for lack of room.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn release_roomless(&self, allocation: Allocation) -> Result<()> {
        let start = allocation.start.cluster(&self.refcounts.geometry);
        self.release(start, allocation.clusters).await?;
        let mut state = self.state();
        let clusters = start.index()..start.index() + allocation.clusters;
        while let Some(free) = state.free.first_in(&clusters) {
            state.leave_out(free.start.max(clusters.start)..free.end.min(clusters.end));
        }
        state.room.note_change();
        state.room.short_until = state.handed_out + SHORT_FOR_CLUSTERS;
        Ok(())
    }

    /// The free clusters that are known, lowest first.
    pub(crate) fn free_extents(&self) -> Vec<Range<u64>> {
        self.state().free.iter().collect()
    }

    /// Leaves free clusters out of which it is known that the storage has no room for them.
    pub(crate) fn leave_out_roomless(&self, clusters: Range<u64>) {
        self.state().leave_out(clusters);
    }
}
