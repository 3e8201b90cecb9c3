//! [`CompressedReads`]: what the reads of an image's compressed clusters share.

use super::cache::ClusterCache;
use crate::qcow2::cache_budget::CacheShare;
use async_lock::{Semaphore, SemaphoreGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use vellum_format::geometry::Geometry;
use vellum_io::lane::compute_threads;

/// Compressed bytes that one I/O for several clusters reads at most.
pub(super) const MAX_BATCH_BYTES: u64 = 128 << 10;
/// Compressed bytes that all reads of an image together hold, roughly.
const MAX_HELD_BYTES: u64 = 4 << 20;
/// Most reads at a time: as many as keep a fast disk busy.
const MAX_READS: usize = 32;
/// Work below this is done sooner than another thread has begun with it.
const WORTH_A_THREAD_NS: u64 = 25_000;
/// The first guess of what a KiB of decompressed bytes costs.
const FIRST_NS_PER_KIB: u32 = 1000;

/// What the reads of an image's compressed clusters share.
#[derive(Debug)]
pub(crate) struct CompressedReads {
    pub(crate) cache: ClusterCache,
    pub(super) reads: Semaphore,
    /// Clusters being read or waiting for it.
    pub(super) wanted: AtomicUsize,
    /// What a KiB of decompressed bytes has cost lately.
    pub(super) ns_per_kib: AtomicU32,
}

impl CompressedReads {
    /// For an image of `size_bytes`; `budget_bytes` are for decompressed clusters.
    pub(crate) fn new(
        geometry: &Geometry,
        size_bytes: u64,
        budget_bytes: u64,
        share: &Arc<CacheShare>,
    ) -> Self {
        let read_bytes = geometry.cluster_size_bytes().max(MAX_BATCH_BYTES);
        let reads = (MAX_HELD_BYTES / read_bytes) as usize;
        CompressedReads {
            cache: ClusterCache::new(geometry, size_bytes, budget_bytes, share),
            reads: Semaphore::new(reads.clamp(compute_threads().min(MAX_READS), MAX_READS)),
            wanted: AtomicUsize::new(0),
            ns_per_kib: AtomicU32::new(FIRST_NS_PER_KIB),
        }
    }

    /// Waits until another read of `clusters` clusters may begin.
    pub(super) async fn begin(&self, clusters: usize) -> Reading<'_> {
        let want = CompressedRead::new(&self.wanted, clusters);
        Reading {
            _turn: self.reads.acquire().await,
            _want: want,
        }
    }

    /// Whether decompressing `len_bytes` bytes should be left to other threads.
    pub(super) fn needs_thread(&self, len_bytes: usize) -> bool {
        let ns_per_kib = u64::from(self.ns_per_kib.load(Ordering::Relaxed));
        let ns = (len_bytes as u64 * ns_per_kib) >> 10;
        self.wanted.load(Ordering::Relaxed) > 1 && ns > WORTH_A_THREAD_NS
    }

    /// Notes what a piece of work has cost. A thread that lost its core, or found its
    /// caches cold, must not make the work look dear: the estimate falls quickly and
    /// rises slowly.
    pub(super) fn note_cost(&self, len_bytes: usize, ns: u64) {
        let sample = (ns << 10) / len_bytes.max(1) as u64;
        let old = u64::from(self.ns_per_kib.load(Ordering::Relaxed));
        let new = if sample < old {
            (old + sample) / 2
        } else {
            old + (sample.min(2 * old + 16) - old) / 32
        };
        self.ns_per_kib.store(new as u32, Ordering::Relaxed);
    }
}

/// Clusters that somebody wants, while it lives.
pub(super) struct CompressedRead<'a> {
    wanted: &'a AtomicUsize,
    clusters: usize,
}

impl<'a> CompressedRead<'a> {
    pub(super) fn new(wanted: &'a AtomicUsize, clusters: usize) -> Self {
        wanted.fetch_add(clusters, Ordering::Relaxed);
        CompressedRead { wanted, clusters }
    }
}

impl Drop for CompressedRead<'_> {
    fn drop(&mut self) {
        self.wanted.fetch_sub(self.clusters, Ordering::Relaxed);
    }
}

/// The right to hold memory for a read.
pub(super) struct Reading<'a> {
    _turn: SemaphoreGuard<'a>,
    _want: CompressedRead<'a>,
}
