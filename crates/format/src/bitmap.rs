//! Persistent bitmaps: the header extension, the directory and the tables.

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::limits;
use crate::types::HostOffset;
use alloc::borrow::Cow;
use alloc::format;

mod directory;
mod table;

pub use directory::{
    BITMAP_DIRECTORY_ENTRY_SIZE_BYTES, BitmapDirectoryEntry, decode_directory, encode_directory,
};
pub use table::{BITMAP_TABLE_ENTRY_SIZE_BYTES, BitmapCluster, BitmapTableEntry};

/// The only type of bitmap that there is.
const DIRTY_TRACKING: u8 = 1;

/// Flags of a bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct BitmapFlags(pub u32);

impl BitmapFlags {
    /// A program has the bitmap loaded, or had when it crashed: the content is
    /// not to be trusted.
    pub const IN_USE: Self = Self(1 << 0);
    /// The bitmap records every write to the disk.
    pub const AUTO: Self = Self(1 << 1);

    /// Whether every flag of `other` is set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// With the flags of `other` set.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// With the flags of `other` clear.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    const fn has_reserved(self) -> bool {
        self.0 & !0b11 != 0
    }
}

/// Bytes of the bitmaps extension.
pub const BITMAPS_EXTENSION_SIZE_BYTES: usize = 24;

/// The bitmaps extension of the header: where the bitmap directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BitmapsExtension {
    /// Bitmaps in the directory.
    pub count: u32,
    /// Bytes of the directory.
    pub directory_size_bytes: u64,
    /// Start of the directory; the start of a cluster.
    pub directory_offset: HostOffset,
}

impl BitmapsExtension {
    /// Decodes the extension's data. `validate` is false for an extension that
    /// the autoclear bit does not vouch for: nobody reads what it points at.
    ///
    /// # Errors
    /// [`FormatErrorKind::Invalid`] for an extension of another length than 24 bytes, or, with
    /// `validate`, for values that the format does not allow.
    pub fn decode(data: &[u8], cluster_size_bytes: u64, validate: bool) -> Result<Self> {
        let length = data.len();
        if length != BITMAPS_EXTENSION_SIZE_BYTES {
            let message = "bitmaps_ext: Invalid extension length";
            return Err(fault("length", length as u64, message));
        }
        let extension = BitmapsExtension {
            count: bytes::be32(data, 0).unwrap_or(0),
            directory_size_bytes: bytes::be64(data, 8).unwrap_or(0),
            directory_offset: HostOffset(bytes::be64(data, 16).unwrap_or(0)),
        };
        if validate {
            let reserved = bytes::be32(data, 4).unwrap_or(0);
            if reserved != 0 {
                let message = "bitmaps_ext: Reserved field is not zero";
                return Err(fault("reserved", reserved.into(), message));
            }
            extension.validate(cluster_size_bytes)?;
        }
        Ok(extension)
    }

    /// The extension's data.
    pub fn encode(self) -> [u8; BITMAPS_EXTENSION_SIZE_BYTES] {
        let mut data = [0; BITMAPS_EXTENSION_SIZE_BYTES];
        data[..4].copy_from_slice(&self.count.to_be_bytes());
        data[8..16].copy_from_slice(&self.directory_size_bytes.to_be_bytes());
        data[16..].copy_from_slice(&self.directory_offset.0.to_be_bytes());
        data
    }

    fn validate(self, cluster_size_bytes: u64) -> Result<()> {
        let count = self.count;
        if count > limits::MAX_BITMAPS {
            let message = format!(
                "bitmaps_ext: Image has {count} bitmaps, exceeding the QEMU supported maximum of {}",
                limits::MAX_BITMAPS
            );
            return Err(fault("nb_bitmaps", count.into(), message));
        }
        if count == 0 {
            let message = "found bitmaps extension with zero bitmaps";
            return Err(fault("nb_bitmaps", 0, message));
        }
        let offset = self.directory_offset.0;
        if !self.directory_offset.is_aligned(cluster_size_bytes) || offset > limits::MAX_SIZE_BYTES
        {
            let message = "bitmaps_ext: invalid bitmap directory offset";
            return Err(fault("bitmap_directory_offset", offset, message));
        }
        let size = self.directory_size_bytes;
        if size > limits::MAX_BITMAP_DIRECTORY_SIZE_BYTES {
            let message = format!(
                "bitmaps_ext: bitmap directory size ({size}) exceeds the maximum supported size \
                 ({})",
                limits::MAX_BITMAP_DIRECTORY_SIZE_BYTES
            );
            return Err(fault("bitmap_directory_size", size, message));
        }
        Ok(())
    }
}

fn fault(field: &'static str, value: u64, message: impl Into<Cow<'static, str>>) -> FormatError {
    FormatError::new(
        FormatErrorKind::Invalid,
        "bitmaps extension",
        field,
        value,
        message,
    )
}
