//! The header, as bytes.

use vellum::{Error, ErrorKind, Result};

use crate::fields::{le32, le64, put};

/// What an image has before its map.
pub(super) const HEADER_BYTES: usize = 512;
pub(super) const SECTOR_BYTES: u64 = 512;
/// The only size of blocks that there is.
pub(super) const BLOCK_BYTES: u64 = 1 << 20;
/// As many blocks as QEMU takes: their map has just under 2 GiB.
pub(super) const MAX_BLOCKS: u32 = 0x1fff_ffff - 0x7f;
/// The largest disk of so many blocks.
pub(super) const MAX_BYTES: u64 = MAX_BLOCKS as u64 * BLOCK_BYTES;

const SIGNATURE: u32 = 0xbeda_107f;
const VERSION_1_1: u32 = 0x0001_0001;
const TEXT: &[u8] = b"<<< QEMU VM Virtual Disk Image >>>\n";
/// Bytes of the header that count, from the place of its own size on.
const HEADER_SIZE: u32 = 0x180;

/// An entry of a block that was never written.
pub(super) const UNALLOCATED: u32 = 0xffff_ffff;
/// An entry of a block that was discarded: it reads as zeroes.
pub(super) const DISCARDED: u32 = 0xffff_fffe;

/// Where a block's bytes are, if it has any.
pub(super) fn allocated(entry: u32) -> Option<u32> {
    (entry < DISCARDED).then_some(entry)
}

/// What the header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Everything was allocated when the image was made.
    pub is_static: bool,
    /// Where the map is, in bytes.
    pub map_bytes: u64,
    /// Where the first block is, in bytes.
    pub data_bytes: u64,
    /// The virtual size in bytes.
    pub size_bytes: u64,
    /// Entries of the map.
    pub blocks: u32,
    /// Blocks that have a place in the file.
    pub allocated_blocks: u32,
}

fn unsupported(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, "open", message)
}

impl Header {
    /// A header for a new image.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a size beyond what the format has.
    pub fn new(size_bytes: u64, is_static: bool) -> Result<Header> {
        check_size(size_bytes)?;
        let blocks = size_bytes.div_ceil(BLOCK_BYTES) as u32;
        let map_bytes = HEADER_BYTES as u64;
        let table_bytes = (u64::from(blocks) * 4).next_multiple_of(SECTOR_BYTES);
        Ok(Header {
            is_static,
            map_bytes,
            data_bytes: map_bytes + table_bytes,
            size_bytes,
            blocks,
            allocated_blocks: if is_static { blocks } else { 0 },
        })
    }

    /// Reads the first sector of an image.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for what is no VDI image, [`ErrorKind::Unsupported`] for one that has what
    /// nobody but VirtualBox reads.
    pub fn decode(bytes: &[u8]) -> Result<Header> {
        let short = || Error::new(ErrorKind::InvalidImage, "open", "the header is cut off");
        let number = |at| le32(bytes, at).ok_or_else(short);
        let signature = number(64)?;
        let size_bytes = le64(bytes, 368).ok_or_else(short)?;
        check_size(size_bytes)?;
        if signature != SIGNATURE {
            let message = format!("Image not in VDI format (bad signature {signature:08x})");
            return Err(Error::new(ErrorKind::InvalidImage, "open", message));
        }
        let version = number(68)?;
        if version != VERSION_1_1 {
            let (major, minor) = (version >> 16, version & 0xffff);
            return Err(unsupported(format!(
                "unsupported VDI image (version {major}.{minor})"
            )));
        }
        let header = Header {
            is_static: number(76)? == 2,
            map_bytes: u64::from(number(340)?),
            data_bytes: u64::from(number(344)?),
            size_bytes: size_bytes.next_multiple_of(SECTOR_BYTES),
            blocks: number(384)?,
            allocated_blocks: number(388)?,
        };
        header.check(number(360)?, number(376)?)?;
        let uuid_is_null = |at: usize| {
            bytes
                .get(at..at + 16)
                .is_some_and(|id| id.iter().all(|&b| b == 0))
        };
        for (name, at) in [("link", 424), ("parent", 440)] {
            if !uuid_is_null(at) {
                return Err(unsupported(format!(
                    "unsupported VDI image (non-NULL {name} UUID)"
                )));
            }
        }
        match header.blocks > MAX_BLOCKS {
            false => Ok(header),
            true => Err(unsupported(format!(
                "unsupported VDI image (too many blocks {}, max is {MAX_BLOCKS})",
                header.blocks
            ))),
        }
    }

    fn check(&self, sector_bytes: u32, block_bytes: u32) -> Result<()> {
        let why = if !self.map_bytes.is_multiple_of(SECTOR_BYTES) {
            format!("unaligned block map offset {:#x}", self.map_bytes)
        } else if !self.data_bytes.is_multiple_of(SECTOR_BYTES) {
            format!("unaligned data offset {:#x}", self.data_bytes)
        } else if u64::from(sector_bytes) != SECTOR_BYTES {
            format!("sector size {sector_bytes} is not {SECTOR_BYTES}")
        } else if u64::from(block_bytes) != BLOCK_BYTES {
            format!("block size {block_bytes} is not {BLOCK_BYTES}")
        } else if self.size_bytes > u64::from(self.blocks) * BLOCK_BYTES {
            let room = u64::from(self.blocks) * BLOCK_BYTES;
            format!(
                "disk size {}, image bitmap has room for {room}",
                self.size_bytes
            )
        } else {
            return Ok(());
        };
        Err(unsupported(format!("unsupported VDI image ({why})")))
    }

    /// The first sector of a new image; `ids` make it and its last change known.
    pub fn encode(&self, ids: &[[u8; 16]; 2]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        put(&mut bytes, 0, TEXT);
        let numbers = [
            (64, SIGNATURE),
            (68, VERSION_1_1),
            (72, HEADER_SIZE),
            (76, if self.is_static { 2 } else { 1 }),
            (340, self.map_bytes as u32),
            (344, self.data_bytes as u32),
            (360, SECTOR_BYTES as u32),
            (376, BLOCK_BYTES as u32),
            (384, self.blocks),
            (ALLOCATED_AT, self.allocated_blocks),
        ];
        for (at, number) in numbers {
            put(&mut bytes, at, &number.to_le_bytes());
        }
        put(&mut bytes, 368, &self.size_bytes.to_le_bytes());
        put(&mut bytes, 392, &ids[0]);
        put(&mut bytes, 408, &ids[1]);
        bytes
    }
}

/// Where the count of allocated blocks stands.
pub(super) const ALLOCATED_AT: usize = 388;

fn check_size(size_bytes: u64) -> Result<()> {
    match size_bytes > MAX_BYTES {
        false => Ok(()),
        true => Err(unsupported(format!(
            "Unsupported VDI image size (size is {size_bytes:#x}, max supported is {MAX_BYTES:#x})"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        for (size, is_static) in [
            (0, false),
            (10_000_384, false),
            (5 << 30, true),
            (MAX_BYTES, false),
        ] {
            let header = Header::new(size, is_static).unwrap();
            let bytes = header.encode(&[[1; 16], [2; 16]]);
            assert_eq!(Header::decode(&bytes).unwrap(), header);
        }
        assert!(Header::new(MAX_BYTES + 1, false).is_err());
    }

    #[test]
    fn each_fault_has_its_words() {
        let good = Header::new(1 << 30, false)
            .unwrap()
            .encode(&[[1; 16], [2; 16]]);
        let faults: [(usize, u32, &str); 9] = [
            (64, 1, "bad signature 00000001"),
            (68, 0x2_0003, "version 2.3"),
            (340, 513, "unaligned block map offset 0x201"),
            (344, 511, "unaligned data offset 0x1ff"),
            (360, 4096, "sector size 4096"),
            (376, 4096, "block size 4096"),
            (384, 3, "image bitmap has room for 3145728"),
            (424, 1, "non-NULL link UUID"),
            (440, 1, "non-NULL parent UUID"),
        ];
        for (at, value, words) in faults {
            let mut bytes = good.clone();
            put(&mut bytes, at, &value.to_le_bytes());
            let error = Header::decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_header_or_an_error(
            mut bytes in prop::collection::vec(any::<u8>(), 0..600), signed: bool,
        ) {
            if signed {
                put(&mut bytes, 64, &SIGNATURE.to_le_bytes());
                put(&mut bytes, 68, &VERSION_1_1.to_le_bytes());
            }
            let _ = Header::decode(&bytes);
        }
    }
}
