//! [`DirtyMap`]: which parts of a device have been written since somebody looked.

use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use event_listener::Event;
use parking_lot::{Mutex, MutexGuard};
use vellum_io::bits::Bits;

use super::mirror::Mirror;

/// The finest grain where nobody asks for another one, in bytes.
pub(super) const MIN_GRAIN_BYTES: u64 = 64 << 10;
/// Larger devices get a coarser grain: bits take 2 MiB at most.
const MAX_GRAINS: u64 = 1 << 24;

/// The grain of a device of this size, `grain_bytes` if it is not too large for that.
pub(super) fn grain_bytes_for(grain_bytes: u64, size_bytes: u64) -> u64 {
    let mut grain_bytes = grain_bytes.max(512);
    while size_bytes.div_ceil(grain_bytes) > MAX_GRAINS {
        grain_bytes *= 2;
    }
    grain_bytes
}

/// What was written, in grains.
#[derive(Debug)]
pub struct DirtyMap {
    size_bytes: u64,
    grain_bytes: u64,
    bits: Mutex<Bits>,
    /// Something has become dirty.
    marked: Event,
    /// Who copies what is dirty.
    follower: OnceLock<Weak<Mirror>>,
}

/// What a map called dirty when it was taken.
#[derive(Debug)]
pub struct DirtyRanges {
    size_bytes: u64,
    grain_bytes: u64,
    bits: Bits,
}

impl DirtyMap {
    /// A map for a device of this size, that calls nothing dirty.
    pub fn new(size_bytes: u64) -> Arc<Self> {
        Self::in_grains_of(MIN_GRAIN_BYTES, size_bytes)
    }

    /// A map whose grains have so many bytes, a power of two; or more, on a device so large
    /// that it would take too much memory.
    pub fn in_grains_of(grain_bytes: u64, size_bytes: u64) -> Arc<Self> {
        let grain_bytes = grain_bytes_for(grain_bytes, size_bytes);
        Arc::new(DirtyMap {
            size_bytes,
            grain_bytes,
            bits: Mutex::new(Bits::none(size_bytes.div_ceil(grain_bytes))),
            marked: Event::new(),
            follower: OnceLock::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Bits> {
        self.bits.lock()
    }

    /// Calls a range dirty; what lies beyond the end is left out.
    pub fn mark(&self, offset_bytes: u64, len_bytes: u64) {
        let end = offset_bytes.saturating_add(len_bytes).min(self.size_bytes);
        if offset_bytes >= end {
            return;
        }
        let mut bits = self.lock();
        for grain in offset_bytes / self.grain_bytes..end.div_ceil(self.grain_bytes) {
            bits.insert(grain);
        }
        drop(bits);
        self.marked.notify(usize::MAX);
    }

    /// Names who copies what is dirty; the first one stays.
    pub(super) fn follow(&self, mirror: &Arc<Mirror>) {
        let _ = self.follower.set(Arc::downgrade(mirror));
    }

    /// Who has writers wait for its copies, if somebody does.
    pub(super) fn follower(&self) -> Option<Arc<Mirror>> {
        let mirror = self.follower.get()?.upgrade()?;
        mirror.keeps_pace().then_some(mirror)
    }

    /// The first dirty range from `from` on, in whole grains: one, or so many bytes at most.
    pub(super) fn next_from(&self, from: u64, limit_bytes: u64) -> Option<Range<u64>> {
        let bits = self.lock();
        let grains = self.size_bytes.div_ceil(self.grain_bytes);
        // The last grain may be longer than what is left of the device.
        let from = (from < self.size_bytes).then_some(from / self.grain_bytes)?;
        let start = bits.find(from..grains, true)?;
        let limit = grains.min(start + (limit_bytes / self.grain_bytes).max(1));
        let end = bits.run_end(start, limit) * self.grain_bytes;
        Some(start * self.grain_bytes..end.min(self.size_bytes))
    }

    /// Calls a range, of whole grains, clean.
    pub(super) fn clean(&self, range: &Range<u64>) {
        let mut bits = self.lock();
        for grain in range.start / self.grain_bytes..range.end.div_ceil(self.grain_bytes) {
            bits.remove(grain);
        }
    }

    /// Calls clean what lies in a range with all of its grain.
    pub(super) fn clean_within(&self, range: &Range<u64>) {
        let end = match range.end >= self.size_bytes {
            true => self.size_bytes.next_multiple_of(self.grain_bytes),
            false => range.end / self.grain_bytes * self.grain_bytes,
        };
        let start = range.start.next_multiple_of(self.grain_bytes);
        if start < end {
            self.clean(&(start..end));
        }
    }

    /// How many bytes are dirty, in whole grains.
    pub fn dirty_bytes(&self) -> u64 {
        self.lock().count() * self.grain_bytes
    }

    /// Takes what is dirty; nothing is then.
    pub fn take(&self) -> DirtyRanges {
        let none = Bits::none(self.size_bytes.div_ceil(self.grain_bytes));
        DirtyRanges {
            size_bytes: self.size_bytes,
            grain_bytes: self.grain_bytes,
            bits: std::mem::replace(&mut *self.lock(), none),
        }
    }

    /// Waits until something is dirty.
    pub async fn wait(&self) {
        loop {
            let marked = self.marked.listen();
            if self.dirty_bytes() > 0 {
                return;
            }
            marked.await;
        }
    }
}

impl DirtyRanges {
    /// Whether an offset is dirty, and where that ends.
    pub fn at(&self, offset_bytes: u64) -> (bool, u64) {
        let grain = offset_bytes / self.grain_bytes;
        let grains = self.size_bytes.div_ceil(self.grain_bytes);
        let end = self.bits.run_end(grain, grains.max(grain + 1));
        let end_bytes = end.saturating_mul(self.grain_bytes);
        (self.bits.contains(grain), end_bytes)
    }

    /// What is dirty, in bytes and in order, none touching the next.
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        let mut at = 0;
        while at < self.size_bytes {
            let (dirty, end) = self.at(at);
            if dirty {
                ranges.push(at..end.min(self.size_bytes));
            }
            at = end;
        }
        ranges
    }

    /// Whether nothing is dirty.
    pub fn is_empty(&self) -> bool {
        self.bits.count() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRAIN: u64 = MIN_GRAIN_BYTES;

    #[test]
    fn ranges_are_told_in_runs_of_grains() {
        let map = DirtyMap::new(1000 * GRAIN + 1);
        map.mark(5 * GRAIN + 7, 1);
        map.mark(64 * GRAIN, 128 * GRAIN);
        map.mark(1000 * GRAIN, 100);
        map.mark(u64::MAX, 1);
        assert_eq!(map.dirty_bytes(), 130 * GRAIN);
        let taken = map.take();
        assert_eq!(map.dirty_bytes(), 0);
        assert!(map.take().is_empty() && !taken.is_empty());
        let mut at = 0;
        let mut runs = Vec::new();
        while at < 1000 * GRAIN + 1 {
            let (dirty, end) = taken.at(at);
            runs.push((dirty, end / GRAIN));
            at = end;
        }
        let expected = [
            (false, 5),
            (true, 6),
            (false, 64),
            (true, 192),
            (false, 1000),
            (true, 1001),
        ];
        assert_eq!(runs, expected);
    }

    #[test]
    fn large_devices_take_bounded_memory() {
        let map = DirtyMap::new(1 << 50);
        assert!(map.lock().end() <= 8 * (2 << 20));
        map.mark((1 << 50) - 1, 1);
        assert!(map.take().at((1 << 50) - 1).0);
    }
}
