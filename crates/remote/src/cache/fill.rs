//! Brings blocks here that are not: whoever wants one waits for the same fetch.
//!
//! Invariants:
//! - A block that is wanted and not known to be whole is on its way, once in this process
//!   ([`State::on_way`]) and, by its claim, once on this host.
//! - A group that somebody has begun to throw out is repaired under a claim that excludes
//!   everybody, other tasks of this process too: claims of one open file do not exclude each other.
//! - Pieces that nobody waits for leave room for those that somebody does.
//! - No lock is held while anybody waits.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_lock::Semaphore;
use event_listener::{Event, listener};
use parking_lot::Mutex;
use vellum_io::lane::{now, sleep};
use vellum_io::spawn_to_completion;
use vellum_io::{Buffer, Error, ErrorKind, Result};
use vellum_storage::Storage;

use super::directory::Directory;
use super::evict;
use super::layout::{BLOCK_BYTES, GROUP_BLOCKS, Identity, entries_of};
use super::place::Place;
use super::storage::CacheOptions;
use super::table::Table;
use super::trace::Trace;
use crate::streams::Streams;

/// Blocks that are fetched at once: 1 MiB.
pub(super) const PIECE_BLOCKS: u64 = 16;
/// Pieces on their way at most, for each storage.
pub(super) const MOST_PIECES: usize = 16;
/// Of these, pieces that nobody waits for.
const MOST_AHEAD: usize = 8;
/// Between two looks at what another process fetches: at first, and at most.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LONGEST_LOOK: Duration = Duration::from_millis(20);
/// So long is waited for who claims blocks, by what an outage may last: he may be stopped.
const LEAST_CLAIM_WAIT: Duration = Duration::from_secs(1);
const LONGEST_CLAIM_WAIT: Duration = Duration::from_secs(10);
/// Between two tries during an outage.
const OUTAGE_PAUSE: Duration = Duration::from_millis(500);
/// So often whoever makes room looks whether there is enough.
const ROUNDS_OF_ROOM: u32 = 16;
/// So long nothing is stored after that has failed.
const STORE_PAUSE: Duration = Duration::from_secs(10);
/// After so many bytes it is looked how much the folder takes; with small limits more often.
const LOOK_BYTES: u64 = 64 << 20;

/// A block that is on its way.
#[derive(Debug, Default)]
pub(super) struct OnWay {
    done: Mutex<Option<Result<()>>>,
    event: Event,
}

impl OnWay {
    fn finish(&self, result: Result<()>) {
        *self.done.lock() = Some(result);
        self.event.notify(usize::MAX);
    }

    pub(super) async fn wait(&self) -> Result<()> {
        loop {
            listener!(self.event => listener);
            if let Some(done) = &*self.done.lock() {
                return done.clone();
            }
            listener.await;
        }
    }
}

/// What changes while a cache is used.
#[derive(Debug)]
pub(super) struct State {
    pub(super) on_way: HashMap<u64, Arc<OnWay>>,
    pub(super) streams: Streams,
    pub(super) trace: Option<Trace>,
    /// Stored since it was looked how much the folder takes.
    stored_bytes: u64,
    /// Blocks that were found whole, or stored, with the generation of their group, since the last sync began.
    pub(super) unsynced: Vec<(u64, u64)>,
    pub(super) is_syncing: bool,
    /// When storing has failed, or somebody who claims blocks has not brought them.
    full_since: Option<Instant>,
}

/// A task of a cache, until it is dropped.
#[derive(Debug)]
pub(super) struct Task(Arc<Cache>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.tasks.fetch_sub(1, Ordering::AcqRel);
        self.0.task_ended.notify(usize::MAX);
    }
}

/// One version of a file: its blocks here, and where the others come from.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) name: String,
    pub(super) place: Place,
    pub(super) table: Table,
    /// `None`: the server was not to be reached when this was opened, and everything was here.
    pub(super) below: Option<Arc<dyn Storage>>,
    pub(super) directory: Option<Directory>,
    pub(super) options: CacheOptions,
    pub(super) state: Mutex<State>,
    pub(super) closed: AtomicBool,
    /// Tasks that use this.
    tasks: AtomicU64,
    task_ended: Event,
    pieces: Semaphore,
    ahead: Semaphore,
    /// Whoever repairs a group has it.
    repairs: async_lock::Mutex<()>,
    /// The server does not answer just now, which was said.
    is_out: AtomicBool,
    fetched_bytes: AtomicU64,
    /// A sync has failed: from then on no block counts as durable.
    pub(super) has_lost: AtomicBool,
}

impl Cache {
    pub(super) fn new(
        name: String,
        place: Place,
        table: Table,
        below: Option<Arc<dyn Storage>>,
        directory: Option<Directory>,
        options: CacheOptions,
    ) -> Self {
        let first = options.readahead_bytes.div_ceil(BLOCK_BYTES);
        let state = State {
            on_way: HashMap::new(),
            streams: Streams::new(first, (64 * first).min(256)),
            trace: None,
            stored_bytes: 0,
            unsynced: Vec::new(),
            is_syncing: false,
            full_since: None,
        };
        Cache {
            name,
            place,
            table,
            below,
            directory,
            options,
            state: Mutex::new(state),
            closed: AtomicBool::new(false),
            tasks: AtomicU64::new(0),
            task_ended: Event::new(),
            pieces: Semaphore::new(MOST_PIECES),
            ahead: Semaphore::new(MOST_AHEAD),
            repairs: async_lock::Mutex::new(()),
            is_out: AtomicBool::new(false),
            fetched_bytes: AtomicU64::new(0),
            has_lost: AtomicBool::new(false),
        }
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.place.identity
    }

    pub(super) fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(super) fn closed_error(&self) -> Error {
        Error::new(ErrorKind::Io, "read", "the node is closed").target(&self.name)
    }

    /// Whether blocks can be stored just now. If not, they are read from the server by whoever wants
    /// them.
    pub(super) fn can_store(&self) -> bool {
        let since = self.state.lock().full_since;
        since.is_none_or(|since| now() > since + STORE_PAUSE)
    }

    /// Something that a close waits for.
    pub(super) fn task(self: &Arc<Self>) -> Task {
        self.tasks.fetch_add(1, Ordering::AcqRel);
        Task(self.clone())
    }

    /// Waits until no task uses this any more.
    pub(super) async fn tasks_end(&self) {
        loop {
            listener!(self.task_ended => listener);
            if self.tasks.load(Ordering::Acquire) == 0 {
                return;
            }
            listener.await;
        }
    }

    /// Has the blocks of a range brought here that are not; `wanted`: somebody waits for them. What
    /// to wait for, for each.
    pub(super) fn want(self: &Arc<Self>, blocks: Range<u64>, wanted: bool) -> Vec<Arc<OnWay>> {
        let (mut waits, mut pieces) = (Vec::new(), Vec::<Range<u64>>::new());
        {
            let mut state = self.state.lock();
            for block in blocks {
                if let Some(on_way) = state.on_way.get(&block) {
                    waits.push(on_way.clone());
                } else if self.table.whole(block..block + 1).is_none() {
                    let on_way = Arc::<OnWay>::default();
                    state.on_way.insert(block, on_way.clone());
                    waits.push(on_way);
                    match pieces.last_mut() {
                        Some(piece) if goes_on(piece, block) => piece.end += 1,
                        _ => pieces.push(block..block + 1),
                    }
                }
            }
        }
        for piece in pieces {
            let (cache, task) = (self.clone(), self.task());
            // Others wait for it, on other lanes too.
            spawn_to_completion(async move {
                cache.bring(piece, wanted).await;
                drop(task);
            });
        }
        waits
    }

    /// Brings the blocks of a piece, which are on their way, and tells those who wait.
    async fn bring(self: Arc<Self>, piece: Range<u64>, wanted: bool) {
        let _ahead = match wanted {
            true => None,
            false => Some(self.ahead.acquire().await),
        };
        let _turn = self.pieces.acquire().await;
        let mut result = Ok(());
        if self.is_closed() {
            result = Err(self.closed_error());
        }
        // Whoever has waited for another piece may find some of this one here by now.
        let (mut next, mut stored) = (piece.start, 0);
        while result.is_ok() && next < piece.end && self.can_store() {
            let Some(run) = self.next_missing(next..piece.end).await else {
                break;
            };
            next = run.end;
            result = self.fetch(run).await.map(|bytes| stored += bytes);
        }
        let on_way: Vec<_> = {
            let mut state = self.state.lock();
            piece
                .filter_map(|block| state.on_way.remove(&block))
                .collect()
        };
        for one in on_way {
            one.finish(result.clone());
        }
        // No reader waits for these.
        self.sync_soon();
        self.mind_limit(stored).await;
    }

    /// The first run of blocks that are not here and whole; what is before it is known to be.
    async fn next_missing(&self, blocks: Range<u64>) -> Option<Range<u64>> {
        self.note_whole(&blocks).await;
        let mut blocks = blocks.skip_while(|&block| self.table.whole(block..block + 1).is_some());
        let first = blocks.next()?;
        let rest = blocks.take_while(|&block| self.table.whole(block..block + 1).is_none());
        Some(first..first + 1 + rest.count() as u64)
    }

    /// Looks which blocks are here and whole, and notes it. What cannot be read is not here.
    async fn note_whole(&self, blocks: &Range<u64>) {
        if self.table.whole(blocks.clone()).is_some() {
            return;
        }
        let shared = self.table.shared();
        let groups = blocks.start / GROUP_BLOCKS..blocks.end.div_ceil(GROUP_BLOCKS);
        let before: Vec<u64> = groups
            .clone()
            .map(|group| shared.generation(group))
            .collect();
        let whole = self.place.whole_blocks(blocks).await.unwrap_or_default();
        for (block, whole) in blocks.clone().zip(whole) {
            let group = block / GROUP_BLOCKS;
            let generation = before[(group - groups.start) as usize];
            // What was read while the group was thrown out says nothing.
            let is_there = generation.is_multiple_of(2) && shared.generation(group) == generation;
            if whole && is_there {
                self.note_one(block, generation);
            }
        }
    }

    fn note_one(&self, block: u64, generation: u64) {
        self.table.set_whole(block, generation);
        if !self.has_lost.load(Ordering::Acquire) {
            self.state.lock().unsynced.push((block, generation));
        }
    }

    /// Fetches blocks that were not here, unless another process does so meanwhile; how many bytes
    /// were stored.
    async fn fetch(&self, run: Range<u64>) -> Result<u64> {
        let entries = entries_of(&run);
        let mut pause = FIRST_LOOK;
        let patience = (self.options.outage).clamp(LEAST_CLAIM_WAIT, LONGEST_CLAIM_WAIT);
        let since = now();
        loop {
            let Ok(is_claimed) = self.place.try_claim(&entries) else {
                return Ok(self.pass_by());
            };
            if is_claimed {
                let half_gone = self.half_gone(&run);
                if half_gone.is_none() {
                    let fetched = self.fetch_claimed(&run).await;
                    self.place.release(&entries);
                    return fetched;
                }
                // All of the group has to be claimed for that, by whoever does it alone.
                self.place.release(&entries);
                if let Some(group) = half_gone
                    && self.repair(group).await.is_err()
                {
                    return Ok(self.pass_by());
                }
            }
            if now().duration_since(since) > patience {
                return Ok(self.pass_by());
            }
            if self.is_closed() {
                return Err(self.closed_error());
            }
            // Two that wait for each other are not to come back at the same moment.
            sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
            pause = (2 * pause).min(LONGEST_LOOK);
            self.note_whole(&run).await;
            if self.table.whole(run.clone()).is_some() {
                return Ok(0);
            }
        }
    }

    /// Blocks cannot come to be here just now: whoever waits reads from the server. Nothing was stored.
    fn pass_by(&self) -> u64 {
        self.state.lock().full_since = Some(now());
        0
    }

    /// Fetches what is missing of a run that is claimed; how many bytes were stored.
    async fn fetch_claimed(&self, run: &Range<u64>) -> Result<u64> {
        let (mut next, mut stored) = (run.start, 0);
        while let Some(missing) = self.next_missing(next..run.end).await {
            next = missing.end;
            let bytes = self.read_below(&missing).await?;
            let len_bytes = bytes.len() as u64;
            self.fetched_bytes.fetch_add(len_bytes, Ordering::Relaxed);
            let done = self.place.store(&missing, bytes).await;
            if done.is_err() {
                return Ok(stored + self.pass_by());
            }
            self.state.lock().full_since = None;
            stored += len_bytes;
            for block in missing {
                let generation = self.table.shared().generation(block / GROUP_BLOCKS);
                self.note_one(block, generation);
            }
        }
        Ok(stored)
    }

    /// A group of these blocks that somebody has begun to throw out.
    fn half_gone(&self, run: &Range<u64>) -> Option<u64> {
        let mut groups = run.start / GROUP_BLOCKS..run.end.div_ceil(GROUP_BLOCKS);
        groups.find(|&group| !self.table.shared().generation(group).is_multiple_of(2))
    }

    /// Finishes what somebody has begun who died while throwing a group out; not if anybody has a
    /// claim there.
    async fn repair(&self, group: u64) -> Result<()> {
        let _turn = self.repairs.lock().await;
        let entries = entries_of(&self.identity().group_blocks(group));
        if !self.place.try_claim_alone(&entries)? {
            return Ok(());
        }
        let shared = self.table.shared();
        let done = match shared.generation(group).is_multiple_of(2) {
            true => Ok(()),
            false => evict::finish(&self.place, shared, group).await,
        };
        self.place.release_alone(&entries);
        done
    }

    /// Where bytes come from that are not here.
    pub(super) fn server(&self) -> Result<&Arc<dyn Storage>> {
        self.below.as_ref().ok_or_else(|| {
            let message = "a block of the cache is gone or damaged, and the server could not be \
                           reached when this was opened; open it anew";
            Error::new(ErrorKind::Io, "read", message).target(&self.name)
        })
    }

    /// Reads from the server; during an outage as long as it may last.
    async fn read_below(&self, blocks: &Range<u64>) -> Result<Buffer> {
        let since = now();
        let below = self.server()?;
        loop {
            let error = match self.place.read_from(&**below, blocks).await {
                Ok(bytes) => {
                    if self.is_out.swap(false, Ordering::AcqRel) {
                        self.say("the server answers again");
                    }
                    return Ok(bytes);
                }
                Err(error) => error,
            };
            let passes = matches!(error.kind(), ErrorKind::Io | ErrorKind::Protocol);
            if !passes || self.is_closed() || now().duration_since(since) > self.options.outage {
                return Err(error);
            }
            if !self.is_out.swap(true, Ordering::AcqRel) {
                self.say(&format!(
                    "the server does not answer ({}); what is not in the cache waits",
                    error.message()
                ));
            }
            sleep(OUTAGE_PAUSE).await;
        }
    }

    pub(super) fn say(&self, text: &str) {
        (self.options.notice)(&format!("'{}': {text}", self.name));
    }

    /// Makes room in the folder when it takes more than it may.
    async fn mind_limit(&self, stored: u64) {
        let (Some(directory), Some(limit)) = (&self.directory, self.options.limit_bytes) else {
            return;
        };
        if stored == 0 {
            return;
        }
        {
            let mut state = self.state.lock();
            state.stored_bytes += stored;
            if state.stored_bytes < LOOK_BYTES.min(limit / 16) {
                return;
            }
            state.stored_bytes = 0;
        }
        let directory = directory.clone();
        // Who finds that somebody makes room already leaves it to that one, so that one looks again at
        // what was stored meanwhile. What cannot go now is tried again later.
        for _ in 0..ROUNDS_OF_ROOM {
            if !directory.used_bytes().is_ok_and(|used| used > limit) {
                return;
            }
            match evict::make_room(&directory, limit - limit / 8).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    return self.say(&format!("no room could be made in the cache: {error}"));
                }
            }
        }
    }
}

fn goes_on(piece: &Range<u64>, block: u64) -> bool {
    piece.end == block && piece.end - piece.start < PIECE_BLOCKS
}
