//! Descriptors of compressed clusters.

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::limits::{COMPRESSED_SECTOR_BYTES, HOST_OFFSET_END};
use crate::types::HostOffset;
use alloc::format;

/// Bit 62 of an L2 entry: the descriptor is one of a compressed cluster.
pub(crate) const COMPRESSED: u64 = 1 << 62;

/// Where a compressed cluster's data is and how far it may reach.
///
/// Only sectors of 512 bytes are counted, so the data ends somewhere within the
/// last one; another cluster's data may begin there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CompressedDescriptor {
    /// First byte of the data; aligned to nothing.
    pub host_offset: HostOffset,
    /// Sectors beyond the one that holds the first byte.
    pub additional_sectors: u32,
}

/// Bits of the descriptor that hold the offset; the rest up to bit 61 count sectors.
const fn offset_bits(cluster_bits: u32) -> u32 {
    62 - (cluster_bits - 8)
}

impl CompressedDescriptor {
    /// The descriptor of `length_bytes` of data at `host_offset` in an
    /// image with clusters of `1 << cluster_bits` bytes.
    ///
    /// # Errors
    /// [`FormatErrorKind::TooLarge`] for more bytes, [`FormatErrorKind::Corrupt`] for a higher
    /// offset than the descriptor has bits for.
    pub fn new(host_offset: HostOffset, length_bytes: u64, cluster_bits: u32) -> Result<Self> {
        let in_sector = host_offset.0 % COMPRESSED_SECTOR_BYTES;
        let sectors = length_bytes
            .max(1)
            .saturating_add(in_sector)
            .div_ceil(COMPRESSED_SECTOR_BYTES);
        let additional = sectors - 1;
        if additional >= 1 << (cluster_bits - 8) {
            return Err(FormatError::new(
                FormatErrorKind::TooLarge,
                "compressed cluster descriptor",
                "additional_sectors",
                additional,
                format!("Compressed data of {length_bytes} bytes does not fit a descriptor"),
            ));
        }
        let descriptor = CompressedDescriptor {
            host_offset,
            additional_sectors: additional as u32,
        };
        descriptor.check_offset(cluster_bits)?;
        Ok(descriptor)
    }

    /// Decodes the 62 low bits of an L2 entry.
    ///
    /// # Errors
    /// [`FormatErrorKind::Corrupt`] for an offset beyond the limit of the format.
    #[inline]
    pub fn decode(entry: u64, cluster_bits: u32) -> Result<Self> {
        let shift = offset_bits(cluster_bits);
        let offset = entry & ((1 << shift) - 1);
        let sectors = (entry >> shift) & ((1 << (cluster_bits - 8)) - 1);
        let descriptor = CompressedDescriptor {
            host_offset: HostOffset(offset),
            additional_sectors: sectors as u32,
        };
        descriptor.check_offset(cluster_bits)?;
        Ok(descriptor)
    }

    /// The L2 entry, with the compressed flag set.
    #[inline]
    pub const fn encode(self, cluster_bits: u32) -> u64 {
        let shift = offset_bits(cluster_bits);
        COMPRESSED | ((self.additional_sectors as u64) << shift) | self.host_offset.0
    }

    /// Most bytes that the data may have: up to the end of the last sector.
    #[inline]
    pub const fn max_len_bytes(self) -> u64 {
        (self.additional_sectors as u64 + 1) * COMPRESSED_SECTOR_BYTES
            - self.host_offset.0 % COMPRESSED_SECTOR_BYTES
    }

    /// The end of the last sector, where the data must have ended.
    #[inline]
    pub const fn end(self) -> HostOffset {
        HostOffset(self.host_offset.0 + self.max_len_bytes())
    }

    /// The first host byte beyond what a descriptor can point at (I23).
    pub const fn offset_end(cluster_bits: u32) -> u64 {
        let by_width = 1 << offset_bits(cluster_bits);
        if by_width < HOST_OFFSET_END {
            by_width
        } else {
            HOST_OFFSET_END
        }
    }

    fn check_offset(self, cluster_bits: u32) -> Result<()> {
        if self.host_offset.0 < Self::offset_end(cluster_bits) {
            return Ok(());
        }
        Err(beyond_limit(self.host_offset.0))
    }
}

#[cold]
fn beyond_limit(offset: u64) -> FormatError {
    FormatError::new(
        FormatErrorKind::Corrupt,
        "compressed cluster descriptor",
        "host_offset",
        offset,
        format!("Compressed cluster offset {offset:#x} is beyond the limit of the format"),
    )
}
