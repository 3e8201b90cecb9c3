//! Decompressed clusters in memory, within a budget of bytes.
//!
//! A random read needs a part of a cluster once: decompressing the rest, and keeping
//! it, would be waste. So a cluster is cached only from its second miss on, or when
//! several requests want it at the same time, which then wait for one decompression.
//! A scan of large requests never gets in here, and what gets in has to be used
//! again to stay (a second chance for each turn of the clock's hand).
//!
//! Joined loads are part of the cache because a load learns here whether others wait, and only then makes the
//! whole cluster.
//!
//! Invariants:
//! - The cached clusters, with all that is needed to find them, take no more than the
//!   budget. They are few and each stands for many microseconds of work, so one
//!   short lock is enough for all lanes.
//! - Before host clusters may be used again, [`ClusterCache::forget`] drops what was
//!   read from them. No request still reads them then (see `order`), so nothing old
//!   comes in afterwards.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use event_listener::{Event, EventListener};
use parking_lot::{Mutex, MutexGuard};
use vellum_format::compressed::CompressedDescriptor;
use vellum_format::geometry::Geometry;
use vellum_io::Buffer;
use vellum_io::buffer::ALIGNMENT_BYTES;

use crate::qcow2::cache_budget::CacheShare;

/// What a cached cluster costs beside its bytes: its place in the clock, in the index
/// and in the list of misses, rounded up.
const ENTRY_BYTES: u64 = 256;
/// Misses remembered for each cluster that there is room for. Many more would find
/// chance repetitions in random reads, and decompress whole clusters for them.
const MISSES_PER_CLUSTER: usize = 2;

/// Where compressed data lies: offset in bytes and sectors.
type Key = (u64, u32);

fn key_of(descriptor: &CompressedDescriptor) -> Key {
    let offset = descriptor.host_offset.bytes();
    (offset, descriptor.additional_sectors)
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct ClusterCache {
    most_clusters: usize,
    /// How far before a host cluster data that reaches into it may begin.
    reach_bytes: u64,
    entry_bytes: usize,
    share: Arc<CacheShare>,
    state: Mutex<State>,
    /// Whoever holds the state writes these, for those that do not.
    clusters: AtomicUsize,
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    clock: Vec<CachedCluster>,
    hand: usize,
    /// Places in the clock.
    index: BTreeMap<Key, usize>,
    loading: Vec<Loading>,
    /// Recent misses, each at a place that its key says; empty until the first one.
    missed: Vec<Option<Key>>,
}

#[derive(Debug)]
struct CachedCluster {
    key: Key,
    cluster: Arc<Buffer>,
    /// Read since the hand came by.
    used: bool,
    /// Not read since the last [`ClusterCache::drop_unused`].
    idle: bool,
}

#[derive(Debug)]
struct Loading {
    key: Key,
    /// Somebody waits.
    joined: bool,
    /// Its host clusters are being given away.
    stale: bool,
    ended: Arc<Event>,
}

/// What a lookup finds.
pub(crate) enum Lookup<'a> {
    /// The decompressed cluster.
    Hit(Arc<Buffer>),
    /// Another request is at it: look again after this.
    Loading(EventListener),
    /// Nothing: decompress it.
    Miss(Loader<'a>),
}

/// The one request that decompresses a cluster; others wait until it is dropped.
pub(crate) struct Loader<'a> {
    cache: &'a ClusterCache,
    key: Key,
    /// The cluster was missed before, not long ago.
    again: bool,
}

impl ClusterCache {
    /// A cache of at most `budget_bytes` bytes for a device of `size_bytes`; too few
    /// for one cluster, and nothing is ever cached.
    pub(crate) fn new(
        geometry: &Geometry,
        size_bytes: u64,
        budget_bytes: u64,
        share: &Arc<CacheShare>,
    ) -> Self {
        let cluster_bytes = geometry.cluster_size_bytes();
        let entry_bytes = cluster_bytes.max(ALIGNMENT_BYTES as u64) + ENTRY_BYTES;
        let most = (budget_bytes / entry_bytes).min(geometry.clusters_for(size_bytes));
        ClusterCache {
            most_clusters: most as usize,
            // As many sectors as a descriptor can count.
            reach_bytes: 2 * cluster_bytes,
            entry_bytes: entry_bytes as usize,
            share: share.clone(),
            state: Mutex::default(),
            clusters: AtomicUsize::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Finds a cluster, or says who is to decompress it.
    pub(crate) fn lookup(&self, descriptor: &CompressedDescriptor) -> Lookup<'_> {
        let key = key_of(descriptor);
        // Made only for the one who gets it: its end is what the others wait for.
        let loader = |again| Loader {
            cache: self,
            key,
            again,
        };
        if self.most_clusters == 0 {
            return Lookup::Miss(loader(false));
        }
        let mut state = self.lock();
        if let Some(cluster) = state.find(&key) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Lookup::Hit(cluster);
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        if let Some(loading) = state.loading.iter_mut().find(|other| other.key == key) {
            loading.joined = true;
            return Lookup::Loading(loading.ended.listen());
        }
        state.loading.push(Loading {
            key,
            joined: false,
            stale: false,
            ended: Arc::default(),
        });
        Lookup::Miss(loader(state.note_miss(key, self.most_clusters)))
    }

    /// Drops what was read from a range of host bytes.
    pub(crate) fn forget(&self, host_bytes: Range<u64>) {
        if self.most_clusters == 0 {
            return;
        }
        let start = host_bytes.start.saturating_sub(self.reach_bytes);
        let keys = (start, 0)..(host_bytes.end, 0);
        let mut state = self.lock();
        let before = state.clock.len();
        while let Some((_, &place)) = state.index.range(keys.clone()).next() {
            state.remove(place);
        }
        for loading in &mut state.loading {
            loading.stale |= keys.contains(&loading.key);
        }
        self.account(before, &state);
    }

    fn account(&self, clusters_before: usize, state: &State) {
        let bytes = |clusters: usize| clusters * self.entry_bytes;
        self.share
            .account(bytes(clusters_before), bytes(state.clock.len()));
        self.clusters.store(state.clock.len(), Ordering::Relaxed);
    }

    /// As [`ClusterCache::used_bytes`], without the lock.
    pub(crate) fn counted_bytes(&self) -> usize {
        self.clusters.load(Ordering::Relaxed) * self.entry_bytes
    }

    /// How often a cluster was there, and how often not.
    pub(crate) fn looks(&self) -> (u64, u64) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (count(&self.hits), count(&self.misses))
    }

    /// Bytes that the cached clusters take.
    pub(crate) fn used_bytes(&self) -> usize {
        self.lock().clock.len() * self.entry_bytes
    }

    /// Drops clusters until so many bytes are free.
    pub(crate) fn evict(&self, wanted_bytes: usize) {
        let mut state = self.lock();
        let before = state.clock.len();
        let goal = before.saturating_sub(wanted_bytes.div_ceil(self.entry_bytes));
        state.make_room(goal);
        self.account(before, &state);
    }

    /// Drops clusters that were not read since the last call.
    pub(crate) fn drop_unused(&self) {
        let mut state = self.lock();
        let before = state.clock.len();
        let mut place = 0;
        while place < state.clock.len() {
            if std::mem::replace(&mut state.clock[place].idle, true) {
                state.remove(place);
            } else {
                place += 1;
            }
        }
        self.account(before, &state);
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        let state = self.lock();
        assert_eq!(state.clock.len(), state.index.len());
        state.clock.len()
    }
}

impl State {
    fn find(&mut self, key: &Key) -> Option<Arc<Buffer>> {
        let cached = &mut self.clock[*self.index.get(key)?];
        (cached.used, cached.idle) = (true, false);
        Some(cached.cluster.clone())
    }

    /// Notes a miss; returns whether the last one at its place was the same.
    fn note_miss(&mut self, key: Key, most_clusters: usize) -> bool {
        if self.missed.is_empty() {
            let places = most_clusters.saturating_mul(MISSES_PER_CLUSTER);
            self.missed.resize(places, None);
        }
        // Fibonacci hashing; offsets have their entropy in the low bits too.
        let hash = u128::from(key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let place = ((hash * self.missed.len() as u128) >> 64) as usize;
        self.missed[place].replace(key) == Some(key)
    }

    fn insert(&mut self, key: Key, cluster: Arc<Buffer>, most_clusters: usize) {
        if self.index.contains_key(&key) {
            return;
        }
        self.make_room(most_clusters.saturating_sub(1));
        self.index.insert(key, self.clock.len());
        self.clock.push(CachedCluster {
            key,
            cluster,
            used: false,
            idle: false,
        });
    }

    /// Drops clusters until there are so many at most.
    fn make_room(&mut self, most_clusters: usize) {
        while self.clock.len() > most_clusters {
            self.hand %= self.clock.len();
            if std::mem::take(&mut self.clock[self.hand].used) {
                self.hand += 1;
            } else {
                self.remove(self.hand);
            }
        }
    }

    fn remove(&mut self, place: usize) {
        let gone = self.clock.swap_remove(place);
        self.index.remove(&gone.key);
        if let Some(moved) = self.clock.get(place) {
            self.index.insert(moved.key, place);
        }
    }
}

impl Loader<'_> {
    /// Whether the whole cluster is worth decompressing: it will be cached.
    pub(crate) fn wants_whole(&self) -> bool {
        self.again || self.with_loading(|loading| loading.joined)
    }

    /// Keeps the cluster for the next request.
    pub(crate) fn keep(self, cluster: Buffer) {
        if self.with_loading(|loading| !loading.stale) {
            self.cache.share.make_room(self.cache.entry_bytes);
            let mut state = self.cache.lock();
            let before = state.clock.len();
            state.insert(self.key, Arc::new(cluster), self.cache.most_clusters);
            self.cache.account(before, &state);
        }
    }

    fn with_loading(&self, test: impl FnOnce(&Loading) -> bool) -> bool {
        let state = self.cache.lock();
        let mut all = state.loading.iter();
        all.find(|loading| loading.key == self.key)
            .is_some_and(test)
    }
}

impl Drop for Loader<'_> {
    fn drop(&mut self) {
        let mut state = self.cache.lock();
        let place = state.loading.iter().position(|other| other.key == self.key);
        let ended = place.map(|place| state.loading.swap_remove(place).ended);
        drop(state);
        if let Some(ended) = ended {
            ended.notify(usize::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use vellum_format::types::HostOffset;

    const CLUSTER: u64 = 65536;

    fn cache(clusters: u64) -> ClusterCache {
        let geometry = Geometry {
            cluster_bits: 16,
            extended_l2: false,
            refcount_order: 4,
            version: 3,
            external_data: false,
        };
        ClusterCache::new(
            &geometry,
            1 << 40,
            clusters * (CLUSTER + ENTRY_BYTES),
            &Arc::default(),
        )
    }

    fn at(host_bytes: u64) -> CompressedDescriptor {
        CompressedDescriptor {
            host_offset: HostOffset(host_bytes),
            additional_sectors: 9,
        }
    }

    /// Reads as a request does; returns whether the cluster was cached.
    fn read(cache: &ClusterCache, descriptor: &CompressedDescriptor) -> bool {
        match cache.lookup(descriptor) {
            Lookup::Hit(cluster) => {
                assert_eq!(cluster[0], descriptor.host_offset.bytes() as u8);
                true
            }
            Lookup::Loading(_) => panic!("nobody else is reading"),
            Lookup::Miss(loader) => {
                if loader.wants_whole() {
                    let mut cluster = Buffer::zeroed(CLUSTER as usize);
                    cluster[0] = descriptor.host_offset.bytes() as u8;
                    loader.keep(cluster);
                }
                false
            }
        }
    }

    #[test]
    fn the_second_miss_keeps_a_cluster_and_the_budget_holds() {
        let cache = cache(10);
        let hot = at(77);
        assert!(!read(&cache, &hot));
        assert!(!read(&cache, &hot));
        assert!(read(&cache, &hot));
        for round in 0..3 {
            for n in 0..1000 {
                read(&cache, &at(100_000 + n));
                read(&cache, &at(100_000 + n));
                assert!(read(&cache, &hot), "round {round}: used ones stay");
                assert!(cache.len() <= 10);
            }
        }
        assert_eq!(cache.len(), 10);
    }

    #[test]
    fn a_scan_keeps_nothing() {
        let cache = cache(10);
        for n in 0..1000 {
            read(&cache, &at(n * 30_000));
        }
        assert_eq!(cache.len(), 0);
    }

    #[test]
    fn less_than_a_cluster_is_no_room() {
        for clusters in [0, 1] {
            let cache = cache(clusters);
            for _ in 0..3 {
                read(&cache, &at(512));
            }
            assert_eq!(cache.len(), clusters as usize);
        }
    }

    #[test]
    fn requests_for_one_cluster_join() {
        let cache = cache(10);
        let Lookup::Miss(first) = cache.lookup(&at(1000)) else {
            panic!("nobody was here");
        };
        assert!(!first.wants_whole());
        let Lookup::Loading(mut second) = cache.lookup(&at(1000)) else {
            panic!("the first is at it");
        };
        assert!(first.wants_whole());
        assert!((&mut second).now_or_never().is_none());
        first.keep(Buffer::zeroed(CLUSTER as usize));
        assert!(second.now_or_never().is_some());
        assert!(matches!(cache.lookup(&at(1000)), Lookup::Hit(_)));
    }

    #[test]
    fn one_who_gives_up_lets_the_next_try() {
        let cache = cache(10);
        let first = cache.lookup(&at(1000));
        let Lookup::Loading(second) = cache.lookup(&at(1000)) else {
            panic!("the first is at it");
        };
        drop(first);
        assert!(second.now_or_never().is_some());
        let Lookup::Miss(next) = cache.lookup(&at(1000)) else {
            panic!("nobody is at it");
        };
        assert!(next.wants_whole());
    }

    #[test]
    fn host_clusters_are_forgotten_with_what_reaches_into_them() {
        let cache = cache(10);
        let (before, reaching, inside, after) = (
            at(7 * CLUSTER),
            at(10 * CLUSTER - 100),
            at(10 * CLUSTER + 700),
            at(11 * CLUSTER),
        );
        for descriptor in [&before, &reaching, &inside, &after] {
            read(&cache, descriptor);
            read(&cache, descriptor);
        }
        cache.forget(10 * CLUSTER..11 * CLUSTER);
        assert!(read(&cache, &before) && read(&cache, &after));
        assert!(!read(&cache, &reaching) && !read(&cache, &inside));
    }

    #[test]
    fn what_is_being_read_from_forgotten_clusters_is_not_kept() {
        let cache = cache(10);
        let Lookup::Miss(loader) = cache.lookup(&at(CLUSTER)) else {
            panic!("nobody was here");
        };
        cache.forget(CLUSTER..2 * CLUSTER);
        loader.keep(Buffer::zeroed(CLUSTER as usize));
        assert_eq!(cache.len(), 0);
    }

    #[test]
    fn cleaning_drops_what_was_not_read_since_the_last_time() {
        let cache = cache(10);
        for n in [1, 2, 3] {
            read(&cache, &at(n));
            read(&cache, &at(n));
        }
        cache.drop_unused();
        assert_eq!(cache.len(), 3);
        assert!(read(&cache, &at(2)));
        cache.drop_unused();
        assert_eq!(cache.len(), 1);
        assert!(read(&cache, &at(2)));
    }
}
