//! The header of a stream: of which disk it is, what it builds on, and where it begins. It is a
//! resume token as well: the header of the stream that goes on where another one was cut off.

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::limits;
use crate::stream::SECTOR_BYTES;
use alloc::vec::Vec;

/// Bytes of a header that say how long it is.
pub const PRELUDE_BYTES: usize = 16;
/// The longest header.
pub const MAX_HEADER_BYTES: usize = FIXED_BYTES + limits::MAX_BITMAP_NAME_LEN_BYTES as usize + 4;

/// `"VLLMSEND"`
const MAGIC: [u8; 8] = *b"VLLMSEND";
const VERSION: u32 = 1;
/// Bytes before the name.
const FIXED_BYTES: usize = 104;
const INCREMENTAL: u32 = 1;

/// What tells a stream from all others: random bytes, never all zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamId(pub [u8; 16]);

const NOBODY: StreamId = StreamId([0; 16]);

/// What a stream begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Which stream this is; one that goes on with it has the same.
    pub id: StreamId,
    /// Size of the disk.
    pub size_bytes: u64,
    /// It says only what has changed: what it does not tell of stays as it is. Otherwise what it
    /// does not tell of reads as zeroes.
    pub incremental: bool,
    /// The grain of what has changed, or the cluster size of the image: a power of two.
    pub granularity_bytes: u32,
    /// The stream that this one builds on, if the sender has said so; of an incremental one only.
    pub base: Option<StreamId>,
    /// Where it begins: what lies before has been sent already.
    pub start_bytes: u64,
    /// What the sender knows its source by.
    pub source: [u8; 32],
    /// The bitmap that says what has changed; empty if none does.
    pub bitmap: Vec<u8>,
}

impl Header {
    /// How long the header is that begins with these bytes.
    ///
    /// # Errors
    /// [`FormatErrorKind::Invalid`] if none does, [`FormatErrorKind::Unsupported`] for a version that is
    /// not known.
    pub fn len_bytes(prelude: &[u8; PRELUDE_BYTES]) -> Result<usize> {
        if prelude[..8] != MAGIC {
            let message = "This is no stream of 'vellum send'";
            return Err(fault(FormatErrorKind::Invalid, "magic", 0, message));
        }
        let version = bytes::be32(prelude, 8).unwrap_or_default();
        if version != VERSION {
            let message = "The version of the stream is not supported";
            let kind = FormatErrorKind::Unsupported;
            return Err(fault(kind, "version", version.into(), message));
        }
        let len = bytes::be32(prelude, 12).unwrap_or_default();
        match usize::try_from(len) {
            Ok(len) if (FIXED_BYTES + 4..=MAX_HEADER_BYTES).contains(&len) => Ok(len),
            _ => invalid("length", len.into(), "The header's length is wrong"),
        }
    }

    /// Decodes a whole header.
    ///
    /// # Errors
    /// As [`Header::len_bytes`]; [`FormatErrorKind::Corrupt`] where its checksum does not agree,
    /// [`FormatErrorKind::Invalid`] where it says what cannot be.
    pub fn decode(raw: &[u8]) -> Result<Header> {
        let Some(prelude) = raw.first_chunk() else {
            return invalid("length", raw.len() as u64, "The header's length is wrong");
        };
        if Header::len_bytes(prelude)? != raw.len() {
            return invalid("length", raw.len() as u64, "The header's length is wrong");
        }
        let (signed, crc) = raw.split_at(raw.len() - 4);
        if bytes::be32(crc, 0) != Some(crc32c::crc32c(signed)) {
            let message = "The stream is damaged: its header's checksum does not agree";
            return Err(fault(FormatErrorKind::Corrupt, "crc", 0, message));
        }
        let flags = bytes::be32(raw, 16).unwrap_or_default();
        if flags & !INCREMENTAL != 0 {
            let message = "The stream uses features that are not known";
            let kind = FormatErrorKind::Unsupported;
            return Err(fault(kind, "flags", flags.into(), message));
        }
        let id = |at| bytes::array(raw, at).map_or(NOBODY, StreamId);
        let header = Header {
            id: id(40),
            size_bytes: bytes::be64(raw, 24).unwrap_or_default(),
            incremental: flags & INCREMENTAL != 0,
            granularity_bytes: bytes::be32(raw, 20).unwrap_or_default(),
            base: Some(id(56)).filter(|base| *base != NOBODY),
            start_bytes: bytes::be64(raw, 32).unwrap_or_default(),
            source: bytes::array(raw, 72).unwrap_or_default(),
            bitmap: signed.get(FIXED_BYTES..).unwrap_or_default().to_vec(),
        };
        header.check()?;
        Ok(header)
    }

    /// The header's bytes.
    ///
    /// # Errors
    /// [`FormatErrorKind::Invalid`] where it says what cannot be.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let len = FIXED_BYTES + self.bitmap.len() + 4;
        let flags = if self.incremental { INCREMENTAL } else { 0 };
        let mut raw = Vec::with_capacity(len);
        raw.extend_from_slice(&MAGIC);
        raw.extend_from_slice(&VERSION.to_be_bytes());
        raw.extend_from_slice(&(len as u32).to_be_bytes());
        raw.extend_from_slice(&flags.to_be_bytes());
        raw.extend_from_slice(&self.granularity_bytes.to_be_bytes());
        raw.extend_from_slice(&self.size_bytes.to_be_bytes());
        raw.extend_from_slice(&self.start_bytes.to_be_bytes());
        raw.extend_from_slice(&self.id.0);
        raw.extend_from_slice(&self.base.unwrap_or(NOBODY).0);
        raw.extend_from_slice(&self.source);
        raw.extend_from_slice(&self.bitmap);
        let crc = crc32c::crc32c(&raw);
        raw.extend_from_slice(&crc.to_be_bytes());
        Ok(raw)
    }

    fn check(&self) -> Result<()> {
        let whole = |bytes: u64| bytes.is_multiple_of(SECTOR_BYTES);
        let (size, start) = (self.size_bytes, self.start_bytes);
        if size > limits::MAX_SIZE_BYTES || !whole(size) {
            return invalid("size", size, "No disk has such a size");
        }
        if start > size || !whole(start) {
            return invalid("start", start, "The stream begins beyond its disk");
        }
        let grain = self.granularity_bytes;
        let least = 1 << limits::MIN_BITMAP_GRANULARITY_BITS;
        if !grain.is_power_of_two() || grain < least {
            return invalid("granularity", grain.into(), "No bitmap has such a grain");
        }
        if self.id == NOBODY || self.base == Some(NOBODY) {
            return invalid("id", 0, "The stream has no identity");
        }
        if self.base.is_some() && !self.incremental {
            return invalid("base", 0, "A whole disk builds on nothing");
        }
        match self.bitmap.len() {
            0..=1023 => Ok(()),
            len => invalid("bitmap", len as u64, "The bitmap's name is too long"),
        }
    }
}

fn fault(
    kind: FormatErrorKind,
    field: &'static str,
    value: u64,
    message: &'static str,
) -> FormatError {
    FormatError::new(kind, "stream header", field, value, message)
}

fn invalid<T>(field: &'static str, value: u64, message: &'static str) -> Result<T> {
    Err(fault(FormatErrorKind::Invalid, field, value, message))
}
