//! The guest ranges that a bitmap calls dirty.

use std::ops::Range;

use super::bits::Bits;

/// Bytes of a device, each dirty or not, in steps of a granularity.
#[derive(Debug, Clone)]
pub(crate) struct Dirty {
    granularity_bits: u8,
    size_bytes: u64,
    bits: Bits,
}

impl Dirty {
    /// A clean device.
    pub(crate) fn new(granularity_bits: u8, size_bytes: u64) -> Self {
        let bits = Bits::new(bits_for(size_bytes, granularity_bits));
        Dirty {
            granularity_bits,
            size_bytes,
            bits,
        }
    }

    pub(crate) fn granularity_bits(&self) -> u8 {
        self.granularity_bits
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub(crate) fn bits(&self) -> &Bits {
        &self.bits
    }

    pub(crate) fn bits_mut(&mut self) -> &mut Bits {
        &mut self.bits
    }

    /// The bits that a range of bytes touches.
    pub(crate) fn bits_of(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start >> self.granularity_bits;
        match range.is_empty() {
            true => start..start,
            false => start..bits_for(range.end, self.granularity_bits),
        }
    }

    pub(crate) fn mark(&mut self, range: &Range<u64>) {
        self.bits.set(self.bits_of(range));
    }

    /// Whether every byte of a range is dirty.
    pub(crate) fn is_marked(&self, range: &Range<u64>) -> bool {
        self.bits.all(self.bits_of(range))
    }

    /// The first run of dirty bytes that ends after `from`.
    pub(crate) fn next_run(&self, from: u64) -> Option<Range<u64>> {
        if from >= self.size_bytes {
            // Also where the last bit stands for more than is left of the device.
            return None;
        }
        let run = self.bits.next_run(from >> self.granularity_bits)?;
        let byte = |bit: u64| (bit << self.granularity_bits).min(self.size_bytes);
        Some(byte(run.start).max(from)..byte(run.end))
    }

    /// Whether the byte at `from` is dirty, and how many of `len_bytes` are alike.
    pub(crate) fn status(&self, from: u64, len_bytes: u64) -> (bool, u64) {
        let end = from.saturating_add(len_bytes);
        match self.next_run(from) {
            Some(run) if run.start <= from => (true, run.end.min(end) - from),
            Some(run) => (false, run.start.min(end) - from),
            None => (false, len_bytes),
        }
    }

    /// Makes dirty what is dirty in `other`.
    pub(crate) fn merge(&mut self, other: &Dirty) {
        let mut from = 0;
        while let Some(run) = other.next_run(from) {
            self.mark(&run);
            from = run.end;
        }
    }

    pub(crate) fn dirty_bytes(&self) -> u64 {
        let cut_off = self.size_bytes % (1 << self.granularity_bits);
        let whole = self.bits.count() << self.granularity_bits;
        match cut_off != 0 && self.bits.all(self.bits.len() - 1..self.bits.len()) {
            true => whole - (1 << self.granularity_bits) + cut_off,
            false => whole,
        }
    }

    /// Changes the device's size; what comes into being is clean.
    pub(crate) fn set_size(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
        self.bits
            .set_len(bits_for(size_bytes, self.granularity_bits));
    }
}

fn bits_for(bytes: u64, granularity_bits: u8) -> u64 {
    bytes.div_ceil(1 << granularity_bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_widened_to_the_granularity() {
        let mut dirty = Dirty::new(12, 10_000);
        dirty.mark(&(4095..4097));
        assert_eq!(dirty.next_run(0), Some(0..8192));
        assert_eq!(dirty.next_run(5000), Some(5000..8192));
        assert!(!dirty.is_marked(&(0..8193)));
        assert_eq!(dirty.status(5000, 9000), (true, 3192));
        assert_eq!(dirty.status(5000, 100), (true, 100));
        assert_eq!(dirty.status(8192, 9000), (false, 9000));
        dirty.mark(&(9999..10_000));
        assert_eq!(dirty.next_run(0), Some(0..10_000));
        assert_eq!(dirty.dirty_bytes(), 10_000);
        assert_eq!(dirty.next_run(10_000), None);

        let mut dirty = Dirty::new(12, 10_000);
        dirty.mark(&(3..3));
        assert_eq!((dirty.next_run(0), dirty.dirty_bytes()), (None, 0));
    }

    #[test]
    fn merging_keeps_what_either_calls_dirty() {
        let mut coarse = Dirty::new(16, 1 << 20);
        let mut fine = Dirty::new(9, 1 << 20);
        fine.mark(&(70_000..70_001));
        coarse.merge(&fine);
        assert_eq!(coarse.next_run(0), Some(65536..131_072));
        fine.merge(&coarse);
        assert_eq!(fine.next_run(0), Some(65536..131_072));
    }
}
