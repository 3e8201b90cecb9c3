//! Entries of the L1 table.

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::geometry::Geometry;
use crate::types::HostOffset;
use alloc::format;

const COPIED: u64 = 1 << 63;
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const RESERVED_MASK: u64 = 0x7f00_0000_0000_01ff;

/// Bytes of an L1 entry.
pub const L1_ENTRY_SIZE_BYTES: u64 = 8;

/// One entry of an L1 table, as stored: where an L2 table is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct L1Entry(pub u64);

impl L1Entry {
    /// Nothing is mapped.
    pub const UNALLOCATED: Self = Self(0);

    /// The entry that points at the L2 table at `l2_offset`; `copied` says that
    /// the table's refcount is exactly one.
    pub const fn new(l2_offset: HostOffset, copied: bool) -> Self {
        Self((l2_offset.0 & OFFSET_MASK) | if copied { COPIED } else { 0 })
    }

    /// Reads entry `index` of a table's bytes; `None` beyond its end.
    pub fn read(table: &[u8], index: usize) -> Option<Self> {
        bytes::be64(table, index.checked_mul(8)?).map(Self)
    }

    /// Writes entry `index` of a table's bytes; false beyond its end.
    #[must_use]
    pub fn write(self, table: &mut [u8], index: usize) -> bool {
        bytes::put_be64(table, index.checked_mul(8), self.0)
    }

    /// The offset field as stored, aligned or not; 0 if nothing is mapped.
    pub const fn raw_offset(self) -> u64 {
        self.0 & OFFSET_MASK
    }

    /// Where the L2 table is: `None` if nothing is mapped.
    ///
    /// # Errors
    /// [`FormatErrorKind::Corrupt`] if the offset does not start a cluster (I1).
    #[inline]
    pub fn decode(self, geometry: &Geometry) -> Result<Option<HostOffset>> {
        let offset = self.raw_offset();
        if !geometry.is_cluster_aligned(offset) {
            return Err(unaligned(offset));
        }
        Ok((offset != 0).then_some(HostOffset(offset)))
    }

    /// Where the L2 table is, for entries that [`L1Entry::decode`] has accepted.
    #[inline]
    pub const fn l2_offset(self) -> Option<HostOffset> {
        match self.raw_offset() {
            0 => None,
            offset => Some(HostOffset(offset)),
        }
    }

    /// Whether the L2 table's refcount is exactly one, so that it may be
    /// changed in place. Accurate in the active L1 table only.
    #[inline]
    pub const fn copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// The same entry with the copied flag set or clear.
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        Self((self.0 & !COPIED) | if copied { COPIED } else { 0 })
    }

    /// Reserved bits that are set. As in QEMU they are ignored when the entry is
    /// used, and a finding when the image is checked.
    pub const fn reserved_bits(self) -> u64 {
        self.0 & RESERVED_MASK
    }
}

#[cold]
fn unaligned(offset: u64) -> FormatError {
    FormatError::new(
        FormatErrorKind::Corrupt,
        "L1 entry",
        "l2_offset",
        offset,
        format!("L2 table offset {offset:#x} unaligned"),
    )
}
