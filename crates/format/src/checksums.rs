//! Checksums: a file beside the image with a CRC32C for each 4 KiB of the image's file
//! (FORMAT.md, section 7c). Vellum's own.
//!
//! ```text
//! file    | superblock | group | group | ...
//! group   | 512 entries | 512 pages |
//! entry   8 bytes: 0, or 1 and the CRC32C of the page
//! page    1024 sums, 4 bytes each
//! ```
//!
//! A page holds the sums of a *region* of the image's file, 4 MiB. All numbers are big-endian.

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::write_log::LogId;
use alloc::vec::Vec;

/// What one sum is taken of.
pub const BLOCK_BYTES: u64 = 4096;
/// Sums in a page.
pub const SUMS_PER_PAGE: u64 = 1024;
/// What a page holds the sums of.
pub const REGION_BYTES: u64 = SUMS_PER_PAGE * BLOCK_BYTES;
/// Bytes of a page, of a group's entries, and of the superblock.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes of an entry.
pub const ENTRY_BYTES: u64 = 8;
/// Entries, and pages, of a group.
pub const PAGES_PER_GROUP: u64 = PAGE_BYTES / ENTRY_BYTES;

const GROUP_BYTES: u64 = (1 + PAGES_PER_GROUP) * PAGE_BYTES;
/// `"VLLMSUMS"`
const MAGIC: [u8; 8] = *b"VLLMSUMS";
const VERSION: u32 = 1;
/// Where the superblock's own checksum lies, and what it is taken of ends.
const CRC: usize = 12;
const SUPERBLOCK_BYTES: usize = 48;
/// Where [`Superblock::left_at`] lies, and its own checksum.
const LEFT_AT: usize = 48;
const LEFT_AT_CRC: usize = 56;
/// An entry that leads to a page has this bit.
const SETTLED: u64 = 1 << 32;
/// What stands for the CRC32Cs that mean something else.
const SUM_OF_RESERVED: u32 = 0xffff_ffff;

/// No image's.
const NOBODY: LogId = LogId([0; 16]);

/// No sum is known.
pub const UNKNOWN: u32 = 0;
/// A part of the block was written after the disk had changed another one: whatever it
/// holds is wrong.
pub const DAMAGED: u32 = 0xffff_fffe;

/// Where the entry of a region lies in the file, in bytes.
pub fn entry_offset_bytes(region: u64) -> u64 {
    let group = PAGE_BYTES + region / PAGES_PER_GROUP * GROUP_BYTES;
    group + region % PAGES_PER_GROUP * ENTRY_BYTES
}

/// Where the page of a region lies in the file, in bytes.
pub fn page_offset_bytes(region: u64) -> u64 {
    let group = PAGE_BYTES + region / PAGES_PER_GROUP * GROUP_BYTES;
    group + (1 + region % PAGES_PER_GROUP) * PAGE_BYTES
}

/// How many regions a file of `len_bytes` bytes may have pages of.
pub fn regions_in(len_bytes: u64) -> u64 {
    let groups_bytes = len_bytes.saturating_sub(PAGE_BYTES);
    let pages = (groups_bytes % GROUP_BYTES).div_ceil(PAGE_BYTES);
    groups_bytes / GROUP_BYTES * PAGES_PER_GROUP + pages.saturating_sub(1)
}

/// The sum of a block whose bytes are `parts`, one behind the other; never [`UNKNOWN`] or [`DAMAGED`].
pub fn sum_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let parts = parts.into_iter();
    match parts.fold(0, crc32c::crc32c_append) {
        UNKNOWN | DAMAGED => SUM_OF_RESERVED,
        sum => sum,
    }
}

/// What the entry of a region says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// No sum of the region counts.
    Open,
    /// The page's sums count, if this is the page's own.
    Settled(u32),
}

impl Entry {
    /// The entry of a page that counts from now on.
    pub fn settled(page: &[u8]) -> Entry {
        Entry::Settled(crc32c::crc32c(page))
    }

    /// Decodes an entry; one that means nothing is taken for [`Entry::Open`].
    pub fn decode(raw: [u8; 8]) -> Entry {
        match u64::from_be_bytes(raw) {
            word if word >> 32 == 1 => Entry::Settled(word as u32),
            _ => Entry::Open,
        }
    }

    /// The entry's bytes.
    pub fn encode(self) -> [u8; 8] {
        match self {
            Entry::Open => [0; 8],
            Entry::Settled(crc) => (SETTLED | u64::from(crc)).to_be_bytes(),
        }
    }
}

/// The sums of a page.
pub fn decode_page(page: &[u8]) -> impl Iterator<Item = u32> {
    let sums = page.as_chunks::<4>().0.iter();
    sums.map(|raw| u32::from_be_bytes(*raw))
}

/// A page's bytes.
pub fn encode_page(sums: impl IntoIterator<Item = u32>) -> Vec<u8> {
    sums.into_iter().flat_map(u32::to_be_bytes).collect()
}

/// The first page of the file: which image's checksums these are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// The identity that stands in the image's header.
    pub id: LogId,
    /// The identity that may still stand there, while it changes.
    pub previous: Option<LogId>,
    /// When the image's file was last modified, as the one who closed it has seen; `None`: it was not closed, or
    /// its sums were not known to be those of what Vellum has written.
    pub left_at: Option<u64>,
}

impl Superblock {
    /// Whether these are the checksums of an image whose header has `id`.
    pub fn is_of(&self, id: LogId) -> bool {
        self.id == id || self.previous == Some(id)
    }

    /// The identity beside `id` that an image with these checksums may have.
    pub fn other_than(&self, id: LogId) -> Option<LogId> {
        let mut both = [Some(self.id), self.previous].into_iter().flatten();
        both.find(|other| *other != id)
    }

    /// Decodes the first page; `None` if it holds no superblock.
    ///
    /// # Errors
    /// [`FormatErrorKind::Unsupported`] for a version that is not known.
    pub fn decode(page: &[u8]) -> Result<Option<Self>> {
        let Some(raw) = page.first_chunk::<SUPERBLOCK_BYTES>() else {
            return Ok(None);
        };
        if raw[..8] != MAGIC || bytes::be32(raw, CRC) != Some(crc_of(raw)) {
            return Ok(None);
        }
        let version = bytes::be32(raw, 8).unwrap_or(0);
        if version != VERSION {
            return Err(FormatError::new(
                FormatErrorKind::Unsupported,
                "checksums",
                "version",
                u64::from(version),
                "The version of the checksums is not supported",
            ));
        }
        let id = |at| bytes::array(raw, at).map(LogId);
        Ok(id(16).map(|first| Superblock {
            id: first,
            previous: id(32).filter(|previous| *previous != NOBODY),
            left_at: left_at(page),
        }))
    }

    /// The first page's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut page = alloc::vec![0; PAGE_BYTES as usize];
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_be_bytes());
        page[16..32].copy_from_slice(&self.id.0);
        page[32..48].copy_from_slice(&self.previous.unwrap_or(NOBODY).0);
        let crc = crc_of(&page);
        page[CRC..CRC + 4].copy_from_slice(&crc.to_be_bytes());
        if let Some(left_at) = self.left_at {
            page[LEFT_AT..LEFT_AT_CRC].copy_from_slice(&left_at.to_be_bytes());
            let crc = left_at_crc_of(&page);
            page[LEFT_AT_CRC..LEFT_AT_CRC + 4].copy_from_slice(&crc.to_be_bytes());
        }
        page
    }
}

/// What a program has left that knows the field: others write zeros there.
fn left_at(page: &[u8]) -> Option<u64> {
    let raw = page.first_chunk::<{ LEFT_AT_CRC + 4 }>()?;
    (bytes::be32(raw, LEFT_AT_CRC) == Some(left_at_crc_of(raw)))
        .then(|| bytes::be64(raw, LEFT_AT))
        .flatten()
}

/// With the identity: the field is of one use of the file.
fn left_at_crc_of(raw: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&raw[16..32]);
    crc32c::crc32c_append(crc, &raw[LEFT_AT..LEFT_AT_CRC])
}

fn crc_of(raw: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&raw[..CRC]);
    crc32c::crc32c_append(crc, &raw[CRC + 4..SUPERBLOCK_BYTES])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_comes_back() {
        let superblock = Superblock {
            id: LogId([7; 16]),
            previous: Some(LogId([8; 16])),
            left_at: Some(99),
        };
        let mut page = superblock.encode();
        assert_eq!(page.len() as u64, PAGE_BYTES);
        assert_eq!(Superblock::decode(&page), Ok(Some(superblock)));
        assert_eq!(Superblock::decode(&page[..47]), Ok(None));
        let nothing_left = Superblock {
            left_at: None,
            ..superblock
        };
        page[LEFT_AT] ^= 1;
        assert_eq!(Superblock::decode(&page), Ok(Some(nothing_left)));
        page = nothing_left.encode();
        assert_eq!(Superblock::decode(&page), Ok(Some(nothing_left)));
        for bit in 0..SUPERBLOCK_BYTES * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Superblock::decode(&page), Ok(None), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        let sums: Vec<u32> = (0..SUMS_PER_PAGE as u32).collect();
        let page = encode_page(sums.iter().copied());
        assert_eq!(page.len() as u64, PAGE_BYTES);
        assert_eq!(decode_page(&page).collect::<Vec<_>>(), sums);
        for entry in [Entry::Open, Entry::settled(&page), Entry::Settled(0)] {
            assert_eq!(Entry::decode(entry.encode()), entry);
        }
        assert_eq!(Entry::decode([0xff; 8]), Entry::Open);
    }

    #[test]
    fn groups_lie_one_behind_the_other() {
        assert_eq!(entry_offset_bytes(0), 4096);
        assert_eq!(page_offset_bytes(0), 8192);
        assert_eq!(entry_offset_bytes(511), 4096 + 511 * 8);
        assert_eq!(page_offset_bytes(511) + PAGE_BYTES, entry_offset_bytes(512));
        assert_eq!(page_offset_bytes(512), entry_offset_bytes(512) + PAGE_BYTES);
        for region in [0, 1, 510, 511, 512, 513, 10_000] {
            let end_bytes = page_offset_bytes(region) + PAGE_BYTES;
            assert_eq!(regions_in(end_bytes), region + 1);
            assert_eq!(regions_in(end_bytes - 1), region + 1);
        }
        assert_eq!((regions_in(0), regions_in(4096)), (0, 0));
        // The last region of the largest image fits.
        assert!(page_offset_bytes((1 << 56) / REGION_BYTES) < 1 << 47);
    }

    #[test]
    fn a_sum_is_never_unknown() {
        assert_eq!(sum_of([&b"1234"[..], b"56789"]), 0xe306_9283);
        assert_eq!(sum_of([]), SUM_OF_RESERVED);
    }
}
