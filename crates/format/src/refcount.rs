//! The refcount table and refcount blocks of 1 to 64 bits a count.

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::geometry::Geometry;
use crate::limits;
use crate::types::HostOffset;
use alloc::format;

const OFFSET_MASK: u64 = !0x1ff;

/// Bytes of a refcount table entry.
pub const REFCOUNT_TABLE_ENTRY_SIZE_BYTES: u64 = 8;

/// One entry of the refcount table, as stored: where a refcount block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RefcountTableEntry(pub u64);

impl RefcountTableEntry {
    /// No block: every refcount in it is 0.
    pub const UNALLOCATED: Self = Self(0);

    /// The entry that points at the block at `offset`.
    pub const fn new(offset: HostOffset) -> Self {
        Self(offset.0 & OFFSET_MASK)
    }

    /// Reads entry `index` of the table's bytes; `None` beyond its end.
    pub fn read(table: &[u8], index: usize) -> Option<Self> {
        bytes::be64(table, index.checked_mul(8)?).map(Self)
    }

    /// Writes entry `index` of the table's bytes; false beyond its end.
    #[must_use]
    pub fn write(self, table: &mut [u8], index: usize) -> bool {
        bytes::put_be64(table, index.checked_mul(8), self.0)
    }

    /// The offset field as stored, aligned or not; 0 if there is no block.
    pub const fn raw_offset(self) -> u64 {
        self.0 & OFFSET_MASK
    }

    /// Where the block is: `None` if there is none.
    ///
    /// # Errors
    /// [`FormatErrorKind::Corrupt`] if the offset does not start a cluster, or is too large to
    /// be one.
    pub fn decode(self, geometry: &Geometry) -> Result<Option<HostOffset>> {
        let offset = self.raw_offset();
        if !geometry.is_cluster_aligned(offset) {
            return Err(fault(offset, "unaligned"));
        }
        if offset >= limits::HOST_OFFSET_END {
            return Err(fault(offset, "is beyond the limit of the format"));
        }
        Ok((offset != 0).then_some(HostOffset(offset)))
    }

    /// Reserved bits that are set: ignored in use, a finding in a check.
    pub const fn reserved_bits(self) -> u64 {
        self.0 & !OFFSET_MASK
    }
}

#[cold]
fn fault(offset: u64, what: &str) -> FormatError {
    FormatError::new(
        FormatErrorKind::Corrupt,
        "refcount table entry",
        "refcount_block_offset",
        offset,
        format!("Refblock offset {offset:#x} {what}"),
    )
}

/// Refcount `index` of a block whose counts have `1 << order` bits; 0 beyond the
/// end of the block.
///
/// Counts narrower than a byte fill it from the least significant bit.
#[inline]
pub fn get(block: &[u8], order: u32, index: usize) -> u64 {
    match order {
        0..=2 => {
            let per_byte_bits = 3 - order;
            let byte = block.get(index >> per_byte_bits).copied().unwrap_or(0);
            let shift = (index & ((1 << per_byte_bits) - 1)) << order;
            u64::from((byte >> shift) & narrow_mask(order))
        }
        3 => block.get(index).copied().unwrap_or(0).into(),
        4 => wide::<2>(block, index).map_or(0, |raw| u16::from_be_bytes(raw).into()),
        5 => wide::<4>(block, index).map_or(0, |raw| u32::from_be_bytes(raw).into()),
        _ => wide::<8>(block, index).map_or(0, u64::from_be_bytes),
    }
}

/// Sets refcount `index` of a block whose counts have `1 << order` bits.
///
/// False, and nothing changed, if `index` is beyond the end of the block or
/// `value` is too large for the width.
#[inline]
#[must_use]
pub fn set(block: &mut [u8], order: u32, index: usize, value: u64) -> bool {
    match order {
        0..=2 => set_narrow(block, order, index, value),
        3 => put(block, index, u8::try_from(value).map(u8::to_be_bytes).ok()),
        4 => put(
            block,
            index,
            u16::try_from(value).map(u16::to_be_bytes).ok(),
        ),
        5 => put(
            block,
            index,
            u32::try_from(value).map(u32::to_be_bytes).ok(),
        ),
        _ => put(block, index, Some(value.to_be_bytes())),
    }
}

/// Adds changes to the first counts of a block; says whether all of the sums are in
/// the block and fit the width of a count. If one does not, nothing has changed.
#[must_use]
pub fn add(block: &mut [u8], order: u32, changes: &[i32]) -> bool {
    if order == 4 {
        return add_to_words(block, changes);
    }
    let change_one = |block: &mut [u8], index: usize, change: i64| {
        let sum = get(block, order, index).checked_add_signed(change);
        change == 0 || sum.is_some_and(|sum| set(block, order, index, sum))
    };
    for (index, &change) in changes.iter().enumerate() {
        if change_one(block, index, change.into()) {
            continue;
        }
        for (index, &change) in changes[..index].iter().enumerate() {
            let undone = change_one(block, index, -i64::from(change));
            debug_assert!(undone, "the old count fits");
        }
        return false;
    }
    true
}

/// The same for counts of 16 bits, without a branch for each.
fn add_to_words(block: &mut [u8], changes: &[i32]) -> bool {
    let Some(words) = block.get_mut(..changes.len() * 2) else {
        return false;
    };
    let mut outside = 0;
    for (word, &change) in words.chunks_exact_mut(2).zip(changes) {
        let sum = i32::from(u16::from_be_bytes([word[0], word[1]])).wrapping_add(change);
        outside |= sum & !0xffff;
        word.copy_from_slice(&(sum as u16).to_be_bytes());
    }
    if outside == 0 {
        return true;
    }
    // Modulo 2^16 nothing was lost.
    for (word, &change) in words.chunks_exact_mut(2).zip(changes) {
        let old = u16::from_be_bytes([word[0], word[1]]).wrapping_sub(change as u16);
        word.copy_from_slice(&old.to_be_bytes());
    }
    false
}

const fn narrow_mask(order: u32) -> u8 {
    ((1u16 << (1 << order)) - 1) as u8
}

fn set_narrow(block: &mut [u8], order: u32, index: usize, value: u64) -> bool {
    let mask = narrow_mask(order);
    let per_byte_bits = 3 - order;
    let shift = (index & ((1 << per_byte_bits) - 1)) << order;
    match block.get_mut(index >> per_byte_bits) {
        Some(byte) if value <= u64::from(mask) => {
            *byte = (*byte & !(mask << shift)) | ((value as u8) << shift);
            true
        }
        _ => false,
    }
}

#[inline]
fn wide<const N: usize>(block: &[u8], index: usize) -> Option<[u8; N]> {
    bytes::array(block, index.checked_mul(N)?)
}

#[inline]
fn put<const N: usize>(block: &mut [u8], index: usize, raw: Option<[u8; N]>) -> bool {
    let place = index
        .checked_mul(N)
        .and_then(|at| block.get_mut(at..))
        .and_then(|rest| rest.first_chunk_mut::<N>());
    match (place, raw) {
        (Some(place), Some(raw)) => {
            *place = raw;
            true
        }
        _ => false,
    }
}
