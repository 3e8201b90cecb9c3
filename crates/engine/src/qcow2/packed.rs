//! Compact in-memory forms of a clean L2 slice.
//!
//! On disk an entry has 8 or 16 bytes, but neighbours are mostly alike. A slice is
//! kept in the smallest of these forms; each gives back the exact bytes, whatever
//! they are:
//!
//! - *empty*: every byte is zero;
//! - *runs*: pieces in which each entry is the one before, or lies one cluster
//!   behind it;
//! - *deltas*: a base, and a number of fixed width for each entry;
//! - *raw*: the bytes. That is the absence of a packed form.
//!
//! Invariant: `unpack(pack(bytes)) == bytes`.

use vellum_format::geometry::Geometry;
use vellum_format::l2::L2Entry;

use super::cache::{Codec, Content};

/// A slice in one of its compact forms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PackedSlice {
    /// Nothing but zeroes.
    Empty,
    /// For each run its entry's words and a word of [`run_head`]; see the head.
    Runs(Box<[u64]>),
    /// For each column its base and its [`Layout`], then the codes, entry by entry.
    Deltas(Box<[u64]>),
}

/// Packs the L2 slices of one image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct L2Codec {
    geometry: Geometry,
}

const FIELDS: usize = 4;
/// Codes wider than this gain nothing, and would not fit with the bit for "zero".
const MAX_CODE_BITS: u32 = 60;
/// Words before the codes for each column.
const COLUMN_HEAD_WORDS: usize = 2;

/// Bits of a word that vary together: first bit and length.
type Field = (u32, u32);

/// The two parts of a subcluster bitmap: allocated, and zero.
const BITMAP_FIELDS: [Field; FIELDS] = [(0, 32), (32, 32), (0, 0), (0, 0)];

impl L2Codec {
    /// A codec for the images of this geometry.
    pub(crate) fn new(geometry: Geometry) -> Self {
        L2Codec { geometry }
    }

    fn columns(&self) -> usize {
        if self.geometry.extended_l2 { 2 } else { 1 }
    }

    /// Flag of zeroes, offset, (of compressed clusters) length, copied flag.
    fn descriptor_fields(&self) -> [Field; FIELDS] {
        let length_at = 70 - self.geometry.cluster_bits;
        [
            (0, 1),
            (1, length_at - 1),
            (length_at, 63 - length_at),
            (63, 1),
        ]
    }

    fn pack_runs(&self, words: &[u64], most_words: usize) -> Option<Box<[u64]>> {
        let columns = self.columns();
        let cluster = self.geometry.cluster_size_bytes();
        let mut runs: Vec<u64> = Vec::new();
        let mut previous: &[u64] = &[];
        // How many entries the last run has: the second one decides its kind.
        let mut len = 0;
        for (index, entry) in words.chunks_exact(columns).enumerate() {
            let step = entry[0].wrapping_sub(previous.first().copied().unwrap_or(0));
            let like = len > 0 && entry[1..] == previous[1..] && (step == 0 || step == cluster);
            match runs.last_mut() {
                Some(head) if like && len == 1 => *head |= u64::from(step != 0) << 32,
                Some(head) if like && (*head >> 32 != 0) == (step != 0) => {}
                _ => {
                    if runs.len() + columns + 1 > most_words {
                        return None;
                    }
                    runs.extend_from_slice(entry);
                    runs.push(index as u64);
                    len = 0;
                }
            }
            len += 1;
            previous = entry;
        }
        Some(runs.into_boxed_slice())
    }

    fn pack_deltas(&self, words: &[u64], most_words: usize) -> Option<Box<[u64]>> {
        let columns = self.columns();
        let column = |at: usize| words.iter().skip(at).step_by(columns).copied();
        let mut layouts = [Layout::of(self.descriptor_fields(), column(0))?; 2];
        if columns == 2 {
            layouts[1] = Layout::of(BITMAP_FIELDS, column(1))?;
        }
        let layouts = &layouts[..columns];
        let entry_bits: usize = layouts.iter().map(|l| l.code_bits as usize).sum();
        let code_words = (words.len() / columns * entry_bits).div_ceil(64);
        // One word more: a code is always read as part of two.
        let all_words = columns * COLUMN_HEAD_WORDS + code_words + 1;
        if all_words > most_words {
            return None;
        }
        let mut packed = Vec::with_capacity(all_words);
        for layout in layouts {
            packed.extend([layout.base, layout.encode()]);
        }
        let mut pending = 0u128;
        let mut bits = 0;
        for entry in words.chunks_exact(columns) {
            for (layout, &word) in layouts.iter().zip(entry) {
                pending |= u128::from(layout.code(word)) << bits;
                bits += layout.code_bits;
                if bits >= 64 {
                    packed.push(pending as u64);
                    pending >>= 64;
                    bits -= 64;
                }
            }
        }
        packed.push(pending as u64);
        packed.resize(all_words, 0);
        Some(packed.into_boxed_slice())
    }

    /// Looks at a slice, in whatever form it is.
    pub(crate) fn view<'a>(&self, content: Content<'a, PackedSlice>) -> SliceView<'a> {
        SliceView {
            geometry: self.geometry,
            content,
        }
    }
}

impl Codec for L2Codec {
    type Packed = PackedSlice;

    fn pack(&self, bytes: &[u8]) -> Option<PackedSlice> {
        let (words, rest) = bytes.as_chunks::<8>();
        if !rest.is_empty() || words.len() % self.columns() != 0 {
            return None;
        }
        let words: Vec<u64> = words.iter().map(|word| u64::from_be_bytes(*word)).collect();
        if words.iter().all(|&word| word == 0) {
            return Some(PackedSlice::Empty);
        }
        let runs = self.pack_runs(&words, words.len() - 1);
        let most_words = runs.as_ref().map_or(words.len(), |runs| runs.len()) - 1;
        match self.pack_deltas(&words, most_words) {
            Some(deltas) => Some(PackedSlice::Deltas(deltas)),
            None => runs.map(PackedSlice::Runs),
        }
    }

    fn unpack(&self, packed: &PackedSlice, bytes: &mut [u8]) {
        bytes.fill(0);
        let view = self.view(Content::Packed(packed));
        let mut entries = view.entries(0);
        let size = self.geometry.l2_entry_size_bytes() as usize;
        for place in bytes.chunks_exact_mut(size) {
            let Some(entry) = entries.next() else {
                break;
            };
            let fits = entry.write(place, 0, &self.geometry);
            debug_assert!(fits, "an entry fits into its own size");
        }
    }

    fn heap_bytes(packed: &PackedSlice) -> usize {
        match packed {
            PackedSlice::Empty => 0,
            PackedSlice::Runs(words) | PackedSlice::Deltas(words) => size_of_val(&**words),
        }
    }
}

/// How the words of a column become codes: the parts of a word that differ, one
/// beside the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    /// What all words have, and the least value of each part that differs.
    base: u64,
    /// Of each part its width in the code and the bit it is added at.
    parts: [(u32, u32); FIELDS],
    /// Code 0 is the word 0, and all others are one higher.
    has_zero: bool,
    code_bits: u32,
}

impl Layout {
    fn of(fields: [Field; FIELDS], words: impl Iterator<Item = u64> + Clone) -> Option<Layout> {
        let nonzero = words.clone().filter(|&word| word != 0);
        let first = nonzero.clone().next().unwrap_or(0);
        let mut differing = 0;
        let mut least = [u64::MAX; FIELDS];
        let mut most = [0; FIELDS];
        for word in nonzero.clone() {
            differing |= word ^ first;
            for (field, (least, most)) in fields.iter().zip(least.iter_mut().zip(&mut most)) {
                let value = field_of(word, *field);
                *least = value.min(*least);
                *most = value.max(*most);
            }
        }
        let mut layout = Layout {
            base: 0,
            parts: [(0, 0); FIELDS],
            has_zero: words.clone().any(|word| word == 0) && first != 0,
            code_bits: 0,
        };
        for (index, field) in fields.iter().enumerate() {
            let shift = field_of(differing, *field).trailing_zeros();
            if first == 0 || field.1 == 0 {
                continue;
            }
            layout.base |= least[index] << field.0;
            if shift < field.1 {
                let width = 64 - ((most[index] - least[index]) >> shift).leading_zeros();
                layout.parts[index] = (width, field.0 + shift);
            }
        }
        layout.code_bits = layout.parts.iter().map(|part| part.0).sum();
        if layout.code_bits > MAX_CODE_BITS {
            return None;
        }
        if layout.has_zero {
            let highest = nonzero.map(|word| layout.code(word)).max().unwrap_or(0);
            layout.code_bits = 64 - highest.leading_zeros();
        }
        Some(layout)
    }

    fn code(&self, word: u64) -> u64 {
        if word == 0 && self.has_zero {
            return 0;
        }
        let mut code = 0;
        let mut at = 0;
        let delta = word.wrapping_sub(self.base);
        for (width, bit) in self.parts {
            if width > 0 {
                code |= (delta >> bit & low_bits(width)) << at;
                at += width;
            }
        }
        code + u64::from(self.has_zero)
    }

    #[inline]
    fn word(&self, code: u64) -> u64 {
        let mut code = code;
        if self.has_zero {
            if code == 0 {
                return 0;
            }
            code -= 1;
        }
        let mut word = self.base;
        for (width, bit) in self.parts {
            word = word.wrapping_add((code & low_bits(width)) << bit);
            code >>= width;
        }
        word
    }

    /// The layout as one word: 14 bits a part, one for zero, seven for the width.
    fn encode(&self) -> u64 {
        let parts = self.parts.iter().rev().fold(0, |word, (width, bit)| {
            word << 14 | u64::from(*width) << 7 | u64::from(*bit)
        });
        parts | u64::from(self.has_zero) << 56 | u64::from(self.code_bits) << 57
    }

    #[inline]
    fn decode(base: u64, word: u64) -> Layout {
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
fn low_bits(count: u32) -> u64 {
    (1 << count) - 1
}

fn field_of(word: u64, (start, len): Field) -> u64 {
    word >> start & low_bits(len)
}

/// A slice to look entries up in.
pub(crate) struct SliceView<'a> {
    geometry: Geometry,
    content: Content<'a, PackedSlice>,
}

impl SliceView<'_> {
    /// The entry at `index`, which must be inside the slice.
    #[inline]
    pub(crate) fn entry(&self, index: usize) -> Option<L2Entry> {
        self.entries(index).next()
    }

    /// The entries from `first` on; of packed slices without an end.
    #[inline]
    pub(crate) fn entries(&self, first: usize) -> Entries<'_> {
        let index = first;
        let geometry = self.geometry;
        match self.content {
            Content::Raw(bytes) => Entries::Raw {
                bytes,
                index,
                geometry,
            },
            Content::Packed(PackedSlice::Empty) => Entries::Empty,
            Content::Packed(PackedSlice::Runs(words)) => {
                Entries::Runs(RunCursor::new(words, index, &geometry))
            }
            Content::Packed(PackedSlice::Deltas(words)) => {
                Entries::Deltas(DeltaCursor::new(words, index, &geometry))
            }
        }
    }
}

/// Entries one after the other.
pub(crate) enum Entries<'a> {
    /// As on disk.
    Raw {
        /// The slice.
        bytes: &'a [u8],
        /// The next entry's index.
        index: usize,
        /// The image's geometry.
        geometry: Geometry,
    },
    /// All zero.
    Empty,
    /// Of runs.
    Runs(RunCursor<'a>),
    /// Of deltas.
    Deltas(DeltaCursor<'a>),
}

impl Iterator for Entries<'_> {
    type Item = L2Entry;

    #[inline]
    fn next(&mut self) -> Option<L2Entry> {
        match self {
            Entries::Raw {
                bytes,
                index,
                geometry,
            } => {
                let entry = L2Entry::read(bytes, *index, geometry);
                *index += 1;
                entry
            }
            Entries::Empty => Some(L2Entry::UNALLOCATED),
            Entries::Runs(cursor) => cursor.next(),
            Entries::Deltas(cursor) => cursor.next(),
        }
    }
}

/// A place in a list of runs.
pub(crate) struct RunCursor<'a> {
    /// This run and those after it.
    runs: &'a [u64],
    stride: usize,
    cluster_bytes: u64,
    index: u64,
}

const RUN_START_MASK: u64 = 0xffff_ffff;

impl<'a> RunCursor<'a> {
    #[inline]
    fn new(words: &'a [u64], index: usize, geometry: &Geometry) -> Self {
        let stride = if geometry.extended_l2 { 3 } else { 2 };
        let index = index as u64;
        let mut low = 0;
        let mut high = words.len() / stride;
        while high - low > 1 {
            let middle = (low + high) / 2;
            match words[middle * stride + stride - 1] & RUN_START_MASK <= index {
                true => low = middle,
                false => high = middle,
            }
        }
        RunCursor {
            runs: words.get(low * stride..).unwrap_or_default(),
            stride,
            cluster_bytes: geometry.cluster_size_bytes(),
            index,
        }
    }

    #[inline]
    fn next(&mut self) -> Option<L2Entry> {
        if let Some(next) = self.runs.get(2 * self.stride - 1)
            && next & RUN_START_MASK <= self.index
        {
            self.runs = &self.runs[self.stride..];
        }
        let run = self.runs.get(..self.stride)?;
        let head = run[self.stride - 1];
        let behind = self.index - (head & RUN_START_MASK);
        let step = if head >> 32 != 0 {
            self.cluster_bytes
        } else {
            0
        };
        self.index += 1;
        Some(L2Entry {
            descriptor: run[0].wrapping_add(behind.wrapping_mul(step)),
            bitmap: if self.stride == 3 { run[1] } else { 0 },
        })
    }
}

/// A place in packed codes.
pub(crate) struct DeltaCursor<'a> {
    codes: &'a [u64],
    descriptor: Layout,
    bitmap: Option<Layout>,
    bit: usize,
}

impl<'a> DeltaCursor<'a> {
    #[inline]
    fn new(words: &'a [u64], index: usize, geometry: &Geometry) -> Self {
        let descriptor = Layout::decode(words[0], words[1]);
        let mut entry_bits = descriptor.code_bits;
        let mut bitmap = None;
        let mut head = COLUMN_HEAD_WORDS;
        if geometry.extended_l2 {
            let layout = Layout::decode(words[2], words[3]);
            entry_bits += layout.code_bits;
            bitmap = Some(layout);
            head += COLUMN_HEAD_WORDS;
        }
        DeltaCursor {
            codes: &words[head..],
            descriptor,
            bitmap,
            bit: index * entry_bits as usize,
        }
    }

    #[inline]
    fn take(&mut self, layout: &Layout) -> Option<u64> {
        let word = self.bit / 64;
        let low = u128::from(*self.codes.get(word)?);
        let both = u128::from(self.codes.get(word + 1).copied().unwrap_or(0)) << 64 | low;
        let code = (both >> (self.bit % 64)) as u64 & low_bits(layout.code_bits);
        self.bit += layout.code_bits as usize;
        Some(layout.word(code))
    }

    #[inline]
    fn next(&mut self) -> Option<L2Entry> {
        let descriptor = self.descriptor;
        let descriptor = self.take(&descriptor)?;
        let bitmap = match self.bitmap {
            Some(layout) => self.take(&layout)?,
            None => 0,
        };
        Some(L2Entry { descriptor, bitmap })
    }
}

#[cfg(test)]
mod tests;
