//! Commits, one at a time, in the order that [`order`](super::order) demands.

mod reclaim;

use super::barrier::is_forgotten;
use super::coalesce::{RunningTurn, Turn};
use crate::qcow2::alloc::refcounts::write_tables;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::overlap::Metadata;
use crate::qcow2::mapping::l1::L1Sector;
use crate::qcow2::table_cache::cache::WriteBack;
use std::sync::Arc;
use vellum_storage::sync::atomic::Ordering;
use vellum_storage::{Error, ErrorKind, Event, Result, spawn_lingering};

/// A commit that is not over. If its lane ends first, nobody knows what has been
/// written, and nothing more may be.
struct Unfinished<'a>(Option<&'a Image>);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(image) = self.0 {
            image.latch(RunningTurn::abandoned());
        }
    }
}

/// A commit in the background; over even if its lane ends first.
struct Relief(Arc<Image>);

impl Drop for Relief {
    fn drop(&mut self) {
        self.0.order.relieving.store(false, Ordering::Release);
    }
}

/// Why a commit failed.
enum Failure {
    /// Something could not be written. Memory still has it.
    Write(Error),
    /// Nobody knows what of everything before is on disk.
    Barrier(Error),
}

impl Failure {
    fn error(&self) -> &Error {
        match self {
            Failure::Write(error) | Failure::Barrier(error) => error,
        }
    }

    fn into_error(self) -> Error {
        match self {
            Failure::Write(error) | Failure::Barrier(error) => error,
        }
    }
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
        !self.order.commits.is_running() && self.l2.is_clean() && self.l1.is_clean()
    }

    /// Makes everything completed before this call durable.
    pub(crate) async fn flush(self: &Arc<Self>) -> Result<()> {
        // Two turns, so that the next drain runs beside this commit.
        self.reached(Event::FlushToOs).await;
        let drained = match self.order.drains.join().await {
            Turn::Served(result) => result,
            Turn::Mine(turn) => turn.end(self.drain_all().await),
        };
        // One cluster that cannot be copied keeps no other change from the disk.
        self.reached(Event::FlushToDisk).await;
        self.commit().await?;
        drained
    }

    /// Makes everything durable that the mapping in memory leads to.
    pub(crate) async fn commit(self: &Arc<Self>) -> Result<()> {
        match self.order.commits.join().await {
            Turn::Served(result) => result,
            Turn::Mine(turn) => {
                let mut unfinished = Unfinished(Some(self));
                let result = self.run_commit().await;
                unfinished.0 = None;
                turn.end(result)
            }
        }
    }

    /// Does `work`, which makes everything durable before it succeeds, before any other
    /// commit begins, and after one of its own if the mapping has changed.
    pub(crate) async fn commit_and<T>(
        self: &Arc<Self>,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let turn = loop {
            if let Turn::Mine(turn) = self.order.commits.join().await {
                break turn;
            }
        };
        let mut unfinished = Unfinished(Some(self));
        let clean = self.l2.is_clean() && self.l1.is_clean() && self.order.lists().noted.is_empty();
        let mut committed = match clean {
            true => self.check_latch(),
            false => self.run_commit().await,
        };
        let result = match &committed {
            Ok(()) => work.await,
            Err(error) => Err(error.clone()),
        };
        if clean && committed.is_ok() && result.is_err() {
            // Those who wait for a commit were promised one.
            committed = self.run_commit().await;
        }
        unfinished.0 = None;
        let committed = turn.end(committed);
        result.and_then(|done| committed.map(|()| done))
    }

    /// Gives back everything that the mapping on disk has dropped, once no request
    /// reads it any more. For work in the commits' turn.
    pub(crate) async fn reclaim_all(&self) -> Result<()> {
        while self.order.lists().has_durable() {
            self.readers.old_gone().await;
            self.reclaim().await?;
        }
        self.allocator.pay_owed().await
    }

    /// Lets dirty tables be written in the background when they fill the cache; waits
    /// only if that is going on already and they fill it again.
    pub(crate) async fn relieve_cache(self: &Arc<Self>) -> Result<()> {
        if !self.l2.wants_writeback() {
            return Ok(());
        }
        if self.l2.is_mostly_dirty() {
            return self.commit().await;
        }
        if !self.order.relieving.swap(true, Ordering::AcqRel) {
            let relief = Relief(self.clone());
            drop(spawn_lingering(async move {
                // A failure latches the image or meets the next flush.
                drop(relief.0.commit().await);
            }));
        }
        Ok(())
    }

    async fn run_commit(self: &Arc<Self>) -> Result<()> {
        self.check_latch()?;
        let dropped = std::mem::take(&mut self.order.lists().noted);
        match self.write_everything().await {
            Ok(()) => self.order.lists().durable.extend(dropped),
            Err(failure) => {
                self.order.lists().noted.splice(0..0, dropped);
                self.metadata_write_failed(&failure).await;
                return Err(failure.into_error());
            }
        }
        self.reclaim().await
    }

    async fn write_everything(&self) -> Result<(), Failure> {
        let copies = MappingCopies {
            slices: self.l2.begin_writeback(),
            sectors: self.l1.take_dirty(),
        };
        let barrier = self.order.needs_barrier() || self.has_external_data();
        let result = if barrier || copies.is_empty() {
            let before = self.write_refcounts_and_barrier().await;
            if copies.is_empty() {
                return before;
            }
            self.write_mapping(copies, before).await
        } else {
            let mark = self.allocator.commit_began();
            let refcounts = self.write_refcounts().await.map_err(Failure::Write);
            let result = self.write_mapping(copies, refcounts).await;
            if result.is_ok() {
                self.allocator.barrier_passed(mark);
            }
            result
        };
        if result.is_err() {
            self.order.still_needs_barrier();
        }
        result
    }

    /// Writes dirty refcount blocks, unless the image is marked dirty instead.
    async fn write_refcounts(&self) -> Result<()> {
        if self.lazy.are_postponed() {
            return Ok(());
        }
        self.allocator.refcounts.write_back().await
    }

    async fn write_refcounts_and_barrier(&self) -> Result<(), Failure> {
        let mark = self.allocator.commit_began();
        self.write_refcounts().await.map_err(Failure::Write)?;
        if self.has_external_data() {
            self.data.flush().await.map_err(Failure::Barrier)?;
        }
        self.file.flush().await.map_err(Failure::Barrier)?;
        self.allocator.barrier_passed(mark);
        Ok(())
    }

    /// Writes the copied mapping tables, unless what must come `before` failed.
    async fn write_mapping(
        &self,
        copies: MappingCopies,
        before: Result<(), Failure>,
    ) -> Result<(), Failure> {
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

    async fn write_copies(&self, copies: MappingCopies) -> Result<(), Failure> {
        if !copies.slices.is_empty() {
            self.reached(Event::L2Update).await;
        }
        if !copies.sectors.is_empty() {
            self.reached(Event::L1Update).await;
        }
        let sectors = copies.sectors.into_iter().map(L1Sector::into_write);
        let sectors: Vec<WriteBack> = sectors.collect();
        let checked = self
            .overlap
            .check_tables(&copies.slices, Metadata::ActiveL2);
        checked.map_err(Failure::Write)?;
        let checked = self.overlap.check_tables(&sectors, Metadata::ActiveL1);
        checked.map_err(Failure::Write)?;
        let tables = copies.slices.into_iter().chain(sectors).collect();
        let written = write_tables(&self.file, tables).await;
        written.map_err(Failure::Write)?;
        self.file.flush().await.map_err(Failure::Barrier)
    }

    /// After a failed write of required metadata nothing more is written: memory
    /// and disk may differ. A full disk is different: making room helps. Not after a failed
    /// barrier, whatever its errno: what it should have made durable may be lost.
    async fn metadata_write_failed(&self, failure: &Failure) {
        let error = failure.error();
        drop(self.mark_corrupt(error.clone()).await);
        match failure {
            Failure::Barrier(_) if is_forgotten(error) => {}
            Failure::Barrier(_) => self.latch(error.clone()),
            Failure::Write(_) if error.kind() == ErrorKind::NoSpace => {}
            Failure::Write(_) => self.latch_unwritten(error.clone()),
        }
    }
}
