//! The block allocation table: its entries, and which of them is whose.

use vellum::Result;

use super::invalid;
use super::metadata::Parameters;

/// Sectors whose bits one bitmap block has.
const SECTORS_PER_CHUNK: u64 = 1 << 23;
/// Size of a bitmap block, in bytes.
pub(super) const BITMAP_BLOCK_BYTES: u64 = 1 << 20;
/// Offsets of blocks are multiples of it, in bytes.
pub(super) const BLOCK_ALIGNMENT_BYTES: u64 = 1 << 20;
/// The table is kept in memory: so many entries take 128 MiB, and map 64 TiB in blocks of 4 MiB.
const MAX_ENTRIES: u64 = 16 << 20;

/// What an entry says of a payload block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// The parent's, or zeroes.
    NotPresent,
    /// Anything: zeroes, here.
    Undefined,
    Zero,
    /// Given back by the guest: zeroes, here.
    Unmapped,
    FullyPresent,
    /// Some sectors are here, as the bitmap says; others are the parent's.
    PartiallyPresent,
}

/// An entry of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Entry(pub u64);

impl Entry {
    pub(super) const ZERO: Entry = Entry(2);

    /// Of a block that lies whole at an offset (a multiple of 1 MiB).
    pub(super) fn fully_present(offset_bytes: u64) -> Entry {
        Entry(offset_bytes & !(BLOCK_ALIGNMENT_BYTES - 1) | 6)
    }

    /// Of a payload block; `None` for the values that mean nothing.
    pub(super) fn state(self) -> Option<State> {
        match self.0 & 7 {
            0 => Some(State::NotPresent),
            1 => Some(State::Undefined),
            2 => Some(State::Zero),
            // 5 is what drafts of the specification said.
            3 | 5 => Some(State::Unmapped),
            6 => Some(State::FullyPresent),
            7 => Some(State::PartiallyPresent),
            _ => None,
        }
    }

    /// Whether a bitmap block is there.
    pub(super) fn has_bitmap(self) -> bool {
        self.0 & 7 == 6
    }

    /// Where the block lies, in bytes.
    pub(super) fn offset_bytes(self) -> u64 {
        self.0 & !(BLOCK_ALIGNMENT_BYTES - 1)
    }
}

/// How many entries there are, and which is whose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub blocks: u64,
    /// Payload entries between two bitmap entries.
    pub chunk_ratio: u64,
    pub entries: u64,
}

impl Shape {
    /// The table of a disk.
    pub(super) fn new(of: &Parameters) -> Shape {
        let blocks = of.size_bytes.div_ceil(of.block_bytes);
        let chunk_ratio = (SECTORS_PER_CHUNK * of.sector_bytes / of.block_bytes).max(1);
        let entries = match of.has_parent {
            true => blocks.div_ceil(chunk_ratio) * (chunk_ratio + 1),
            false => blocks + blocks.saturating_sub(1) / chunk_ratio,
        };
        Shape {
            blocks,
            chunk_ratio,
            entries,
        }
    }

    /// That the table fits its region and the memory.
    pub(super) fn check(&self, region_bytes: u32) -> Result<()> {
        if self.entries > u64::from(region_bytes) / 8 {
            return Err(invalid(
                "the VHDX block allocation table is too small for the disk",
            ));
        }
        if self.is_too_large() {
            let message = "the VHDX block allocation table is too large";
            return Err(vellum::Error::new(
                vellum::ErrorKind::Unsupported,
                "open",
                message,
            ));
        }
        Ok(())
    }

    /// Whether the table takes more memory than is given to it.
    pub(super) fn is_too_large(&self) -> bool {
        self.entries > MAX_ENTRIES
    }

    /// The entry of a payload block.
    pub(super) fn payload(&self, block: u64) -> usize {
        (block + block / self.chunk_ratio) as usize
    }

    /// The entry of the bitmap block that has the bits of a payload block.
    pub(super) fn bitmap(&self, block: u64) -> usize {
        let chunk = block / self.chunk_ratio;
        (chunk * (self.chunk_ratio + 1) + self.chunk_ratio) as usize
    }

    /// Which payload block an entry is of, if it is none of a bitmap.
    pub(super) fn block_of(&self, entry: u64) -> Option<u64> {
        let per_chunk = self.chunk_ratio + 1;
        let block = entry / per_chunk * self.chunk_ratio + entry % per_chunk;
        (entry % per_chunk != self.chunk_ratio && block < self.blocks).then_some(block)
    }
}

/// A run of sectors of one kind in a block of a differencing image: whether they are here, and how
/// many they are, from `first` on up to `count`. Bit 0 of byte 0 is the first sector's.
pub(super) fn bitmap_run(bitmap: &[u8], first: u64, count: u64) -> (bool, u64) {
    let bit = |sector: u64| {
        let byte = bitmap.get((sector / 8) as usize).copied().unwrap_or(0);
        byte >> (sector % 8) & 1 == 1
    };
    let is_here = bit(first);
    let whole = if is_here { 0xff } else { 0 };
    let mut len = 1;
    while len < count {
        let sector = first + len;
        let is_whole_byte =
            sector.is_multiple_of(8) && bitmap.get((sector / 8) as usize) == Some(&whole);
        if is_whole_byte {
            len += 8;
        } else if bit(sector) == is_here {
            len += 1;
        } else {
            break;
        }
    }
    (is_here, len.min(count))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shape(size_bytes: u64, has_parent: bool) -> Shape {
        Shape::new(&Parameters {
            block_bytes: 256 << 20,
            leaves_blocks: false,
            has_parent,
            size_bytes,
            sector_bytes: 512,
        })
    }

    #[test]
    fn bitmap_entries_come_after_each_chunk() {
        // A chunk is 4 GiB: 16 blocks.
        let dynamic = shape(9 << 30, false);
        assert_eq!(
            (dynamic.blocks, dynamic.chunk_ratio, dynamic.entries),
            (36, 16, 38)
        );
        assert_eq!(
            [0, 15, 16, 35].map(|block| dynamic.payload(block)),
            [0, 15, 17, 37]
        );
        assert_eq!([0, 15, 16].map(|block| dynamic.bitmap(block)), [16, 16, 33]);
        let differencing = shape(9 << 30, true);
        assert_eq!(differencing.entries, 3 * 17);
        assert_eq!(differencing.bitmap(35), 50);
        assert_eq!(shape(0, false).entries, 0);
        assert_eq!(shape(1, false).entries, 1);
        // A full chunk needs no bitmap entry behind it.
        assert_eq!(shape(4 << 30, false).entries, 16);
        for block in 0..36 {
            assert_eq!(dynamic.block_of(dynamic.payload(block) as u64), Some(block));
        }
        assert_eq!(dynamic.block_of(16), None);
    }

    #[test]
    fn an_entry_tells_state_and_place() {
        let entry = Entry::fully_present(5 << 20);
        assert_eq!(entry.state(), Some(State::FullyPresent));
        assert_eq!(entry.offset_bytes(), 5 << 20);
        assert_eq!(Entry::ZERO.state(), Some(State::Zero));
        assert_eq!(Entry(4).state(), None);
    }

    proptest! {
        #[test]
        fn runs_are_those_of_single_bits(
            bitmap in proptest::collection::vec(prop_oneof![Just(0u8), Just(255), any::<u8>()], 1..20),
            first in 0u64..160,
            count in 1u64..200,
        ) {
            let bit = |sector: u64| bitmap.get((sector / 8) as usize).is_some_and(|byte| byte >> (sector % 8) & 1 == 1);
            let len = (0..count).take_while(|at| bit(first + at) == bit(first)).count() as u64;
            prop_assert_eq!(bitmap_run(&bitmap, first, count), (bit(first), len));
        }
    }
}
