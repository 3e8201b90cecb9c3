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
//! Invariants:
//! - A mapping entry is copied in 1 only after the data that it points at was
//!   written and its refcount raised in memory, so 2 makes both durable.
//! - A cluster is noted as dropped only after the mapping that drops it has
//!   changed in memory, so 3 writes that change.
//!
//! Concurrent flushes share commits: a flush is served by any commit that starts
//! after it.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_listener::Event;
use futures_util::future::try_join_all;
use vellum_format::types::HostCluster;
use vellum_storage::{Buffers, Error, ErrorKind, Result, WriteFlags};

use super::cache::WriteBack;
use super::image::Image;
use super::l1::L1Sector;
use super::refcounts::write_tables;

/// A run of clusters that the mapping has dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dropped {
    pub(crate) start: HostCluster,
    pub(crate) count: u64,
    /// Give the space back to the storage if nobody else uses it.
    pub(crate) discard: bool,
}

#[derive(Default)]
struct Turns {
    started: u64,
    finished: u64,
    running: bool,
    /// Why the commits up to `finished` failed, if the last of them did.
    failure: Option<Error>,
}

#[derive(Default)]
struct DroppedLists {
    /// Dropped in memory, not on disk yet.
    noted: Vec<Dropped>,
    /// Dropped on disk; perhaps still being read.
    durable: Vec<Dropped>,
    /// As `durable`, since before the last turn of the readers' generations.
    quiescing: Vec<Dropped>,
}

/// The state of commits.
#[derive(Default)]
pub(crate) struct Order {
    turns: Mutex<Turns>,
    turn_ended: Event,
    dropped: Mutex<DroppedLists>,
}

impl std::fmt::Debug for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Order")
    }
}

impl Order {
    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lists(&self) -> MutexGuard<'_, DroppedLists> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the mapping in memory has dropped a run of clusters.
    pub(crate) fn note_dropped(&self, dropped: Dropped) {
        let mut lists = self.lists();
        if let Some(last) = lists.noted.last_mut() {
            let adjacent = last.start.index() + last.count == dropped.start.index();
            if adjacent && last.discard == dropped.discard {
                last.count += dropped.count;
                return;
            }
        }
        lists.noted.push(dropped);
    }
}

enum Turn {
    Mine(u64),
    Served(Result<()>),
}

/// Dirty mapping tables, as they were when a commit began.
struct MappingCopies {
    slices: Vec<WriteBack>,
    sectors: Vec<L1Sector>,
}

impl MappingCopies {
    fn is_empty(&self) -> bool {
        self.slices.is_empty() && self.sectors.is_empty()
    }
}

impl Image {
    /// Whether the mapping in memory is the one that a crash would leave.
    pub(crate) fn mapping_is_durable(&self) -> bool {
        !self.order.turns().running && self.l2.is_clean() && self.l1.is_clean()
    }

    /// Makes everything completed before this call durable.
    pub(crate) async fn commit(self: &Arc<Self>) -> Result<()> {
        let wanted = self.order.turns().started + 1;
        match self.wait_for_turn(wanted).await {
            Turn::Served(result) => result,
            Turn::Mine(turn) => {
                let result = self.run_commit().await;
                let mut turns = self.order.turns();
                turns.finished = turn;
                turns.running = false;
                turns.failure = result.as_ref().err().cloned();
                drop(turns);
                self.order.turn_ended.notify(usize::MAX);
                result
            }
        }
    }

    async fn wait_for_turn(&self, wanted: u64) -> Turn {
        loop {
            let listener = self.order.turn_ended.listen();
            {
                let mut turns = self.order.turns();
                if turns.finished >= wanted {
                    return Turn::Served(turns.failure.clone().map_or(Ok(()), Err));
                }
                if !turns.running {
                    turns.running = true;
                    turns.started += 1;
                    return Turn::Mine(turns.started);
                }
            }
            listener.await;
        }
    }

    async fn run_commit(self: &Arc<Self>) -> Result<()> {
        self.check_latch()?;
        let dropped = std::mem::take(&mut self.order.lists().noted);
        let result = self.write_everything().await;
        match &result {
            Ok(()) => self.order.lists().durable.extend(dropped),
            Err(error) => {
                self.order.lists().noted.splice(0..0, dropped);
                self.metadata_write_failed(error);
            }
        }
        result?;
        self.reclaim().await
    }

    async fn write_everything(&self) -> Result<()> {
        let copies = MappingCopies {
            slices: self.l2.begin_writeback(),
            sectors: self.l1.take_dirty(),
        };
        let before = self.write_refcounts_and_barrier().await;
        if copies.is_empty() {
            return before;
        }
        self.write_mapping(copies, before).await
    }

    async fn write_refcounts_and_barrier(&self) -> Result<()> {
        let mark = self.allocator.commit_began();
        if !self.lazy.are_postponed() {
            self.allocator.refcounts.write_back().await?;
        }
        if self.has_external_data() {
            self.data.flush().await?;
        }
        self.file.flush().await?;
        self.allocator.barrier_passed(mark);
        Ok(())
    }

    /// Writes the copied mapping tables, unless what must come `before` failed.
    async fn write_mapping(&self, copies: MappingCopies, before: Result<()>) -> Result<()> {
        let keys: Vec<u64> = copies.slices.iter().map(|copy| copy.key).collect();
        let sectors: Vec<usize> = copies.sectors.iter().map(L1Sector::sector).collect();
        let result = match before {
            Ok(()) => self.write_copies(copies).await,
            Err(error) => Err(error),
        };
        self.l2.end_writeback(keys, result.is_ok());
        if result.is_err() {
            self.l1.mark_dirty(sectors);
        }
        result
    }

    async fn write_copies(&self, copies: MappingCopies) -> Result<()> {
        write_tables(&self.file, copies.slices).await?;
        let sectors = copies.sectors.into_iter().map(|sector| {
            let buffers = Buffers::from_iter([sector.bytes]);
            self.file
                .write(sector.offset_bytes, buffers, WriteFlags::default())
        });
        try_join_all(sectors).await?;
        self.file.flush().await
    }

    /// Gives back clusters that are dropped on disk and that no request reads.
    async fn reclaim(&self) -> Result<()> {
        // The second round serves what only waited for the readers' turn.
        for _ in 0..2 {
            let Some(ready) = self.take_quiescent() else {
                return Ok(());
            };
            for dropped in ready {
                self.release_clusters(dropped).await?;
            }
        }
        Ok(())
    }

    fn take_quiescent(&self) -> Option<Vec<Dropped>> {
        let mut lists = self.order.lists();
        if !self.readers.old_are_gone() {
            return None;
        }
        let ready = std::mem::take(&mut lists.quiescing);
        if !lists.durable.is_empty() {
            lists.quiescing = std::mem::take(&mut lists.durable);
            self.readers.turn();
        }
        Some(ready)
    }

    async fn release_clusters(&self, dropped: Dropped) -> Result<()> {
        if dropped.discard {
            // A hint: what cannot be looked up now is not punched.
            drop(self.punch_unshared(dropped).await);
        }
        match self.allocator.release(dropped.start, dropped.count).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.mark_corrupt(error).await),
        }
    }

    /// Punches those clusters whose last user is gone, while their count still
    /// keeps them from being allocated.
    async fn punch_unshared(&self, dropped: Dropped) -> Result<()> {
        let end = dropped.start.index() + dropped.count;
        let start = dropped.start.index();
        let mut run = start;
        for cluster in start..end {
            if self.refcount(HostCluster(cluster)).await? != 1 {
                self.punch(run..cluster).await;
                run = cluster + 1;
            }
        }
        self.punch(run..end).await;
        Ok(())
    }

    async fn punch(&self, clusters: Range<u64>) {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let len_bytes = (clusters.end - clusters.start) * cluster_bytes;
        if len_bytes > 0 {
            // A hint: that it failed does not matter to anybody.
            drop(
                self.file
                    .discard(clusters.start * cluster_bytes, len_bytes)
                    .await,
            );
        }
    }

    /// After a failed write of required metadata nothing more is written: memory
    /// and disk may differ. A full disk is different: making room helps.
    fn metadata_write_failed(&self, error: &Error) {
        if error.kind() != ErrorKind::NoSpace {
            self.latch(error.clone());
        }
    }
}
