//! The header of a Bochs image.

use vellum::{Error, ErrorKind, Result};

use crate::fields::{le32, le64, until_nul};

/// What the header takes.
pub(super) const HEADER_BYTES: usize = 512;
const VERSION_1: u32 = 0x0001_0000;
const VERSION_2: u32 = 0x0002_0000;
/// What the largest image takes that Bochs' own tool makes, about 8 TB.
const MOST_EXTENTS: u32 = 1 << 20;
const MOST_EXTENT_BYTES: u32 = 8 << 20;

/// What the header says, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The virtual size in bytes, whole sectors.
    pub size_bytes: u64,
    /// Entries of the catalog: one for each extent of the disk.
    pub extents: u32,
    /// The bytes of the disk that an extent holds, a power of two.
    pub extent_bytes: u32,
    /// What the bitmap before each extent takes, in bytes, whole sectors.
    pub bitmap_bytes: u64,
    /// Where the catalog begins, in bytes.
    pub catalog_bytes: u64,
}

fn text_is(bytes: &[u8], at: usize, len: usize, text: &str) -> bool {
    let field = bytes.get(at..at.saturating_add(len));
    field.is_some_and(|field| until_nul(field) == text.as_bytes())
}

pub(super) fn has_magic(bytes: &[u8]) -> bool {
    text_is(bytes, 0, 32, "Bochs Virtual HD Image")
        && text_is(bytes, 32, 16, "Redolog")
        && text_is(bytes, 48, 16, "Growing")
        && matches!(le32(bytes, 64), Some(VERSION_1 | VERSION_2))
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

impl Header {
    /// Reads a header.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for all that QEMU refuses, in its words.
    pub fn decode(bytes: &[u8]) -> Result<Header> {
        let short = || invalid("Image not in Bochs format");
        if !has_magic(bytes) || bytes.len() < HEADER_BYTES {
            return Err(short());
        }
        let field = |at| le32(bytes, at).ok_or_else(short);
        // The second version has aligned the size by four bytes that mean nothing.
        let size_at = if field(64)? == VERSION_1 { 84 } else { 88 };
        let header = Header {
            size_bytes: le64(bytes, size_at).ok_or_else(short)? & !511,
            extents: field(72)?,
            extent_bytes: field(80)?,
            bitmap_bytes: u64::from(field(76)?).max(1).next_multiple_of(512),
            catalog_bytes: field(68)?.into(),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<()> {
        let extent_bytes = self.extent_bytes;
        if self.extents > MOST_EXTENTS {
            return Err(invalid("Catalog size is too large"));
        }
        if extent_bytes < 512 {
            return Err(invalid("Extent size must be at least 512"));
        }
        if !extent_bytes.is_power_of_two() {
            let message = format!("Extent size {extent_bytes} is not a power of two");
            return Err(invalid(message));
        }
        if extent_bytes > MOST_EXTENT_BYTES {
            return Err(invalid(format!("Extent size {extent_bytes} is too large")));
        }
        if self.bitmap_bytes > extent_bytes.max(512).into() {
            // No bit is for less than a sector; and offsets fit in 64 bits then.
            return Err(invalid("Bitmap size is too large"));
        }
        if u64::from(self.extents) < self.size_bytes.div_ceil(extent_bytes.into()) {
            return Err(invalid("Catalog size is too small for this disk size"));
        }
        Ok(())
    }

    /// Where the bitmap of an extent begins, which is the extent's number in the file.
    pub(super) fn bitmap_offset_bytes(&self, number: u32) -> u64 {
        // Below 2^32 times 2^24, and a little.
        let data = self.catalog_bytes + u64::from(self.extents) * 4;
        data + u64::from(number) * (self.bitmap_bytes + u64::from(self.extent_bytes))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A header as Bochs' own tool makes it.
    pub(crate) fn encode(
        version: u32,
        extents: u32,
        extent_bytes: u32,
        size_bytes: u64,
    ) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, b"Bochs Virtual HD Image");
        put(32, b"Redolog");
        put(48, b"Growing");
        put(64, &version.to_le_bytes());
        put(68, &512u32.to_le_bytes());
        put(72, &extents.to_le_bytes());
        put(76, &(extent_bytes / 512 / 8).max(1).to_le_bytes());
        put(80, &extent_bytes.to_le_bytes());
        let size_at = if version == VERSION_1 { 84 } else { 88 };
        put(size_at, &size_bytes.to_le_bytes());
        bytes
    }

    #[test]
    fn both_versions_are_read() {
        for version in [VERSION_1, VERSION_2] {
            let header = Header::decode(&encode(version, 10, 4096, 40960)).unwrap();
            assert_eq!(header.size_bytes, 40960);
            assert_eq!(header.bitmap_bytes, 512);
            assert_eq!(header.bitmap_offset_bytes(2), 512 + 40 + 2 * (512 + 4096));
        }
    }

    #[test]
    fn what_qemu_refuses_is_refused_in_its_words() {
        for (extents, extent_bytes, size, message) in [
            (1 << 21, 4096, 4096, "Catalog size is too large"),
            (1, 256, 256, "Extent size must be at least 512"),
            (1, 4097, 512, "Extent size 4097 is not a power of two"),
            (1, 16 << 20, 512, "Extent size 16777216 is too large"),
            (
                1,
                4096,
                8192,
                "Catalog size is too small for this disk size",
            ),
        ] {
            let bytes = encode(VERSION_2, extents, extent_bytes, size);
            assert_eq!(Header::decode(&bytes).unwrap_err().message(), message);
        }
        let error = Header::decode(&[0; 512]).unwrap_err();
        assert_eq!(error.message(), "Image not in Bochs format");
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_header_or_an_error(mut bytes in proptest::collection::vec(any::<u8>(), 0..600), whole: bool) {
            if whole && bytes.len() >= 72 {
                bytes.splice(..72, encode(VERSION_2, 1, 512, 512).into_iter().take(72));
            }
            if let Ok(header) = Header::decode(&bytes) {
                header.bitmap_offset_bytes(u32::MAX);
            }
        }
    }
}
