//! [`DirtyMap`]: which parts of a device have been written since somebody looked.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_listener::Event;

/// The finest grain, in bytes.
const MIN_GRAIN_BYTES: u64 = 64 << 10;
/// Larger devices get a coarser grain: a map takes 2 MiB at most.
const MAX_GRAINS: u64 = 1 << 24;

/// Bits for the grains of a device.
#[derive(Debug, Clone)]
struct Bits {
    words: Vec<u64>,
    set: u64,
}

/// What was written, in grains.
#[derive(Debug)]
pub struct DirtyMap {
    size_bytes: u64,
    grain_bytes: u64,
    bits: Mutex<Bits>,
    /// Something has become dirty.
    marked: Event,
}

/// What a map called dirty when it was taken.
#[derive(Debug)]
pub struct DirtyRanges {
    size_bytes: u64,
    grain_bytes: u64,
    bits: Bits,
}

impl Bits {
    fn none(grains: u64) -> Bits {
        Bits {
            words: vec![0; grains.div_ceil(64) as usize],
            set: 0,
        }
    }

    fn set(&mut self, grain: u64) {
        let (word, bit) = ((grain / 64) as usize, 1 << (grain % 64));
        if let Some(word) = self.words.get_mut(word)
            && *word & bit == 0
        {
            *word |= bit;
            self.set += 1;
        }
    }

    fn is_set(&self, grain: u64) -> bool {
        let word = self.words.get((grain / 64) as usize);
        word.is_some_and(|word| word >> (grain % 64) & 1 == 1)
    }

    /// Where the grains that are like this one end.
    fn run_end(&self, grain: u64, end: u64) -> u64 {
        let dirty = self.is_set(grain);
        let same = if dirty { u64::MAX } else { 0 };
        let mut at = grain + 1;
        while at < end {
            if at.is_multiple_of(64) && self.words.get((at / 64) as usize) == Some(&same) {
                at += 64;
            } else if self.is_set(at) == dirty {
                at += 1;
            } else {
                break;
            }
        }
        at.min(end)
    }
}

impl DirtyMap {
    /// A map for a device of this size, that calls nothing dirty.
    pub fn new(size_bytes: u64) -> Arc<Self> {
        let mut grain_bytes = MIN_GRAIN_BYTES;
        while size_bytes.div_ceil(grain_bytes) > MAX_GRAINS {
            grain_bytes *= 2;
        }
        Arc::new(DirtyMap {
            size_bytes,
            grain_bytes,
            bits: Mutex::new(Bits::none(size_bytes.div_ceil(grain_bytes))),
            marked: Event::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Bits> {
        self.bits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a range dirty; what lies beyond the end is left out.
    pub fn mark(&self, offset_bytes: u64, len_bytes: u64) {
        let end = offset_bytes.saturating_add(len_bytes).min(self.size_bytes);
        if offset_bytes >= end {
            return;
        }
        let mut bits = self.lock();
        for grain in offset_bytes / self.grain_bytes..end.div_ceil(self.grain_bytes) {
            bits.set(grain);
        }
        drop(bits);
        self.marked.notify(usize::MAX);
    }

    /// How many bytes are dirty, in whole grains.
    pub fn dirty_bytes(&self) -> u64 {
        self.lock().set * self.grain_bytes
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
        (self.bits.is_set(grain), end_bytes)
    }

    /// Whether nothing is dirty.
    pub fn is_empty(&self) -> bool {
        self.bits.set == 0
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
        assert!(map.lock().words.len() * 8 <= 2 << 20);
        map.mark((1 << 50) - 1, 1);
        assert!(map.take().at((1 << 50) - 1).0);
    }
}
