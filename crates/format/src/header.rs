//! The header of an image with everything in its first cluster: fixed fields,
//! extensions and the name of the backing file.

use crate::bitmap::BitmapsExtension;
use crate::bytes;
use crate::crypto::{CryptMethod, EncryptionHeaderPointer};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::extension::{Extension, kind};
use crate::features::{Autoclear, Compatible, Incompatible};
use crate::geometry::{self, Geometry};
use crate::limits;
use crate::types::HostOffset;
use crate::write_log::{MAX_LEN_BYTES, WriteLogExtension};
use alloc::borrow::Cow;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

mod decode;
mod encode;

/// `QFI\xfb`: the first four bytes of every image.
pub const MAGIC: u32 = 0x5146_49fb;

/// Offsets in bytes of the header's fields, for rewriting single ones in place.
pub mod field {
    /// `magic`, 4 bytes.
    pub const MAGIC: usize = 0;
    /// `version`, 4 bytes.
    pub const VERSION: usize = 4;
    /// `backing_file_offset`, 8 bytes.
    pub const BACKING_FILE_OFFSET: usize = 8;
    /// `backing_file_size`, 4 bytes.
    pub const BACKING_FILE_SIZE: usize = 16;
    /// `cluster_bits`, 4 bytes.
    pub const CLUSTER_BITS: usize = 20;
    /// `size`, 8 bytes.
    pub const SIZE: usize = 24;
    /// `crypt_method`, 4 bytes.
    pub const CRYPT_METHOD: usize = 32;
    /// `l1_size`, 4 bytes.
    pub const L1_SIZE: usize = 36;
    /// `l1_table_offset`, 8 bytes.
    pub const L1_TABLE_OFFSET: usize = 40;
    /// `refcount_table_offset`, 8 bytes.
    pub const REFCOUNT_TABLE_OFFSET: usize = 48;
    /// `refcount_table_clusters`, 4 bytes.
    pub const REFCOUNT_TABLE_CLUSTERS: usize = 56;
    /// `nb_snapshots`, 4 bytes.
    pub const SNAPSHOT_COUNT: usize = 60;
    /// `snapshots_offset`, 8 bytes.
    pub const SNAPSHOTS_OFFSET: usize = 64;
    /// `incompatible_features`, 8 bytes; from version 3 on.
    pub const INCOMPATIBLE_FEATURES: usize = 72;
    /// `compatible_features`, 8 bytes; from version 3 on.
    pub const COMPATIBLE_FEATURES: usize = 80;
    /// `autoclear_features`, 8 bytes; from version 3 on.
    pub const AUTOCLEAR_FEATURES: usize = 88;
    /// `refcount_order`, 4 bytes; from version 3 on.
    pub const REFCOUNT_ORDER: usize = 96;
    /// `header_length`, 4 bytes; from version 3 on.
    pub const HEADER_LENGTH: usize = 100;
    /// `compression_type`, 1 byte; present if `header_length` is above this.
    pub const COMPRESSION_TYPE: usize = 104;
    /// What follows the known fields.
    pub const TAIL: usize = 105;
}

/// The fields `refcount_table_offset` and `refcount_table_clusters` as they lie side by side
/// in the header, from [`field::REFCOUNT_TABLE_OFFSET`] on: one write changes both.
pub fn encode_refcount_table(offset: HostOffset, clusters: u32) -> [u8; 12] {
    let mut fields = [0; 12];
    fields[..8].copy_from_slice(&offset.bytes().to_be_bytes());
    fields[8..].copy_from_slice(&clusters.to_be_bytes());
    fields
}

/// How compressed clusters are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CompressionType {
    /// Raw deflate, without a zlib header; QEMU calls it zlib.
    #[default]
    Zlib,
    /// Zstandard frames.
    Zstd,
}

impl CompressionType {
    /// The number that the header stores.
    pub const fn number(self) -> u8 {
        match self {
            CompressionType::Zlib => 0,
            CompressionType::Zstd => 1,
        }
    }

    /// QEMU's name.
    pub const fn name(self) -> &'static str {
        match self {
            CompressionType::Zlib => "zlib",
            CompressionType::Zstd => "zstd",
        }
    }
}

/// What a header is decoded for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Purpose {
    /// To use the image.
    #[default]
    Use,
    /// To check it: a missing refcount table and a bad snapshot table are then
    /// findings, not refusals.
    Check,
}

/// The header of an image.
///
/// Lengths and places inside the first cluster (`header_length`, the offset and
/// length of the backing file's name) are not kept: encoding decides them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// A cluster has `1 << cluster_bits` bytes.
    pub cluster_bits: u32,
    /// Size of the guest disk as stored; see [`Header::guest_size_bytes`].
    pub size_bytes: u64,
    /// How guest data is encrypted.
    pub crypt_method: CryptMethod,
    /// Entries of the active L1 table.
    pub l1_entries: u32,
    /// Start of the active L1 table.
    pub l1_table_offset: HostOffset,
    /// Start of the refcount table.
    pub refcount_table_offset: HostOffset,
    /// Clusters of the refcount table.
    pub refcount_table_clusters: u32,
    /// Internal snapshots.
    pub snapshot_count: u32,
    /// Start of the snapshot table.
    pub snapshots_offset: HostOffset,
    /// Features that a program must know; none in version 2.
    pub incompatible: Incompatible,
    /// Features that a program may ignore; none in version 2.
    pub compatible: Compatible,
    /// Features that a program clears if it does not know them; none in version 2.
    pub autoclear: Autoclear,
    /// A refcount has `1 << refcount_order` bits; 4 in version 2.
    pub refcount_order: u32,
    /// How compressed clusters are compressed.
    pub compression_type: CompressionType,
    /// Bytes of the header proper behind `compression_type` that are not known
    /// here; empty if they are only the usual seven zeros.
    pub unknown_header_tail: Vec<u8>,
    /// The extensions, in their order on disk.
    pub extensions: Vec<Extension>,
    /// Name of the backing file: bytes without NUL, not empty.
    pub backing_file: Option<Vec<u8>>,
}

/// Whether `prefix`, the first bytes of a file, looks like a qcow2 image: the
/// magic and a version of 2 or above.
pub fn probe(prefix: &[u8]) -> bool {
    bytes::be32(prefix, field::MAGIC) == Some(MAGIC)
        && bytes::be32(prefix, field::VERSION).is_some_and(|version| version >= 2)
}

/// How many bytes of the file [`Header::decode`] wants, judged by its first 24
/// or more bytes: the first cluster.
///
/// # Errors
/// [`FormatErrorKind::NotQcow2`] without the magic, [`FormatErrorKind::Unsupported`] for a
/// version that is not 2 or 3, [`FormatErrorKind::Invalid`] for a cluster size beyond the
/// limits.
pub fn first_cluster_size_bytes(prefix: &[u8]) -> Result<u64> {
    let version = decode::check_magic(prefix)?;
    geometry::check_version(version)?;
    let cluster_bits = bytes::be32(prefix, field::CLUSTER_BITS).unwrap_or(0);
    geometry::check_cluster_bits(cluster_bits)?;
    Ok(1 << cluster_bits)
}

impl Header {
    /// The sizes that follow from the header.
    pub const fn geometry(&self) -> Geometry {
        Geometry {
            cluster_bits: self.cluster_bits,
            extended_l2: self.incompatible.contains(Incompatible::EXTENDED_L2),
            refcount_order: self.refcount_order,
            version: self.version,
            external_data: self.incompatible.contains(Incompatible::EXTERNAL_DATA),
        }
    }

    /// Size of the disk as the guest sees it: whole sectors of 512 bytes.
    pub const fn guest_size_bytes(&self) -> u64 {
        self.size_bytes & !511
    }

    /// Length of the header proper, before the extensions.
    pub fn header_len_bytes(&self) -> u32 {
        if self.version < 3 {
            return limits::HEADER_LEN_V2_BYTES;
        }
        let end = bytes::padded(field::TAIL.saturating_add(self.unknown_header_tail.len()));
        u32::try_from(end)
            .unwrap_or(u32::MAX)
            .max(limits::KNOWN_HEADER_LEN_V3_BYTES)
    }

    /// The backing file's name as text.
    pub fn backing_file_text(&self) -> Option<Cow<'_, str>> {
        self.backing_file.as_deref().map(String::from_utf8_lossy)
    }

    /// Name of the backing file's format, if the image says one. An empty name says none, as to QEMU.
    pub fn backing_format(&self) -> Option<Cow<'_, str>> {
        self.last(|extension| match extension {
            Extension::BackingFormat(name) => Some(bytes::until_nul(name)),
            _ => None,
        })
        .filter(|name| !name.is_empty())
        .map(String::from_utf8_lossy)
    }

    /// Name of the external data file, if the image says one.
    pub fn external_data_file(&self) -> Option<&[u8]> {
        self.last(|extension| match extension {
            Extension::ExternalDataFile(name) => Some(bytes::until_nul(name)),
            _ => None,
        })
    }

    /// The write log that the image names, if its extension can be read. It holds writes that the
    /// image lacks while [`Incompatible::WRITE_LOG`] is set, and does not count otherwise.
    pub fn write_log(&self) -> Option<WriteLogExtension> {
        WriteLogExtension::decode(self.unknown_extension(kind::WRITE_LOG)?).ok()
    }

    /// The bytes of the image's own file that the write log has, whether or not it holds anything:
    /// whole clusters, of [`crate::write_log::MAX_LEN_BYTES`] at most, if
    /// [`Autoclear::WRITE_LOG_INSIDE`] vouches for them.
    pub fn write_log_inside(&self) -> Option<Range<u64>> {
        let vouched = self.autoclear.contains(Autoclear::WRITE_LOG_INSIDE);
        let place = self.write_log().filter(|_| vouched)?.inside()?;
        let cluster = self.geometry().cluster_size_bytes();
        let is_whole = (place.start | place.end).is_multiple_of(cluster);
        let is_possible = place.start > 0 && place.end - place.start <= MAX_LEN_BYTES;
        (is_whole && is_possible).then_some(place)
    }

    /// Names no write log any more. It must hold nothing: [`Incompatible::WRITE_LOG`] stays as it is.
    pub fn forget_write_log(&mut self) {
        self.remove_extension(kind::WRITE_LOG);
        self.autoclear = self.autoclear.without(Autoclear::WRITE_LOG_INSIDE);
    }

    /// The data of the last extension of a type that is kept as it is (I15).
    pub fn unknown_extension(&self, kind: u32) -> Option<&[u8]> {
        self.last(|extension| match extension {
            Extension::Unknown { kind: found, data } if *found == kind => Some(&**data),
            _ => None,
        })
    }

    /// Where the bitmaps are, if the autoclear bit vouches for them.
    pub fn bitmaps(&self) -> Option<BitmapsExtension> {
        if !self.autoclear.contains(Autoclear::BITMAPS) {
            return None;
        }
        self.last(|extension| match extension {
            Extension::Bitmaps(bitmaps) => Some(*bitmaps),
            _ => None,
        })
    }

    /// Where the LUKS header is.
    pub fn encryption_header(&self) -> Option<EncryptionHeaderPointer> {
        self.last(|extension| match extension {
            Extension::CryptoHeader(pointer) => Some(*pointer),
            _ => None,
        })
    }

    /// As QEMU has it, the last extension of a type counts.
    fn last<'a, T>(&'a self, pick: impl Fn(&'a Extension) -> Option<T>) -> Option<T> {
        self.extensions.iter().rev().find_map(pick)
    }

    /// Adds an extension, in place of those of the same type, in the order in
    /// which QEMU writes them.
    pub fn set_extension(&mut self, extension: Extension) {
        self.remove_extension(extension.kind());
        let rank = extension.rank();
        let at = self
            .extensions
            .iter()
            .position(|other| other.rank() > rank)
            .unwrap_or(self.extensions.len());
        self.extensions.insert(at, extension);
    }

    /// Removes every extension of a type.
    pub fn remove_extension(&mut self, kind: u32) {
        self.extensions.retain(|extension| extension.kind() != kind);
    }
}

fn fault(
    kind: FormatErrorKind,
    field: &'static str,
    value: u64,
    message: impl Into<Cow<'static, str>>,
) -> FormatError {
    FormatError::new(kind, "header", field, value, message)
}

fn invalid(
    field: &'static str,
    value: impl Into<u64>,
    message: impl Into<Cow<'static, str>>,
) -> FormatError {
    fault(FormatErrorKind::Invalid, field, value.into(), message)
}

impl Header {
    /// Checks what does not concern the layout of the first cluster, in QEMU's
    /// order.
    fn check_values(&self, purpose: Purpose) -> Result<()> {
        geometry::check_subcluster_size(self.cluster_bits, self.geometry().extended_l2)?;
        geometry::check_refcount_order(self.refcount_order)?;
        self.check_refcount_table(purpose)?;
        if purpose == Purpose::Use {
            self.check_table(&Table {
                name: "Snapshot table",
                field: "snapshots_offset",
                offset: self.snapshots_offset,
                entries: self.snapshot_count.into(),
                entry_size_bytes: crate::snapshot::SNAPSHOT_HEADER_SIZE_BYTES as u64,
                max_entries: limits::MAX_SNAPSHOTS.into(),
            })?;
        }
        self.check_table(&Table {
            name: "Active L1 table",
            field: "l1_table_offset",
            offset: self.l1_table_offset,
            entries: self.l1_entries.into(),
            entry_size_bytes: 8,
            max_entries: limits::MAX_L1_SIZE_BYTES / 8,
        })?;
        self.check_size()
    }

    fn check_refcount_table(&self, purpose: Purpose) -> Result<()> {
        if self.refcount_table_clusters == 0 && purpose == Purpose::Use {
            return Err(invalid(
                "refcount_table_clusters",
                0u64,
                "Image does not contain a reference count table",
            ));
        }
        let cluster_size = self.geometry().cluster_size_bytes();
        self.check_table(&Table {
            name: "Reference count table",
            field: "refcount_table_offset",
            offset: self.refcount_table_offset,
            entries: self.refcount_table_clusters.into(),
            entry_size_bytes: cluster_size,
            max_entries: limits::MAX_REFCOUNT_TABLE_SIZE_BYTES / cluster_size,
        })
    }

    fn check_table(&self, table: &Table) -> Result<()> {
        if table.entries > table.max_entries {
            return Err(fault(
                FormatErrorKind::TooLarge,
                table.field,
                table.entries,
                format!("{} too large", table.name),
            ));
        }
        let end = (table.entries * table.entry_size_bytes).checked_add(table.offset.0);
        let fits = end.is_some_and(|end| end <= limits::MAX_SIZE_BYTES);
        if !fits || !self.geometry().is_cluster_aligned(table.offset.0) {
            return Err(invalid(
                table.field,
                table.offset.0,
                format!("{} offset invalid", table.name),
            ));
        }
        Ok(())
    }

    fn check_size(&self) -> Result<()> {
        let needed = self.geometry().l1_entries_for(self.size_bytes);
        if needed > i32::MAX as u64 || self.size_bytes > limits::MAX_SIZE_BYTES {
            return Err(fault(
                FormatErrorKind::TooLarge,
                "size",
                self.size_bytes,
                "Image is too big",
            ));
        }
        if u64::from(self.l1_entries) < needed {
            return Err(invalid("l1_size", self.l1_entries, "L1 table is too small"));
        }
        Ok(())
    }

    /// Checks that concern several parts of the first cluster.
    fn check_parts(&self) -> Result<()> {
        let geometry = self.geometry();
        if self.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA) && !geometry.external_data {
            return Err(invalid(
                "autoclear_features",
                self.autoclear.bits(),
                "data-file-raw requires a data file",
            ));
        }
        if self.crypt_method == CryptMethod::Luks && self.encryption_header().is_none() {
            return Err(invalid(
                "crypt_method",
                self.crypt_method.number(),
                "Missing CRYPTO header for crypt method 2",
            ));
        }
        Ok(())
    }
}

/// A table that the header points at.
struct Table {
    name: &'static str,
    field: &'static str,
    offset: HostOffset,
    entries: u64,
    entry_size_bytes: u64,
    max_entries: u64,
}
