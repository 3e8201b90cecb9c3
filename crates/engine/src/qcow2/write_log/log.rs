//! [`WriteLog`]: a log in use; its superblocks and appends.
//!
//! Invariants:
//! - One at a time appends or retires (`rounds`), and one at a time writes a superblock.
//! - A batch is appended once that before it is durable. The superblock is durable before what it
//!   gives up is overwritten, and before a record names it (W8).
//! - After a failure of the log's file nothing is appended any more, and a log that failed with
//!   live records is ended by the image's header, not by a superblock.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use vellum_format::write_log::{BLOCK_BYTES, LogId, RING_START_BYTES, Superblock};
use vellum_io::{Buffer, Buffers, Error, Result};
use vellum_storage::mutants::{self, Mutant};
use vellum_storage::{Storage, WriteFlags};

use super::live::LiveChunks;
use super::overlaps::Overlaps;
use super::pending::{BatchHead, Pending};
use super::ring::{Mark, Ring};
use crate::qcow2::commit::coalesce::Coalescer;
use vellum_io::range_lock::RangeLock;

/// The part of the ring that one batch takes at most.
const MAX_BATCH_SHARE: u64 = 4;
/// More than this between two flushes goes past the log: what counts then is how much is written, and
/// the log would double that.
const MAX_PENDING_BYTES: u64 = 1 << 20;

/// What lies between the numbers of two uses of a log: more than a ring has records.
const NUMBERS_APART: u64 = 1 << 32;

/// What appends and superblocks share.
#[derive(Debug)]
pub(super) struct LogState {
    ring: Ring,
    /// What live records take of the ring, for those that do not hold this.
    live_bytes: Arc<AtomicU64>,
    live: LiveChunks,
    next_sequence: u64,
    next_batch: u64,
    /// Of the superblock that was written last, or is being written.
    generation: u64,
    /// Of the newest one that is durable.
    durable_generation: u64,
    /// The incompatible bit is set: there may be live records.
    pub(super) is_marked: bool,
    /// Why nothing is appended any more.
    pub(super) failure: Option<Error>,
}

impl LogState {
    /// Nothing before `mark` is live any more.
    fn release(&mut self, mark: Mark) {
        self.ring.release(mark);
        self.live.release(mark);
        self.tell_live();
    }

    /// Gives a place to a batch that nothing else gets.
    fn take(&mut self, at_bytes: u64, len_bytes: u64) {
        self.ring.take(at_bytes, len_bytes);
        self.tell_live();
    }

    fn tell_live(&self) {
        self.live_bytes
            .store(self.ring.live_bytes(), Ordering::Relaxed);
    }
}

/// See the module's head.
pub(crate) struct WriteLog {
    /// The log's file.
    pub(super) file: Arc<dyn Storage>,
    /// The same, as batches are written to it, and the offset of its first byte there.
    batches: (Arc<dyn Storage>, u64),
    /// See [`LogParts::inside`].
    pub(super) inside: Option<Range<u64>>,
    pub(super) id: LogId,
    pub(super) len_bytes: u64,
    /// Guest ranges, in bytes, of requests that will be noted: those that overlap take turns.
    pub(super) noting: Arc<RangeLock>,
    /// What runs.
    pub(super) overlaps: Overlaps,
    pub(super) pending: Mutex<Pending>,
    pub(super) rounds: Coalescer,
    live_bytes: Arc<AtomicU64>,
    state: Mutex<LogState>,
    superblock: async_lock::Mutex<()>,
    /// How many want no records in the log for now.
    pub(super) suspensions: AtomicU64,
    /// A commit is under way that moves the tail.
    pub(super) is_moving_tail: AtomicBool,
    /// Somebody looks whether the log is idle.
    pub(super) is_watched: AtomicBool,
    /// Appends so far.
    pub(super) appends: AtomicU64,
    /// Those of them, since the tail moved, of changes that were all made in place.
    pub(super) detained: AtomicU64,
}

impl fmt::Debug for WriteLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteLog({:?})", self.file.name())
    }
}

/// How full a write log is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteLogUsage {
    /// Bytes of records that a crash would have replayed.
    pub live_bytes: u64,
    /// Bytes that all records may take together.
    pub capacity_bytes: u64,
    /// Batches of records that were appended since the image was opened.
    pub appends: u64,
}

/// A moment: everything that was appended before it.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogMark {
    ring: Mark,
    next_sequence: u64,
    next_batch: u64,
}

/// What a log is made of that is taken into use.
pub(super) struct LogParts {
    pub(super) file: Arc<dyn Storage>,
    /// What batches are written to, which may encrypt them, and the offset of the log's first byte
    /// there.
    pub(super) batches: (Arc<dyn Storage>, u64),
    /// The bytes of the image's own file that the log has, if it does not lie in another one.
    pub(super) inside: Option<Range<u64>>,
    pub(super) id: LogId,
    pub(super) len_bytes: u64,
    /// The newest superblock that is there.
    pub(super) old: Option<Superblock>,
    /// Of the image.
    pub(super) cluster_bytes: u64,
}

impl WriteLog {
    /// A log with nothing in it; no superblock of it is written yet.
    pub(super) fn new(parts: LogParts) -> WriteLog {
        let LogParts {
            file,
            batches,
            inside,
            id,
            len_bytes,
            old,
            cluster_bytes,
        } = parts;
        // No record that is still there has such a number.
        let [next_sequence, next_batch] = old.map_or([1, 1], |old| {
            [old.start_sequence, old.start_batch].map(|start| start + NUMBERS_APART)
        });
        let live_bytes = Arc::new(AtomicU64::new(0));
        WriteLog {
            file,
            batches,
            inside,
            id,
            len_bytes,
            noting: Arc::default(),
            overlaps: Overlaps::default(),
            pending: Mutex::default(),
            rounds: Coalescer::default(),
            live_bytes: live_bytes.clone(),
            state: Mutex::new(LogState {
                ring: Ring::new(len_bytes),
                live_bytes,
                live: LiveChunks::new(cluster_bytes),
                next_sequence,
                next_batch,
                generation: old.map_or(0, |old| old.generation),
                durable_generation: 0,
                is_marked: false,
                failure: None,
            }),
            superblock: async_lock::Mutex::new(()),
            suspensions: AtomicU64::new(0),
            is_moving_tail: AtomicBool::new(false),
            is_watched: AtomicBool::new(false),
            appends: AtomicU64::new(0),
            detained: AtomicU64::new(0),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, LogState> {
        self.state.lock()
    }

    /// How full it is. No lock of a request is taken for that.
    pub(crate) fn usage(&self) -> WriteLogUsage {
        WriteLogUsage {
            live_bytes: self.live_bytes.load(Ordering::Relaxed),
            capacity_bytes: self.len_bytes.saturating_sub(RING_START_BYTES),
            appends: self.appends.load(Ordering::Relaxed),
        }
    }

    /// What all notes may take together.
    pub(super) fn max_pending_bytes(&self) -> u64 {
        let ring_bytes = self.state().ring.capacity_bytes();
        (ring_bytes / MAX_BATCH_SHARE).min(MAX_PENDING_BYTES)
    }

    /// Whether live records fill a quarter of the ring: a commit that takes long finds room for what
    /// comes meanwhile.
    pub(super) fn wants_tail_moved(&self) -> bool {
        let state = self.state();
        4 * state.ring.live_bytes() > state.ring.capacity_bytes()
    }

    /// Whether all changes were made in place, and no live record is of one of their clusters.
    pub(super) fn goes_around(&self, pending: &Pending) -> bool {
        let state = self.state();
        let is_clear =
            |range: Range<u64>| mutants::is(Mutant::GoAroundLive) || !state.live.touches(&range);
        pending.is_in_place()
            && state.failure.is_none()
            && self.suspensions.load(Ordering::Acquire) == 0
            && pending.ranges().all(is_clear)
    }

    /// The place of a batch, if it can be appended.
    pub(super) fn place(&self, pending: &Pending) -> Option<u64> {
        if !pending.is_complete() || self.suspensions.load(Ordering::Acquire) > 0 {
            return None;
        }
        let state = self.state();
        match state.failure {
            None => state.ring.place(pending.batch_bytes()),
            Some(_) => None,
        }
    }

    /// Appends a batch at a place that was found for it, durably. The incompatible bit must be
    /// durable, and a superblock of this log. After a failure, and if it is not awaited, nothing
    /// may be appended before the log's start lies behind it.
    pub(super) async fn append(&self, at_bytes: u64, pending: &Pending) -> Result<()> {
        let batch = {
            let mut state = self.state();
            // A superblock that is being written may be torn: a record that named it would tell
            // of a loss.
            let generation = match mutants::is(Mutant::NameSuperblockEarly) {
                true => state.generation,
                false => state.durable_generation,
            };
            let batch = BatchHead {
                id: self.id,
                generation,
                batch: state.next_batch,
                sequence: state.next_sequence,
            };
            // Whatever becomes of it, nothing else gets this place and these numbers.
            state.take(at_bytes, pending.batch_bytes());
            let end = state.ring.mark();
            for range in pending.ranges() {
                state.live.note(&range, end);
            }
            state.next_batch += 1;
            state.next_sequence += pending.count();
            batch
        };
        let bytes = pending.encode(&batch);
        let (batches, base_bytes) = &self.batches;
        if mutants::is(Mutant::AppendWithoutFlush) {
            let (buffers, flags) = (Buffers::from_iter([bytes]), WriteFlags::default());
            batches.write(base_bytes + at_bytes, buffers, flags).await?;
        } else {
            write_durably(batches, base_bytes + at_bytes, bytes).await?;
        }
        self.appends.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// A moment: everything that was appended before it.
    pub(super) fn mark(&self) -> LogMark {
        let state = self.state();
        LogMark {
            ring: state.ring.mark(),
            next_sequence: state.next_sequence,
            next_batch: state.next_batch,
        }
    }

    /// Says durably that only what was appended after `mark` is live, unless that was said
    /// already. The image has everything before durably.
    pub(super) async fn release(&self, mark: LogMark) -> Result<()> {
        let _one = self.superblock.lock().await;
        if self.state().ring.is_released(mark.ring) {
            return Ok(());
        }
        self.write_next_superblock(self.id, mark).await?;
        self.state().release(mark.ring);
        Ok(())
    }

    /// Says durably where the next batch begins; there are no live records.
    pub(super) async fn begin(&self) -> Result<()> {
        let _one = self.superblock.lock().await;
        let mark = self.mark();
        self.write_next_superblock(self.id, mark).await?;
        self.state().release(mark.ring);
        Ok(())
    }

    /// There are no live records; the header says so.
    pub(super) fn note_ended(&self) {
        let mut state = self.state();
        let mark = state.ring.mark();
        state.release(mark);
        state.is_marked = false;
    }

    /// Says durably that the file is the log of `id` from now on, and empty.
    pub(super) async fn leave(&self, id: LogId) -> Result<()> {
        let _one = self.superblock.lock().await;
        self.write_next_superblock(id, self.mark()).await
    }

    /// Writes the superblock that is not the newest.
    async fn write_next_superblock(&self, id: LogId, start: LogMark) -> Result<()> {
        let generation = {
            let mut state = self.state();
            state.generation += 1;
            state.generation
        };
        // A batch may have ended where the ring does.
        let start_bytes = match start.ring.offset_bytes {
            end if end == self.len_bytes => RING_START_BYTES,
            inside => inside,
        };
        let superblock = Superblock {
            id,
            len_bytes: self.len_bytes,
            generation,
            start_bytes,
            start_sequence: start.next_sequence,
            start_batch: start.next_batch,
        };
        write_superblock(&self.file, &superblock).await?;
        self.state().durable_generation = generation;
        Ok(())
    }
}

/// Writes a superblock in the place that its generation has, durably.
pub(super) async fn write_superblock(
    file: &Arc<dyn Storage>,
    superblock: &Superblock,
) -> Result<()> {
    let at_bytes = superblock.generation % 2 * BLOCK_BYTES;
    write_durably(file, at_bytes, Buffer::copy_of(&superblock.encode())).await
}

/// A write that is durable when this returns.
async fn write_durably(file: &Arc<dyn Storage>, at_bytes: u64, bytes: Buffer) -> Result<()> {
    let (buffers, flags) = (Buffers::from_iter([bytes]), WriteFlags::default());
    file.write(at_bytes, buffers, flags).await?;
    // No FUA: where the disk has none, the kernel completes such a write on a worker of its own,
    // which waits for milliseconds while the machine is busy.
    file.flush().await
}
