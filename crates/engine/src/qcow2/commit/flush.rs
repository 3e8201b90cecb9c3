//! Commits, one at a time, in the order that [`write_order`](super::write_order) demands.

mod reclaim;

use super::barrier::is_forgotten;
use super::coalesce::{Leader, Role};
use super::room::RoomSearch;
use crate::qcow2::alloc::refcounts::write_tables;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::overlap::Metadata;
use crate::qcow2::mapping::l1::L1Sector;
use crate::qcow2::table_cache::cache::WriteBack;
use std::sync::Arc;
use tracing::trace;
use vellum_io::sync::atomic::Ordering;
use vellum_io::{Error, ErrorKind, Result, spawn_to_completion};
use vellum_storage::Event;

/// So many clusters may have lower counts in memory than on disk after a commit, if the next open is
/// told of leaks.
const MOST_LOWERED: u64 = 7;

/// A commit that is not over. If its lane ends first, nobody knows what has been
/// written, and nothing more may be.
struct UnfinishedCommit<'a>(Option<&'a Image>);

impl Drop for UnfinishedCommit<'_> {
    fn drop(&mut self) {
        if let Some(image) = self.0 {
            image.stop_changes(Leader::abandoned());
        }
    }
}

/// A commit in the background; over even if its lane ends first.
struct BackgroundCommit(Arc<Image>);

impl Drop for BackgroundCommit {
    fn drop(&mut self) {
        self.0
            .commits
            .background_commit
            .store(false, Ordering::Release);
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
    /// That of a barrier: nobody may take it for one that can be tried again.
    fn of_sync(error: Error) -> Failure {
        Failure::Barrier(error.of_failed_sync())
    }

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
        !self.commits.commit_coalescer.is_running() && self.l2.is_clean() && self.l1.is_clean()
    }

    /// Makes everything completed before this call durable.
    pub(crate) async fn flush(self: &Arc<Self>) -> Result<()> {
        trace!(name: "qcow2_flush_start", image = self.name);
        let mut search = RoomSearch::since(self.allocator.room_changes());
        let flushed = loop {
            match self.write_back_and_commit().await {
                Err(error) if self.make_room(&mut search, &error).await => {}
                flushed => break flushed,
            }
        };
        match &flushed {
            Ok(()) => trace!(name: "qcow2_flush_done", image = self.name),
            Err(error) => trace!(name: "qcow2_flush_failed", image = self.name, error = %error),
        }
        flushed
    }

    async fn write_back_and_commit(self: &Arc<Self>) -> Result<()> {
        // Two coalescers, so that the next writeback runs beside this commit.
        self.emit(Event::FlushToOs).await;
        // Rule 8: buffered bytes get their place before the mapping is written.
        let written_back = match self.commits.writeback_coalescer.join().await {
            Role::Follower(result) => result,
            Role::Leader(leader) => leader.end(self.write_back_all().await),
        };
        // One cluster that cannot be copied keeps no other change from the disk.
        self.emit(Event::FlushToDisk).await;
        self.commit().await.and(written_back)
    }

    /// After a request that has found no room: gives back what the mapping has dropped, for
    /// those who try again.
    pub(crate) async fn look_for_room(self: &Arc<Self>, error: &Error) {
        if error.kind() != ErrorKind::NoSpace {
            return;
        }
        self.write_buffer.room_below.note_full();
        self.hurry_if_short();
        if self.commits.lists().has_any() {
            drop(self.commit().await);
        }
    }

    /// Makes durable what was written to places that the mapping on disk leads to.
    pub(crate) async fn sync_in_place(&self) -> Result<()> {
        self.fail_stop.check("flush", &self.name)?;
        self.emit(Event::FlushToDisk).await;
        let synced = match self.has_external_data() {
            true => self.data.flush().await,
            false => self.file.flush().await,
        };
        match synced.map_err(Failure::of_sync) {
            Ok(()) => Ok(()),
            Err(failure) => {
                self.metadata_write_failed(&failure).await;
                Err(failure.into_error())
            }
        }
    }

    /// Makes everything durable that the mapping in memory leads to.
    pub(crate) async fn commit(self: &Arc<Self>) -> Result<()> {
        match self.commits.commit_coalescer.join().await {
            Role::Follower(result) => result,
            Role::Leader(leader) => {
                let mut unfinished = UnfinishedCommit(Some(self));
                let result = self.run_commit().await;
                unfinished.0 = None;
                leader.end(result)
            }
        }
    }

    /// Does `work` after a commit of its own, and before any other begins. Those who wait for a commit meanwhile
    /// have had theirs, whatever becomes of the work.
    pub(crate) async fn commit_and<T>(
        self: &Arc<Self>,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let leader = loop {
            if let Role::Leader(leader) = self.commits.commit_coalescer.join().await {
                break leader;
            }
        };
        let mut unfinished = UnfinishedCommit(Some(self));
        let committed = self.run_commit().await;
        let result = match &committed {
            Ok(()) => work.await,
            Err(error) => Err(error.clone()),
        };
        unfinished.0 = None;
        let committed = leader.end(committed);
        result.and_then(|done| committed.map(|()| done))
    }

    /// Gives back everything that the mapping on disk has dropped, once no request
    /// reads it any more. For work in the commits' turn.
    pub(crate) async fn reclaim_after_reads(&self) -> Result<()> {
        while self.commits.lists().has_durable() {
            self.read_epochs.wait_for_previous().await;
            self.reclaim().await?;
        }
        self.allocator.apply_deferred_decrements().await
    }

    /// Lets dirty tables be written in the background when they fill the cache; waits
    /// only if that is going on already and they fill it again, or if time must not count.
    pub(crate) async fn start_background_commit(self: &Arc<Self>) -> Result<()> {
        if self.l2.is_mostly_dirty() || self.reproducible {
            return self.commit().await;
        }
        if !self.commits.background_commit.swap(true, Ordering::AcqRel) {
            let background = BackgroundCommit(self.clone());
            drop(spawn_to_completion(async move {
                // A failure stops changes to the image or meets the next flush.
                drop(background.0.commit().await);
            }));
        }
        Ok(())
    }

    async fn run_commit(self: &Arc<Self>) -> Result<()> {
        self.fail_stop.check("flush", &self.name)?;
        trace!(name: "qcow2_commit_start", image = self.name);
        let dropped = std::mem::take(&mut self.commits.lists().not_durable);
        match self.write_everything().await {
            Ok(()) => self.commits.lists().durable.extend(dropped),
            Err(failure) => {
                trace!(name: "qcow2_commit_failed", image = self.name, error = %failure.error());
                self.commits.lists().not_durable.splice(0..0, dropped);
                self.metadata_write_failed(&failure).await;
                return Err(failure.into_error());
            }
        }
        trace!(name: "qcow2_commit_done", image = self.name);
        self.reclaim().await?;
        self.write_lowered_counts().await;
        Ok(())
    }

    /// Writes counts that have gone down if they are many, or nothing tells the next open of leaks: else
    /// a killed process leaks those clusters.
    /// No barrier is needed, and what fails is written, or reported, by the next commit.
    async fn write_lowered_counts(&self) {
        let refcounts = &self.allocator.refcounts;
        let most = match self.tells_of_leaks {
            true => MOST_LOWERED,
            false => 0,
        };
        if refcounts.lowered_clusters() > most && !self.refcounts_are_lazy() {
            drop(refcounts.write_back().await);
        }
    }

    async fn write_everything(&self) -> Result<(), Failure> {
        // Rule 1: data and refcounts of everything in these copies are complete, and become
        // durable before the copies are written.
        let copies = MappingCopies {
            slices: self.l2.begin_writeback(),
            sectors: self.l1.take_dirty(),
        };
        let barrier = self.commits.needs_barrier() || self.has_external_data();
        let result = if barrier || copies.is_empty() {
            let before = self.write_refcounts_and_barrier().await;
            if copies.is_empty() {
                return before;
            }
            self.write_mapping(copies, before).await
        } else {
            let mark = self.allocator.begin_commit();
            let refcounts = self.write_refcounts().await.map_err(Failure::Write);
            let result = self.write_mapping(copies, refcounts).await;
            if result.is_ok() {
                self.allocator.barrier_passed(mark);
            }
            result
        };
        if result.is_err() {
            self.commits.still_needs_barrier();
        }
        result
    }

    /// Writes dirty refcount blocks, unless the image is marked dirty instead.
    async fn write_refcounts(&self) -> Result<()> {
        if self.refcounts_are_lazy() {
            return Ok(());
        }
        self.allocator.refcounts.write_back().await
    }

    async fn write_refcounts_and_barrier(&self) -> Result<(), Failure> {
        let mark = self.allocator.begin_commit();
        self.write_refcounts().await.map_err(Failure::Write)?;
        if self.has_external_data() {
            self.data.flush().await.map_err(Failure::of_sync)?;
        }
        self.file.flush().await.map_err(Failure::of_sync)?;
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
            self.emit(Event::L2Update).await;
        }
        if !copies.sectors.is_empty() {
            self.emit(Event::L1Update).await;
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
        self.file.flush().await.map_err(Failure::of_sync)
    }

    /// After a failed write of required metadata nothing more is written: memory
    /// and disk may differ. A full disk is different: making room helps. Not after a failed
    /// barrier, whatever its errno: what it should have made durable may be lost.
    async fn metadata_write_failed(&self, failure: &Failure) {
        let error = failure.error();
        drop(self.mark_corrupt(error.clone()).await);
        // Rule 11: nothing is built upon what may not be on disk.
        match failure {
            Failure::Barrier(_) if is_forgotten(error) => {}
            Failure::Barrier(_) => self.stop_changes(error.clone()),
            Failure::Write(_) if error.kind() == ErrorKind::NoSpace => {}
            Failure::Write(_) => self.stop_changes_until_retry(error.clone()),
        }
    }
}
