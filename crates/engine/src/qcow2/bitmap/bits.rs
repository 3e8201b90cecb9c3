//! A set of bits in memory that takes little where it is empty or full.
//!
//! Bits are kept in chunks of 32 Ki. A chunk without bits takes no memory, one that is
//! full as good as none, any other 4 KiB.
//!
//! Invariants:
//! - No bit at or beyond the length is ever told.
//! - A mixed chunk holds no bits at or beyond the length; a full one may stand for some.

use std::collections::BTreeMap;
use std::ops::Range;

const CHUNK_BITS: u64 = 1 << 15;
const WORDS: usize = (CHUNK_BITS / 64) as usize;
const CHUNK_BYTES: u64 = CHUNK_BITS / 8;

#[derive(Debug, Clone)]
enum Chunk {
    Ones,
    Mixed(Box<[u64; WORDS]>),
}

/// See the module's head.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bits {
    len: u64,
    /// By number; what is missing is zeroes.
    chunks: BTreeMap<u64, Chunk>,
}

/// The bits of one word that `range`, offsets in a chunk, touches in word `index`.
fn mask(range: &Range<u64>, index: usize) -> u64 {
    let start = index as u64 * 64;
    let from = range.start.saturating_sub(start).min(64);
    let to = range.end.saturating_sub(start).min(64);
    if from >= to {
        return 0;
    }
    (u64::MAX >> (64 - (to - from))) << from
}

/// Cuts a range of bits at chunks: (number, range in the chunk).
fn pieces(range: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> {
    let chunks = match range.is_empty() {
        true => 0..0,
        false => range.start / CHUNK_BITS..range.end.div_ceil(CHUNK_BITS),
    };
    chunks.map(move |chunk| {
        let start = chunk * CHUNK_BITS;
        let from = range.start.saturating_sub(start);
        (chunk, from..(range.end - start).min(CHUNK_BITS))
    })
}

fn words_of(range: &Range<u64>) -> Range<usize> {
    (range.start / 64) as usize..range.end.div_ceil(64) as usize
}

impl Bits {
    /// No bit of `len` is set.
    pub(crate) fn new(len: u64) -> Self {
        Bits {
            len,
            chunks: BTreeMap::new(),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    fn clip(&self, range: Range<u64>) -> Range<u64> {
        range.start.min(self.len)..range.end.min(self.len)
    }

    pub(crate) fn set(&mut self, range: Range<u64>) {
        for (number, inside) in pieces(self.clip(range)) {
            let whole = inside.start == 0
                && (inside.end == CHUNK_BITS || number * CHUNK_BITS + inside.end == self.len);
            if whole {
                self.chunks.insert(number, Chunk::Ones);
                continue;
            }
            let empty = || Chunk::Mixed(Box::new([0; WORDS]));
            if let Chunk::Mixed(words) = self.chunks.entry(number).or_insert_with(empty) {
                for index in words_of(&inside) {
                    words[index] |= mask(&inside, index);
                }
            }
        }
    }

    /// Whether every bit of a range is set.
    pub(crate) fn all(&self, range: Range<u64>) -> bool {
        pieces(self.clip(range)).all(|(number, inside)| match self.chunks.get(&number) {
            None => false,
            Some(Chunk::Ones) => true,
            Some(Chunk::Mixed(words)) => words_of(&inside).all(|index| {
                let mask = mask(&inside, index);
                words[index] & mask == mask
            }),
        })
    }

    /// The first run of set bits that ends after `from`, cut off before it.
    pub(crate) fn next_run(&self, from: u64) -> Option<Range<u64>> {
        let start = self.next(from, true)?;
        let end = self.next(start, false).unwrap_or(self.len);
        Some(start..end)
    }

    /// The first bit from `from` on that is, or is not, set.
    fn next(&self, from: u64, set: bool) -> Option<u64> {
        let mut at = from;
        while at < self.len {
            let number = at / CHUNK_BITS;
            match (self.chunks.get(&number), set) {
                (Some(Chunk::Ones), true) | (None, false) => return Some(at),
                (Some(Chunk::Mixed(words)), _) => {
                    let found = next_in(words, at % CHUNK_BITS, set);
                    if let Some(found) = found.map(|found| number * CHUNK_BITS + found) {
                        return Some(found).filter(|&found| found < self.len);
                    }
                    at = (number + 1) * CHUNK_BITS;
                }
                (Some(Chunk::Ones), false) => at = (number + 1) * CHUNK_BITS,
                (None, true) => at = *self.chunks.range(number..).next()?.0 * CHUNK_BITS,
            }
        }
        None
    }

    pub(crate) fn count(&self) -> u64 {
        let chunks = self.chunks.iter();
        chunks
            .map(|(number, chunk)| match chunk {
                Chunk::Ones => CHUNK_BITS.min(self.len - number * CHUNK_BITS),
                Chunk::Mixed(words) => words.iter().map(|word| u64::from(word.count_ones())).sum(),
            })
            .sum()
    }

    /// Copies bits to `out`, the first of a byte into its lowest place, from the bit
    /// `8 * first_byte` on; beyond the length there are zeroes.
    pub(crate) fn copy_to(&self, first_byte: u64, out: &mut [u8]) {
        out.fill(0);
        let end = (first_byte + out.len() as u64) * 8;
        for (number, inside) in pieces(self.clip(first_byte * 8..end)) {
            let first = number * CHUNK_BYTES + inside.start / 8 - first_byte;
            let bytes = inside.start / 8..inside.end.div_ceil(8);
            let place = &mut out[first as usize..(first + bytes.end - bytes.start) as usize];
            match self.chunks.get(&number) {
                None => {}
                Some(Chunk::Ones) => {
                    place.fill(0xff);
                    if inside.end % 8 != 0
                        && let Some(last) = place.last_mut()
                    {
                        *last = 0xff >> (8 - inside.end % 8);
                    }
                }
                Some(Chunk::Mixed(words)) => {
                    for (byte, at) in place.iter_mut().zip(bytes) {
                        *byte = words[at as usize / 8].to_le_bytes()[at as usize % 8];
                    }
                }
            }
        }
    }

    /// Sets the bits that `bytes`, written by [`Bits::copy_to`], hold.
    pub(crate) fn add_from(&mut self, first_byte: u64, bytes: &[u8]) {
        let end = (first_byte + bytes.len() as u64) * 8;
        for (number, inside) in pieces(self.clip(first_byte * 8..end)) {
            let first = (number * CHUNK_BYTES + inside.start / 8 - first_byte) as usize;
            let count = (inside.end.div_ceil(8) - inside.start / 8) as usize;
            let part = &bytes[first..first + count];
            if part.iter().all(|&byte| byte == 0) {
                continue;
            }
            if part.iter().all(|&byte| byte == 0xff) {
                self.set(number * CHUNK_BITS + inside.start..number * CHUNK_BITS + inside.end);
                continue;
            }
            let empty = || Chunk::Mixed(Box::new([0; WORDS]));
            if let Chunk::Mixed(words) = self.chunks.entry(number).or_insert_with(empty) {
                for (at, &byte) in (inside.start / 8..).zip(part) {
                    let word = u64::from(byte) << (at % 8 * 8);
                    words[at as usize / 8] |= word & mask(&inside, at as usize / 8);
                }
            }
        }
    }

    /// Changes the length; bits that come into being are not set.
    pub(crate) fn set_len(&mut self, len: u64) {
        let last = self.len.min(len) / CHUNK_BITS;
        let inside = 0..self.len.min(len) % CHUNK_BITS;
        self.len = len;
        drop(self.chunks.split_off(&(last + 1)));
        let Some(chunk) = self.chunks.get_mut(&last) else {
            return;
        };
        let mut words = Box::new([0; WORDS]);
        for (index, word) in words.iter_mut().enumerate() {
            *word = mask(&inside, index)
                & match chunk {
                    Chunk::Ones => u64::MAX,
                    Chunk::Mixed(words) => words[index],
                };
        }
        *chunk = Chunk::Mixed(words);
    }
}

fn next_in(words: &[u64; WORDS], from: u64, set: bool) -> Option<u64> {
    let range = from..CHUNK_BITS;
    words_of(&range).find_map(|index| {
        let word = if set { words[index] } else { !words[index] };
        let found = word & mask(&range, index);
        (found != 0).then(|| index as u64 * 64 + u64::from(found.trailing_zeros()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEN: u64 = 3 * CHUNK_BITS + 77;

    fn runs(bits: &Bits) -> Vec<Range<u64>> {
        let mut from = 0;
        std::iter::from_fn(|| {
            let run = bits.next_run(from)?;
            from = run.end;
            Some(run)
        })
        .collect()
    }

    #[test]
    fn a_full_chunk_that_is_cut_does_not_grow_back() {
        let mut bits = Bits::new(100);
        bits.set(0..100);
        bits.set_len(300);
        assert_eq!(runs(&bits), [0..100]);
        bits.set_len(50);
        bits.set_len(100);
        assert_eq!(runs(&bits), [0..50]);
        assert!(bits.all(10..50) && !bits.all(10..51));
    }

    proptest! {
        #[test]
        fn is_what_a_list_of_bits_is(
            sets in prop::collection::vec((0..LEN + 9, 0u64..40_000), 0..12),
            (from, len) in (0..LEN, 1u64..40_000),
            new_len in 0..LEN + 100,
        ) {
            let mut bits = Bits::new(LEN);
            let mut model = vec![false; LEN as usize];
            for (start, len) in sets {
                bits.set(start..start + len);
                let clip = |at: u64| at.min(LEN) as usize;
                model[clip(start)..clip(start + len)].fill(true);
            }
            let mut told = vec![false; LEN as usize];
            for run in runs(&bits) {
                told[run.start as usize..run.end as usize].fill(true);
            }
            prop_assert_eq!(&told, &model);
            prop_assert_eq!(bits.count(), model.iter().filter(|bit| **bit).count() as u64);
            let range = from..(from + len).min(LEN);
            let all = model[range.start as usize..range.end as usize].iter().all(|bit| *bit);
            prop_assert_eq!(bits.all(range), all);

            let mut copy = Bits::new(LEN);
            for first in (0..LEN.div_ceil(8)).step_by(700) {
                let mut bytes = [0xaa; 700];
                bits.copy_to(first, &mut bytes);
                copy.add_from(first, &bytes);
            }
            prop_assert_eq!(runs(&copy), runs(&bits));

            bits.set_len(new_len);
            model.resize(new_len as usize, false);
            let mut told = vec![false; new_len as usize];
            for run in runs(&bits) {
                told[run.start as usize..run.end as usize].fill(true);
            }
            prop_assert_eq!(&told, &model);
        }
    }
}
