//! Room for requests that found none: what the mapping has dropped is committed and freed, what was
//! reserved is returned, and the request is tried again as long as that may help.
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
        while self.allocator.is_scanning() && self.allocator.scan_on().await.is_ok() {}
        if search.attempts > ATTEMPTS_ANYWHERE {
            self.leave_out_holes().await;
        }
        let changes = self.allocator.room_changes();
        let has_changed = search.changes.replace(changes) != Some(changes);
        let may_go_on = search.attempts < MOST_ATTEMPTS && search.searches < MOST_SEARCHES;
        if has_changed && may_go_on {
            return true;
        }
        let was_left_out = self.allocator.end_room_search();
        // Clusters that failed with ENOSPC for other requests may have room by now.
        may_go_on && was_left_out && is_full(error) && !std::mem::replace(&mut search.is_last, true)
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
        let cluster_bytes = self.geometry.cluster_size_bytes();
        for extent in self.allocator.free_extents() {
            let mut at = extent.start;
            while at < extent.end {
                let (start, len_bytes) = (at * cluster_bytes, (extent.end - at) * cluster_bytes);
                let Ok(status) = self.file.block_status(start, len_bytes).await else {
                    return;
                };
                let run = match status.status {
                    BlockStatus::Data => at..at + status.len_bytes / cluster_bytes,
                    _ => at..at + status.len_bytes.div_ceil(cluster_bytes),
                };
                let is_hole = run.is_empty() || status.status != BlockStatus::Data;
                let run = at..run.end.max(at + 1).min(extent.end);
                if is_hole && !self.has_room_at(&run).await {
                    self.allocator.leave_out_roomless(run.clone());
                }
                at = run.end;
            }
        }
    }

    async fn has_room_at(&self, run: &Range<u64>) -> bool {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let room = self.file.allocate(run.start * cluster_bytes, cluster_bytes);
        !matches!(room.await, Err(error) if error.kind() == ErrorKind::NoSpace)
    }
}
