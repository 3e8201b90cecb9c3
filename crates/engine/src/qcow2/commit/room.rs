//! Room for requests that found none: what the mapping has dropped is committed and freed, what was
//! reserved is returned, and the request is tried again as long as that may help.
//!
//! A write into a hole that the mapping leads to has one more way: free clusters that take room of the
//! host return it ([`Image::punch_free_clusters`]).
//!
//! Invariants:
//! - Whoever searches for room holds no guest range and no turn of the commits: it may wait for
//!   requests that hold these.
//! - A search ends: each attempt needs a change since the one before, which others make only as they
//!   get on, and both kinds of attempts are bounded ([`MOST_ATTEMPTS`], [`MOST_SEARCHES`]).
//! - It waits for reads of what was dropped, but not for ever: a read whose future nobody polls
//!   does not end.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{Either, select};
use vellum_io::{Error, ErrorKind, Result, lane};
use vellum_storage::BlockStatus;
use vellum_storage::mutants::{self, Mutant};

use crate::qcow2::alloc::allocator::room::is_full;
use crate::qcow2::image::Image;

/// How often a request is tried at most for which the storage has no room.
const MOST_ATTEMPTS: u32 = 6;
/// The same for one that finds no free cluster: others may take what is freed meanwhile.
const MOST_SEARCHES: u32 = 16;
/// After so many failures only clusters are tried that have room for certain.
const ATTEMPTS_ANYWHERE: u32 = 2;
/// How long a request without room waits for reads of dropped clusters.
const MAX_WAIT_FOR_READS: Duration = Duration::from_secs(5);
/// The same for one that could let the file grow instead.
const SHORT_WAIT_FOR_READS: Duration = Duration::from_millis(20);

/// The attempts of one request.
#[derive(Debug, Default)]
pub(crate) struct RoomSearch {
    attempts: u32,
    searches: u32,
    /// [`room_changes`](crate::qcow2::alloc::allocator::Allocator::room_changes) at the last one.
    changes: Option<u64>,
    /// All clusters that had been left out are tried once more.
    is_last: bool,
    /// So many clusters the last attempt wrote where the mapping leads: no other ones help.
    in_place_clusters: u64,
    /// The first error of the storage: what it says, no later one says better.
    first: Option<Error>,
}

impl RoomSearch {
    /// For a request that writes nothing anew, so that it is tried again only if something was freed.
    pub(crate) fn since(changes: u64) -> Self {
        RoomSearch {
            changes: Some(changes),
            ..RoomSearch::default()
        }
    }

    /// Notes to how many clusters the attempt that has failed wrote in place, where the mapping leads.
    pub(crate) fn note_in_place(&mut self, clusters: u64) {
        self.in_place_clusters = clusters;
    }

    /// The error of a request that ends with `last`.
    pub(crate) fn error(&mut self, last: Error) -> Error {
        match is_full(&last) {
            true => self.first.take().unwrap_or(last),
            false => last,
        }
    }
}

impl Image {
    /// After a request failed with `error`: if that is a lack of room, frees and returns what can
    /// be. Returns whether the request should be tried again.
    pub(crate) async fn make_room(
        self: &Arc<Self>,
        search: &mut RoomSearch,
        error: &Error,
    ) -> bool {
        // A read that fails, of a backing file, does not lack room of this image.
        let lacks_room = error.kind() == ErrorKind::NoSpace && error.operation() != "read";
        // Who injects an error wants to see what it leads to.
        let is_injected = !is_full(error) && self.file.event_listener().is_some();
        if !lacks_room || is_injected || self.fail_stop.check("write", &self.name).is_err() {
            return false;
        }
        self.write_buffer.room_below.note_full();
        self.hurry_if_short();
        search.searches += 1;
        if !is_full(error) {
            search.attempts += 1;
            search.first.get_or_insert_with(|| error.clone());
        }
        // What cannot be freed or looked up now is no room for this request.
        drop(self.allocator.return_reserves().await);
        drop(self.free_dropped(MAX_WAIT_FOR_READS).await);
        drop(self.allocator.scan_rest().await);
        if search.attempts > ATTEMPTS_ANYWHERE {
            self.leave_out_holes().await;
        }
        let may_go_on = search.attempts < MOST_ATTEMPTS && search.searches < MOST_SEARCHES;
        let has_changed = search.changes != Some(self.allocator.room_changes());
        let lacks_block = !has_changed || search.in_place_clusters > 0 && search.attempts > 1;
        if may_go_on && lacks_block && !is_full(error) {
            self.punch_free_clusters(search).await;
        }
        let changes = self.allocator.room_changes();
        if search.changes.replace(changes) != Some(changes) && may_go_on {
            return true;
        }
        let was_left_out = self.allocator.end_room_search();
        // A cluster that was left out may hold some blocks, though not all that it needs itself.
        let needs_any_block = search.in_place_clusters > 0;
        let is_last_resort = was_left_out && !search.is_last && (is_full(error) || needs_any_block);
        if may_go_on && is_last_resort {
            // Clusters that failed with ENOSPC for other requests may have room by now, and a block that
            // one of those left out holds is room for any.
            search.is_last = true;
            self.punch_free_clusters(search).await;
        }
        may_go_on && is_last_resort
    }

    /// Before a request that takes about `want` clusters: commits what was dropped if the file
    /// would grow else, though enough is about to be free. The caller holds nothing.
    pub(crate) async fn free_before_growth(self: &Arc<Self>, want: u64) {
        if self.allocator.wants_frees(want) {
            // The file can grow, and whatever else is wrong meets the next flush.
            drop(Box::pin(self.free_dropped(SHORT_WAIT_FOR_READS)).await);
        }
    }

    /// Before a change that cannot be tried again: frees what was dropped if room is scarce.
    pub(crate) async fn free_before_change(self: &Arc<Self>) {
        if self.allocator.is_scarce() {
            drop(self.free_dropped(MAX_WAIT_FOR_READS).await);
        }
    }

    /// Commits and frees what the mapping has dropped until now, as far as reads that run end within
    /// `max_wait`.
    async fn free_dropped(self: &Arc<Self>, max_wait: Duration) -> Result<()> {
        if mutants::is(Mutant::KeepPendingFrees) {
            return Ok(());
        }
        let _one = self.commits.freeing.lock().await;
        // A commit that runs has taken what it makes durable off the lists.
        if self.commits.lists().has_any() || self.commits.commit_coalescer.is_running() {
            // In the turn of the commits: whoever counts what is free does so between two of them.
            self.commit_and(self.reclaim_within(max_wait)).await?;
        }
        self.allocator.apply_deferred_decrements().await
    }

    async fn reclaim_within(&self, max_wait: Duration) -> Result<()> {
        while self.commits.lists().has_durable() {
            let readers = self.read_epochs.wait_for_previous();
            futures_util::pin_mut!(readers);
            if readers.as_mut().now_or_never().is_none() {
                let limit = std::pin::pin!(lane::sleep(max_wait));
                if let Either::Right(_) = select(readers, limit).await {
                    return Ok(());
                }
            }
            self.reclaim().await?;
        }
        Ok(())
    }

    /// Leaves free clusters out that would take room of the host, where it says which: those that are
    /// holes. A run of them is left out only if not even its first cluster can be given room.
    async fn leave_out_holes(&self) {
        for extent in self.allocator.free_extents() {
            let mut at = extent.start;
            while at < extent.end {
                let Ok((run, is_hole)) = self.run_alike(at..extent.end).await else {
                    return;
                };
                if is_hole && !self.has_room_at(&run).await {
                    self.allocator.leave_out_roomless(run.clone());
                }
                at = run.end;
            }
        }
    }

    /// Has free clusters return room of the host: as much as the request needs, twice as much at each
    /// attempt, for others may take it. Where the host tells of none that takes room, it may not tell of
    /// all: then, and at the last attempts, every free cluster returns what it has.
    async fn punch_free_clusters(self: &Arc<Self>, search: &RoomSearch) {
        // Clusters are allocated while they are punched: others would find none free, and give up.
        let _one = self.commits.punching.lock().await;
        let wanted = search.in_place_clusters.max(1) << search.attempts;
        let needs_all = search.is_last || search.attempts > ATTEMPTS_ANYWHERE;
        if needs_all || self.punch_data(wanted).await == 0 {
            for extent in self.allocator.free_extents() {
                self.punch_free_among(extent, u64::MAX).await;
            }
        }
    }

    /// Punches up to `most` free clusters that the host tells of as data; returns how many.
    async fn punch_data(self: &Arc<Self>, most: u64) -> u64 {
        let mut punched = 0;
        for extent in self.allocator.free_extents() {
            let mut at = extent.start;
            while at < extent.end && punched < most {
                let Ok((run, is_hole)) = self.run_alike(at..extent.end).await else {
                    return punched;
                };
                at = run.end;
                if !is_hole {
                    punched += self.punch_free_among(run, most - punched).await;
                }
            }
        }
        punched
    }

    /// Punches up to `most` free clusters among these, while they are allocated; returns how many.
    async fn punch_free_among(self: &Arc<Self>, mut clusters: Range<u64>, most: u64) -> u64 {
        let start = clusters.start;
        clusters.end = clusters.end.min(start.saturating_add(most));
        while !clusters.is_empty() {
            let taken = self.allocator.allocate_among(clusters.clone()).await;
            let Ok(Some(taken)) = taken else {
                break;
            };
            let first = taken.start.cluster(&self.geometry).index();
            clusters.start = first + taken.clusters;
            self.punch(first..clusters.start).await;
            self.give_back(taken).await;
        }
        clusters.start - start
    }

    /// The first clusters of an extent that are alike, and whether they are a hole in the file.
    async fn run_alike(&self, extent: Range<u64>) -> Result<(Range<u64>, bool)> {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let len_bytes = (extent.end - extent.start) * cluster_bytes;
        let start = extent.start * cluster_bytes;
        let status = self.file.block_status(start, len_bytes).await?;
        let whole = status.len_bytes / cluster_bytes;
        let is_data = status.status == BlockStatus::Data;
        let count = match is_data {
            true => whole,
            false => status.len_bytes.div_ceil(cluster_bytes),
        };
        let end = (extent.start + count.max(1)).min(extent.end);
        Ok((extent.start..end, !is_data || whole == 0))
    }

    async fn has_room_at(&self, run: &Range<u64>) -> bool {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let room = self.file.allocate(run.start * cluster_bytes, cluster_bytes);
        !matches!(room.await, Err(error) if error.kind() == ErrorKind::NoSpace)
    }
}
