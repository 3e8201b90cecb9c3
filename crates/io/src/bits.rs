//! [`Bits`]: a set of small numbers, one bit each.

use std::ops::Range;

/// The numbers below a length that are in the set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bits {
    words: Vec<u64>,
    len: u64,
    count: u64,
}

impl Bits {
    /// No number below `len`.
    pub fn none(len: u64) -> Bits {
        Bits {
            words: vec![0; len.div_ceil(64) as usize],
            len,
            count: 0,
        }
    }

    /// Every number below `len`.
    pub fn all(len: u64) -> Bits {
        let mut bits = Bits::none(len);
        (0..len).for_each(|number| bits.insert(number));
        bits
    }

    /// Numbers below this one can be in the set.
    pub fn end(&self) -> u64 {
        self.len
    }

    /// How many are in the set.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether a number is in the set.
    pub fn contains(&self, number: u64) -> bool {
        let word = self.words.get((number / 64) as usize);
        word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    /// Adds a number; nothing at or beyond the length.
    pub fn insert(&mut self, number: u64) {
        if number < self.len && !self.contains(number) {
            self.words[(number / 64) as usize] |= 1 << (number % 64);
            self.count += 1;
        }
    }

    /// Takes a number out.
    pub fn remove(&mut self, number: u64) {
        if self.contains(number) {
            self.words[(number / 64) as usize] &= !(1 << (number % 64));
            self.count -= 1;
        }
    }

    /// The first number of a range that is in the set, or is not; none at or beyond the length.
    pub fn find(&self, range: Range<u64>, in_set: bool) -> Option<u64> {
        let end = range.end.min(self.len);
        let mut at = range.start;
        while at < end {
            let word = self.words[(at / 64) as usize];
            let word = if in_set { word } else { !word } >> (at % 64);
            if word != 0 {
                at += u64::from(word.trailing_zeros());
                return (at < end).then_some(at);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    /// Where the numbers from `from` on end that are in the set as `from` is, or are not; at most
    /// `limit`.
    pub fn run_end(&self, from: u64, limit: u64) -> u64 {
        let end = self.find(from + 1..limit, !self.contains(from));
        end.unwrap_or(limit)
    }

    /// The numbers in the set, in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let next = move |from| self.find(from..self.len, true);
        std::iter::successors(next(0), move |number| next(number + 1))
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn check(bits: &Bits, set: &BTreeSet<u64>) {
        assert_eq!(bits.count(), set.len() as u64);
        assert!(bits.iter().eq(set.iter().copied()));
        for from in 0..bits.end() + 9 {
            assert_eq!(bits.contains(from), set.contains(&from));
            for (in_set, end) in [(false, from + 70), (true, from + 70), (true, u64::MAX)] {
                let mut inside = from..bits.end().min(end);
                let first = inside.find(|number| set.contains(number) == in_set);
                assert_eq!(bits.find(from..end, in_set), first);
            }
            let mut others =
                (from..from + 70).skip_while(|at| set.contains(at) == set.contains(&from));
            let end = others.next().filter(|end| *end < bits.end());
            assert_eq!(bits.run_end(from, from + 70), end.unwrap_or(from + 70));
        }
    }

    #[test]
    fn are_a_set_of_numbers_below_their_length() {
        let mut random = 1u64;
        let mut next = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % below
        };
        for len in [0, 1, 63, 64, 65, 300] {
            let (mut bits, mut set) = (Bits::none(len), BTreeSet::new());
            for _ in 0..100 {
                // Runs, so that whole words come about.
                let (start, count, adds) = (next(len + 9), next(90), next(2) == 0);
                for number in start..start + count {
                    if adds {
                        bits.insert(number);
                        set.extend(Some(number).filter(|number| *number < len));
                    } else {
                        bits.remove(number);
                        set.remove(&number);
                    }
                }
                check(&bits, &set);
            }
            check(&Bits::all(len), &(0..len).collect());
        }
    }
}
