//! The table of internal snapshots: entries of variable length, one after the
//! other, each starting at a multiple of 8 bytes.

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::geometry::Geometry;
use crate::limits;
use crate::types::HostOffset;
use alloc::borrow::Cow;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// Bytes of a snapshot table entry's fixed part.
pub const SNAPSHOT_HEADER_SIZE_BYTES: usize = 40;
/// Extra data whose meaning is known: VM state size, disk size, icount.
const KNOWN_EXTRA_SIZE_BYTES: usize = 24;
/// The stored icount of a snapshot that has none.
const NO_ICOUNT: u64 = u64::MAX;

/// One internal snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SnapshotEntry {
    /// Start of the snapshot's L1 table; see [`SnapshotEntry::check_l1_table`].
    pub l1_table_offset: HostOffset,
    /// Entries of the snapshot's L1 table.
    pub l1_entries: u32,
    /// The identifier, unique in the image; a decimal number in QEMU's images.
    pub id: Vec<u8>,
    /// The name, chosen by the user.
    pub name: Vec<u8>,
    /// When the snapshot was taken: seconds since the epoch.
    pub date_seconds: u32,
    /// When the snapshot was taken: nanoseconds of the second.
    pub date_nanoseconds: u32,
    /// How long the guest had run, in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// Bytes of saved VM state, which lies behind the disk's end; 0 if none.
    pub vm_state_size_bytes: u64,
    /// Size of the disk at that time; version 3 requires it.
    pub disk_size_bytes: Option<u64>,
    /// Instructions that the guest had executed, where recorded.
    pub icount: Option<u64>,
    /// Extra data behind what is known here.
    pub unknown_extra_data: Vec<u8>,
}

impl SnapshotEntry {
    /// Decodes the entry at the start of `raw` and says how many bytes it has,
    /// without padding. `index` is its place in the table, for error messages.
    ///
    /// # Errors
    /// [`FormatErrorKind::Truncated`] if `raw` ends within the entry,
    /// [`FormatErrorKind::TooLarge`] for extra data beyond the limit.
    pub fn decode(raw: &[u8], index: u32) -> Result<(Self, usize)> {
        let (entry, used, extra_len) = Self::decode_cutting(raw, index)?;
        check_extra_len(extra_len, index).map_err(|error| {
            error.with_hint("You can force-remove this extra metadata with qemu-img check -r all")
        })?;
        Ok((entry, used))
    }

    /// Decodes the entry at the start of `raw` like [`SnapshotEntry::decode`], but
    /// cuts off extra data beyond the limit. Says also how much extra data there is.
    ///
    /// # Errors
    /// [`FormatErrorKind::Truncated`] if `raw` ends within the entry.
    pub fn decode_cutting(raw: &[u8], index: u32) -> Result<(Self, usize, u32)> {
        let mut reader = Reader { raw, at: 0, index };
        let mut entry = SnapshotEntry {
            l1_table_offset: HostOffset(reader.be64()?),
            l1_entries: reader.be32()?,
            ..SnapshotEntry::default()
        };
        let id_len = reader.be16()?;
        let name_len = reader.be16()?;
        entry.date_seconds = reader.be32()?;
        entry.date_nanoseconds = reader.be32()?;
        entry.vm_clock_nanoseconds = reader.be64()?;
        entry.vm_state_size_bytes = reader.be32()?.into();
        let extra_len = reader.be32()?;
        let kept = extra_len.min(limits::MAX_SNAPSHOT_EXTRA_DATA_BYTES);
        entry.take_extra(reader.take(kept as usize)?);
        reader.take((extra_len - kept) as usize)?;
        entry.id = reader.take(id_len.into())?.to_vec();
        entry.name = reader.take(name_len.into())?.to_vec();
        Ok((entry, reader.at, extra_len))
    }

    fn take_extra(&mut self, extra: &[u8]) {
        if let Some(size) = bytes::be64(extra, 0) {
            self.vm_state_size_bytes = size;
        }
        self.disk_size_bytes = bytes::be64(extra, 8);
        self.icount = bytes::be64(extra, 16).filter(|&icount| icount != NO_ICOUNT);
        self.unknown_extra_data = extra.get(KNOWN_EXTRA_SIZE_BYTES..).unwrap_or(&[]).to_vec();
    }

    /// Appends entry `index` of a table to `out`, without padding.
    ///
    /// Like QEMU it writes the known extra data in full, except for an entry
    /// that has no disk size: that one is left as short as it was.
    fn encode(&self, index: u32, out: &mut Vec<u8>) -> Result<()> {
        let extra = self.extra();
        let extra_len = len_u32(&extra);
        check_extra_len(extra_len, index)?;
        let id_len = len_u16("id_str_size", &self.id)?;
        let name_len = len_u16("name_size", &self.name)?;
        // A reader that knows only 32 bits must see "no VM state", not a part of it.
        let short_vm_state = u32::try_from(self.vm_state_size_bytes).unwrap_or(0);
        out.extend_from_slice(&self.l1_table_offset.0.to_be_bytes());
        out.extend_from_slice(&self.l1_entries.to_be_bytes());
        out.extend_from_slice(&id_len.to_be_bytes());
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&self.date_seconds.to_be_bytes());
        out.extend_from_slice(&self.date_nanoseconds.to_be_bytes());
        out.extend_from_slice(&self.vm_clock_nanoseconds.to_be_bytes());
        out.extend_from_slice(&short_vm_state.to_be_bytes());
        out.extend_from_slice(&extra_len.to_be_bytes());
        out.extend_from_slice(&extra);
        out.extend_from_slice(&self.id);
        out.extend_from_slice(&self.name);
        Ok(())
    }

    fn extra(&self) -> Vec<u8> {
        let mut extra = Vec::new();
        let large = self.vm_state_size_bytes > u32::MAX.into();
        let Some(disk_size) = self.disk_size_bytes else {
            if large {
                extra.extend_from_slice(&self.vm_state_size_bytes.to_be_bytes());
            }
            return extra;
        };
        extra.extend_from_slice(&self.vm_state_size_bytes.to_be_bytes());
        extra.extend_from_slice(&disk_size.to_be_bytes());
        extra.extend_from_slice(&self.icount.unwrap_or(NO_ICOUNT).to_be_bytes());
        extra.extend_from_slice(&self.unknown_extra_data);
        extra
    }

    /// Checks the L1 table's place and size, which decoding leaves alone: one
    /// bad snapshot must not make the others, and the disk, unreadable (I32).
    ///
    /// # Errors
    /// [`FormatErrorKind::TooLarge`] for a table beyond the limit, [`FormatErrorKind::Invalid`]
    /// for one that does not start a cluster or ends beyond all files.
    pub fn check_l1_table(&self, geometry: &Geometry) -> Result<()> {
        let size = u64::from(self.l1_entries) * 8;
        if size > limits::MAX_L1_SIZE_BYTES {
            let entries = self.l1_entries.into();
            let message = "Snapshot L1 table too large";
            return Err(fault(
                FormatErrorKind::TooLarge,
                "l1_size",
                entries,
                message,
            ));
        }
        let offset = self.l1_table_offset.0;
        let end = offset.checked_add(size);
        if end.is_none_or(|end| end > limits::MAX_SIZE_BYTES)
            || !geometry.is_cluster_aligned(offset)
        {
            let message = "Snapshot L1 table offset invalid";
            return Err(fault(
                FormatErrorKind::Invalid,
                "l1_table_offset",
                offset,
                message,
            ));
        }
        Ok(())
    }

    /// The identifier as text.
    pub fn id_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(bytes::until_nul(&self.id))
    }

    /// The name as text.
    pub fn name_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(bytes::until_nul(&self.name))
    }
}

/// Decodes the `count` entries of a snapshot table and says how many bytes they
/// fill.
///
/// The header does not tell the table's length (I29): `raw` may go on beyond it.
///
/// # Errors
/// [`FormatErrorKind::Truncated`] if `raw` ends within the table, [`FormatErrorKind::TooLarge`]
/// for a table or extra data beyond the limits.
pub fn decode_table(raw: &[u8], count: u32) -> Result<(Vec<SnapshotEntry>, usize)> {
    // A count is only believed once the bytes are there.
    let most = raw.len() / SNAPSHOT_HEADER_SIZE_BYTES;
    let mut entries = Vec::with_capacity(most.min(count as usize));
    let mut at = 0usize;
    for index in 0..count {
        at = bytes::padded(at);
        let (entry, used) = SnapshotEntry::decode(raw.get(at..).unwrap_or(&[]), index)?;
        at = at.saturating_add(used);
        check_table_size(at as u64).map_err(|error| {
            let overhang = count - index;
            error.with_hint(format_args!(
                "You can force-remove all {overhang} overhanging snapshots with qemu-img check -r \
                 all"
            ))
        })?;
        entries.push(entry);
    }
    Ok((entries, at))
}

/// The snapshot table of `entries`.
///
/// # Errors
/// [`FormatErrorKind::TooLarge`] for more, or longer, entries than the limits allow.
pub fn encode_table(entries: &[SnapshotEntry]) -> Result<Vec<u8>> {
    if entries.len() > limits::MAX_SNAPSHOTS as usize {
        let count = entries.len() as u64;
        let message = "Snapshot table too large";
        return Err(fault(
            FormatErrorKind::TooLarge,
            "nb_snapshots",
            count,
            message,
        ));
    }
    let mut out = Vec::new();
    for (index, entry) in (0..).zip(entries) {
        out.resize(bytes::padded(out.len()), 0);
        entry.encode(index, &mut out)?;
        check_table_size(out.len() as u64)?;
    }
    Ok(out)
}

/// Reads the fields of one entry in their order.
struct Reader<'a> {
    raw: &'a [u8],
    at: usize,
    index: u32,
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let end = self.at.saturating_add(length);
        let part = self
            .raw
            .get(self.at..end)
            .ok_or_else(|| truncated(self.index))?;
        self.at = end;
        Ok(part)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let index = self.index;
        bytes::array(self.take(N)?, 0).ok_or_else(|| truncated(index))
    }

    fn be16(&mut self) -> Result<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn be32(&mut self) -> Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn be64(&mut self) -> Result<u64> {
        self.array().map(u64::from_be_bytes)
    }
}

fn truncated(index: u32) -> FormatError {
    fault(
        FormatErrorKind::Truncated,
        "nb_snapshots",
        index.into(),
        format!("Snapshot table entry {index} goes on beyond the end of the table"),
    )
}

fn check_extra_len(length: u32, index: u32) -> Result<()> {
    if length <= limits::MAX_SNAPSHOT_EXTRA_DATA_BYTES {
        return Ok(());
    }
    Err(fault(
        FormatErrorKind::TooLarge,
        "extra_data_size",
        length.into(),
        format!("Too much extra metadata in snapshot table entry {index}"),
    ))
}

fn check_table_size(size: u64) -> Result<()> {
    if size <= limits::MAX_SNAPSHOT_TABLE_SIZE_BYTES {
        return Ok(());
    }
    let message = "Snapshot table is too big";
    Err(fault(
        FormatErrorKind::TooLarge,
        "nb_snapshots",
        size,
        message,
    ))
}

fn len_u32(data: &[u8]) -> u32 {
    u32::try_from(data.len()).unwrap_or(u32::MAX)
}

fn len_u16(field: &'static str, data: &[u8]) -> Result<u16> {
    u16::try_from(data.len()).map_err(|_| {
        let length = data.len() as u64;
        let message = "A snapshot's ID or name is longer than 65535 bytes";
        fault(FormatErrorKind::TooLarge, field, length, message)
    })
}

fn fault(
    kind: FormatErrorKind,
    field: &'static str,
    value: u64,
    message: impl Into<Cow<'static, str>>,
) -> FormatError {
    FormatError::new(kind, "snapshot table", field, value, message)
}
