//! The write buffer: guest bytes of partial writes to clusters that need copy-on-write,
//! kept in memory until their cluster is *written back*, which is to say written whole to a
//! new place and linked.
//!
//! A small write to such a cluster is complete as soon as its bytes are here, as in
//! the volatile cache of a disk. What the following writes overwrite then never has
//! to be copied, and many writes of one cluster cost one fill. This module holds the
//! bytes and says what is to be written back next; `writeback` does it.
//!
//! Invariants:
//! - Pieces are added by requests that hold their guest range shared, and removed by
//!   a writeback that holds the whole cluster exclusive. A cluster that has pieces has no
//!   place of its own for those bytes, so no request writes them in place.
//! - A read looks here first and at the mapping afterwards: what it does not find
//!   here any more, the mapping leads to.
//! - Memory stays within the budget, but that a write finds room in an empty cache
//!   whatever the budget is. What a write will take is known exactly before it is
//!   taken. One that finds no room waits for writebacks, or, once a writeback has failed,
//!   goes past the cache and meets the failure itself.

mod pieces;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use event_listener::{Event, EventListener};
use parking_lot::{Mutex, MutexGuard};
use vellum_io::{Buffer, Error, Result};

use super::room_below::RoomBelow;
use crate::qcow2::cache_budget::CacheShare;
use pieces::{Pieces, memory_for};

/// Ends of recent writes that are remembered to recognise sequential ones.
const STREAMS: usize = 16;

/// A cluster that has pieces.
#[derive(Default)]
struct Cluster {
    pieces: Pieces,
    /// Waits for being written back, or is being written back.
    queued: bool,
    /// Got bytes since the last sweep.
    touched: bool,
    /// Its key among the arrivals.
    arrival: u64,
}

/// What is to become of a write that was put into the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Buffered {
    /// More bytes of the cluster may follow.
    Waiting,
    /// The cluster is queued for being written back.
    Queued,
}

/// Where a write lies.
pub(crate) struct Place {
    /// Guest offset of the cluster's first byte.
    pub(crate) cluster_start: u64,
    /// Offset of the first byte in the cluster.
    pub(crate) inside: u64,
    /// Length of the cluster, shorter at the end of the device.
    pub(crate) cluster_len_bytes: u64,
}

#[derive(Default)]
struct State {
    /// By guest offset of the first byte.
    clusters: BTreeMap<u64, Cluster>,
    /// All clusters in order of arrival.
    arrivals: BTreeMap<u64, u64>,
    /// Those of them that are not queued.
    waiting: BTreeMap<u64, u64>,
    next_arrival: u64,
    queue: VecDeque<u64>,
    memory_bytes: usize,
    recent_ends: VecDeque<u64>,
    in_writeback: usize,
    sweeping: bool,
    /// A write came since the last sweep.
    has_arrivals: bool,
    failure: Option<Error>,
}

impl State {
    /// Whether there is no room for a write.
    fn is_full(&self, place: &Place, len_bytes: usize, budget_bytes: usize) -> bool {
        let growth = match self.clusters.get(&place.cluster_start) {
            Some(cluster) => cluster.pieces.growth(place.inside, len_bytes as u64),
            None => memory_for(len_bytes),
        };
        growth > 0 && self.memory_bytes + growth > budget_bytes && !self.clusters.is_empty()
    }

    fn is_sequential(&mut self, start: u64, end: u64) -> bool {
        let follows = self.recent_ends.iter().position(|&recent| recent == start);
        if let Some(index) = follows {
            self.recent_ends.remove(index);
        } else if self.recent_ends.len() == STREAMS {
            self.recent_ends.pop_front();
        }
        self.recent_ends.push_back(end);
        follows.is_some()
    }

    /// The cluster at `cluster_start`, new if there is none.
    fn cluster(&mut self, cluster_start: u64) -> (&mut Cluster, bool) {
        let (mut is_new, arrival) = (false, self.next_arrival);
        let cluster = self.clusters.entry(cluster_start).or_insert_with(|| {
            is_new = true;
            Cluster {
                arrival,
                ..Cluster::default()
            }
        });
        if is_new {
            self.arrivals.insert(arrival, cluster_start);
            self.waiting.insert(arrival, cluster_start);
            self.next_arrival += 1;
        }
        (cluster, is_new)
    }

    fn enqueue(&mut self, cluster_start: u64) {
        if let Some(cluster) = self.clusters.get_mut(&cluster_start)
            && !cluster.queued
        {
            cluster.queued = true;
            self.waiting.remove(&cluster.arrival);
            self.queue.push_back(cluster_start);
        }
    }

    /// Queues the oldest waiting clusters until `wanted` bytes will come free.
    fn enqueue_oldest(&mut self, wanted: usize) {
        let mut found = 0;
        while found < wanted
            && let Some((_, &oldest)) = self.waiting.first_key_value()
        {
            let oldest_cluster = self.clusters.get(&oldest);
            found += oldest_cluster.map_or(0, |cluster| cluster.pieces.memory_bytes());
            self.enqueue(oldest);
        }
    }
}

/// The write buffer of an image; see the module's head.
pub(crate) struct WriteBuffer {
    state: Mutex<State>,
    /// Knows how many clusters are here, to be asked without the lock.
    pub(crate) room_below: RoomBelow,
    /// Something was written back, or could not be.
    changed: Event,
    budget_bytes: AtomicUsize,
    /// See [`WriteBuffer::defer`].
    is_deferring: AtomicBool,
    share: Arc<CacheShare>,
}

impl WriteBuffer {
    /// A cache that holds at most `budget_bytes` bytes; 0: none.
    pub(crate) fn new(budget_bytes: usize) -> Self {
        WriteBuffer {
            state: Mutex::default(),
            room_below: RoomBelow::new(0),
            changed: Event::new(),
            budget_bytes: AtomicUsize::new(budget_bytes),
            is_deferring: AtomicBool::new(false),
            share: Arc::default(),
        }
    }

    /// Has it take no more than an equal part of what the caches of many images take together.
    pub(crate) fn sharing(mut self, share: &Arc<CacheShare>) -> Self {
        self.share = share.clone();
        self
    }

    /// Has each cluster that waits owe the host so much room.
    pub(crate) fn owing(mut self, bytes_each: u64) -> Self {
        self.room_below = RoomBelow::new(bytes_each);
        self
    }

    /// From now on a cluster waits for more bytes until half of the budget is used or no writes
    /// come for a moment, wherever they lie: flushes do not wait for what is here, so its copies
    /// need not compete with the guest's requests. The budget grows to `budget_bytes`, if there is
    /// one.
    pub(crate) fn defer(&self, budget_bytes: usize) {
        if self.budget_bytes() > 0 {
            self.budget_bytes.fetch_max(budget_bytes, Ordering::AcqRel);
        }
        self.is_deferring.store(true, Ordering::Release);
    }

    fn budget_bytes(&self) -> usize {
        self.share
            .part_of(self.budget_bytes.load(Ordering::Acquire))
    }

    /// Whether clusters wait, as [`WriteBuffer::defer`] says.
    pub(crate) fn is_deferring(&self) -> bool {
        self.is_deferring.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Whether nothing is here.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.room_below.clusters() == 0
    }

    /// Whether writes are put here at all.
    pub(crate) fn has_budget(&self) -> bool {
        self.budget_bytes() > 0
    }

    /// Whether writes should be put here at the moment.
    pub(crate) fn takes_writes(&self) -> bool {
        self.has_budget() && !self.room_below.is_short() && self.lock().failure.is_none()
    }

    /// Whether something could not be written back when that was last tried.
    pub(crate) fn has_failed(&self) -> bool {
        self.lock().failure.is_some()
    }

    /// Puts bytes here; `None` if there is no room, and clusters are queued to make
    /// some. The caller holds the guest range shared.
    pub(crate) fn put(&self, place: &Place, bytes: &[u8]) -> Option<Buffered> {
        let mut state = self.lock();
        let budget_bytes = self.budget_bytes();
        if state.is_full(place, bytes.len(), budget_bytes) {
            state.enqueue_oldest(budget_bytes / 4);
            return None;
        }
        state.has_arrivals = true;
        let start = place.cluster_start + place.inside;
        let sequential = state.is_sequential(start, start + bytes.len() as u64);
        let (cluster, is_new) = state.cluster(place.cluster_start);
        if is_new {
            self.room_below.owe_one();
        }
        cluster.touched = true;
        let pieces = &mut cluster.pieces;
        let before = pieces.memory_bytes();
        pieces.put(place.inside, bytes);
        let grown = pieces.memory_bytes() - before;
        let is_whole = pieces.covers(0..place.cluster_len_bytes);
        let is_expecting = sequential || place.inside == 0 || self.is_deferring();
        state.memory_bytes += grown;
        if is_whole || !is_expecting {
            state.enqueue(place.cluster_start);
            return Some(Buffered::Queued);
        }
        if self.is_deferring() && state.memory_bytes > budget_bytes / 2 {
            // Faster than it fills, but no more than that: the guest's own requests wait for room
            // one by one at worst.
            state.enqueue_oldest(2 * grown);
            return Some(Buffered::Queued);
        }
        Some(Buffered::Waiting)
    }

    /// The next clusters to write back, `batch` at most, unless `most` are being written back
    /// already; to be followed by [`WriteBuffer::writeback_ended`].
    pub(crate) fn next_for_writeback(&self, most: usize, batch: usize) -> Vec<u64> {
        let mut state = self.lock();
        if state.in_writeback >= most {
            return Vec::new();
        }
        let count = batch.min(state.queue.len());
        state.in_writeback += count;
        state.queue.drain(..count).collect()
    }

    /// A writeback begun by [`WriteBuffer::next_for_writeback`] has ended.
    pub(crate) fn writeback_ended(&self, clusters: &[u64], result: Result<()>) {
        let mut state = self.lock();
        state.in_writeback -= clusters.len();
        if let Err(error) = result {
            for cluster_start in clusters {
                let Some(cluster) = state.clusters.get_mut(cluster_start) else {
                    continue;
                };
                cluster.queued = false;
                let arrival = cluster.arrival;
                state.waiting.insert(arrival, *cluster_start);
                state.failure = Some(error.clone());
            }
        }
        drop(state);
        self.changed.notify(usize::MAX);
    }

    /// Queues everything; what is to be written back then has arrived before the result.
    /// An earlier failure is forgotten: those clusters get another chance.
    pub(crate) fn enqueue_all(&self) -> u64 {
        let mut state = self.lock();
        state.failure = None;
        state.enqueue_oldest(usize::MAX);
        state.next_arrival
    }

    /// Whether everything that arrived before `until` is written back, or why it cannot be.
    pub(crate) fn is_written_back(&self, until: u64) -> Option<Result<()>> {
        let state = self.lock();
        let oldest = state.arrivals.first_key_value();
        match &state.failure {
            _ if oldest.is_none_or(|(arrival, _)| *arrival >= until) => Some(Ok(())),
            Some(error) => Some(Err(error.clone())),
            None => None,
        }
    }

    /// Whether a write of `len_bytes` would have to wait.
    pub(crate) fn is_full(&self, place: &Place, len_bytes: u64) -> bool {
        let state = self.lock();
        state.failure.is_none() && state.is_full(place, len_bytes as usize, self.budget_bytes())
    }

    /// Tells when something changes after this call.
    pub(crate) fn listen(&self) -> EventListener {
        self.changed.listen()
    }

    /// Whether the caller is to sweep from now on; if so, until
    /// [`WriteBuffer::sweep`] says that nothing is left, or [`WriteBuffer::end_sweeping`].
    pub(crate) fn begin_sweeping(&self) -> bool {
        !std::mem::replace(&mut self.lock().sweeping, true)
    }

    /// Nobody sweeps any more.
    pub(crate) fn end_sweeping(&self) {
        self.lock().sweeping = false;
    }

    /// Guest offsets of the clusters here that `range` touches.
    pub(crate) fn clusters_in(&self, range: Range<u64>, cluster_bytes: u64) -> Vec<u64> {
        let first = range.start.saturating_sub(cluster_bytes - 1);
        let state = self.lock();
        state
            .clusters
            .range(first..range.end)
            .map(|(start, _)| *start)
            .collect()
    }

    /// Queues every cluster that got no bytes since the last call, none of them while writes come
    /// and [are deferred](WriteBuffer::defer); says whether others are left, else sweeping has ended.
    pub(crate) fn sweep(&self) -> bool {
        let mut state = self.lock();
        if std::mem::take(&mut state.has_arrivals) && self.is_deferring() {
            return true;
        }
        let mut idle = Vec::new();
        for (start, cluster) in &mut state.clusters {
            if !std::mem::take(&mut cluster.touched) && !cluster.queued {
                idle.push(*start);
            }
        }
        for start in idle {
            state.enqueue(start);
        }
        state.sweeping = state.clusters.values().any(|cluster| !cluster.queued);
        state.sweeping
    }

    /// The first piece of a cluster that ends after `from`, as offsets in the cluster.
    pub(crate) fn piece_after(&self, cluster_start: u64, from: u64) -> Option<Range<u64>> {
        let state = self.lock();
        let pieces = &state.clusters.get(&cluster_start)?.pieces;
        let piece = pieces.iter().find(|piece| piece.end() > from)?;
        Some(piece.start..piece.end())
    }

    /// Whether all pieces of the cluster lie inside a guest range.
    pub(crate) fn is_inside(&self, cluster_start: u64, range: &Range<u64>) -> bool {
        let state = self.lock();
        state.clusters.get(&cluster_start).is_none_or(|cluster| {
            cluster.pieces.iter().all(|piece| {
                range.start <= cluster_start + piece.start
                    && cluster_start + piece.end() <= range.end
            })
        })
    }

    /// The first piece that ends after a guest offset, in guest bytes.
    pub(crate) fn piece_from(&self, guest: u64, cluster_bytes: u64) -> Option<Range<u64>> {
        let first = guest.saturating_sub(cluster_bytes - 1);
        let state = self.lock();
        let pieces = state.clusters.range(first..).flat_map(|(start, cluster)| {
            let pieces = cluster.pieces.iter();
            pieces.map(move |piece| start + piece.start..start + piece.end())
        });
        pieces.into_iter().find(|piece| piece.end > guest)
    }

    /// Whether pieces cover a range of the cluster without a gap.
    pub(crate) fn covers(&self, cluster_start: u64, range: Range<u64>) -> bool {
        let state = self.lock();
        state
            .clusters
            .get(&cluster_start)
            .is_some_and(|cluster| cluster.pieces.covers(range))
    }

    /// Copies what is here of the guest range that begins at `guest` over `bytes`;
    /// returns how many bytes that were.
    pub(crate) fn copy_over(&self, guest: u64, bytes: &mut [u8], cluster_bytes: u64) -> u64 {
        let range = guest..guest + bytes.len() as u64;
        let first = guest.saturating_sub(cluster_bytes - 1);
        let state = self.lock();
        let mut copied = 0;
        for (cluster_start, cluster) in state.clusters.range(first..range.end) {
            let parts = cluster.pieces.iter();
            for (start, part) in parts.filter_map(|piece| piece.part_in(*cluster_start, &range)) {
                bytes[(start - guest) as usize..][..part.len()].copy_from_slice(part);
                copied += part.len() as u64;
            }
        }
        copied
    }

    /// Copies of the pieces that a guest range touches, with their guest offsets.
    pub(crate) fn pieces_in(&self, range: Range<u64>, cluster_bytes: u64) -> Vec<(u64, Buffer)> {
        let first = range.start.saturating_sub(cluster_bytes - 1);
        let state = self.lock();
        let mut found = Vec::new();
        for (cluster_start, cluster) in state.clusters.range(first..range.end) {
            let parts = cluster.pieces.iter();
            let parts = parts.filter_map(|piece| piece.part_in(*cluster_start, &range));
            found.extend(parts.map(|(start, part)| (start, Buffer::copy_of(part))));
        }
        found
    }

    /// Forgets the pieces inside a range of the cluster; none may reach out of it.
    pub(crate) fn remove(&self, cluster_start: u64, range: Range<u64>) {
        let mut state = self.lock();
        let Some(cluster) = state.clusters.get_mut(&cluster_start) else {
            return;
        };
        let before = cluster.pieces.memory_bytes();
        cluster.pieces.remove(&range);
        let freed = before - cluster.pieces.memory_bytes();
        if cluster.pieces.is_empty() {
            let arrival = cluster.arrival;
            state.arrivals.remove(&arrival);
            state.waiting.remove(&arrival);
            state.clusters.remove(&cluster_start);
            self.room_below.paid_one();
        }
        if state.clusters.is_empty() {
            state.failure = None;
        }
        state.memory_bytes -= freed;
        drop(state);
        self.changed.notify(usize::MAX);
    }
}

impl std::fmt::Debug for WriteBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WriteBuffer({} clusters)", self.room_below.clusters())
    }
}

#[cfg(test)]
mod tests {
    use super::pieces::UNIT_BYTES;
    use super::*;
    use proptest::prelude::*;

    const CLUSTER: u64 = 64;

    fn place(guest: u64) -> Place {
        Place {
            cluster_start: guest / CLUSTER * CLUSTER,
            inside: guest % CLUSTER,
            cluster_len_bytes: CLUSTER,
        }
    }

    #[test]
    fn sequential_bytes_wait_for_the_whole_cluster() {
        let cache = WriteBuffer::new(1 << 20);
        for at in (0..48).step_by(16) {
            assert_eq!(cache.put(&place(at), &[1; 16]), Some(Buffered::Waiting));
        }
        assert_eq!(cache.next_for_writeback(8, 1), []);
        assert_eq!(cache.put(&place(48), &[1; 16]), Some(Buffered::Queued));
        assert_eq!(cache.next_for_writeback(8, 1), [0]);
        assert!(cache.covers(0, 0..CLUSTER));
    }

    #[test]
    fn bytes_in_the_middle_do_not_wait() {
        let cache = WriteBuffer::new(1 << 20);
        assert_eq!(cache.put(&place(16), &[1; 16]), Some(Buffered::Queued));
        assert_eq!(cache.put(&place(100), &[1; 8]), Some(Buffered::Queued));
        assert_eq!(cache.next_for_writeback(1, 1), [0]);
        assert_eq!(cache.next_for_writeback(1, 1), [], "one at a time");
        cache.remove(0, 0..CLUSTER);
        cache.writeback_ended(&[0], Ok(()));
        assert_eq!(cache.next_for_writeback(1, 1), [64]);
    }

    #[test]
    fn deferred_bytes_wait_until_half_of_the_budget_is_used() {
        let cache = WriteBuffer::new(UNIT_BYTES);
        cache.defer(8 * UNIT_BYTES);
        for cluster in 0..4 {
            let kept = cache.put(&place(cluster * CLUSTER + 16), &[1; 8]);
            assert_eq!(kept, Some(Buffered::Waiting), "{cluster}");
        }
        assert!(cache.sweep(), "others are left");
        assert_eq!(cache.next_for_writeback(8, 8), [], "writes came");
        let fifth = cache.put(&place(4 * CLUSTER + 16), &[1; 8]);
        assert_eq!(fifth, Some(Buffered::Queued));
        assert_eq!(cache.next_for_writeback(8, 8), [0, 64], "the oldest");
        let whole = cache.put(&place(9 * CLUSTER), &[1; CLUSTER as usize]);
        assert_eq!(whole, Some(Buffered::Queued));
        cache.sweep();
        cache.sweep();
        assert!(!cache.sweep(), "no writes came for a while");
        let rest = cache.next_for_writeback(16, 16);
        assert!(rest.contains(&(4 * CLUSTER)), "{rest:?}");
    }

    #[test]
    fn a_buffer_that_is_off_stays_off() {
        let cache = WriteBuffer::new(0);
        cache.defer(8 * UNIT_BYTES);
        assert!(!cache.takes_writes());
    }

    #[test]
    fn a_full_cache_queues_the_oldest() {
        let cache = WriteBuffer::new(4 * UNIT_BYTES);
        for cluster in 0..4 {
            let kept = cache.put(&place(cluster * CLUSTER), &[1; 16]);
            assert_eq!(kept, Some(Buffered::Waiting));
        }
        assert!(cache.is_full(&place(4 * CLUSTER), 16));
        assert!(
            !cache.is_full(&place(16), 16),
            "there is memory for more of a piece"
        );
        assert_eq!(cache.put(&place(4 * CLUSTER), &[1; 16]), None);
        assert_eq!(cache.next_for_writeback(8, 1), [0]);
        assert_eq!(cache.next_for_writeback(8, 1), [], "the others are younger");
    }

    #[test]
    fn a_failed_drain_stops_caching_until_one_works() {
        let cache = WriteBuffer::new(1 << 20);
        assert_eq!(cache.put(&place(16), &[1; 16]), Some(Buffered::Queued));
        assert_eq!(cache.next_for_writeback(1, 1), [0]);
        let full = Error::new(vellum_io::ErrorKind::NoSpace, "write", "full");
        cache.writeback_ended(&[0], Err(full));
        assert!(!cache.takes_writes());
        assert_eq!(
            cache.clusters_in(0..u64::MAX, CLUSTER),
            [0],
            "nothing is lost"
        );
        let until = cache.enqueue_all();
        assert!(cache.takes_writes(), "another chance");
        assert!(cache.is_written_back(until).is_none());
        assert_eq!(cache.next_for_writeback(1, 1), [0]);
        cache.remove(0, 0..CLUSTER);
        cache.writeback_ended(&[0], Ok(()));
        assert!(cache.is_written_back(until).unwrap().is_ok());
    }

    #[test]
    fn a_failure_ends_with_the_bytes_it_is_about() {
        let cache = WriteBuffer::new(1 << 20);
        let full = || Error::new(vellum_io::ErrorKind::NoSpace, "write", "full");
        assert_eq!(cache.put(&place(16), &[1; 16]), Some(Buffered::Queued));
        assert_eq!(cache.next_for_writeback(1, 1), [0]);
        cache.writeback_ended(&[0], Err(full()));
        assert!(!cache.takes_writes());
        cache.remove(0, 0..u64::MAX);
        assert!(cache.takes_writes());
        assert_eq!(cache.put(&place(16), &[1; 16]), Some(Buffered::Queued));
        assert_eq!(cache.next_for_writeback(1, 1), [0]);
        cache.remove(0, 0..u64::MAX);
        cache.writeback_ended(&[0], Err(full()));
        assert!(cache.takes_writes());
    }

    #[test]
    fn idle_clusters_are_swept() {
        let cache = WriteBuffer::new(1 << 20);
        assert_eq!(cache.put(&place(0), &[1; 16]), Some(Buffered::Waiting));
        assert!(cache.begin_sweeping());
        assert!(!cache.begin_sweeping());
        assert!(cache.sweep(), "touched since");
        assert!(!cache.sweep());
        assert_eq!(cache.next_for_writeback(1, 1), [0]);
        assert!(cache.begin_sweeping());
    }

    proptest! {
        #[test]
        fn never_takes_more_than_its_budget(
            puts in prop::collection::vec((0u64..(1 << 18), 1u64..40_000), 1..60),
            budget_units in 1usize..40,
        ) {
            const LARGE: u64 = 1 << 16;
            let cache = WriteBuffer::new(budget_units * UNIT_BYTES);
            for (guest, len) in puts {
                let inside = guest % LARGE;
                let at = Place {
                    cluster_start: guest - inside,
                    inside,
                    cluster_len_bytes: LARGE,
                };
                let bytes = vec![1; len.min(LARGE - inside) as usize];
                let (was_empty, before) = (cache.is_empty(), cache.lock().memory_bytes);
                let full = cache.is_full(&at, bytes.len() as u64);
                let kept = cache.put(&at, &bytes);
                prop_assert_eq!(kept.is_none(), full);
                let state = cache.lock();
                let memory: usize = state.clusters.values().map(|cluster| cluster.pieces.memory_bytes()).sum();
                prop_assert_eq!(memory, state.memory_bytes);
                // The first write may be larger than the budget.
                let most = cache.budget_bytes().max(before);
                prop_assert!(was_empty || memory <= most);
                drop(state);
                if kept.is_none() {
                    cache.remove(at.cluster_start, 0..LARGE);
                }
            }
        }

        #[test]
        fn holds_the_last_bytes_of_every_place(
            puts in prop::collection::vec((0u64..CLUSTER, 1u64..CLUSTER, any::<u8>()), 1..40),
            (from, to) in (0u64..CLUSTER, 0u64..CLUSTER),
        ) {
            let cache = WriteBuffer::new(1 << 20);
            let mut model = [None; CLUSTER as usize];
            for (start, len, byte) in puts {
                let end = (start + len).min(CLUSTER);
                let bytes = vec![byte; (end - start) as usize];
                cache.put(&place(start), &bytes).unwrap();
                model[start as usize..end as usize].fill(Some(byte));
            }
            let mut seen = [0; CLUSTER as usize];
            let copied = cache.copy_over(0, &mut seen, CLUSTER);
            prop_assert_eq!(copied, model.iter().flatten().count() as u64);
            for (at, byte) in model.iter().enumerate() {
                prop_assert_eq!(seen[at], byte.unwrap_or(0));
            }
            let (from, to) = (from.min(to), from.max(to));
            let whole = model[from as usize..to as usize].iter().all(Option::is_some);
            prop_assert_eq!(cache.covers(0, from..to), whole);
            let pieces = cache.pieces_in(from..to, CLUSTER);
            let in_pieces: u64 = pieces.iter().map(|(_, piece)| piece.len() as u64).sum();
            let wanted = model[from as usize..to as usize].iter().flatten().count();
            prop_assert_eq!(in_pieces, wanted as u64);
        }
    }
}
