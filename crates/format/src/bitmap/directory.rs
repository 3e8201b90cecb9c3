//! The bitmap directory: entries of variable length, each padded to 8 bytes.

use super::{BitmapFlags, DIRTY_TRACKING};
use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::geometry::Geometry;
use crate::limits;
use crate::types::HostOffset;
use alloc::borrow::Cow;
use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// Bytes of a directory entry's fixed part.
pub const BITMAP_DIRECTORY_ENTRY_SIZE_BYTES: usize = 24;

/// One persistent dirty bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BitmapDirectoryEntry {
    /// Start of the bitmap table; the start of a cluster.
    pub table_offset: HostOffset,
    /// Entries of the bitmap table.
    pub table_entries: u32,
    /// In use, and enabled.
    pub flags: BitmapFlags,
    /// A bit stands for `1 << granularity_bits` bytes of the disk.
    pub granularity_bits: u8,
    /// The name, unique in the image.
    pub name: Vec<u8>,
}

impl BitmapDirectoryEntry {
    /// The name as text.
    pub fn name_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.name)
    }

    /// Table entries that a bitmap of `guest_size_bytes` needs.
    pub fn table_entries_for(
        guest_size_bytes: u64,
        granularity_bits: u8,
        geometry: &Geometry,
    ) -> u64 {
        let bits =
            guest_size_bytes.div_ceil(1u64.checked_shl(granularity_bits.into()).unwrap_or(1));
        bits.div_ceil(8).div_ceil(geometry.cluster_size_bytes())
    }

    /// Whether the table has as many entries as a disk of `guest_size_bytes` asks for (I34).
    pub fn fits(&self, guest_size_bytes: u64, geometry: &Geometry) -> bool {
        // A table has an entry at least, so none fits a disk without bytes: QEMU does not open that image.
        let needed = Self::table_entries_for(guest_size_bytes, self.granularity_bits, geometry);
        u64::from(self.table_entries) == needed
    }

    /// Decodes the entry at the start of `raw` and says how many bytes it has,
    /// with its padding.
    fn decode(raw: &[u8]) -> Option<(RawEntry, usize)> {
        let name_len = usize::from(bytes::be16(raw, 18)?);
        let extra_len = usize::try_from(bytes::be32(raw, 20)?).ok()?;
        let name_at = BITMAP_DIRECTORY_ENTRY_SIZE_BYTES.checked_add(extra_len)?;
        let end = name_at.checked_add(name_len)?;
        let padded_end = bytes::padded(end);
        raw.get(..padded_end)?;
        let entry = BitmapDirectoryEntry {
            table_offset: HostOffset(bytes::be64(raw, 0)?),
            table_entries: bytes::be32(raw, 8)?,
            flags: BitmapFlags(bytes::be32(raw, 12)?),
            granularity_bits: *raw.get(17)?,
            name: raw.get(name_at..end)?.to_vec(),
        };
        let raw = RawEntry {
            entry,
            bitmap_type: *raw.get(16)?,
            extra_data_bytes: extra_len as u64,
        };
        Some((raw, padded_end))
    }

    fn encode(&self, out: &mut Vec<u8>) {
        // The name's length is checked before.
        let name_len = u16::try_from(self.name.len()).unwrap_or(u16::MAX);
        out.extend_from_slice(&self.table_offset.0.to_be_bytes());
        out.extend_from_slice(&self.table_entries.to_be_bytes());
        out.extend_from_slice(&self.flags.0.to_be_bytes());
        out.extend_from_slice(&[DIRTY_TRACKING, self.granularity_bits]);
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&0u32.to_be_bytes());
        out.extend_from_slice(&self.name);
        out.resize(bytes::padded(out.len()), 0);
    }

    /// The first field that breaks a rule, with its value.
    fn broken_rule(&self, disk: &Disk) -> Option<(&'static str, u64)> {
        let granularity = limits::MIN_BITMAP_GRANULARITY_BITS..=limits::MAX_BITMAP_GRANULARITY_BITS;
        let offset = self.table_offset.0;
        let entries = u64::from(self.table_entries);
        let data_size = entries.saturating_mul(disk.geometry.cluster_size_bytes());
        if self.table_entries == 0
            || self.table_entries > limits::MAX_BITMAP_TABLE_ENTRIES
            || data_size > limits::MAX_BITMAP_DATA_SIZE_BYTES
        {
            return Some(("bitmap_table_size", entries));
        }
        if offset == 0
            || !disk.geometry.is_cluster_aligned(offset)
            || offset >= limits::HOST_OFFSET_END
        {
            return Some(("bitmap_table_offset", offset));
        }
        if !granularity.contains(&self.granularity_bits) {
            return Some(("granularity_bits", self.granularity_bits.into()));
        }
        if self.flags.has_reserved() {
            return Some(("flags", self.flags.0.into()));
        }
        let name_len = self.name.len();
        if name_len == 0 || name_len > limits::MAX_BITMAP_NAME_LEN_BYTES.into() {
            return Some(("name_size", name_len as u64));
        }
        // A bitmap in use may be stale and of a size that a resize has left behind.
        let covered = (u128::from(data_size) * 8) << self.granularity_bits;
        if !self.flags.contains(BitmapFlags::IN_USE) && u128::from(disk.guest_size_bytes) > covered
        {
            return Some(("bitmap_table_size", entries));
        }
        None
    }

    fn check(&self, disk: &Disk) -> Result<()> {
        match self.broken_rule(disk) {
            Some((field, value)) => Err(self.constraint(field, value)),
            None => Ok(()),
        }
    }

    fn constraint(&self, field: &'static str, value: u64) -> FormatError {
        let name = self.name_text();
        fault(
            field,
            value,
            format!("Bitmap '{name}' doesn't satisfy the constraints"),
        )
    }
}

/// An entry with what a decoded one need not remember.
struct RawEntry {
    entry: BitmapDirectoryEntry,
    bitmap_type: u8,
    extra_data_bytes: u64,
}

/// What the bitmaps describe.
struct Disk<'a> {
    geometry: &'a Geometry,
    guest_size_bytes: u64,
}

/// Decodes a bitmap directory (I33, I34): all of its bytes, and the number of
/// bitmaps that the header extension claims.
///
/// # Errors
/// [`FormatErrorKind::Invalid`] for a directory or an entry that the format does not allow, for
/// another number of entries than `count`, and for extra data, which nobody understands.
pub fn decode_directory(
    directory: &[u8],
    count: u32,
    geometry: &Geometry,
    guest_size_bytes: u64,
) -> Result<Vec<BitmapDirectoryEntry>> {
    check_directory_size(directory.len())?;
    let disk = Disk {
        geometry,
        guest_size_bytes,
    };
    let mut entries = Vec::new();
    let mut rest = directory;
    while !rest.is_empty() {
        if rest.len() < BITMAP_DIRECTORY_ENTRY_SIZE_BYTES {
            return Err(broken(directory, rest));
        }
        if entries.len() >= count as usize {
            let message = "More bitmaps found than specified in header extension";
            return Err(fault("nb_bitmaps", count.into(), message));
        }
        let (raw, used) =
            BitmapDirectoryEntry::decode(rest).ok_or_else(|| broken(directory, rest))?;
        if raw.extra_data_bytes != 0 {
            let message = "Bitmap extra data is not supported";
            return Err(fault("extra_data_size", raw.extra_data_bytes, message));
        }
        if raw.bitmap_type != DIRTY_TRACKING {
            return Err(raw.entry.constraint("type", raw.bitmap_type.into()));
        }
        raw.entry.check(&disk)?;
        entries.push(raw.entry);
        rest = rest.get(used..).unwrap_or(&[]);
    }
    if entries.len() < count as usize {
        let message = "Less bitmaps found than specified in header extension";
        return Err(fault("nb_bitmaps", count.into(), message));
    }
    check_unique_names(&entries)?;
    Ok(entries)
}

/// The bitmap directory of `entries`.
///
/// # Errors
/// [`FormatErrorKind::Invalid`] for entries that [`decode_directory`] would refuse.
pub fn encode_directory(
    entries: &[BitmapDirectoryEntry],
    geometry: &Geometry,
    guest_size_bytes: u64,
) -> Result<Vec<u8>> {
    if entries.len() > limits::MAX_BITMAPS as usize {
        let count = entries.len() as u64;
        return Err(fault(
            "nb_bitmaps",
            count,
            "Maximum number of persistent bitmaps is exceeded",
        ));
    }
    let disk = Disk {
        geometry,
        guest_size_bytes,
    };
    let mut out = Vec::new();
    for entry in entries {
        entry.check(&disk)?;
        entry.encode(&mut out);
        check_directory_size(out.len())?;
    }
    check_unique_names(entries)?;
    Ok(out)
}

fn check_directory_size(size: usize) -> Result<()> {
    let message = if size == 0 {
        "Requested bitmap directory size is zero"
    } else if size as u64 > limits::MAX_BITMAP_DIRECTORY_SIZE_BYTES {
        "Requested bitmap directory size is too big"
    } else {
        return Ok(());
    };
    Err(fault("bitmap_directory_size", size as u64, message))
}

fn check_unique_names(entries: &[BitmapDirectoryEntry]) -> Result<()> {
    let mut names = BTreeSet::new();
    for entry in entries {
        if !names.insert(entry.name.as_slice()) {
            let message = format!("Bitmap already exists: {}", entry.name_text());
            return Err(fault("name", entry.name.len() as u64, message));
        }
    }
    Ok(())
}

/// The directory makes no sense where `rest` begins.
fn broken(directory: &[u8], rest: &[u8]) -> FormatError {
    let at = directory.len().saturating_sub(rest.len());
    fault("entry_offset", at as u64, "Broken bitmap directory")
}

fn fault(field: &'static str, value: u64, message: impl Into<Cow<'static, str>>) -> FormatError {
    FormatError::new(
        FormatErrorKind::Invalid,
        "bitmap directory",
        field,
        value,
        message,
    )
}
