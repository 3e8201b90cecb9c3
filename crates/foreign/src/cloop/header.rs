//! The header of a cloop image, and the checks of its offsets.

use vellum::{Error, ErrorKind, Result};

use crate::fields::be32;

/// What stands before the offsets.
pub(super) const HEADER_BYTES: usize = 136;
const BLOCK_SIZE_AT: usize = 128;
const BLOCKS_AT: usize = 132;
/// The largest block, compressed at most twice as large.
const MOST_BLOCK_BYTES: u32 = 64 << 20;
/// The offsets take at most 512 MiB.
const MOST_OFFSETS: u64 = (512 << 20) / 8;

const SCRIPT: &[u8] =
    b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n";

pub(super) fn has_magic(bytes: &[u8]) -> bool {
    let len = SCRIPT.len().min(bytes.len());
    len > 0 && bytes.get(..len) == SCRIPT.get(..len)
}

/// What the header says, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What a block holds, in bytes; whole sectors.
    pub block_bytes: u32,
    /// How many blocks there are.
    pub blocks: u32,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

impl Header {
    /// Reads a header. What stands before its numbers does not matter.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for all that QEMU refuses, in its words.
    pub fn decode(bytes: &[u8]) -> Result<Header> {
        let field = |at| be32(bytes, at).ok_or_else(|| invalid("the header is cut off"));
        let header = Header {
            block_bytes: field(BLOCK_SIZE_AT)?,
            blocks: field(BLOCKS_AT)?,
        };
        let block_bytes = header.block_bytes;
        if !block_bytes.is_multiple_of(512) {
            let message = format!("block_size {block_bytes} must be a multiple of 512");
            return Err(invalid(message));
        }
        if block_bytes == 0 {
            return Err(invalid("block_size cannot be zero"));
        }
        if block_bytes > MOST_BLOCK_BYTES {
            let message = format!("block_size {block_bytes} must be 64 MB or less");
            return Err(invalid(message));
        }
        let most_blocks = (u32::MAX - 1) / 8;
        if header.blocks > most_blocks {
            let message = format!("n_blocks {} must be {most_blocks} or less", header.blocks);
            return Err(invalid(message));
        }
        if header.offsets() > MOST_OFFSETS {
            let message = "image requires too many offsets, try increasing block size";
            return Err(invalid(message));
        }
        Ok(header)
    }

    /// How many offsets there are: one more than blocks.
    pub fn offsets(&self) -> u64 {
        u64::from(self.blocks) + 1
    }

    /// The virtual size in bytes.
    pub fn size_bytes(&self) -> u64 {
        u64::from(self.block_bytes) * u64::from(self.blocks)
    }
}

/// The length of the compressed block that ends at the offset with a number.
pub(super) fn compressed_bytes(number: u64, start_bytes: u64, end_bytes: u64) -> Result<u64> {
    let Some(len_bytes) = end_bytes.checked_sub(start_bytes) else {
        let message = format!(
            "offsets not monotonically increasing at index {number}, image file is corrupt"
        );
        return Err(invalid(message));
    };
    if len_bytes > 2 * u64::from(MOST_BLOCK_BYTES) {
        let message =
            format!("invalid compressed block size at index {number}, image file is corrupt");
        return Err(invalid(message));
    }
    Ok(len_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(block_bytes: u32, blocks: u32) -> Vec<u8> {
        let mut bytes = SCRIPT.to_vec();
        bytes.resize(BLOCK_SIZE_AT, 0);
        bytes.extend(block_bytes.to_be_bytes());
        bytes.extend(blocks.to_be_bytes());
        bytes
    }

    #[test]
    fn what_qemu_refuses_is_refused_in_its_words() {
        for (block_bytes, blocks, message) in [
            (513, 1, "block_size 513 must be a multiple of 512"),
            (0, 1, "block_size cannot be zero"),
            (128 << 20, 1, "block_size 134217728 must be 64 MB or less"),
            (
                512,
                u32::MAX,
                "n_blocks 4294967295 must be 536870911 or less",
            ),
            (
                512,
                536_870_911,
                "image requires too many offsets, try increasing block size",
            ),
        ] {
            let error = Header::decode(&header(block_bytes, blocks)).unwrap_err();
            assert_eq!(error.message(), message);
        }
        assert!(
            compressed_bytes(3, 10, 9)
                .unwrap_err()
                .message()
                .contains("index 3")
        );
        assert!(compressed_bytes(3, 0, 129 << 20).is_err());
        let good = Header::decode(&header(512, 7)).unwrap();
        assert_eq!((good.offsets(), good.size_bytes()), (8, 3584));
        assert!(has_magic(&header(512, 7)) && !has_magic(b"") && !has_magic(b"QFI"));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_header_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(header) = Header::decode(&bytes) {
                header.size_bytes();
            }
        }
    }
}
