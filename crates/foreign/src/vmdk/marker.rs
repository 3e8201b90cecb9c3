//! Markers of streamed extents, and compressed grains. Bytes in, values out; no I/O.
//!
//! ```text
//! grain           0 guest sector (8)   8 compressed bytes (4)   12 zlib stream ...
//! anything else   0 sectors that follow (8)   8 zero (4)   12 type (4)   16 zeroes to 512
//! ```
//! Each begins at a sector. A stream ends with a footer's marker, the footer (a header with the real
//! offset of the directory) and the end-of-stream marker, which is a sector of zeroes.

use std::cell::RefCell;

use libdeflater::{CompressionLvl, Compressor, Decompressor};
use vellum::{Error, ErrorKind, Result};

use super::header::{SparseHeader, u32_at, u64_at};

/// Bytes of a marker before the stream that a grain is.
pub const GRAIN_MARKER_BYTES: usize = 12;

/// The marker of an end of the stream: a whole sector.
pub const END_OF_STREAM: [u8; 512] = [0; 512];

/// The marker that stands before a footer.
const FOOTER_TYPE: u32 = 3;

/// Bytes of what ends a stream whose directory is at the end.
pub const FOOTER_BYTES: usize = 3 * 512;

/// The header at the end of a stream: `bytes` are the last [`FOOTER_BYTES`] of the file.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] if there is none.
pub fn parse_footer(bytes: &[u8]) -> Result<SparseHeader> {
    let (marker, rest) = bytes.split_at_checked(512).unwrap_or_default();
    let (header, end) = rest.split_at_checked(512).unwrap_or_default();
    let is_footer = u32_at(marker, 8) == 0 && u32_at(marker, 12) == FOOTER_TYPE;
    let is_end = end.len() >= 512 && end.iter().take(16).all(|&byte| byte == 0);
    SparseHeader::parse(header)
        .filter(|_| is_footer && is_end)
        .ok_or_else(|| Error::new(ErrorKind::InvalidImage, "open", "Invalid footer"))
}

/// What stands before a compressed grain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrainMarker {
    /// The grain's first sector in the guest's view.
    pub guest_sector: u64,
    /// Bytes of the stream behind the marker.
    pub stream_bytes: u32,
}

impl GrainMarker {
    /// Parses a marker: any bytes are one.
    pub fn parse(bytes: &[u8]) -> GrainMarker {
        GrainMarker {
            guest_sector: u64_at(bytes, 0),
            stream_bytes: u32_at(bytes, 8),
        }
    }
}

thread_local! {
    // Both own tables of tens of kilobytes or more that are worth keeping.
    static DEFLATER: RefCell<Compressor> = RefCell::new(Compressor::new(CompressionLvl::default()));
    static INFLATER: RefCell<Decompressor> = RefCell::new(Decompressor::new());
}

/// A marker and the compressed content behind it, filled up to whole sectors.
///
/// # Errors
/// [`ErrorKind::Io`] if the compressor fails, or gives more than a marker can count.
pub fn pack_grain(guest_sector: u64, content: &[u8]) -> Result<Vec<u8>> {
    DEFLATER.with_borrow_mut(|deflater| {
        let most_bytes = deflater.zlib_compress_bound(content.len());
        let mut packed = vec![0; GRAIN_MARKER_BYTES + most_bytes];
        let (marker, stream) = packed.split_at_mut(GRAIN_MARKER_BYTES);
        let stream_bytes = deflater.zlib_compress(content, stream).ok();
        let Some(counted) = stream_bytes.and_then(|len| u32::try_from(len).ok()) else {
            let message = "cannot compress the data";
            return Err(Error::new(ErrorKind::Io, "write compressed", message));
        };
        marker[..8].copy_from_slice(&guest_sector.to_le_bytes());
        marker[8..].copy_from_slice(&counted.to_le_bytes());
        packed.truncate(GRAIN_MARKER_BYTES + counted as usize);
        packed.resize(packed.len().next_multiple_of(512), 0);
        Ok(packed)
    })
}

/// The content of a compressed grain, at most `most_bytes`; what follows the stream does not matter.
///
/// # Errors
/// [`ErrorKind::Corrupt`] for what is no whole stream, or one of more bytes.
pub fn unpack(stream: &[u8], most_bytes: usize) -> Result<Vec<u8>> {
    let mut content = vec![0; most_bytes];
    let inflated =
        INFLATER.with_borrow_mut(|inflater| inflater.zlib_decompress(stream, &mut content));
    let Ok(len) = inflated else {
        let message = "a compressed grain does not decompress";
        return Err(Error::new(ErrorKind::Corrupt, "read", message));
    };
    content.truncate(len);
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_footer_is_recognized() {
        let header = SparseHeader::new(1 << 20, true, false);
        let mut footer = vec![0; FOOTER_BYTES];
        footer[0] = 1;
        footer[12] = 3;
        footer[512..1024].copy_from_slice(&header.encode());
        assert_eq!(parse_footer(&footer).unwrap(), header);
        for at in [8, 12, 512, 1024, 1036] {
            let mut changed = footer.clone();
            changed[at] ^= 1;
            assert_eq!(
                parse_footer(&changed).unwrap_err().message(),
                "Invalid footer"
            );
        }
    }

    proptest! {
        #[test]
        fn grains_come_back(content in proptest::collection::vec(any::<u8>(), 1..70_000)) {
            let packed = pack_grain(77, &content).unwrap();
            prop_assert_eq!(packed.len() % 512, 0);
            let marker = GrainMarker::parse(&packed);
            prop_assert_eq!(marker.guest_sector, 77);
            let stream = &packed[12..12 + marker.stream_bytes as usize];
            prop_assert_eq!(&unpack(stream, content.len()).unwrap(), &content);
            prop_assert_eq!(&unpack(&packed[12..], 70_000).unwrap(), &content);
            prop_assert!(unpack(stream, content.len() - 1).is_err());
        }

        #[test]
        fn any_bytes_give_a_value_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..1600),
        ) {
            let _ = (parse_footer(&bytes), GrainMarker::parse(&bytes), unpack(&bytes, 4096));
        }
    }
}
