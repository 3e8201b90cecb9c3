//! A flush of an image with a write log, and what follows it: the log's tail moves on, and the
//! log is ended where nothing is written any more.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use vellum_format::features::Incompatible;
use vellum_io::{Error, Result, lane, spawn, spawn_to_completion};
use vellum_storage::mutants::{self, Mutant};

use super::log::WriteLog;
use super::overlaps::RequestId;
use super::pending::Pending;
use crate::qcow2::commit::coalesce::Role;
use crate::qcow2::image::Image;

/// After so long without an append the image is made whole without its log.
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// So many flushes are appended only because of live records of the same clusters, until the tail
/// moves on.
const MAX_DETAINED: u64 = 64;

impl Image {
    /// Makes everything durable that was complete before this call: by the log if that can
    /// take it.
    pub(crate) async fn guest_flush(self: &Arc<Self>) -> Result<()> {
        let Some(log) = self.write_log.get() else {
            return self.flush().await;
        };
        match log.rounds.join().await {
            Role::Follower(result) => result,
            Role::Leader(leader) => leader.end(self.flush_once(log).await),
        }
    }

    /// A flush, for the leader of the log's round.
    async fn flush_once(self: &Arc<Self>, log: &WriteLog) -> Result<()> {
        self.fail_stop.check("flush", &self.name)?;
        let taken = Taken::from(log);
        let pending = &taken.pending;
        if pending.is_empty() {
            // Rule 11: no flush succeeds after a barrier that failed, whoever asked for that.
            return taken.end(self.barrier_failure.check());
        }
        if log.goes_around(pending) {
            let synced = self.sync_in_place().await;
            return taken.end(synced);
        }
        let place = match self.needs_only_a_sync(log) {
            true => None,
            false => log.place(pending),
        };
        if let Some(at_bytes) = place {
            match self.append(log, at_bytes, pending).await {
                Ok(()) => {
                    self.after_append(log, pending);
                    return taken.end(Ok(()));
                }
                Err(error) => self.log_failed(log, &error),
            }
        }
        let flushed = self.flush_past(log).await;
        taken.end(flushed)
    }

    /// Whether no record is live and a commit of the image would write nothing: then it costs no
    /// more than an append.
    fn needs_only_a_sync(&self, log: &WriteLog) -> bool {
        !log.state().is_marked && self.write_buffer.is_empty() && self.mapping_is_durable()
    }

    async fn append(
        self: &Arc<Self>,
        log: &WriteLog,
        at_bytes: u64,
        pending: &Pending,
    ) -> Result<()> {
        if !log.state().is_marked {
            // Rule W5: the superblock and the bit come before the first record.
            log.begin().await?;
            if mutants::is(Mutant::MarkLate) {
                log.append(at_bytes, pending).await?;
                log.state().is_marked = true;
                let image = self.clone();
                drop(spawn_to_completion(async move {
                    let marked =
                        image.change_incompatible(|bits| bits.with(Incompatible::WRITE_LOG));
                    marked.await
                }));
                return Ok(());
            }
            self.change_incompatible(|bits| bits.with(Incompatible::WRITE_LOG))
                .await?;
            log.state().is_marked = true;
        }
        // Rule W1: one durable write is the flush.
        log.append(at_bytes, pending).await
    }

    /// Commits the image, after which no record is live.
    async fn flush_past(self: &Arc<Self>, log: &WriteLog) -> Result<()> {
        self.flush().await?;
        self.retire(log).await
    }

    /// Says durably that no record is live; the image has everything.
    async fn retire(self: &Arc<Self>, log: &WriteLog) -> Result<()> {
        // Rule W4: what went past the log is newer than any record.
        if !log.state().is_marked || mutants::is(Mutant::KeepRecordsLive) {
            return Ok(());
        }
        if log.state().failure.is_none() {
            match log.release(log.mark()).await {
                Ok(()) => return Ok(()),
                Err(error) => self.log_failed(log, &error),
            }
        }
        self.end_log(log).await
    }

    /// Clears the incompatible bit; the image has everything durably.
    async fn end_log(self: &Arc<Self>, log: &WriteLog) -> Result<()> {
        if log.state().is_marked {
            self.change_incompatible(|bits| bits.without(Incompatible::WRITE_LOG))
                .await?;
            log.note_ended();
        }
        Ok(())
    }

    /// The log's file failed: from now on flushes commit the image.
    fn log_failed(&self, log: &WriteLog, error: &Error) {
        let first = {
            let mut state = log.state();
            let first = state.failure.is_none();
            state.failure.get_or_insert_with(|| error.clone());
            first
        };
        if first {
            let name = log.file.name();
            self.messages.say(&format!(
                "{}: the write log '{name}' failed and is not used any more: {error}",
                self.name
            ));
        }
    }

    fn after_append(self: &Arc<Self>, log: &WriteLog, pending: &Pending) {
        let detained = match pending.is_in_place() {
            // Once the tail has moved such writes need no append.
            true => log.detained.fetch_add(1, Ordering::AcqRel) + 1,
            false => 0,
        };
        let wants_tail_moved = log.wants_tail_moved() || detained >= MAX_DETAINED;
        if wants_tail_moved && !log.is_moving_tail.swap(true, Ordering::AcqRel) {
            let mover = TailMover(self.clone());
            drop(spawn_to_completion(async move { mover.run().await }));
        }
        if !log.is_watched.swap(true, Ordering::AcqRel) {
            let watch = IdleWatch(Arc::downgrade(self));
            drop(spawn(async move { watch.run().await }));
        }
    }

    /// Moves the log's tail to where its head is now.
    async fn move_tail(self: &Arc<Self>, log: &WriteLog) -> Result<()> {
        let mark = log.mark();
        log.detained.store(0, Ordering::Release);
        // Rule W3: a commit that begins after the changes that go.
        if !mutants::is(Mutant::MoveTailUnflushed) {
            self.flush().await?;
        }
        match log.release(mark).await {
            Ok(()) => Ok(()),
            Err(error) => {
                self.log_failed(log, &error);
                Err(error)
            }
        }
    }

    /// Keeps the log without live records until the result is dropped, as long as others go on
    /// with the image; `None`: it has no log.
    ///
    /// # Errors
    /// When the image cannot be committed, or its header be written.
    pub(crate) async fn suspend_log(self: &Arc<Self>) -> Result<Option<Suspension>> {
        let Some(log) = self.write_log.get() else {
            return Ok(None);
        };
        log.suspensions.fetch_add(1, Ordering::AcqRel);
        let id = log.overlaps.begin_other(0..u64::MAX);
        let suspension = Suspension(Some((self.clone(), id)));
        self.empty_log(log).await?;
        Ok(Some(suspension))
    }

    async fn empty_idle_log(self: Arc<Self>) {
        if let Some(log) = self.write_log.get() {
            // A failure meets the next flush, or the close.
            drop(self.empty_log(log).await);
        }
    }

    /// Has the image commit everything, and ends the log until the next append.
    async fn empty_log(self: &Arc<Self>, log: &WriteLog) -> Result<()> {
        let leader = loop {
            if let Role::Leader(leader) = log.rounds.join().await {
                break leader;
            }
        };
        let taken = Taken::from(log);
        if taken.pending.is_empty() && !log.state().is_marked {
            return leader.end(taken.end(Ok(())));
        }
        let emptied = match self.flush_past(log).await {
            Ok(()) => self.end_log(log).await,
            Err(error) => Err(error),
        };
        leader.end(taken.end(emptied))
    }
}

/// What was changed before a flush. Unless that succeeds, also if its lane ends before, the
/// next flush goes past the log.
struct Taken<'a> {
    log: &'a WriteLog,
    pending: Pending,
    is_durable: bool,
}

impl<'a> Taken<'a> {
    fn from(log: &'a WriteLog) -> Taken<'a> {
        Taken {
            log,
            pending: std::mem::take(&mut *log.pending.lock()),
            is_durable: false,
        }
    }

    /// The flush is over.
    fn end(mut self, result: Result<()>) -> Result<()> {
        self.is_durable = result.is_ok();
        result
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if !self.is_durable {
            self.log.pending.lock().note_other();
        }
    }
}

/// No records are appended while this lives.
#[must_use = "the log is used again once this is dropped"]
pub(crate) struct Suspension(Option<(Arc<Image>, RequestId)>);

impl Suspension {
    /// The log is never used again.
    pub(crate) fn keep(mut self) {
        // Not forgotten: the image would never be dropped, and keep its files locked.
        self.0 = None;
    }
}

impl Drop for Suspension {
    fn drop(&mut self) {
        if let Some((image, id)) = self.0.take()
            && let Some(log) = image.write_log.get()
        {
            // What was done meanwhile may be nobody's note.
            log.pending.lock().note_other();
            log.overlaps.end_other(id);
            log.suspensions.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Moves the tail in the background; over even if its lane ends first.
struct TailMover(Arc<Image>);

impl TailMover {
    async fn run(&self) {
        if let Some(log) = self.0.write_log.get() {
            // A failure meets the flush that finds no room.
            drop(self.0.move_tail(log).await);
        }
    }
}

impl Drop for TailMover {
    fn drop(&mut self) {
        if let Some(log) = self.0.write_log.get() {
            log.is_moving_tail.store(false, Ordering::Release);
        }
    }
}

/// Ends the log when nothing has been appended for a while.
struct IdleWatch(Weak<Image>);

impl IdleWatch {
    async fn run(&self) {
        let mut seen = 0;
        loop {
            lane::sleep(IDLE_AFTER).await;
            let Some(image) = self.0.upgrade() else {
                return;
            };
            let Some(log) = image.write_log.get() else {
                return;
            };
            let appends = log.appends.load(Ordering::Acquire);
            if appends == seen {
                // Others wait for this, whatever becomes of the lane's own work.
                spawn_to_completion(image.clone().empty_idle_log()).await;
                return;
            }
            seen = appends;
        }
    }
}

impl Drop for IdleWatch {
    fn drop(&mut self) {
        if let Some(image) = self.0.upgrade()
            && let Some(log) = image.write_log.get()
        {
            log.is_watched.store(false, Ordering::Release);
        }
    }
}
