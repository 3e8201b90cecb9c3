//! Allocation of host clusters.
//!
//! Clusters come from the *reserve*: a few clusters whose counts were raised already.
//! The reserve is filled from the lowest known free cluster, or else from the *tail*, the
//! clusters beyond everything in use. Sequential writers side by side have free runs set
//! aside (`streams`). What must wait for the disk on the way (a slice of refcounts, a new
//! refcount block, a longer file) is done ahead, in the background; see `prealloc`. What
//! happens where room runs out is in `room`.
//!
//! Invariants:
//! - A cluster is in the reserve, or handed out, or neither and then counted as
//!   used by something else, or its count in memory is zero.
//! - No cluster beyond the end of a storage of fixed length is counted.
//! - The tail only moves up while the reserve or a window holds clusters, so one that came
//!   from beyond the end of the file was never written. It moves down where the file is
//!   cut.
//! - While the file is made longer, nothing beyond its new end is handed out; while
//!   somebody holds its end, the tail stays where it is, and nothing is counted ahead.
//! - An [`Allocation`] is `refcount_durable` only if its counts and a file that is long enough
//!   are durable, or the header says that counts are not to be trusted: a mapping to it needs
//!   no barrier before it. It `reads_as_zeroes` only if nothing was ever written there.
//! - The file is cut, and a run of clusters claimed at its end, only by the one who holds that
//!   end ([`Allocator::hold_end`]). A length from before a cut proves nothing afterwards.

mod release;
pub(crate) mod room;
mod windows;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::{Mutex, MutexGuard};
use vellum_format::geometry::Geometry;
use vellum_format::limits::HOST_OFFSET_END;
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::range_lock::overlap;
use vellum_io::{Error, ErrorKind, Result};
use vellum_storage::Event;

use super::beyond::Beyond;
use super::free_index::FreeIndex;
use super::prealloc::{FileLength, LengthMark, PreallocateAhead};
use super::refcounts::Refcounts;
use super::reserve::{Reserve, ReservedRun};
use super::scan::Scan;
use super::streams::Streams;
use crate::debug_events::emit;
use crate::qcow2::integrity::overlap::refusal;
use room::{Room, Tail};

/// Extents of free clusters that are kept in memory, at most.
const MOST_FREE_EXTENTS: usize = 32768;

/// A run of newly allocated clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocation {
    /// Host offset of the first cluster.
    pub(crate) start: HostOffset,
    /// Number of clusters.
    pub(crate) clusters: u64,
    /// The clusters lie beyond everything ever written: they read as zeroes.
    pub(crate) reads_as_zeroes: bool,
    /// Their counts are durable already, and so is a file that reaches to their end:
    /// a mapping that points at them needs no barrier before it.
    pub(crate) refcount_durable: bool,
}

impl Allocation {
    /// What is left of it without its first `clusters`.
    pub(crate) fn skip(self, clusters: u64, geometry: &Geometry) -> Self {
        Allocation {
            start: HostOffset(self.start.bytes() + clusters * geometry.cluster_size_bytes()),
            clusters: self.clusters - clusters,
            ..self
        }
    }

    /// One cluster of it.
    pub(crate) fn part(self, index: u64, geometry: &Geometry) -> Self {
        Allocation {
            clusters: 1,
            ..self.skip(index, geometry)
        }
    }
}

/// A moment between two commits; see [`Allocator::begin_commit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RefcountMark {
    period: u64,
    length: LengthMark,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) free: FreeIndex,
    pub(crate) scan: Scan,
    /// The first cluster beyond everything in use.
    pub(crate) tail: u64,
    pub(crate) reserve: Reserve,
    pub(crate) streams: Streams,
    pub(super) room: Room,
    /// Clusters handed out since the image was opened.
    pub(crate) handed_out: u64,
    /// Counts that are raised now are written by the commit that ends this period.
    period: u64,
    /// The last period whose counts are durable.
    durable_period: u64,
    /// The image is marked dirty: no mapping has to wait for counts.
    refcounts_lazy: bool,
    /// Clusters beyond the tail that were freed, and may be in use again: a refcount table has
    /// been there.
    pub(crate) written_beyond: Vec<Range<u64>>,
    pub(crate) length: FileLength,
    /// Clusters beyond the end of the file that entries lead to, if there are any: nothing
    /// is handed out there.
    pub(crate) beyond: Option<Beyond>,
    /// Somebody holds the end of the file: see [`Allocator::hold_end`].
    pub(crate) end_held: bool,
    /// Something is being prepared in the background.
    pub(crate) preparing: bool,
    /// Nothing is prepared again before so many clusters were handed out.
    pub(crate) prepare_from: u64,
    /// The image is being closed: nothing is counted ahead any more.
    pub(crate) closing: bool,
    /// So many have clusters handed out from the lowest free ones on: see `below`.
    pub(crate) lowest_first: u32,
    /// Indexes of refcount blocks that were made since the image was opened. The
    /// file need not reach to them before something behind them is used.
    pub(crate) made_blocks: Vec<u64>,
    /// Clusters whose counts must still go down by one.
    pub(crate) deferred_decrements: Vec<Range<u64>>,
}

impl State {
    /// The first of these clusters, beyond the end of the file, that entries lead to.
    pub(crate) fn first_mapped_in(&self, clusters: &Range<u64>) -> Result<Option<Range<u64>>> {
        match &self.beyond {
            Some(beyond) => beyond.first_in(clusters),
            None => Ok(None),
        }
    }
}

/// What an attempt to allocate came to.
pub(crate) enum Attempt {
    Done(Allocation),
    Blocked(Blocker),
}

/// What has to be done before clusters can be counted or handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocker {
    /// A slice of refcounts is not in memory.
    Load(u64),
    /// This cluster has no refcount block.
    NoBlock(HostCluster),
    /// The file is being made longer, and not long enough, or somebody holds its end.
    Extending,
    /// The storage is full up to its end; there may be free clusters below.
    Scan,
    /// No cluster is free.
    Full,
}

/// Hands out host clusters.
#[derive(Debug)]
pub(crate) struct Allocator {
    pub(crate) refcounts: Refcounts,
    /// One request at a time makes new refcount blocks, or changes where the file ends.
    pub(crate) growing: async_lock::Mutex<()>,
    state: Mutex<State>,
    pub(crate) options: PreallocateAhead,
    zero_init: bool,
    /// See [`Allocator::note_pending_frees`].
    pending_frees: AtomicU64,
}

/// The end of the file, held; over even if its holder is dropped.
pub(crate) struct HeldEnd<'a> {
    allocator: &'a Allocator,
    _one: async_lock::MutexGuard<'a, ()>,
}

impl Drop for HeldEnd<'_> {
    fn drop(&mut self) {
        self.allocator.state().end_held = false;
    }
}

impl Allocator {
    /// An allocator over `refcounts`, which know the file.
    ///
    /// # Errors
    /// When the length of the file cannot be had.
    pub(crate) fn new(refcounts: Refcounts, options: PreallocateAhead) -> Result<Arc<Self>> {
        let capabilities = refcounts.file.capabilities();
        let len_bytes = refcounts.file.len_bytes()?;
        let tail = if capabilities.growable {
            refcounts.geometry.clusters_for(len_bytes)
        } else {
            refcounts.first_of_last_block()
        };
        let limit = room::limit_of(&refcounts)?;
        let state = State {
            free: FreeIndex::new(MOST_FREE_EXTENTS),
            scan: Scan::new(tail, refcounts.entries_per_slice()),
            tail,
            reserve: Reserve::default(),
            streams: Streams::default(),
            room: Room::new(limit),
            handed_out: 0,
            period: 1,
            durable_period: 0,
            refcounts_lazy: false,
            written_beyond: Vec::new(),
            length: FileLength::new(&capabilities, len_bytes, tail),
            beyond: None,
            end_held: false,
            preparing: false,
            prepare_from: 0,
            closing: false,
            lowest_first: 0,
            made_blocks: Vec::new(),
            deferred_decrements: Vec::new(),
        };
        Ok(Arc::new(Allocator {
            refcounts,
            growing: async_lock::Mutex::new(()),
            state: Mutex::new(state),
            options,
            zero_init: capabilities.growable && capabilities.has_zero_init,
            pending_frees: AtomicU64::new(0),
        }))
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Keeps the tail where it is for everybody else, and the length of the file.
    /// The holder must not allocate in the usual way meanwhile.
    pub(crate) async fn hold_end(&self) -> HeldEnd<'_> {
        let one = self.growing.lock().await;
        self.state().end_held = true;
        HeldEnd {
            allocator: self,
            _one: one,
        }
    }

    /// Whether a write to clusters that were handed out may find no room.
    pub(crate) fn may_have_holes(&self) -> bool {
        self.zero_init
    }

    pub(crate) fn cluster_bytes(&self) -> u64 {
        self.refcounts.geometry.cluster_size_bytes()
    }

    /// Allocates between one and `want` clusters that lie side by side, each with
    /// a refcount of one. `after`: where the data of the guest cluster before these
    /// ends, so that a sequential writer stays sequential in the file.
    ///
    /// # Errors
    /// When the refcounts cannot be read, or the format's limits are reached;
    /// [`ErrorKind::NoSpace`] if no cluster is free, apart from those that wait for a commit.
    pub(crate) async fn allocate_near(
        self: &Arc<Self>,
        want: u64,
        after: Option<HostOffset>,
    ) -> Result<Allocation> {
        let after = after.map(|after| after.cluster(&self.refcounts.geometry).index());
        let allocation = loop {
            match self.attempt(want.max(1), after)? {
                Attempt::Done(allocation) => break allocation,
                Attempt::Blocked(obstacle) => self.resolve(obstacle).await?,
            }
        };
        self.prepare();
        self.emit_refcounts_raised().await;
        Ok(allocation)
    }

    /// Tells the debugger that counts have gone up in memory.
    pub(crate) async fn emit_refcounts_raised(&self) {
        emit(&self.refcounts.file, Event::RefblockAlloc).await;
        emit(&self.refcounts.file, Event::RefblockLoad).await;
    }

    pub(crate) async fn resolve(self: &Arc<Self>, obstacle: Blocker) -> Result<()> {
        match obstacle {
            Blocker::Load(key) => self.refcounts.load(key).await,
            Blocker::NoBlock(cluster) => self.add_refcount_block(cluster).await,
            Blocker::Scan => self.scan_on().await,
            Blocker::Extending => {
                drop(self.growing.lock().await);
                Ok(())
            }
            Blocker::Full => Err(room::full()),
        }
    }

    fn attempt(&self, want: u64, after: Option<u64>) -> Result<Attempt> {
        let mut state = self.state();
        self.look_for_recovery(&mut state);
        let want = state.room.most_at_once(state.handed_out, want);
        if let Some(after) = after
            && let Some(attempt) = self.continue_stream(&mut state, want, after)?
        {
            return Ok(attempt);
        }
        loop {
            let have = state.reserve.clusters();
            if have == 0 || (have < want && self.continues_reserve(&state, want)) {
                let ahead = self.ahead_clusters(&state);
                let obstacle = self.raise(&mut state, want, (want - have).max(ahead))?;
                match obstacle {
                    // The reserve serves a part of the request.
                    Some(_) if have > 0 => {}
                    Some(obstacle) => return Ok(Attempt::Blocked(obstacle)),
                    None => continue,
                }
            }
            if let Some(run) = state.reserve.take(want) {
                if !state.length.allows(run.end * self.cluster_bytes()) {
                    state.reserve.give_back(run);
                    return Ok(Attempt::Blocked(Blocker::Extending));
                }
                state.streams.note_stop(run.end, 0);
                let allocation = self.hand_out(&mut state, run);
                self.count_ahead(&mut state);
                return Ok(Attempt::Done(allocation));
            }
        }
    }

    /// Whether the clusters that would be counted next follow those in the reserve.
    fn continues_reserve(&self, state: &State, want: u64) -> bool {
        let extent = self.free_extent(state, want);
        let next = extent.map_or(state.tail, |extent| extent.start);
        state.reserve.end_of_only_run() == Some(next)
    }

    fn hand_out(&self, state: &mut State, run: ReservedRun) -> Allocation {
        let end_bytes = run.end * self.cluster_bytes();
        state.handed_out += run.clusters();
        state.length.note_end(end_bytes);
        let durable = (state.refcounts_lazy || run.period <= state.durable_period)
            && state.length.is_durable_to(end_bytes);
        Allocation {
            start: HostOffset(run.start * self.cluster_bytes()),
            clusters: run.clusters(),
            reads_as_zeroes: run.reads_as_zeroes,
            refcount_durable: durable && !state.closing,
        }
    }

    /// Raises the counts of up to `count` free clusters and puts those into the
    /// reserve; it may find none in one call. `want` of them should lie side by side.
    /// Returns what is in the way.
    pub(crate) fn raise(
        &self,
        state: &mut State,
        want: u64,
        count: u64,
    ) -> Result<Option<Blocker>> {
        let extent = self.free_extent(state, want);
        if !state.scan.left.is_empty() && state.scan.is_due(extent.clone()) {
            return self.scan_slice(state);
        }
        if let Some(extent) = extent {
            return self.raise_free(state, extent, count);
        }
        match self.look_at_tail(state)? {
            Tail::Usable => self.raise_tail(state, count),
            Tail::Retry => Ok(None),
            Tail::Blocked(obstacle) => Ok(Some(obstacle)),
        }
    }

    fn raise_free(
        &self,
        state: &mut State,
        extent: Range<u64>,
        count: u64,
    ) -> Result<Option<Blocker>> {
        let want = count.min(extent.end - extent.start);
        let (clusters, slice) = match self.find(extent.start, want)? {
            Ok(found) => found,
            Err(obstacle) => return Ok(Some(obstacle)),
        };
        let end = clusters.end.min(extent.end);
        // What was passed over is in use, whatever the index says.
        state
            .free
            .remove(extent.start..slice.end.min(clusters.start));
        if clusters.start < end && !self.take(state, clusters.start..end, false)? {
            return Ok(Some(Blocker::Load(slice.key)));
        }
        state.free.remove(clusters.start..end);
        Ok(None)
    }

    fn raise_tail(&self, state: &mut State, count: u64) -> Result<Option<Blocker>> {
        if state.end_held {
            return Ok(Some(Blocker::Extending));
        }
        check_limit(HostCluster(state.tail), self.cluster_bytes())?;
        let (mut clusters, slice) = match self.find(state.tail, count)? {
            Ok(found) => found,
            Err(obstacle) => return Ok(Some(obstacle)),
        };
        if clusters.end > state.room.limit() {
            clusters.end = state.room.limit();
            if clusters.is_empty() {
                state.tail = clusters.end;
                return Ok(None);
            }
        }
        if let Some(mapped) = state.first_mapped_in(&clusters)? {
            if mapped.start <= clusters.start {
                clusters.end = clusters.end.min(mapped.end);
                return self.leave_out(state, &clusters, slice.key);
            }
            clusters.end = mapped.start;
        }
        let mut written = state.written_beyond.iter();
        let reads_as_zeroes = self.zero_init && !written.any(|written| overlap(written, &clusters));
        if !clusters.is_empty() && !self.take(state, clusters.clone(), reads_as_zeroes)? {
            return Ok(Some(Blocker::Load(slice.key)));
        }
        state.tail = clusters.end.min(slice.end);
        Ok(None)
    }

    /// The first free clusters, at most `want`, from `cluster` on in its slice;
    /// where there are none, both ends are that of the slice.
    pub(super) fn find(
        &self,
        cluster: u64,
        want: u64,
    ) -> Result<std::result::Result<(Range<u64>, RefcountSlice), Blocker>> {
        let Some(place) = self.refcounts.place(HostCluster(cluster))? else {
            return Ok(Err(Blocker::NoBlock(HostCluster(cluster))));
        };
        let Some(run) = self.refcounts.find_unused(place.key, place.index, want) else {
            return Ok(Err(Blocker::Load(place.key)));
        };
        let first = cluster - place.index as u64;
        let slice = RefcountSlice {
            key: place.key,
            end: first + self.refcounts.entries_per_slice(),
        };
        Ok(Ok((
            first + run.start as u64..first + run.end as u64,
            slice,
        )))
    }

    /// Raises the counts of free clusters of one slice; `false`: it has left memory.
    fn take(&self, state: &mut State, clusters: Range<u64>, reads_as_zeroes: bool) -> Result<bool> {
        if !self.count_once(&clusters)? {
            return Ok(false);
        }
        state.reserve.push(ReservedRun {
            start: clusters.start,
            end: clusters.end,
            period: state.period,
            reads_as_zeroes,
        });
        Ok(true)
    }

    /// Raises the counts of free clusters of one slice to one; `false`: it has left memory.
    pub(super) fn count_once(&self, clusters: &Range<u64>) -> Result<bool> {
        self.refuse_metadata(clusters)?;
        let Some(place) = self.refcounts.place(HostCluster(clusters.start))? else {
            return Ok(false);
        };
        let count = (clusters.end - clusters.start) as usize;
        let run = place.index..place.index + count;
        Ok(self.refcounts.take(place.key, run))
    }

    /// Refuses clusters that hold metadata: a refcount of zero there is damage, not
    /// room, whatever writes are checked against.
    pub(crate) fn refuse_metadata(&self, clusters: &Range<u64>) -> Result<()> {
        match self.refcounts.overlap.find(clusters, |_| true) {
            None => Ok(()),
            Some(kind) => Err(refusal(kind)),
        }
    }

    /// Notes that everything below `end_bytes` may have been written.
    pub(crate) fn note_end(&self, end_bytes: u64) {
        self.state().length.note_end(end_bytes);
    }

    /// Lowers the counts that could not be read when it was due.
    ///
    /// # Errors
    /// If they cannot be read now.
    pub(crate) async fn apply_deferred_decrements(&self) -> Result<()> {
        let deferred = std::mem::take(&mut self.state().deferred_decrements);
        self.decrement(deferred).await?;
        match self.state().deferred_decrements.is_empty() {
            true => Ok(()),
            false => Err(Error::from_errno("refcount", 5)),
        }
    }

    /// Begins the part of a commit that makes counts durable: call it right before
    /// the dirty refcount blocks are copied for writing.
    pub(crate) fn begin_commit(&self) -> RefcountMark {
        let mut state = self.state();
        let mark = RefcountMark {
            period: state.period,
            length: state.length.mark(),
        };
        state.period += 1;
        mark
    }

    /// Tells that what was copied after `mark` has been written and a barrier passed.
    pub(crate) fn barrier_passed(&self, mark: RefcountMark) {
        let mut state = self.state();
        state.durable_period = state.durable_period.max(mark.period);
        state.length.note_durable(mark.length);
    }

    /// Tells whether the header says that counts on disk are not to be trusted.
    pub(crate) fn set_refcounts_lazy(&self, postponed: bool) {
        self.state().refcounts_lazy = postponed;
    }
}

/// A slice of a refcount block.
#[derive(Debug, Clone, Copy)]
pub(super) struct RefcountSlice {
    pub(super) key: u64,
    /// The cluster after its last one.
    pub(super) end: u64,
}

pub(crate) fn check_limit(cluster: HostCluster, cluster_bytes: u64) -> Result<()> {
    if cluster.index() < HOST_OFFSET_END / cluster_bytes {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::NoSpace,
        "allocate",
        "the image has reached the format's largest size",
    )
    .with_errno(27))
}

#[cfg(test)]
mod tests;
