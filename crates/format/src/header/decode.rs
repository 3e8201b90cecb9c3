//! Bytes to header. The checks come in QEMU's order, so that a file with several
//! faults is refused in the same words.

use super::{CompressionType, Header, MAGIC, Purpose, fault, field, invalid};
use crate::bytes;
use crate::crypto::CryptMethod;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::extension;
use crate::features::{Autoclear, Compatible, Incompatible};
use crate::geometry;
use crate::limits;
use crate::types::HostOffset;
use alloc::borrow::Cow;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// A file's first bytes, going on with zeros: a file may end within its first
/// cluster.
struct Raw<'a>(&'a [u8]);

impl<'a> Raw<'a> {
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut value = [0; N];
        for (to, from) in value.iter_mut().zip(self.0.get(at..).unwrap_or(&[])) {
            *to = *from;
        }
        value
    }

    fn be32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.array(at))
    }

    fn be64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.array(at))
    }

    /// Bytes `start..end`, which are within the first cluster.
    fn range(&self, start: usize, end: usize) -> Cow<'a, [u8]> {
        if let Some(inside) = self.0.get(start..end) {
            return Cow::Borrowed(inside);
        }
        let mut part = self.0.get(start..).unwrap_or(&[]).to_vec();
        part.resize(end.saturating_sub(start), 0);
        Cow::Owned(part)
    }
}

impl Header {
    /// Decodes the header of an image that is to be used (I5 to I16).
    ///
    /// `bytes` is the file's first cluster (see
    /// [`first_cluster_size_bytes`](super::first_cluster_size_bytes)), or the
    /// whole file if that is shorter; more does no harm.
    ///
    /// # Errors
    /// [`FormatErrorKind::NotQcow2`] without the magic; [`FormatErrorKind::Unsupported`] for a
    /// version, feature or method that is not known here; [`FormatErrorKind::TooLarge`] and
    /// [`FormatErrorKind::Invalid`] for values that the limits or the format do not allow.
    pub fn decode(bytes: &[u8]) -> Result<Header> {
        Header::decode_for(bytes, Purpose::Use)
    }

    /// Decodes the header of an image, as strictly as its `purpose` needs.
    ///
    /// # Errors
    /// As [`Header::decode`].
    pub fn decode_for(bytes: &[u8], purpose: Purpose) -> Result<Header> {
        let raw = Raw(bytes);
        let version = check_magic(bytes)?;
        geometry::check_version(version)?;
        let cluster_bits = raw.be32(field::CLUSTER_BITS);
        geometry::check_cluster_bits(cluster_bits)?;
        let layout = Layout::decode(&raw, version, cluster_bits)?;
        let mut header = fixed_fields(&raw, &layout)?;
        header.check_values(purpose)?;
        header.crypt_method = CryptMethod::decode(raw.be32(field::CRYPT_METHOD))?;
        let context = extension::Context {
            cluster_size_bytes: layout.cluster_size as u64,
            crypt_method: header.crypt_method,
            bitmaps_consistent: header.autoclear.contains(Autoclear::BITMAPS),
        };
        header.extensions = extension::decode_all(&layout.extension_area(&raw), &context)?;
        header.check_parts()?;
        header.backing_file = backing_file(&raw, &layout)?;
        Ok(header)
    }
}

/// Where things are in the first cluster.
struct Layout {
    version: u32,
    cluster_bits: u32,
    cluster_size: usize,
    header_len: usize,
    /// 0 if there is no backing file.
    backing_file_offset: usize,
}

impl Layout {
    fn decode(raw: &Raw, version: u32, cluster_bits: u32) -> Result<Self> {
        let cluster_size = 1usize << cluster_bits;
        let header_len = header_len(raw, version, cluster_size)?;
        let offset = raw.be64(field::BACKING_FILE_OFFSET);
        let backing_file_offset = usize::try_from(offset)
            .ok()
            .filter(|&offset| offset <= cluster_size)
            .ok_or_else(|| invalid("backing_file_offset", offset, "Invalid backing file offset"))?;
        Ok(Layout {
            version,
            cluster_bits,
            cluster_size,
            header_len,
            backing_file_offset,
        })
    }

    fn extension_area<'a>(&self, raw: &Raw<'a>) -> Cow<'a, [u8]> {
        let end = match self.backing_file_offset {
            0 => self.cluster_size,
            offset => offset,
        };
        if end <= self.header_len {
            return Cow::Borrowed(&[]);
        }
        raw.range(self.header_len, end)
    }
}

pub(super) fn check_magic(bytes: &[u8]) -> Result<u32> {
    let raw = Raw(bytes);
    let magic = raw.be32(field::MAGIC);
    if magic != MAGIC {
        return Err(fault(
            FormatErrorKind::NotQcow2,
            "magic",
            magic.into(),
            "Image is not in qcow2 format",
        ));
    }
    Ok(raw.be32(field::VERSION))
}

fn header_len(raw: &Raw, version: u32, cluster_size: usize) -> Result<usize> {
    if version == 2 {
        return Ok(limits::HEADER_LEN_V2_BYTES as usize);
    }
    let length = raw.be32(field::HEADER_LENGTH);
    let message = if length < limits::MIN_HEADER_LEN_V3_BYTES {
        "qcow2 header too short"
    } else if length as usize > cluster_size {
        "qcow2 header exceeds cluster size"
    } else if !length.is_multiple_of(8) {
        "qcow2 header length is not a multiple of 8"
    } else {
        return Ok(length as usize);
    };
    Err(invalid("header_length", length, message))
}

fn fixed_fields(raw: &Raw, layout: &Layout) -> Result<Header> {
    let from_v3 = |value: u64| if layout.version >= 3 { value } else { 0 };
    let incompatible = Incompatible(from_v3(raw.be64(field::INCOMPATIBLE_FEATURES)));
    let compression_type = compression_type(raw, layout, incompatible)?;
    if !incompatible.unknown().is_empty() {
        return Err(unsupported_features(raw, layout, incompatible.unknown()));
    }
    Ok(Header {
        version: layout.version,
        cluster_bits: layout.cluster_bits,
        size_bytes: raw.be64(field::SIZE),
        crypt_method: CryptMethod::None,
        l1_entries: raw.be32(field::L1_SIZE),
        l1_table_offset: HostOffset(raw.be64(field::L1_TABLE_OFFSET)),
        refcount_table_offset: HostOffset(raw.be64(field::REFCOUNT_TABLE_OFFSET)),
        refcount_table_clusters: raw.be32(field::REFCOUNT_TABLE_CLUSTERS),
        snapshot_count: raw.be32(field::SNAPSHOT_COUNT),
        snapshots_offset: HostOffset(raw.be64(field::SNAPSHOTS_OFFSET)),
        incompatible,
        compatible: Compatible(from_v3(raw.be64(field::COMPATIBLE_FEATURES))),
        autoclear: Autoclear(from_v3(raw.be64(field::AUTOCLEAR_FEATURES))),
        refcount_order: match layout.version {
            2 => limits::DEFAULT_REFCOUNT_ORDER,
            _ => raw.be32(field::REFCOUNT_ORDER),
        },
        compression_type,
        unknown_header_tail: unknown_tail(raw, layout),
        extensions: Vec::new(),
        backing_file: None,
    })
}

fn unknown_tail(raw: &Raw, layout: &Layout) -> Vec<u8> {
    if layout.header_len <= field::TAIL {
        return Vec::new();
    }
    let tail = raw.range(field::TAIL, layout.header_len);
    let known_len = limits::KNOWN_HEADER_LEN_V3_BYTES as usize;
    if layout.header_len == known_len && tail.iter().all(|&byte| byte == 0) {
        return Vec::new();
    }
    tail.into_owned()
}

fn compression_type(
    raw: &Raw,
    layout: &Layout,
    incompatible: Incompatible,
) -> Result<CompressionType> {
    let [number] = if layout.header_len > field::COMPRESSION_TYPE {
        raw.array(field::COMPRESSION_TYPE)
    } else {
        [0]
    };
    let compression_type = match number {
        0 => CompressionType::Zlib,
        1 => CompressionType::Zstd,
        _ => {
            return Err(fault(
                FormatErrorKind::Unsupported,
                "compression_type",
                number.into(),
                format!("qcow2: unknown compression type: {number}"),
            ));
        }
    };
    check_compression_bit(compression_type, incompatible)?;
    Ok(compression_type)
}

pub(super) fn check_compression_bit(
    compression_type: CompressionType,
    incompatible: Incompatible,
) -> Result<()> {
    let set = incompatible.contains(Incompatible::COMPRESSION);
    let message = match (compression_type, set) {
        (CompressionType::Zlib, true) => {
            "qcow2: Compression type incompatible feature bit must not be set"
        }
        (CompressionType::Zstd, false) => {
            "qcow2: Compression type incompatible feature bit must be set"
        }
        _ => return Ok(()),
    };
    Err(invalid(
        "compression_type",
        compression_type.number(),
        message,
    ))
}

fn unsupported_features(raw: &Raw, layout: &Layout, unknown: Incompatible) -> FormatError {
    let mut named = String::new();
    let mut missing = unknown.bits();
    let mut name_feature = |text: &str| {
        if !named.is_empty() {
            named.push_str(", ");
        }
        named.push_str(text);
    };
    for name in extension::find_feature_names(&layout.extension_area(raw)) {
        let bit = 1u64.checked_shl(name.bit.into()).unwrap_or(0);
        let text = name.text();
        if text.is_empty() {
            break;
        }
        if name.feature_type == extension::feature_type::INCOMPATIBLE && missing & bit != 0 {
            name_feature(&text);
            missing &= !bit;
        }
    }
    if missing != 0 {
        name_feature(&format!("Unknown incompatible feature: {missing:x}"));
    }
    fault(
        FormatErrorKind::Unsupported,
        "incompatible_features",
        unknown.bits(),
        format!("Unsupported qcow2 feature(s): {named}"),
    )
}

fn backing_file(raw: &Raw, layout: &Layout) -> Result<Option<Vec<u8>>> {
    let offset = layout.backing_file_offset;
    if offset == 0 {
        return Ok(None);
    }
    let length = raw.be32(field::BACKING_FILE_SIZE);
    let max = layout
        .cluster_size
        .saturating_sub(offset)
        .min(limits::MAX_BACKING_FILE_LEN_BYTES as usize);
    if length as usize > max {
        return Err(invalid(
            "backing_file_size",
            length,
            "Backing file name too long",
        ));
    }
    let name = raw.range(offset, offset + length as usize);
    let name = bytes::until_nul(&name);
    Ok((!name.is_empty()).then(|| name.to_vec()))
}
