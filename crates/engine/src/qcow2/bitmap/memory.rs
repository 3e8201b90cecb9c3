//! [`MemoryBitmap`]: a dirty bitmap that ends with the program.
//!
//! Invariant: its granularity never changes, so what it called dirty stays so through any
//! number of merges and sizes.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::api::DirtyBitmap;
use super::dirty::Dirty;

/// A dirty bitmap of any device, kept in memory only.
/// [`Recorder`](crate::nodes::Recorder) has it tell what is written.
#[derive(Debug)]
pub struct MemoryBitmap {
    name: String,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    dirty: Dirty,
    records: bool,
}

impl MemoryBitmap {
    /// A bitmap that calls nothing dirty, and records writes if `records`.
    /// `granularity_bytes` is rounded up to a power of two.
    pub fn new(name: &str, size_bytes: u64, granularity_bytes: u64, records: bool) -> Arc<Self> {
        let bytes = granularity_bytes.max(1).next_power_of_two();
        let dirty = Dirty::new(bytes.trailing_zeros() as u8, size_bytes);
        Arc::new(MemoryBitmap {
            name: name.to_owned(),
            state: Mutex::new(State { dirty, records }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes that a bit stands for.
    pub fn granularity_bytes(&self) -> u64 {
        1 << self.lock().dirty.granularity_bits()
    }

    /// Whether it records writes.
    pub fn records(&self) -> bool {
        self.lock().records
    }

    /// Has it record writes from now on, or no more.
    pub fn set_records(&self, records: bool) {
        self.lock().records = records;
    }

    /// What it calls dirty now.
    pub fn read(&self) -> DirtyBitmap {
        let dirty = self.lock().dirty.clone();
        DirtyBitmap { dirty }
    }

    /// Makes it call some ranges of bytes dirty, and nothing else.
    pub fn set(&self, ranges: &[Range<u64>]) {
        let mut state = self.lock();
        let mut dirty = Dirty::new(state.dirty.granularity_bits(), state.dirty.size_bytes());
        for range in ranges {
            dirty.mark(range);
        }
        state.dirty = dirty;
    }

    /// Adds what another bitmap calls dirty; what lies beyond the end is left out.
    pub fn merge(&self, source: &DirtyBitmap) {
        self.lock().dirty.merge(&source.dirty);
    }

    /// Whether the byte at `offset_bytes` is dirty, and how many bytes from there on, at
    /// most `len_bytes`, are alike. What lies beyond the end of the device is clean.
    pub fn status(&self, offset_bytes: u64, len_bytes: u64) -> (bool, u64) {
        self.lock().dirty.status(offset_bytes, len_bytes)
    }

    /// Notes a write, if it records writes. The device may have become longer with it.
    pub(crate) fn note(&self, range: &Range<u64>, size_bytes: u64) {
        let mut state = self.lock();
        if size_bytes > state.dirty.size_bytes() {
            state.dirty.set_size(size_bytes);
        }
        if state.records {
            state.dirty.mark(range);
        }
    }

    /// Notes that the device has another size; what comes into being is clean.
    pub(crate) fn set_size(&self, size_bytes: u64) {
        self.lock().dirty.set_size(size_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(bitmap: &MemoryBitmap) -> Vec<Range<u64>> {
        bitmap.read().ranges().collect()
    }

    #[test]
    fn what_is_written_while_it_records_is_dirty() {
        let bitmap = MemoryBitmap::new("b", 1 << 20, 65536, true);
        bitmap.note(&(1..2), 1 << 20);
        bitmap.set_records(false);
        bitmap.note(&(900_000..900_001), 1 << 20);
        assert_eq!(ranges(&bitmap), [0..65536]);
        // A device that has grown by a write.
        bitmap.set_records(true);
        bitmap.note(&(1 << 20..(1 << 20) + 1), (1 << 20) + 512);
        assert_eq!(ranges(&bitmap), [0..65536, 1 << 20..(1 << 20) + 512]);
        bitmap.set_size(65536);
        bitmap.set_size(1 << 20);
        assert_eq!(ranges(&bitmap), [0..65536]);
    }

    #[test]
    fn merging_does_not_reach_beyond_the_end() {
        let bitmap = MemoryBitmap::new("b", 65536, 512, true);
        let long = DirtyBitmap::all_dirty(1 << 20, 4096);
        bitmap.merge(&long);
        assert_eq!(bitmap.read().dirty_bytes(), 65536);
        assert_eq!(bitmap.status(65536, 9), (false, 9));
    }
}
