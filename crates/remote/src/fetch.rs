//! Fetching: which blocks are asked for when, by how many connections, how often.
//!
//! A read on a lane notes the blocks that it wants ([`Fetcher::read`]) and waits for each; tasks
//! on the network's threads take pieces of neighbours, those waited for first, until none is left.
//!
//! Invariants:
//! - A block that is wanted and not there is in a piece, or a task looks for pieces after it was
//!   noted: both happen under one lock.
//! - No lock is held while anybody waits.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};
use vellum_io::buffer::total_len;
use vellum_io::{Buffers, Error, ErrorKind, Result};

use crate::blocks::{BLOCK_BYTES, Blocks, PIECE_BLOCKS, Slot};
use crate::failure::Failure;
use crate::http;
#[cfg(feature = "s3")]
use crate::object;
use crate::streams::Streams;

/// Connections to a server at most; it may want fewer.
const MOST_CONNECTIONS: usize = 16;
/// What a file has in memory at most, beside what readers hold: 64 MiB, or what the user says.
pub(crate) const MOST_KEPT_BYTES: u64 = 64 << 20;
/// What it may have at least: 2 MiB.
const LEAST_KEPT_BYTES: u64 = 2 << 20;
/// How much of a long read is on its way or in memory for it: 16 MiB.
const READ_BLOCKS: usize = 256;
/// What is fetched ahead of one reader at most: 16 MiB, or what the user says.
const MOST_AHEAD_BLOCKS: u64 = 256;
/// By how much the first distance may grow.
const AHEAD_GROWTH: u64 = 64;
/// A read waits so many times the server's silence before it fails.
pub(crate) const PATIENCE: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Tries again what failed, with growing pauses, as long as there is hope.
#[derive(Debug)]
pub(crate) struct Retries {
    patience: Duration,
    since: Instant,
    pause: Duration,
}

impl Retries {
    pub(crate) fn new(patience: Duration) -> Self {
        Retries {
            patience,
            since: Instant::now(),
            pause: FIRST_PAUSE,
        }
    }

    /// Something has come.
    fn progress(&mut self) {
        self.since = Instant::now();
        self.pause = FIRST_PAUSE;
    }

    /// What has taken so long was not in vain: hope lasts longer by it.
    #[cfg(feature = "s3")]
    pub(crate) fn exclude(&mut self, time: Duration) {
        self.since += time;
    }

    /// When hope ends.
    fn end(&self) -> Instant {
        self.since + self.patience
    }

    /// When a try ends in which bytes only drip in: early enough for another one.
    fn end_of_try(&self) -> Instant {
        let half = self.since + self.patience / 2;
        match Instant::now() < half {
            true => half,
            false => self.end(),
        }
    }

    /// Waits before the next try; the failure, if there is to be none.
    pub(crate) async fn wait_after(&mut self, failure: Failure) -> Result<()> {
        let asked = match &failure {
            Failure::Final(_) => return Err(failure.into_error()),
            Failure::Passing(_, asked) | Failure::Busy(_, asked) => *asked,
            Failure::Unreachable(_) => None,
        };
        // Whoever failed beside this one is not to come back at the same moment.
        let jitter = self.pause.mul_f64(fastrand::f64() / 2.0);
        let pause = asked.unwrap_or_default().max(self.pause);
        // A server may ask for any time.
        if pause > self.patience || Instant::now() + pause + jitter > self.end() {
            return Err(failure.into_error());
        }
        sleep(pause + jitter).await;
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
        Ok(())
    }
}

/// Where the bytes of a file come from.
#[derive(Debug)]
pub(crate) enum Source {
    Http(Box<http::Source>),
    #[cfg(feature = "s3")]
    Object(Box<object::Source>, object::Version),
}

impl Source {
    fn name(&self) -> &str {
        match self {
            Source::Http(source) => source.name(),
            #[cfg(feature = "s3")]
            Source::Object(source, _) => source.name(),
        }
    }

    fn timeout(&self) -> Duration {
        match self {
            Source::Http(source) => source.timeout(),
            #[cfg(feature = "s3")]
            Source::Object(source, _) => source.timeout(),
        }
    }

    /// Reads a range of the version that was opened, and gives the pieces to `take` in order.
    /// A server may send less: then the rest has to be asked for. Each call of `take` says until
    /// when the next bytes must be there.
    async fn read(
        &self,
        range: Range<u64>,
        take: impl FnMut(&[u8]) -> Instant + Send,
    ) -> Result<(), Failure> {
        match self {
            Source::Http(source) => source.read(range, take).await,
            #[cfg(feature = "s3")]
            Source::Object(source, version) => source.read(version, range, take).await,
        }
    }
}

/// What fetches the blocks of one file.
#[derive(Debug)]
pub(crate) struct Fetcher {
    source: Source,
    len_bytes: u64,
    state: Mutex<State>,
    closed: AtomicBool,
    handle: Handle,
}

#[derive(Debug)]
struct State {
    blocks: Blocks,
    streams: Streams,
    /// Tasks that take pieces.
    tasks: usize,
    /// How many there may be.
    allowed: usize,
}

impl Fetcher {
    /// `handle` is that of a runtime which each reader keeps alive.
    pub(crate) fn new(
        source: Source,
        len_bytes: u64,
        (readahead_bytes, keep_bytes): (u64, u64),
        handle: Handle,
    ) -> Arc<Self> {
        let keep_blocks = keep_bytes.clamp(LEAST_KEPT_BYTES, MOST_KEPT_BYTES) / BLOCK_BYTES;
        let first = readahead_bytes.div_ceil(BLOCK_BYTES).min(keep_blocks / 4);
        let most = first.saturating_mul(AHEAD_GROWTH).min(MOST_AHEAD_BLOCKS);
        let state = State {
            blocks: Blocks::new(keep_blocks as usize),
            streams: Streams::new(first, most),
            tasks: 0,
            allowed: MOST_CONNECTIONS,
        };
        Arc::new(Fetcher {
            source,
            len_bytes,
            state: Mutex::new(state),
            closed: AtomicBool::new(false),
            handle,
        })
    }

    pub(crate) fn name(&self) -> &str {
        self.source.name()
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Puts the file's first bytes in their places, which have come with the first answer.
    pub(crate) fn put_first(&self, bytes: &[u8]) {
        let mut state = self.state.lock();
        for (index, block) in (0..).zip(bytes.chunks(BLOCK_BYTES as usize)) {
            let end = (index + 1) * BLOCK_BYTES;
            if block.len() as u64 == end.min(self.len_bytes) - index * BLOCK_BYTES {
                state.blocks.want(index);
                let _ = state.blocks.next_piece();
                state.blocks.arrived(index, Ok(block.to_vec()));
            }
        }
    }

    /// Nothing is fetched any more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.state.lock().blocks.fail_waiting(&self.closed_error());
    }

    fn closed_error(&self) -> Error {
        Error::new(ErrorKind::Io, "read", "the node is closed").target(self.name())
    }

    /// Reads; what lies beyond the end is zeroes.
    pub(crate) async fn read(
        self: Arc<Self>,
        offset_bytes: u64,
        mut buffers: Buffers,
    ) -> Result<Buffers> {
        let end = offset_bytes.saturating_add(total_len(&buffers));
        let inside = offset_bytes.min(self.len_bytes)..end.min(self.len_bytes);
        let mut target = Target::new(&mut buffers);
        if !inside.is_empty() {
            self.read_inside(inside, &mut target)
                .await
                .map_err(|error| error.at(offset_bytes))?;
        }
        target.zero_rest();
        Ok(buffers)
    }

    async fn read_inside(
        self: &Arc<Self>,
        range: Range<u64>,
        target: &mut Target<'_>,
    ) -> Result<()> {
        let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
        let mut slots = VecDeque::new();
        let mut next = blocks.start;
        for index in blocks.clone() {
            if slots.len() <= READ_BLOCKS / 2 && next < blocks.end {
                let end = blocks.end.min(next + READ_BLOCKS as u64 / 2);
                let behind = (end == blocks.end).then_some(&blocks);
                self.want(next..end, behind, &mut slots)?;
                next = end;
            }
            let slot = slots.pop_front().expect("one is noted for each block");
            let bytes = slot.wait().await?;
            let start = index * BLOCK_BYTES;
            let from = range.start.max(start) - start;
            let to = range.end.min(start + bytes.len() as u64) - start;
            target.put(&bytes[from as usize..to as usize]);
        }
        Ok(())
    }

    /// Notes that blocks are read now, and what is to be fetched `behind` a whole read.
    fn want(
        self: &Arc<Self>,
        blocks: Range<u64>,
        behind: Option<&Range<u64>>,
        slots: &mut VecDeque<Arc<Slot>>,
    ) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(self.closed_error());
        }
        let mut state = self.state.lock();
        for index in blocks {
            slots.push_back(state.blocks.want(index));
        }
        if let Some(read) = behind {
            let room = state.blocks.room_ahead();
            let ahead = state.streams.note(read.clone(), room);
            let end = self.len_bytes.div_ceil(BLOCK_BYTES);
            for index in ahead.start..ahead.end.min(end) {
                state.blocks.want_ahead(index);
            }
        }
        drop(state);
        self.start_tasks();
        Ok(())
    }

    /// Starts tasks for what waits.
    fn start_tasks(self: &Arc<Self>) {
        let tasks = self.state.lock().new_tasks();
        for _ in 0..tasks {
            self.handle.spawn(self.clone().fetch());
        }
    }

    /// Takes pieces until there is none.
    async fn fetch(self: Arc<Self>) {
        let mut counted = Counted(Some(&self));
        loop {
            let piece = {
                let mut state = self.state.lock();
                let piece = match state.tasks <= state.allowed {
                    true => state.blocks.next_piece(),
                    false => None,
                };
                if piece.is_none() {
                    state.tasks -= 1;
                    counted.0 = None;
                }
                piece
            };
            let Some(piece) = piece else { return };
            self.fetch_piece(piece).await;
        }
    }

    async fn fetch_piece(self: &Arc<Self>, piece: Range<u64>) {
        let patience = PATIENCE * self.source.timeout();
        let mut retries = Retries::new(patience);
        let mut filling = Filling {
            fetcher: self,
            next: piece.start,
            end: piece.end,
            bytes: Vec::new(),
        };
        let end = (piece.end * BLOCK_BYTES).min(self.len_bytes);
        while filling.next < piece.end {
            if self.closed.load(Ordering::Acquire) {
                filling.fail(&self.closed_error());
                return;
            }
            filling.bytes.clear();
            let range = filling.next * BLOCK_BYTES..end;
            let before = filling.next;
            let mut until = retries.end_of_try();
            let read = self.source.read(range, |chunk| {
                if filling.take(chunk) {
                    retries.progress();
                    until = retries.end_of_try();
                }
                until
            });
            let failure = match read.await {
                Ok(()) => {
                    self.allow_more();
                    // A server may send less than a block of what was asked for: not for ever.
                    match filling.next > before {
                        true => continue,
                        false => self.too_little(),
                    }
                }
                Err(failure) => failure,
            };
            if matches!(failure, Failure::Busy(..)) {
                self.allow_fewer();
            }
            if let Err(error) = retries.wait_after(failure).await {
                filling.fail(&error);
                return;
            }
        }
    }

    fn too_little(&self) -> Failure {
        let message = "the server sends less than it is asked for";
        let error = Error::new(ErrorKind::Protocol, "read", message);
        Failure::Passing(error.target(self.name()), None)
    }

    /// The server is busy: half as many connections are enough.
    fn allow_fewer(&self) {
        let mut state = self.state.lock();
        state.allowed = (state.allowed / 2).max(1);
    }

    /// Pieces arrive: one more connection may be tried.
    fn allow_more(self: &Arc<Self>) {
        {
            let mut state = self.state.lock();
            if state.allowed == MOST_CONNECTIONS {
                return;
            }
            state.allowed += 1;
        }
        self.start_tasks();
    }
}

impl State {
    /// How many tasks to start for what waits; they are counted.
    fn new_tasks(&mut self) -> usize {
        let free = self.allowed.saturating_sub(self.tasks);
        let new = self.blocks.waiting_pieces().min(free);
        self.tasks += new;
        new
    }
}

/// A task that is counted, until it has said itself that it ends.
struct Counted<'a>(Option<&'a Arc<Fetcher>>);

impl Drop for Counted<'_> {
    /// The task was ended from outside, or by a panic: others do what waits.
    fn drop(&mut self) {
        if let Some(fetcher) = self.0 {
            fetcher.state.lock().tasks -= 1;
            fetcher.start_tasks();
        }
    }
}

/// The blocks of a piece as their bytes come in.
struct Filling<'a> {
    fetcher: &'a Fetcher,
    next: u64,
    end: u64,
    bytes: Vec<u8>,
}

impl Drop for Filling<'_> {
    /// Whoever waits for what did not come, whatever ended the task, is told.
    fn drop(&mut self) {
        if self.next < self.end {
            let error = Error::new(ErrorKind::Io, "read", "the fetch was given up");
            self.fail(&error.target(self.fetcher.name()));
        }
    }
}

impl Filling<'_> {
    fn block_len(&self) -> usize {
        let start = self.next * BLOCK_BYTES;
        (self.fetcher.len_bytes - start).min(BLOCK_BYTES) as usize
    }

    /// Takes bytes; whether a block is whole now.
    fn take(&mut self, mut chunk: &[u8]) -> bool {
        let mut whole = false;
        while !chunk.is_empty() {
            let len = self.block_len();
            if self.bytes.capacity() == 0 {
                self.bytes.reserve_exact(len);
            }
            let (now, rest) = chunk.split_at(chunk.len().min(len - self.bytes.len()));
            self.bytes.extend_from_slice(now);
            chunk = rest;
            if self.bytes.len() == len {
                let bytes = std::mem::take(&mut self.bytes);
                self.fetcher
                    .state
                    .lock()
                    .blocks
                    .arrived(self.next, Ok(bytes));
                self.next += 1;
                whole = true;
            }
        }
        whole
    }

    fn fail(&mut self, error: &Error) {
        let mut state = self.fetcher.state.lock();
        for index in self.next..self.end {
            state.blocks.arrived(index, Err(error.clone()));
        }
        self.next = self.end;
    }
}

/// Buffers that are filled from their start.
struct Target<'a> {
    buffers: &'a mut Buffers,
    at: usize,
    filled: usize,
}

impl<'a> Target<'a> {
    fn new(buffers: &'a mut Buffers) -> Self {
        Target {
            buffers,
            at: 0,
            filled: 0,
        }
    }

    fn put(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let free = &mut self.buffers[self.at][self.filled..];
            let (now, rest) = bytes.split_at(bytes.len().min(free.len()));
            free[..now.len()].copy_from_slice(now);
            self.filled += now.len();
            bytes = rest;
            if self.filled == self.buffers[self.at].len() {
                self.at += 1;
                self.filled = 0;
            }
        }
    }

    fn zero_rest(&mut self) {
        for buffer in self.buffers.iter_mut().skip(self.at) {
            buffer[self.filled..].fill(0);
            self.filled = 0;
        }
    }
}

/// What the first answer is to hold: enough to find out what the file is.
pub(crate) const FIRST_BYTES: u64 = BLOCK_BYTES;
const _: () = assert!(PIECE_BLOCKS * BLOCK_BYTES <= 1 << 20);
