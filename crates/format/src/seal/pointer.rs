//! Where an image's seal is, and what all seals have in common.

use alloc::borrow::Cow;
use alloc::vec::Vec;

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};

/// A BLAKE3 hash.
pub type Hash = [u8; 32];

/// The hash of a leaf of which the image holds nothing itself.
pub const NOTHING: Hash = [0; 32];

/// Bytes of a node, and of the superblock.
pub const NODE_BYTES: usize = 4096;

/// Guest bytes of a leaf.
pub const LEAF_BYTES: u64 = 4096;

/// Hashes in a hash node.
pub const HASHES_PER_NODE: u64 = 128;

/// Guest bytes under a hash node of the content's tree.
pub const NODE_GUEST_BYTES: u64 = LEAF_BYTES * HASHES_PER_NODE;

/// Where the seal of an image lies: the data of the header extension [`SEAL`].
///
/// [`SEAL`]: crate::extension::kind::SEAL
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealPointer {
    /// Where its area begins in the image file; the start of a cluster.
    pub offset_bytes: u64,
    /// Bytes of the area, a multiple of [`NODE_BYTES`].
    pub length_bytes: u64,
}

const POINTER_VERSION: u32 = 1;

const POINTER_BYTES: usize = 24;

impl SealPointer {
    /// Decodes the data of the extension, of an image with clusters of `cluster_bytes`.
    ///
    /// # Errors
    /// [`FormatErrorKind::Unsupported`] for another version, [`FormatErrorKind::Invalid`] for a
    /// place that no area can have.
    pub fn decode(data: &[u8], cluster_bytes: u64) -> Result<SealPointer> {
        if data.len() != POINTER_BYTES {
            return Err(fault("length", data.len() as u64, "wrong length"));
        }
        let version = bytes::be32(data, 0).unwrap_or_default();
        if version != POINTER_VERSION {
            return Err(unsupported("version", version.into()));
        }
        let reserved = bytes::be32(data, 4).unwrap_or_default();
        let pointer = SealPointer {
            offset_bytes: bytes::be64(data, 8).unwrap_or_default(),
            length_bytes: bytes::be64(data, 16).unwrap_or_default(),
        };
        let (at, len) = (pointer.offset_bytes, pointer.length_bytes);
        let ends = at
            .checked_add(len)
            .is_some_and(|end| end <= i64::MAX as u64);
        if reserved != 0 || at == 0 || !at.is_multiple_of(cluster_bytes.max(1)) {
            return Err(fault("offset", at, "no place of a seal"));
        }
        if len == 0 || !len.is_multiple_of(NODE_BYTES as u64) || !ends {
            return Err(fault("length", len, "no length of a seal"));
        }
        Ok(pointer)
    }

    /// The data of the extension.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(POINTER_BYTES);
        data.extend_from_slice(&POINTER_VERSION.to_be_bytes());
        data.extend_from_slice(&[0; 4]);
        data.extend_from_slice(&self.offset_bytes.to_be_bytes());
        data.extend_from_slice(&self.length_bytes.to_be_bytes());
        data
    }
}

pub(crate) fn fault(
    field: &'static str,
    value: u64,
    message: impl Into<Cow<'static, str>>,
) -> FormatError {
    FormatError::new(FormatErrorKind::Invalid, "seal", field, value, message)
}

pub(crate) fn unsupported(field: &'static str, value: u64) -> FormatError {
    FormatError::new(
        FormatErrorKind::Unsupported,
        "seal",
        field,
        value,
        "a newer program has made it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_survives_and_odd_ones_are_refused() {
        let pointer = SealPointer {
            offset_bytes: 0x30000,
            length_bytes: 0x3000,
        };
        let data = pointer.encode();
        assert_eq!(SealPointer::decode(&data, 0x10000).as_ref(), Ok(&pointer));
        assert!(
            SealPointer::decode(&data, 0x20000).is_err(),
            "inside a cluster"
        );
        assert!(SealPointer::decode(&data[1..], 0x10000).is_err());
        for (at, bit) in [(3, 2), (7, 1), (23, 1), (16, 0x80)] {
            let mut broken = data.clone();
            broken[at] ^= bit;
            assert!(SealPointer::decode(&broken, 0x10000).is_err(), "byte {at}");
        }
    }
}
