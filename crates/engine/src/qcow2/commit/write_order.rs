//! Which dirty state may reach the disk before which, and when freed clusters may
//! be used again.
//!
//! All changes reach the disk by *commits*, one at a time:
//!
//! 1. what the mapping has dropped so far is noted; dirty mapping tables are
//!    copied; then dirty refcount blocks are written;
//! 2. barrier: data, copied-on-write data, new tables and refcounts are durable;
//! 3. the copies of the mapping tables are written;
//! 4. barrier: the mapping is durable;
//! 5. what was noted in 1 is nobody's on disk; once no request reads it either,
//!    its refcounts go down and it may be used again.
//!
//! Step 2 is left out when no change in the copies needs it ([`WriteOrder::AnyTime`]): an
//! entry that points at a new cluster whose refcount is durable already and which
//! reads on disk as what the guest saw there before, namely zeroes, may be on disk
//! before the data is.
//!
//! Invariants:
//! - A mapping entry is copied in 1 only after the data that it points at was
//!   written and its refcount raised in memory, so 2 makes both durable.
//! - A cluster is noted as dropped only after the mapping that drops it has
//!   changed in memory, so 3 writes that change.
//!
//! Concurrent flushes share commits: a flush is served by any commit that starts
//! after it.

#[cfg(all(test, shuttle))]
mod interleavings;

use vellum_format::types::HostCluster;
use vellum_io::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use vellum_io::sync::{Mutex, MutexGuard};

use super::coalesce::Coalescer;
use super::epochs::Epochs;

/// When a change of the mapping may reach the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteOrder {
    /// At any time.
    AnyTime,
    /// After a barrier that follows everything that was written before the change.
    AfterBarrier,
}

impl WriteOrder {
    /// For a mapping to new clusters that read as the old content did, whether or not
    /// their refcounts are durable.
    pub(crate) fn of_new_clusters(refcount_durable: bool) -> Self {
        match refcount_durable {
            true => WriteOrder::AnyTime,
            false => WriteOrder::AfterBarrier,
        }
    }
}

/// Why the mapping has dropped a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DropReason {
    /// The guest has discarded it, or zeroed it and let its space go.
    Discarded,
    /// The guest's data lies elsewhere now. Never punched: the cluster is soon used
    /// again.
    Replaced,
    /// The device has become smaller.
    Shrunk,
    /// It belonged to a snapshot, or to what a snapshot has replaced.
    Snapshot,
    /// It was a table.
    Other,
}

/// A run of clusters that the mapping has dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DroppedRun {
    pub(crate) start: HostCluster,
    pub(crate) count: u64,
    pub(crate) reason: DropReason,
    /// How many of them become free with that: nothing else refers to them.
    pub(crate) freeable: u64,
}

/// The same clusters in as few runs as possible: what lay scattered for the guest may lie
/// side by side in the file, and each run costs requests.
pub(super) fn merged(mut runs: Vec<DroppedRun>) -> Vec<DroppedRun> {
    runs.sort_by_key(|run| run.start);
    runs.dedup_by(|next, run| {
        let follows = run.start.index() + run.count == next.start.index();
        let joins = follows && run.reason == next.reason;
        if joins {
            run.count += next.count;
            run.freeable += next.freeable;
        }
        joins
    });
    runs
}

#[derive(Default)]
pub(super) struct DeferredFrees {
    /// Dropped in memory, not on disk yet.
    pub(super) not_durable: Vec<DroppedRun>,
    /// Dropped on disk; perhaps still being read.
    pub(super) durable: Vec<DroppedRun>,
    /// As `durable`, since before the last turn of the readers' generations.
    pub(super) quiescing: Vec<DroppedRun>,
    ever_dropped_clusters: u64,
}

impl DeferredFrees {
    pub(super) fn has_any(&self) -> bool {
        !self.not_durable.is_empty() || self.has_durable()
    }

    pub(super) fn has_durable(&self) -> bool {
        !self.durable.is_empty() || !self.quiescing.is_empty()
    }
}

/// The state of commits.
#[derive(Default)]
pub(crate) struct Commits {
    pub(super) commit_coalescer: Coalescer,
    pub(super) writeback_coalescer: Coalescer,
    deferred_frees: Mutex<DeferredFrees>,
    /// Changes that need a barrier: running, and whether any has ended since the
    /// last commit took its copies.
    pub(super) running_changes: AtomicUsize,
    changed_since_commit: AtomicBool,
    /// A commit in the background is under way.
    pub(super) background_commit: AtomicBool,
    /// One at a time commits for the sake of what was dropped.
    pub(super) freeing: async_lock::Mutex<()>,
    /// One at a time has free clusters return their room.
    pub(super) punching: async_lock::Mutex<()>,
}

/// A running change of the mapping that needs a barrier before it.
#[derive(Debug)]
pub(crate) struct OrderedChange<'a>(&'a Commits);

impl Drop for OrderedChange<'_> {
    fn drop(&mut self) {
        self.0.changed_since_commit.store(true, Ordering::SeqCst);
        self.0.running_changes.fetch_sub(1, Ordering::SeqCst);
    }
}

impl std::fmt::Debug for Commits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Order")
    }
}

impl Commits {
    pub(super) fn lists(&self) -> MutexGuard<'_, DeferredFrees> {
        self.deferred_frees.lock()
    }

    /// Must be held while a table of the mapping is changed in memory.
    pub(crate) fn begin_change(&self, order: WriteOrder) -> Option<OrderedChange<'_>> {
        (order == WriteOrder::AfterBarrier).then(|| {
            self.running_changes.fetch_add(1, Ordering::SeqCst);
            OrderedChange(self)
        })
    }

    /// Whether anything in copies taken just before needs a barrier.
    pub(super) fn needs_barrier(&self) -> bool {
        // In this order: a change that has ended has left its mark first.
        let running = self.running_changes.load(Ordering::SeqCst) > 0;
        self.changed_since_commit.swap(false, Ordering::SeqCst) || running
    }

    /// The barrier failed: the changes still need one.
    pub(super) fn still_needs_barrier(&self) {
        self.changed_since_commit.store(true, Ordering::SeqCst);
    }

    /// Notes that the mapping in memory has dropped a run of clusters.
    pub(crate) fn defer_free(&self, dropped: DroppedRun) {
        let mut lists = self.lists();
        lists.ever_dropped_clusters += dropped.count;
        if let Some(last) = lists.not_durable.last_mut() {
            let adjacent = last.start.index() + last.count == dropped.start.index();
            if adjacent && last.reason == dropped.reason {
                last.count += dropped.count;
                last.freeable += dropped.freeable;
                return;
            }
        }
        lists.not_durable.push(dropped);
    }

    /// How many clusters the mapping has dropped since the image was opened.
    pub(crate) fn ever_dropped_clusters(&self) -> u64 {
        self.lists().ever_dropped_clusters
    }

    /// What is dropped on disk and no request reads any more; what was dropped since waits
    /// for those that read now. `None`: some still read.
    pub(super) fn take_quiescent(&self, readers: &Epochs) -> Option<Vec<DroppedRun>> {
        let mut lists = self.lists();
        let quiet = readers.quiet()?;
        let ready = std::mem::take(&mut lists.quiescing);
        // Where somebody else has just begun an epoch, its turn comes with the next one.
        if !lists.durable.is_empty() && readers.advance(quiet) {
            lists.quiescing = std::mem::take(&mut lists.durable);
        }
        Some(ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, count: u64, reason: DropReason) -> DroppedRun {
        DroppedRun {
            start: HostCluster(start),
            count,
            reason,
            freeable: 0,
        }
    }

    #[test]
    fn dropped_runs_are_joined_where_they_lie_side_by_side() {
        let (cut, replaced) = (DropReason::Shrunk, DropReason::Replaced);
        let scattered = vec![
            run(9, 1, cut),
            run(4, 2, cut),
            run(6, 1, replaced),
            run(10, 5, cut),
            run(1, 3, cut),
            // Compressed clusters are dropped once for each reference.
            run(10, 5, cut),
        ];
        let joined = vec![
            run(1, 5, cut),
            run(6, 1, replaced),
            run(9, 6, cut),
            run(10, 5, cut),
        ];
        assert_eq!(merged(scattered), joined);
    }
}
