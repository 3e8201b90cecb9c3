//! A machine's disk: files, requests in flight, and what a power cut leaves.
//!
//! Invariants:
//! - A request takes effect when the scheduler completes it, in any order.
//! - A completed flush has made durable exactly the records of its file that were
//!   complete when the flush was asked for.
//! - Nothing here depends on time, threads or addresses: equal schedules give
//!   equal disks.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use parking_lot::{Mutex, MutexGuard};
use vellum_io::{Buffers, Io};
use vellum_storage::{BlockStatus, StorageExtent};

use crate::disk_bugs::DiskBug;
use crate::disk_room::Room;
use crate::faults::{FULL, Faults};
use crate::record::{CutPoint, Record};
use crate::reply::Reply;
use crate::rng::Rng;
use crate::schedule::{RequestKind, Scheduler};
use crate::sparse_bytes::SparseBytes;
use crate::storage::{SimFileOptions, SimStorage};

/// When requests complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// At once; nothing is recorded, so there is nothing to cut.
    Instant,
    /// When the scheduler says so.
    Scheduled,
}

/// A set of simulated files that lose power together.
#[derive(Debug)]
pub struct Disk {
    core: Mutex<Core>,
}

#[derive(Debug)]
struct Core {
    mode: Mode,
    files: Vec<File>,
    pending: Vec<Pending>,
    bug: Option<DiskBug>,
    faults: Option<Faults>,
    /// A request has failed since the files were opened.
    has_failed: bool,
    /// Numbers completed records.
    next_landing: u64,
    flushes: u64,
}

/// What a write log is called.
pub(crate) const LOG_NAME: &str = "log";
/// The name of the file with an image's checksums.
pub(crate) const SUMS_NAME: &str = "sums";

#[derive(Debug)]
struct File {
    durable: SparseBytes,
    volatile: SparseBytes,
    landed: Vec<Landed>,
    /// A flush has failed since it was opened.
    flush_failed: bool,
    /// A write log: an image goes on without one that fails.
    is_beside: bool,
    /// What its first descriptor remembers of that.
    memory: Arc<AtomicI32>,
    /// Its blocks, if it has a quota.
    room: Room,
}

#[derive(Debug)]
struct Landed {
    number: u64,
    record: Record,
}

/// A request in flight.
#[derive(Debug)]
struct Pending {
    file: usize,
    request: Request,
    /// It completes after all others.
    late: bool,
}

/// What is asked of a file.
#[derive(Debug)]
pub(crate) enum Request {
    Read {
        offset_bytes: u64,
        buffers: Buffers,
        reply: Reply<Buffers>,
    },
    Write {
        record: Record,
        buffers: Buffers,
        reply: Reply<Buffers>,
    },
    Change {
        record: Record,
        reply: Reply<()>,
    },
    Flush {
        before: u64,
        /// Where the descriptor remembers that it has lost writes.
        memory: Arc<AtomicI32>,
        /// With what one has failed that ran beside this one: the kernel tells a loss to one of
        /// them, and storages to all.
        beside: Option<i32>,
        reply: Reply<()>,
    },
    Status {
        offset_bytes: u64,
        len_bytes: u64,
        reply: Reply<StorageExtent>,
    },
}

impl Request {
    fn kind(&self) -> RequestKind {
        match self {
            Request::Read { .. } | Request::Status { .. } => RequestKind::Read,
            Request::Write { .. } | Request::Change { .. } => RequestKind::Write,
            Request::Flush { .. } => RequestKind::Flush,
        }
    }

    /// Fails a change; others are not refused.
    fn refuse(self, errno: i32) {
        let error = vellum_io::Error::from_errno("write", errno);
        match self {
            Request::Write { reply, .. } => reply.send(Err(error)),
            Request::Change { reply, .. } => reply.send(Err(error)),
            Request::Read { .. } | Request::Flush { .. } | Request::Status { .. } => {}
        }
    }

    fn record(&self) -> Option<&Record> {
        match self {
            Request::Write { record, .. } | Request::Change { record, .. } => Some(record),
            _ => None,
        }
    }
}

impl Disk {
    /// A disk without files.
    pub fn new(mode: Mode) -> Arc<Disk> {
        let core = Core {
            mode,
            files: Vec::new(),
            pending: Vec::new(),
            bug: None,
            faults: None,
            has_failed: false,
            next_landing: 0,
            flushes: 0,
        };
        Arc::new(Disk {
            core: Mutex::new(core),
        })
    }

    /// Makes the disk break its word; see [`crate::disk_bugs`].
    pub fn set_bug(&self, bug: Option<DiskBug>) {
        self.lock().bug = bug;
    }

    /// Has requests fail from now on, or none any more. Gives back what was set before, which
    /// goes on where it stopped when it is set again.
    pub fn set_faults(&self, faults: Option<Faults>) -> Option<Faults> {
        std::mem::replace(&mut self.lock().faults, faults)
    }

    /// Sets how many blocks a file may have allocated; `None`: as many as it wants. See
    /// [`crate::disk_room`].
    pub fn set_quota(&self, file: usize, quota_blocks: Option<u64>) {
        let file = &mut self.lock().files[file];
        file.room.set_quota(quota_blocks, &file.volatile);
    }

    /// Whether a flush of any file but a write log has failed since the files were opened.
    pub fn any_flush_failed(&self) -> bool {
        let core = self.lock();
        let mut files = core.files.iter();
        files.any(|file| file.flush_failed && !file.is_beside)
    }

    /// Whether a request has failed since the files were opened.
    pub fn has_failed(&self) -> bool {
        self.lock().has_failed
    }

    /// Opens all files anew: what failed flushes have lost is not there to be read any more,
    /// and the first descriptor of each forgets them.
    pub fn reopen(&self) {
        let mut core = self.lock();
        core.has_failed = false;
        for file in &mut core.files {
            file.memory.store(0, Ordering::Relaxed);
            if !std::mem::take(&mut file.flush_failed) {
                continue;
            }
            file.volatile = file.durable.clone();
            for landed in &file.landed {
                landed.record.apply(&mut file.volatile);
            }
        }
    }

    /// A further descriptor of a file.
    pub fn open_again(
        self: &Arc<Self>,
        file: usize,
        name: &str,
        traits: SimFileOptions,
    ) -> SimStorage {
        SimStorage::new(self.clone(), file, name, traits)
    }

    /// The number of files.
    pub fn files(&self) -> usize {
        self.lock().files.len()
    }

    /// Adds a file that holds `pages` durably.
    pub fn add_file(
        self: &Arc<Self>,
        name: &str,
        pages: SparseBytes,
        traits: SimFileOptions,
    ) -> Arc<SimStorage> {
        let mut core = self.lock();
        let storage = SimStorage::new(self.clone(), core.files.len(), name, traits);
        let durable = match core.mode {
            Mode::Instant => SparseBytes::new(),
            Mode::Scheduled => pages.clone(),
        };
        core.files.push(File {
            durable,
            volatile: pages,
            landed: Vec::new(),
            flush_failed: false,
            is_beside: [LOG_NAME, SUMS_NAME].contains(&name),
            memory: storage.memory(),
            room: Room::default(),
        });
        Arc::new(storage)
    }

    /// Completes one request in flight; `false` if there is none.
    pub fn complete_one(&self, scheduler: &mut Scheduler) -> bool {
        let mut core = self.lock();
        if core.pending.is_empty() {
            return false;
        }
        let all_late = core.pending.iter().all(|pending| pending.late);
        let ready = |pending: &&Pending| all_late || !pending.late;
        let places: Vec<usize> = (0..core.pending.len())
            .filter(|&at| ready(&&core.pending[at]))
            .collect();
        let kinds: Vec<RequestKind> = places
            .iter()
            .map(|&at| core.pending[at].request.kind())
            .collect();
        let pending = core.pending.remove(places[scheduler.pick(&kinds)]);
        match core.fault(&pending) {
            Some(errno) => core.fail(pending, errno),
            None => core.complete(pending),
        }
        true
    }

    /// Lets requests that were held behind all others complete in any order: for whoever
    /// waits by making requests, which they would never be let past.
    pub fn end_delays(&self) {
        let mut core = self.lock();
        core.pending
            .iter_mut()
            .for_each(|pending| pending.late = false);
    }

    /// How many requests are in flight.
    pub fn in_flight(&self) -> usize {
        self.lock().pending.len()
    }

    /// This moment, as a power cut sees it.
    pub fn cut_point(&self) -> CutPoint {
        let core = self.lock();
        let mut landed: Vec<&Landed> = core.files.iter().flat_map(|file| &file.landed).collect();
        landed.sort_by_key(|landed| landed.number);
        let mut records: Vec<Record> = landed.iter().map(|landed| landed.record.clone()).collect();
        let completed = records.len();
        // A write in flight with `forced` promises nothing before it completes.
        let in_flight = core
            .pending
            .iter()
            .filter_map(|pending| pending.request.record());
        records.extend(in_flight.map(|record| Record {
            forced: false,
            ..record.clone()
        }));
        CutPoint {
            durable: core.files.iter().map(|file| file.durable.clone()).collect(),
            volatile: core
                .files
                .iter()
                .map(|file| file.volatile.clone())
                .collect(),
            records,
            completed,
        }
    }

    /// This moment, as it is left by the death of the process: what is complete stays, what
    /// is in flight may land or not.
    pub fn death_point(&self) -> CutPoint {
        let point = self.cut_point();
        CutPoint {
            durable: point.volatile.clone(),
            records: point.records[point.completed..].to_vec(),
            completed: 0,
            volatile: point.volatile,
        }
    }

    /// Writes that have completed before anybody opened the files, and are not durable.
    pub(crate) fn land_unsynced<'a>(&self, records: impl Iterator<Item = &'a Record>) {
        let mut core = self.lock();
        records.for_each(|record| core.land(record));
    }

    /// What a reader of a file sees now.
    pub fn contents(&self, file: usize) -> SparseBytes {
        self.lock().files[file].volatile.clone()
    }

    pub(crate) fn len_bytes(&self, file: usize) -> u64 {
        self.lock().files[file].volatile.len_bytes()
    }

    /// Starts a request that replies with `T`.
    pub(crate) fn submit<T: 'static>(
        &self,
        file: usize,
        request: impl FnOnce(Reply<T>) -> Request,
    ) -> Io<T> {
        let reply = Reply::new();
        let request = request(reply.clone());
        let mut core = self.lock();
        let pending = Pending {
            file,
            request: core.stamp(request),
            late: false,
        };
        if core.mode == Mode::Instant {
            core.complete(pending);
            drop(core);
            return Io::ready(reply.take().expect("an instant request is complete"));
        }
        core.pending.push(pending);
        Io::boxed(reply)
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }
}

impl Core {
    /// Notes what was complete when a flush was asked for.
    fn stamp(&self, request: Request) -> Request {
        match request {
            Request::Flush { reply, memory, .. } => Request::Flush {
                before: self.next_landing,
                memory,
                beside: None,
                reply,
            },
            other => other,
        }
    }

    fn complete(&mut self, pending: Pending) {
        let file = pending.file;
        let blocks = pending.request.record().map(|record| &record.blocks);
        if blocks.is_some_and(|blocks| !self.files[file].room.apply(blocks)) {
            return pending.request.refuse(FULL);
        }
        match pending.request {
            Request::Read {
                mut offset_bytes,
                mut buffers,
                reply,
            } => {
                for buffer in &mut buffers {
                    self.files[file].volatile.read(offset_bytes, buffer);
                    offset_bytes += buffer.len() as u64;
                }
                reply.send(Ok(buffers));
            }
            Request::Write {
                record,
                buffers,
                reply,
            } => {
                self.land(&record);
                reply.send(Ok(buffers));
            }
            Request::Change { record, reply } => {
                self.land(&record);
                reply.send(Ok(()));
            }
            Request::Flush {
                before,
                beside,
                reply,
                ..
            } => {
                self.flush(file, before);
                let lost = beside.map(|errno| vellum_io::Error::from_errno("flush", errno));
                reply.send(lost.map_or(Ok(()), Err));
            }
            Request::Status {
                offset_bytes,
                len_bytes,
                reply,
            } => {
                let (hole, len_bytes) = self.files[file].volatile.run(offset_bytes, len_bytes);
                let status = if hole {
                    BlockStatus::Hole
                } else {
                    BlockStatus::Data
                };
                reply.send(Ok(StorageExtent { status, len_bytes }));
            }
        }
    }

    /// The errno with which a request is to fail.
    fn fault(&mut self, pending: &Pending) -> Option<i32> {
        self.faults.as_mut()?.strike(pending.request.kind())
    }

    /// Fails a request. A write may have landed, those beside it take long; a flush loses some
    /// of what it was to make durable.
    fn fail(&mut self, pending: Pending, errno: i32) {
        let Some(faults) = &mut self.faults else {
            return self.complete(pending);
        };
        let (lands, holds_up) = (faults.rng.chance(1, 3), faults.rng.chance(2, 3));
        let loses = faults.rng.next_u64();
        let hides = self.bug.as_ref().is_some_and(DiskBug::hides_failures);
        let (forgets, unreported) = (faults.forgets, faults.unreported || hides);
        let error = |operation| vellum_io::Error::from_errno(operation, errno);
        self.has_failed = true;
        let record = pending.request.record().cloned();
        if let (Some(record), true) = (&record, lands) {
            self.land(&Record {
                forced: false,
                ..record.clone()
            });
        }
        if record.is_some() && holds_up {
            let beside = self.pending.iter_mut();
            beside
                .filter(|other| other.file == pending.file && other.request.record().is_some())
                .for_each(|other| other.late = true);
        }
        match pending.request {
            Request::Read { reply, .. } => reply.send(Err(error("read"))),
            Request::Write { reply, .. } => reply.send(Err(error("write"))),
            Request::Change { reply, .. } => reply.send(Err(error("write"))),
            Request::Status { reply, .. } => reply.send(Err(error("block status"))),
            Request::Flush {
                before,
                memory,
                reply,
                ..
            } => {
                self.lose(pending.file, before, loses);
                if unreported {
                    return reply.send(Ok(()));
                }
                let others = self.pending.iter_mut();
                for other in others.filter(|other| other.file == pending.file) {
                    if let Request::Flush { beside, .. } = &mut other.request {
                        *beside = Some(errno);
                    }
                }
                if !forgets {
                    memory.store(errno, Ordering::Relaxed);
                }
                reply.send(Err(error("flush")));
            }
        }
    }

    /// A flush that fails: of what it was to make durable some is, sector by sector, and the
    /// rest is clean as far as the kernel knows, so that no later flush is about it.
    fn lose(&mut self, file: usize, before: u64, seed: u64) {
        let mut rng = Rng::new(seed);
        let file = &mut self.files[file];
        file.flush_failed = true;
        let landed = std::mem::take(&mut file.landed);
        let (covered, left): (Vec<_>, Vec<_>) = landed
            .into_iter()
            .partition(|landed| landed.number < before);
        for landed in &covered {
            match rng.below(4) {
                // What was written through is there already.
                _ if landed.record.forced => landed.record.apply(&mut file.durable),
                0 | 1 => landed.record.apply(&mut file.durable),
                2 => landed.record.apply_torn(&mut file.durable, &mut rng),
                _ => {}
            }
        }
        file.landed = left;
    }

    fn land(&mut self, record: &Record) {
        let file = &mut self.files[record.file];
        let mut record = record.landed(&file.volatile);
        let settled = file.durable.len_bytes().min(file.volatile.len_bytes());
        if record.end_bytes() <= settled && record.sectors() > 0 {
            // The length that it needs cannot be lost any more.
            record.grows_to = None;
        }
        if let Some(bug) = &self.bug {
            record.late = bug.delays(&file.volatile, &record);
        }
        record.apply(&mut file.volatile);
        if self.mode == Mode::Scheduled {
            file.landed.push(Landed {
                number: self.next_landing,
                record,
            });
        }
        self.next_landing += 1;
    }

    fn flush(&mut self, file: usize, before: u64) {
        self.flushes += 1;
        let lies = |bug: &DiskBug| bug.swallows(self.flushes);
        if self.bug.as_ref().is_some_and(lies) {
            return;
        }
        let file = &mut self.files[file];
        let landed = std::mem::take(&mut file.landed);
        let (covered, mut left): (Vec<_>, Vec<_>) = landed
            .into_iter()
            .partition(|landed| landed.number < before);
        for at in 0..covered.len() {
            let record = &covered[at].record;
            // A late record that a later one covers is durable with it.
            let late = record.late
                && !covered[at + 1..]
                    .iter()
                    .any(|next| next.record.overlaps(record));
            if late {
                let record = Record {
                    late: false,
                    ..record.clone()
                };
                left.push(Landed {
                    number: covered[at].number,
                    record,
                });
            } else {
                record.apply(&mut file.durable);
            }
        }
        left.sort_by_key(|landed| landed.number);
        file.landed = left;
    }
}
