//! The header of dynamic and differencing images: where the table is, how large blocks are, who the parent is.

use vellum::{Error, ErrorKind, Result};

use super::footer::{LEN_BYTES as FOOTER_BYTES, checksum};
use super::invalid;
use crate::fields::put;
use crate::fields::{array, be32, be64};

/// What the header takes, in bytes.
pub(super) const LEN_BYTES: usize = 1024;
/// Where the checksum stands.
const SUM_AT: usize = 36;
/// Size of the blocks of new images, in bytes.
pub(super) const BLOCK_BYTES: u32 = 2 << 20;
/// Where the table of new images is, in bytes: behind the footer's copy and the header.
pub(super) const TABLE_BYTES: u64 = (FOOTER_BYTES + LEN_BYTES) as u64;
/// An entry of a block that has no place.
pub(super) const UNALLOCATED: u32 = 0xffff_ffff;
/// The table is kept in memory: so many entries take 64 MiB, and map 2040 GiB in blocks of 128 KiB.
const MAX_ENTRIES: u32 = 16 << 20;

/// One of the eight ways to the parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Locator {
    /// Which system's paths it has.
    pub platform: [u8; 4],
    /// What was set aside for it, in sectors or, as some have it, in bytes.
    space: u32,
    pub len_bytes: u32,
    pub offset_bytes: u64,
}

impl Locator {
    /// Where its place ends, which is within a file so long: nothing else may be put there.
    pub(super) fn end_bytes(&self, file_bytes: u64) -> Option<u64> {
        let space_bytes = match self.space {
            sectors @ ..512 => u64::from(sectors) * 512,
            bytes => bytes.into(),
        };
        let end = |len_bytes: u64| {
            let end = self.offset_bytes.checked_add(len_bytes)?;
            Some(end.checked_next_multiple_of(512)?).filter(|end| *end <= file_bytes)
        };
        end(space_bytes.max(self.len_bytes.into())).or_else(|| end(self.len_bytes.into()))
    }
}

/// What the header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    /// Where the table is in the file.
    pub table_bytes: u64,
    pub entries: u32,
    /// A power of two.
    pub block_bytes: u32,
    pub parent_id: [u8; 16],
    /// The parent's file name, without a folder.
    pub parent_name: String,
    pub locators: Vec<Locator>,
}

impl Header {
    /// Reads the header of a disk of so many sectors.
    pub(super) fn decode(bytes: &[u8], sectors: u64) -> Result<Header> {
        if !bytes.starts_with(b"cxsparse") {
            return Err(invalid("Invalid header magic"));
        }
        let fields = || {
            Some((
                be64(bytes, 16)?,
                be32(bytes, 28)?,
                be32(bytes, 32)?,
                array(bytes, 40)?,
            ))
        };
        let (table_bytes, entries, block_bytes, parent_id) =
            fields().ok_or_else(|| invalid("Error reading dynamic VHD header"))?;
        if !block_bytes.is_power_of_two() || block_bytes < 512 {
            return Err(invalid(format!("Invalid block size {block_bytes}")));
        }
        let size_bytes = sectors * 512;
        if size_bytes / u64::from(block_bytes) > u64::from(u32::MAX) {
            return Err(invalid("Too many blocks"));
        }
        if u64::from(entries) * u64::from(block_bytes) < size_bytes {
            return Err(invalid("Page table too small"));
        }
        if entries > MAX_ENTRIES {
            let message = format!("Max Table Entries too large ({})", entries.cast_signed());
            return Err(Error::new(ErrorKind::Unsupported, "open", message));
        }
        let name = bytes.get(64..576).unwrap_or_default();
        let locators = (0..8).filter_map(|index| decode_locator(bytes, 576 + 24 * index));
        Ok(Header {
            table_bytes,
            entries,
            block_bytes,
            parent_id,
            parent_name: text_of(
                name.chunks_exact(2)
                    .map(|unit| u16::from_be_bytes([unit[0], unit[1]])),
            ),
            locators: locators.collect(),
        })
    }

    /// The header of a new image without a parent.
    pub(super) fn encode(entries: u32) -> Vec<u8> {
        let mut bytes = vec![0; LEN_BYTES];
        put(&mut bytes, 0, b"cxsparse");
        put(&mut bytes, 8, &u64::MAX.to_be_bytes());
        put(&mut bytes, 16, &TABLE_BYTES.to_be_bytes());
        put(&mut bytes, 24, &0x0001_0000u32.to_be_bytes());
        put(&mut bytes, 28, &entries.to_be_bytes());
        put(&mut bytes, 32, &BLOCK_BYTES.to_be_bytes());
        put_checksum(&mut bytes);
        bytes
    }

    /// What the bitmap before each block takes, in bytes: a bit for each sector, in whole sectors.
    pub(super) fn bitmap_bytes(&self) -> u64 {
        // As QEMU counts: none for blocks of less than 4 KiB.
        u64::from(self.block_bytes / (8 * 512)).next_multiple_of(512)
    }
}

pub(super) fn put_checksum(bytes: &mut [u8]) {
    let sum = checksum(bytes, SUM_AT);
    put(bytes, SUM_AT, &sum.to_be_bytes());
}

fn decode_locator(bytes: &[u8], at: usize) -> Option<Locator> {
    let locator = Locator {
        platform: be32(bytes, at)?.to_be_bytes(),
        space: be32(bytes, at + 4)?,
        len_bytes: be32(bytes, at + 8)?,
        offset_bytes: be64(bytes, at + 16)?,
    };
    (locator.platform != [0; 4]).then_some(locator)
}

/// A text in UTF-16, up to its first NUL.
pub(super) fn text_of(units: impl Iterator<Item = u16>) -> String {
    let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
    String::from_utf16_lossy(&units)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_header_goes_there_and_back() {
        let header = Header::decode(&Header::encode(5), 5 * 4096).unwrap();
        assert_eq!((header.entries, header.block_bytes), (5, BLOCK_BYTES));
        assert_eq!((header.table_bytes, header.bitmap_bytes()), (1536, 512));
        assert_eq!(header.parent_name, "");
        assert!(header.locators.is_empty());
    }

    #[test]
    fn each_fault_has_qemus_words() {
        let good = Header::encode(5);
        let faults: [(usize, u32, u64, &str); 5] = [
            (0, 0, 1, "Invalid header magic"),
            (32, 3 << 20, 1, "Invalid block size 3145728"),
            (32, 256, 1, "Invalid block size 256"),
            (28, 4, 5 * 4096, "Page table too small"),
            (28, u32::MAX, 1, "Max Table Entries too large (-1)"),
        ];
        for (at, value, sectors, words) in faults {
            let mut bytes = good.clone();
            put(&mut bytes, at, &value.to_be_bytes());
            let error = Header::decode(&bytes, sectors).unwrap_err();
            assert_eq!(error.message(), words);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_header_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..1100), sectors in 0..=0xff00_0000u64,
        ) {
            let mut bytes = bytes;
            put(&mut bytes, 0, b"cxsparse");
            put(&mut bytes, 32, &BLOCK_BYTES.to_be_bytes());
            let _ = Header::decode(&bytes, sectors);
        }
    }
}
