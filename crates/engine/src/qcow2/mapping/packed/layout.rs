//! How words of 64 bits become codes of fixed width, and back: a base, and the
//! parts of the words that differ, one beside the other.

pub(super) const FIELDS: usize = 4;
/// Codes wider than this gain nothing, and would not fit with the bit for "zero".
const MAX_CODE_BITS: u32 = 60;
/// Bits of a word that vary together: first bit and length.
pub(super) type Field = (u32, u32);

/// How the words of a column become codes: the parts of a word that differ, one
/// beside the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// What all words have, and the least value of each part that differs.
    pub(super) base: u64,
    /// Of each part its width in the code and the bit it is added at; those that
    /// there are come first.
    pub(super) parts: [(u32, u32); FIELDS],
    /// Code 0 is the word 0, and all others are one higher.
    pub(super) has_zero: bool,
    pub(super) code_bits: u32,
}

impl Layout {
    pub(super) fn of(fields: &[Field; FIELDS], words: &[u64]) -> Option<Layout> {
        let first = words.iter().copied().find(|&word| word != 0).unwrap_or(0);
        // Zeroes have a code of their own: let them look like the first word.
        let word_of = |&word: &u64| if word == 0 { first } else { word };
        let (differing, has_zero) = words.iter().fold((0, false), |(bits, zero), word| {
            (bits | word_of(word) ^ first, zero | (*word == 0))
        });
        let has_zero = has_zero && first != 0;
        let mut layout = Layout {
            base: first,
            parts: [(0, 0); FIELDS],
            has_zero,
            code_bits: 0,
        };
        let mut parts = layout.parts.iter_mut();
        for &(start, len) in fields {
            let mask = low_bits(len) << start;
            if differing & mask == 0 {
                continue;
            }
            let values = words.iter().map(word_of).map(|word| word & mask);
            let (least, most) = values.fold((u64::MAX, 0), |(least, most), value| {
                (value.min(least), value.max(most))
            });
            let bit = (differing & mask).trailing_zeros();
            let width = 64 - ((most - least) >> bit).leading_zeros();
            layout.base = layout.base & !mask | least;
            layout.code_bits += width;
            if let Some(part) = parts.next() {
                *part = (width, bit);
            }
        }
        if layout.code_bits > MAX_CODE_BITS {
            return None;
        }
        if has_zero {
            let codes = words.iter().map(|&word| layout.code(word));
            let highest = codes.fold(0, u64::max);
            layout.code_bits = 64 - highest.leading_zeros();
        }
        Some(layout)
    }

    #[inline]
    pub(super) fn code(&self, word: u64) -> u64 {
        if word == 0 && self.has_zero {
            return 0;
        }
        let mut code = 0;
        let mut at = 0;
        let delta = word.wrapping_sub(self.base);
        for (width, bit) in self.parts {
            if width == 0 {
                break;
            }
            code |= (delta >> bit & low_bits(width)) << at;
            at += width;
        }
        code + u64::from(self.has_zero)
    }

    #[inline]
    pub(super) fn word(&self, code: u64) -> u64 {
        let mut code = code;
        if self.has_zero {
            if code == 0 {
                return 0;
            }
            code -= 1;
        }
        let mut word = self.base;
        for (width, bit) in self.parts {
            if width == 0 {
                break;
            }
            word = word.wrapping_add((code & low_bits(width)) << bit);
            code >>= width;
        }
        word
    }

    /// The layout as one word: 14 bits a part, one for zero, seven for the width.
    pub(super) fn encode(&self) -> u64 {
        let parts = self.parts.iter().rev().fold(0, |word, (width, bit)| {
            word << 14 | u64::from(*width) << 7 | u64::from(*bit)
        });
        parts | u64::from(self.has_zero) << 56 | u64::from(self.code_bits) << 57
    }

    #[inline]
    pub(super) fn decode(base: u64, word: u64) -> Layout {
        let part = |index: u32| {
            let part = (word >> (14 * index)) as u32;
            (part >> 7 & 0x7f, part & 0x7f)
        };
        Layout {
            base,
            parts: [part(0), part(1), part(2), part(3)],
            has_zero: word >> 56 & 1 != 0,
            code_bits: (word >> 57) as u32,
        }
    }
}

#[inline]
pub(super) fn low_bits(count: u32) -> u64 {
    (1 << count) - 1
}

/// Puts codes one behind the other, the low bits first.
pub(super) struct BitWriter {
    pub(super) words: Vec<u64>,
    pub(super) pending: u64,
    /// Bits of `pending` that are taken, less than 64.
    pub(super) bits: u32,
}

impl BitWriter {
    pub(super) fn push_all(
        &mut self,
        [descriptors, bitmaps]: &[Vec<u64>; 2],
        layouts: &[Layout; 2],
    ) {
        for (index, &descriptor) in descriptors.iter().enumerate() {
            self.push(layouts[0].code(descriptor), layouts[0].code_bits);
            if let Some(&bitmap) = bitmaps.get(index) {
                self.push(layouts[1].code(bitmap), layouts[1].code_bits);
            }
        }
    }

    #[inline]
    pub(super) fn push(&mut self, code: u64, len_bits: u32) {
        self.pending |= code << self.bits;
        let bits = self.bits + len_bits;
        self.bits = bits % 64;
        if bits >= 64 {
            self.words.push(self.pending);
            // What did not fit; nothing where it ended with the word.
            let fitted = len_bits - self.bits;
            self.pending = code.checked_shr(fitted).unwrap_or(0);
        }
    }
}
