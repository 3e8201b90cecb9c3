//! Numbers and checksums of VHDX, whose bytes are all little-endian.

pub(super) use crate::fields::{array, le16, le32, le64, put};

/// CRC-32C of `bytes`, those of the checksum itself (4 at offset 4 in all structures of VHDX) taken for zero.
pub(super) fn checksum(bytes: &[u8]) -> Option<u32> {
    let sum = crc32c::crc32c(bytes.get(..4)?);
    let sum = crc32c::crc32c_append(sum, &[0; 4]);
    Some(crc32c::crc32c_append(sum, bytes.get(8..)?))
}

/// Whether a structure has the checksum that it says it has.
pub(super) fn checksum_is_right(bytes: &[u8]) -> bool {
    checksum(bytes).is_some_and(|sum| le32(bytes, 4) == Some(sum))
}

/// Writes the checksum of a structure into it.
pub(super) fn put_checksum(bytes: &mut [u8]) {
    if let Some(sum) = checksum(bytes) {
        put(bytes, 4, &sum.to_le_bytes());
    }
}
