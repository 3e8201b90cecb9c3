//! Sparse bytes of one simulated file, cheap to copy.
//!
//! A copy shares all pages with its original until one of them is written, so a
//! power cut costs as much as it changes.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// The smallest unit that a power cut keeps or loses.
pub const SECTOR_BYTES: u64 = 512;

const PAGE_BYTES: u64 = 4096;

type Page = [u8; PAGE_BYTES as usize];

/// The bytes of a file: pages that were written, and a fill byte for the others.
#[derive(Clone)]
pub struct SparseBytes {
    pages: BTreeMap<u64, Arc<Page>>,
    len_bytes: u64,
    fill: u8,
}

impl SparseBytes {
    /// An empty file.
    pub fn new() -> Self {
        SparseBytes {
            pages: BTreeMap::new(),
            len_bytes: 0,
            fill: 0,
        }
    }

    /// A device of `len_bytes` bytes that hold `fill` until they are written.
    pub fn device(len_bytes: u64, fill: u8) -> Self {
        SparseBytes {
            pages: BTreeMap::new(),
            len_bytes,
            fill,
        }
    }

    /// The length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Sets the length; added bytes read as zeroes.
    pub fn set_len(&mut self, len_bytes: u64) {
        if len_bytes < self.len_bytes {
            self.zero(len_bytes, self.len_bytes - len_bytes);
            self.pages.split_off(&len_bytes.div_ceil(PAGE_BYTES));
        }
        self.len_bytes = len_bytes;
    }

    /// The numbers of the pages of 4 KiB that were written, in order.
    pub fn allocated_pages(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.keys().copied()
    }

    /// What other bytes have another one of, as good as always.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.len_bytes, self.fill).hash(&mut hasher);
        self.pages.hash(&mut hasher);
        hasher.finish()
    }

    /// Reads into `out`; bytes beyond the end are zero.
    pub fn read(&self, offset_bytes: u64, out: &mut [u8]) {
        let end = offset_bytes + out.len() as u64;
        let within = self.len_bytes.clamp(offset_bytes, end) - offset_bytes;
        let (inside, beyond) = out.split_at_mut(within as usize);
        inside.fill(self.fill);
        beyond.fill(0);
        let stop = offset_bytes + within;
        if within == 0 {
            return;
        }
        for (&index, page) in self
            .pages
            .range(offset_bytes / PAGE_BYTES..stop.div_ceil(PAGE_BYTES))
        {
            let start = index * PAGE_BYTES;
            let (from, to) = (start.max(offset_bytes), (start + PAGE_BYTES).min(stop));
            inside[(from - offset_bytes) as usize..(to - offset_bytes) as usize]
                .copy_from_slice(&page[(from - start) as usize..(to - start) as usize]);
        }
    }

    /// The bytes of a range.
    pub fn bytes(&self, offset_bytes: u64, len_bytes: u64) -> Vec<u8> {
        let mut out = vec![0; len_bytes as usize];
        self.read(offset_bytes, &mut out);
        out
    }

    /// The big-endian 64-bit number at an offset.
    pub fn be64(&self, offset_bytes: u64) -> u64 {
        let mut word = [0; 8];
        self.read(offset_bytes, &mut word);
        u64::from_be_bytes(word)
    }

    /// Writes bytes; the file grows to hold them.
    pub fn write(&mut self, offset_bytes: u64, data: &[u8]) {
        self.len_bytes = self.len_bytes.max(offset_bytes + data.len() as u64);
        let fill = self.fill;
        let mut at = offset_bytes;
        let mut rest = data;
        while !rest.is_empty() {
            let inside = at % PAGE_BYTES;
            let (now, later) = rest.split_at(rest.len().min((PAGE_BYTES - inside) as usize));
            let page = self
                .pages
                .entry(at / PAGE_BYTES)
                .or_insert_with(|| Arc::new([fill; PAGE_BYTES as usize]));
            Arc::make_mut(page)[inside as usize..][..now.len()].copy_from_slice(now);
            at += now.len() as u64;
            rest = later;
        }
    }

    /// Writes a big-endian 64-bit number.
    pub fn put_be64(&mut self, offset_bytes: u64, value: u64) {
        self.write(offset_bytes, &value.to_be_bytes());
    }

    /// Makes a range inside the file read as zeroes.
    pub fn zero(&mut self, offset_bytes: u64, len_bytes: u64) {
        let end = (offset_bytes + len_bytes).min(self.len_bytes);
        let mut at = offset_bytes;
        while at < end {
            let next = ((at / PAGE_BYTES + 1) * PAGE_BYTES).min(end);
            let whole = next - at == PAGE_BYTES
                || (at.is_multiple_of(PAGE_BYTES) && next == self.len_bytes);
            if whole && self.fill == 0 {
                self.pages.remove(&(at / PAGE_BYTES));
            } else if self.fill != 0 || self.pages.contains_key(&(at / PAGE_BYTES)) {
                const ZEROES: Page = [0; PAGE_BYTES as usize];
                self.write(at, &ZEROES[..(next - at) as usize]);
            }
            at = next;
        }
    }

    /// Whether a range was never written (and reads as zeroes), and how far that
    /// answer holds from `offset_bytes`, at most `len_bytes`.
    pub fn run(&self, offset_bytes: u64, len_bytes: u64) -> (bool, u64) {
        let end = offset_bytes + len_bytes;
        if offset_bytes >= self.len_bytes {
            return (true, len_bytes);
        }
        let stop = end.min(self.len_bytes);
        if self.fill != 0 {
            return (false, stop - offset_bytes);
        }
        let first = offset_bytes / PAGE_BYTES;
        let mut following = self.pages.range(first..).map(|(&index, _)| index);
        match following.next() {
            Some(index) if index == first => {
                let mut next = first + 1;
                while following.next() == Some(next) {
                    next += 1;
                }
                (false, (next * PAGE_BYTES).min(stop) - offset_bytes)
            }
            // A hole that reaches the end of the file goes on beyond it.
            Some(index) if index * PAGE_BYTES < stop => (true, index * PAGE_BYTES - offset_bytes),
            _ => (true, len_bytes),
        }
    }

    /// The 64-bit words of a range that may differ from zero, with their offsets.
    /// `offset_bytes` must be a multiple of 8.
    pub fn words(&self, offset_bytes: u64, len_bytes: u64) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        let end = offset_bytes + len_bytes;
        let mut at = offset_bytes;
        while at < end {
            let (hole, run) = self.run(at, end - at);
            if !hole {
                let bytes = self.bytes(at, run);
                for (index, word) in bytes.chunks_exact(8).enumerate() {
                    let value = u64::from_be_bytes(word.try_into().unwrap_or_default());
                    if value != 0 {
                        found.push((at + index as u64 * 8, value));
                    }
                }
            }
            at += run;
        }
        found
    }

    /// Whether a range holds the same bytes in `other`.
    pub fn same(&self, other: &SparseBytes, offset_bytes: u64, len_bytes: u64) -> bool {
        let end = offset_bytes + len_bytes;
        let mut at = offset_bytes;
        while at < end {
            let next = ((at / PAGE_BYTES + 1) * PAGE_BYTES).min(end);
            let index = at / PAGE_BYTES;
            let shared = match (self.pages.get(&index), other.pages.get(&index)) {
                (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                (None, None) => self.fill == other.fill,
                _ => false,
            };
            if !shared && self.bytes(at, next - at) != other.bytes(at, next - at) {
                return false;
            }
            at = next;
        }
        true
    }
}

impl Default for SparseBytes {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SparseBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Pages({} bytes, {} pages)",
            self.len_bytes,
            self.pages.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn behaves_like_a_vector_of_bytes() {
        let mut rng = Rng::new(3);
        let (mut pages, mut plain) = (SparseBytes::new(), Vec::<u8>::new());
        for round in 0..2000u32 {
            let (at, len) = (rng.below(20_000), rng.below(9000));
            match rng.below(5) {
                0 => {
                    pages.set_len(at);
                    plain.resize(at as usize, 0);
                }
                1 => {
                    pages.zero(at, len);
                    let end = ((at + len) as usize).min(plain.len());
                    plain[(at as usize).min(end)..end].fill(0);
                }
                _ => {
                    let data = vec![round as u8 | 1; len as usize];
                    pages.write(at, &data);
                    let end = (at + len) as usize;
                    plain.resize(plain.len().max(end), 0);
                    plain[at as usize..end].copy_from_slice(&data);
                }
            }
            assert_eq!(pages.len_bytes(), plain.len() as u64);
            let mut expected = plain.clone();
            expected.resize(40_000, 0);
            assert_eq!(pages.bytes(0, 40_000), expected, "round {round}");
        }
    }

    #[test]
    fn runs_cover_the_file_and_holes_are_zero() {
        let mut pages = SparseBytes::new();
        pages.set_len(50_000);
        pages.write(9000, &[1; 5000]);
        assert_eq!(pages.run(0, 60_000), (true, 8192));
        assert_eq!(pages.run(8192, 60_000), (false, 8192));
        assert_eq!(pages.run(16_384, 60_000), (true, 60_000));
        assert_eq!(SparseBytes::device(4096, 7).run(0, 9000), (false, 4096));
    }

    #[test]
    fn copies_are_independent_and_comparable() {
        let mut a = SparseBytes::device(8192, 0xe5);
        let b = a.clone();
        assert!(a.same(&b, 0, 8192));
        a.write(4096, &[1]);
        assert!(!a.same(&b, 0, 8192));
        assert!(a.same(&b, 0, 4096));
        assert_eq!(b.bytes(4096, 1), [0xe5]);
    }

    #[test]
    fn words_skip_what_is_zero() {
        let mut pages = SparseBytes::new();
        pages.set_len(1 << 20);
        pages.put_be64(8, 5);
        pages.put_be64(65_536, 6);
        assert_eq!(pages.words(0, 1 << 20), [(8, 5), (65_536, 6)]);
    }
}
