//! [`CacheBudget`]: one bound for the caches of many images.
//!
//! Each image's caches have limits of their own; together they also stay within the budget.
//! Whoever needs room beyond it has the image that takes most of some it looks at give up
//! clean tables. So images that are in use tend to equal parts, and those that need less
//! keep what they have.
//!
//! Invariants:
//! - What counts is the memory that caches really take, as they account for it themselves.
//! - Beyond the budget there is only what cannot be evicted: dirty tables, which are written
//!   earlier for that, and the last table of each cache.
//! - No lock of a cache is held while another image's caches are asked for room.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// So many images are looked at to find the one that gives room.
const LOOKED_AT: usize = 16;
/// What is evicted at once, at least: finding who gives room is dearer than a table.
const EVICTED_BYTES: usize = 64 << 10;
/// So often is room sought for one table before it goes beyond the budget.
const ATTEMPTS: usize = 4;
/// This part is left to what finds tables, which grows by steps.
const SPARE_PART: usize = 32;
/// An image may always have so much that it can work at all.
const MIN_PART_BYTES: usize = 64 << 10;

/// A bound for the caches of all images that are opened with it
/// ([`OpenOptions::cache_budget`](crate::qcow2::OpenOptions)): metadata, decompressed
/// clusters, and the mapping of backing chains. What small writes wait in is bounded by an
/// equal part for each image.
#[derive(Debug)]
pub struct CacheBudget {
    total_bytes: usize,
    used_bytes: AtomicUsize,
    /// How many images there are, to be asked without the lock.
    count: AtomicUsize,
    images: Mutex<Images>,
}

/// Whose caches count.
pub(crate) trait CacheOwner: std::fmt::Debug + Send + Sync {
    /// What its caches take.
    fn share(&self) -> &CacheShare;

    /// Drops what can be read again from the caches, until so many bytes are free.
    fn evict(&self, wanted_bytes: usize);
}

#[derive(Debug, Default)]
struct Images {
    all: Vec<Weak<dyn CacheOwner>>,
    /// Where the next look begins.
    next: usize,
}

impl CacheBudget {
    /// A budget of so many bytes.
    pub fn new(total_bytes: u64) -> Arc<Self> {
        Arc::new(CacheBudget {
            total_bytes: usize::try_from(total_bytes).unwrap_or(usize::MAX),
            used_bytes: AtomicUsize::new(0),
            count: AtomicUsize::new(0),
            images: Mutex::default(),
        })
    }

    /// Bytes that all caches may take together.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes as u64
    }

    /// Bytes that all caches take now.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed) as u64
    }

    /// Whether so many bytes more are too many.
    fn is_beyond(&self, need_bytes: usize) -> bool {
        let used_bytes = self.used_bytes.load(Ordering::Relaxed);
        let most_bytes = self.total_bytes - self.total_bytes / SPARE_PART;
        used_bytes.saturating_add(need_bytes) > most_bytes
    }

    /// Of some images the one whose caches take most.
    fn largest_of_some(&self) -> Option<Arc<dyn CacheOwner>> {
        let mut images = self.images.lock();
        images.all.retain(|image| image.strong_count() > 0);
        let count = images.all.len();
        self.count.store(count, Ordering::Relaxed);
        let first = images.next % count.max(1);
        images.next = first + LOOKED_AT;
        let some = (0..count.min(LOOKED_AT)).map(|n| (first + n) % count);
        let some: Vec<_> = some.filter_map(|n| images.all[n].upgrade()).collect();
        drop(images);
        some.into_iter()
            .max_by_key(|image| image.share().used_bytes())
    }
}

/// What the caches of one image take of a budget, if there is one.
#[derive(Debug, Default)]
pub(crate) struct CacheShare {
    budget: Option<Arc<CacheBudget>>,
    used_bytes: AtomicUsize,
}

impl CacheShare {
    /// A part of a budget; of none it has no bound.
    pub(crate) fn new(budget: Option<Arc<CacheBudget>>) -> Arc<Self> {
        Arc::new(CacheShare {
            budget,
            used_bytes: AtomicUsize::new(0),
        })
    }

    /// Lets others have this image make room.
    pub(crate) fn join(&self, image: Weak<dyn CacheOwner>) {
        if let Some(budget) = &self.budget {
            let mut images = budget.images.lock();
            images.all.retain(|image| image.strong_count() > 0);
            images.all.push(image);
            budget.count.store(images.all.len(), Ordering::Relaxed);
        }
    }

    /// Counts what a cache takes now instead of what it took before.
    pub(crate) fn account(&self, before_bytes: usize, now_bytes: usize) {
        let Some(budget) = &self.budget else {
            return;
        };
        // Wrapping: the difference may be negative.
        let change = now_bytes.wrapping_sub(before_bytes);
        self.used_bytes.fetch_add(change, Ordering::Relaxed);
        budget.used_bytes.fetch_add(change, Ordering::Relaxed);
    }

    /// Has some image give room, this one included, unless so many bytes are within the
    /// budget. No lock of any cache may be held.
    pub(crate) fn make_room(&self, need_bytes: usize) {
        let Some(budget) = &self.budget else {
            return;
        };
        for _ in 0..ATTEMPTS {
            if !budget.is_beyond(need_bytes) {
                return;
            }
            if let Some(image) = budget.largest_of_some() {
                image.evict(need_bytes.max(EVICTED_BYTES));
            }
        }
    }

    /// What this image may take of a limit of its own where all take the same.
    pub(crate) fn part_of(&self, limit_bytes: usize) -> usize {
        let Some(budget) = &self.budget else {
            return limit_bytes;
        };
        let equal_bytes = budget.total_bytes / budget.count.load(Ordering::Relaxed).max(1);
        limit_bytes.min(equal_bytes.max(MIN_PART_BYTES))
    }

    fn used_bytes(&self) -> usize {
        self.used_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for CacheShare {
    fn drop(&mut self) {
        let used_bytes = *self.used_bytes.get_mut();
        self.account(used_bytes, 0);
    }
}
