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

mod layout;

use vellum_format::geometry::Geometry;
use vellum_format::l2::{L2Entry, Mapping};
use vellum_io::buffer::is_zero;

use crate::qcow2::table_cache::cache::{Codec, Content, packed_cost_bytes};
use layout::{BitWriter, FIELDS, Field, Layout, low_bits};

/// A slice in one of its compact forms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PackedSlice {
    /// Nothing but zeroes.
    Empty,
    /// For each run the words of its first entry, then that entry's index and
    /// whether the others lie behind it.
    Runs(Box<[u64]>),
    /// For each column its base and its [`Layout`], then the codes, entry by entry.
    Deltas(Box<[u64]>),
}

/// Whether a slice is nothing but zeroes.
pub(crate) fn is_empty(slice: &Content<'_, PackedSlice>) -> bool {
    match slice {
        Content::Raw(bytes) => is_zero(bytes),
        Content::Packed(packed) => **packed == PackedSlice::Empty,
    }
}

/// Packs the L2 slices of one image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct L2Codec {
    geometry: Geometry,
}

/// Words before the codes for each column.
const COLUMN_HEAD_WORDS: usize = 2;

/// The two parts of a subcluster bitmap: allocated, and zero.
const BITMAP_FIELDS: [Field; FIELDS] = [(0, 32), (32, 32), (0, 0), (0, 0)];

impl L2Codec {
    /// A codec for the images of this geometry.
    pub(crate) fn new(geometry: Geometry) -> Self {
        L2Codec { geometry }
    }

    /// What the cache takes for a clean slice, with all bookkeeping, about.
    pub(crate) fn cost_bytes(&self, slice: &[u8]) -> u64 {
        let heap = self
            .pack(slice)
            .as_ref()
            .map_or(slice.len(), Self::heap_bytes);
        packed_cost_bytes::<PackedSlice>(heap) as u64
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

    /// The words of each column. One allocation and one pass, as every load does it.
    fn columns_of(&self, bytes: &[u8]) -> [Vec<u64>; 2] {
        let words = bytes.as_chunks::<8>().0;
        if self.columns() == 1 {
            let descriptors = words.iter().map(|word| u64::from_be_bytes(*word));
            return [descriptors.collect(), Vec::new()];
        }
        let entries = words.as_chunks::<2>().0.iter();
        let (descriptors, bitmaps) = entries
            .map(|[descriptor, bitmap]| {
                (u64::from_be_bytes(*descriptor), u64::from_be_bytes(*bitmap))
            })
            .unzip();
        [descriptors, bitmaps]
    }

    /// Runs, if they take `most_words` words at most.
    fn pack_runs(&self, columns: &[Vec<u64>; 2], most_words: usize) -> Option<Box<[u64]>> {
        let stride = self.columns() + 1;
        let cluster = self.geometry.cluster_size_bytes();
        let [descriptors, bitmaps] = columns;
        let mut runs: Vec<u64> = Vec::new();
        let mut index = 0;
        while let Some(&first) = descriptors.get(index) {
            if runs.len() + stride > most_words {
                return None;
            }
            let step = match descriptors.get(index + 1) {
                Some(&second) if second == first.wrapping_add(cluster) => cluster,
                _ => 0,
            };
            let bitmap = bitmaps.get(index);
            let mut end = index + 1;
            let mut expected = first.wrapping_add(step);
            while descriptors.get(end) == Some(&expected) && bitmaps.get(end) == bitmap {
                expected = expected.wrapping_add(step);
                end += 1;
            }
            runs.push(first);
            runs.extend(bitmap);
            runs.push(index as u64 | u64::from(step != 0) << RUN_LINEAR_BIT);
            index = end;
        }
        Some(runs.into_boxed_slice())
    }

    /// The layouts of the columns, and the words that they make.
    fn layouts(&self, columns: &[Vec<u64>; 2]) -> Option<([Layout; 2], usize)> {
        let descriptor = Layout::of(&self.descriptor_fields(), &columns[0])?;
        let bitmap = Layout::of(&BITMAP_FIELDS, &columns[1])?;
        let entry_bits = (descriptor.code_bits + bitmap.code_bits) as usize;
        let code_words = (columns[0].len() * entry_bits).div_ceil(64);
        // One word more: a code is always read as part of two.
        let all_words = self.columns() * COLUMN_HEAD_WORDS + code_words + 1;
        Some(([descriptor, bitmap], all_words))
    }

    fn pack_deltas(
        &self,
        columns: &[Vec<u64>; 2],
        layouts: &[Layout; 2],
        all_words: usize,
    ) -> Box<[u64]> {
        let mut packed = BitWriter {
            words: Vec::with_capacity(all_words),
            pending: 0,
            bits: 0,
        };
        for layout in &layouts[..self.columns()] {
            packed.words.extend([layout.base, layout.encode()]);
        }
        let [descriptors, bitmaps] = columns;
        let [(_, bit), (second, _), ..] = layouts[0].parts;
        if bitmaps.is_empty() && second == 0 && !layouts[0].has_zero {
            // The usual slice of a used image: only the offsets differ.
            for &descriptor in descriptors {
                let code = descriptor.wrapping_sub(layouts[0].base) >> bit;
                packed.push(code, layouts[0].code_bits);
            }
        } else {
            packed.push_all(columns, layouts);
        }
        packed.words.push(packed.pending);
        packed.words.resize(all_words, 0);
        packed.words.into_boxed_slice()
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
        if !bytes.len().is_multiple_of(8 * self.columns()) {
            return None;
        }
        let columns = self.columns_of(bytes);
        if columns.iter().flatten().all(|&word| word == 0) {
            return Some(PackedSlice::Empty);
        }
        let raw_words = bytes.len() / 8;
        let deltas = self.layouts(&columns);
        let deltas = deltas.filter(|(_, words)| *words < raw_words);
        let most_words = deltas.as_ref().map_or(raw_words - 1, |(_, words)| *words);
        if let Some(runs) = self.pack_runs(&columns, most_words) {
            return Some(PackedSlice::Runs(runs));
        }
        let (layouts, words) = deltas?;
        let deltas = self.pack_deltas(&columns, &layouts, words);
        Some(PackedSlice::Deltas(deltas))
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

impl Entries<'_> {
    /// How many entries behind the last one, which says `mapping`, are known to continue
    /// it: each one cluster further on the host, or without a place like it. Where the
    /// form does not tell, 0.
    #[inline]
    pub(crate) fn continuing(&self, mapping: &Mapping) -> u64 {
        let linear = match mapping {
            Mapping::Data { .. } | Mapping::Zero { host: Some(_), .. } => true,
            Mapping::Unallocated | Mapping::Zero { host: None, .. } => false,
            Mapping::Compressed(_) | Mapping::Subclusters { .. } => return 0,
        };
        match self {
            Entries::Empty if !linear => u64::MAX,
            Entries::Runs(cursor) => cursor.continuing(linear),
            _ => 0,
        }
    }

    /// Leaves out some of the entries that [`Entries::continuing`] tells of.
    #[inline]
    pub(crate) fn skip_continuing(&mut self, count: u64) {
        if let Entries::Runs(cursor) = self {
            cursor.index += count;
        }
    }
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
const RUN_LINEAR_BIT: u32 = 32;
/// Bits of a descriptor below its flags.
const OFFSET_BITS: u32 = 56;

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

    /// How many more entries this run has, if it is of that kind. Its last entry is one
    /// whose offset has not overflowed into the flags.
    #[inline]
    fn continuing(&self, linear: bool) -> u64 {
        let Some([first, .., head]) = self.runs.get(..self.stride) else {
            return 0;
        };
        if (head >> RUN_LINEAR_BIT != 0) != linear {
            return 0;
        }
        let next = self.runs.get(2 * self.stride - 1);
        let end = next.map_or(u64::MAX, |next| next & RUN_START_MASK);
        let clusters_left =
            (low_bits(OFFSET_BITS) - (first & low_bits(OFFSET_BITS))) / self.cluster_bytes;
        let end = match linear {
            true => end.min((head & RUN_START_MASK) + clusters_left + 1),
            false => end,
        };
        end.saturating_sub(self.index)
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
        let step = if head >> RUN_LINEAR_BIT != 0 {
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
