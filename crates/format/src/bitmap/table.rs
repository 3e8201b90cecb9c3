//! Bitmap tables: where each cluster of a bitmap's bits is.

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::geometry::Geometry;
use crate::types::HostOffset;
use alloc::format;

const ALL_ONES: u64 = 1;
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// Bytes of a bitmap table entry.
pub const BITMAP_TABLE_ENTRY_SIZE_BYTES: u64 = 8;

/// One entry of a bitmap table, as stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct BitmapTableEntry(pub u64);

/// Where the bits of one cluster's worth of bitmap are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BitmapCluster {
    /// All bits are 0.
    Zeros,
    /// All bits are 1.
    Ones,
    /// The bits are in this host cluster.
    Stored(HostOffset),
}

impl BitmapTableEntry {
    /// Reads entry `index` of a table's bytes; `None` beyond its end.
    pub fn read(table: &[u8], index: usize) -> Option<Self> {
        bytes::be64(table, index.checked_mul(8)?).map(Self)
    }

    /// Writes entry `index` of a table's bytes; false beyond its end.
    #[must_use]
    pub fn write(self, table: &mut [u8], index: usize) -> bool {
        bytes::put_be64(table, index.checked_mul(8), self.0)
    }

    /// Where the bits are; unlike in L1 and L2 tables, reserved bits are refused (I35).
    ///
    /// # Errors
    /// [`FormatErrorKind::Corrupt`] for reserved bits that are set, or an offset that does not
    /// start a cluster.
    pub fn decode(self, geometry: &Geometry) -> Result<BitmapCluster> {
        let offset = self.0 & OFFSET_MASK;
        let rest = self.0 & !OFFSET_MASK;
        match (offset, rest) {
            (0, 0) => Ok(BitmapCluster::Zeros),
            (0, ALL_ONES) => Ok(BitmapCluster::Ones),
            (_, 0) if geometry.is_cluster_aligned(offset) => {
                Ok(BitmapCluster::Stored(HostOffset(offset)))
            }
            _ => Err(FormatError::new(
                FormatErrorKind::Corrupt,
                "bitmap table entry",
                "entry",
                self.0,
                format!("Bitmap table entry {:#x} is invalid", self.0),
            )),
        }
    }
}

impl BitmapCluster {
    /// The entry that says this.
    pub const fn encode(self) -> BitmapTableEntry {
        BitmapTableEntry(match self {
            BitmapCluster::Zeros => 0,
            BitmapCluster::Ones => ALL_ONES,
            BitmapCluster::Stored(offset) => offset.0 & OFFSET_MASK,
        })
    }
}
