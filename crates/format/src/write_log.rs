//! The write log: guest writes that are durable in another file than the image, until
//! the image has them too (FORMAT.md, section 7b). Vellum's own.
//!
//! ```text
//! file    | superblock | superblock | blocks of the ring ...                    |
//! batch   | record | record | ... | zeroes up to a block's end |
//! record  | head, 64 bytes | payload | zeroes up to a multiple of 8 |
//! ```
//!
//! All numbers are big-endian. A batch begins with a block, and is appended with one
//! durable write.

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::limits;
use alloc::vec::Vec;
use core::ops::Range;

/// What a batch, and each superblock, is a multiple of.
pub const BLOCK_BYTES: u64 = 4096;
/// Where the ring begins: behind the two superblocks.
pub const RING_START_BYTES: u64 = 2 * BLOCK_BYTES;
/// The shortest log: a ring of 16 blocks.
pub const MIN_LEN_BYTES: u64 = RING_START_BYTES + 16 * BLOCK_BYTES;
/// The longest log.
pub const MAX_LEN_BYTES: u64 = 1 << 30;
/// Most guest bytes that one record changes.
pub const MAX_RECORD_BYTES: u64 = 64 << 10;
/// Bytes of a record before its payload.
pub const RECORD_HEAD_BYTES: usize = 64;
/// What sequence and batch numbers of superblocks are below.
pub const NUMBERS_END: u64 = 1 << 63;
/// What generations of superblocks are below: so much has room in a record.
pub const GENERATIONS_END: u64 = 1 << 48;
/// Longest name of the log in an image.
pub const MAX_NAME_LEN_BYTES: usize = 1023;

/// `"VLLMWLOG"`
const SUPERBLOCK_MAGIC: [u8; 8] = *b"VLLMWLOG";
/// `"VLRC"`
const RECORD_MAGIC: [u8; 4] = *b"VLRC";
const VERSION: u32 = 1;
const SUPERBLOCK_BYTES: usize = 72;
/// Where the checksum lies in a superblock, and in the head of a record.
const SUPERBLOCK_CRC: usize = 12;
const RECORD_CRC: usize = 4;
/// Where the word lies in the head of a record whose low 48 bits are a generation.
const GENERATION: usize = 56;

/// What ties a log to one opening of one image: random bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LogId(pub [u8; 16]);

/// The CRC32C (Castagnoli) of `parts`, one behind the other.
fn crc32c(parts: &[&[u8]]) -> u32 {
    let parts = parts.iter();
    parts.fold(0, |crc, part| crc32c::crc32c_append(crc, part))
}

/// The extension of the header that names the log: its identity, 16 bytes, and the name of
/// its file or its place in the image. It counts only while the incompatible bit is set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteLogExtension {
    /// The log's identity.
    pub id: LogId,
    /// The name of the file, relative to the image's folder as a data file's is; no name, but
    /// [a place](WriteLogExtension::inside), if it begins with a NUL.
    pub name: Vec<u8>,
}

/// What the name begins with of a log that lies in the image: no name of a file does.
const INSIDE: [u8; 8] = [0; 8];

impl WriteLogExtension {
    /// The extension for a log in these bytes of the image's own file.
    pub fn for_inside(id: LogId, place: &Range<u64>) -> Self {
        let numbers = [place.start, place.end - place.start];
        let numbers = numbers.into_iter().flat_map(u64::to_be_bytes);
        WriteLogExtension {
            id,
            name: INSIDE.into_iter().chain(numbers).collect(),
        }
    }

    /// The bytes of the image's own file that are the log: not empty, and below 2^63. `None`: the log
    /// is another file, or nobody knows.
    pub fn inside(&self) -> Option<Range<u64>> {
        if self.name.len() != INSIDE.len() + 16 || self.name[..INSIDE.len()] != INSIDE {
            return None;
        }
        let (start, len) = (bytes::be64(&self.name, 8)?, bytes::be64(&self.name, 16)?);
        let end = start
            .checked_add(len)
            .filter(|end| *end <= limits::MAX_SIZE_BYTES)?;
        (len > 0).then_some(start..end)
    }

    /// The name of the log's file; `None`: it lies in the image, or nobody knows where.
    pub fn file_name(&self) -> Option<&[u8]> {
        (self.name.first() != Some(&0)).then_some(&self.name)
    }

    /// Decodes the extension's data.
    ///
    /// # Errors
    /// [`FormatErrorKind::Invalid`] if it holds no identity, or a name that is empty or too long.
    pub fn decode(data: &[u8]) -> Result<Self> {
        let id = bytes::array(data, 0).map(LogId);
        let name = data.get(16..).unwrap_or_default();
        let length = data.len() as u64;
        match id {
            Some(id) if (1..=MAX_NAME_LEN_BYTES).contains(&name.len()) => Ok(WriteLogExtension {
                id,
                name: name.to_vec(),
            }),
            _ => Err(extension_fault(length, "Invalid length of the name")),
        }
    }

    /// The extension's data.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = self.id.0.to_vec();
        data.extend_from_slice(&self.name);
        data
    }
}

fn extension_fault(value: u64, message: &'static str) -> FormatError {
    let structure = "write_log_ext";
    FormatError::new(
        FormatErrorKind::Invalid,
        structure,
        "length",
        value,
        message,
    )
}

/// One of the two blocks that say where the live records begin. Each change is written to
/// the one that holds the older, so that a torn write leaves the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// Whose log this is.
    pub id: LogId,
    /// Bytes of the whole file that belong to the log.
    pub len_bytes: u64,
    /// The higher one counts.
    pub generation: u64,
    /// Where in the file the first live batch begins; a block's start inside the ring.
    pub start_bytes: u64,
    /// The sequence number of its first record.
    pub start_sequence: u64,
    /// Its batch number.
    pub start_batch: u64,
}

impl Superblock {
    /// Decodes a block; `None` if it holds no superblock, or a torn one.
    ///
    /// # Errors
    /// [`FormatErrorKind::Unsupported`] for a version that is not known, and
    /// [`FormatErrorKind::Invalid`] for places and numbers that no log has.
    pub fn decode(block: &[u8]) -> Result<Option<Self>> {
        let Some(raw) = block.first_chunk::<SUPERBLOCK_BYTES>() else {
            return Ok(None);
        };
        if raw[..8] != SUPERBLOCK_MAGIC || bytes::be32(raw, SUPERBLOCK_CRC) != Some(crc_of(raw)) {
            return Ok(None);
        }
        let version = bytes::be32(raw, 8).unwrap_or(0);
        if version != VERSION {
            let message = "The version of the write log is not supported";
            return Err(FormatError::new(
                FormatErrorKind::Unsupported,
                "write log",
                "version",
                version.into(),
                message,
            ));
        }
        let word = |at| bytes::be64(raw, at).unwrap_or(0);
        let superblock = Superblock {
            id: LogId(bytes::array(raw, 16).unwrap_or_default()),
            len_bytes: word(32),
            generation: word(40),
            start_bytes: word(48),
            start_sequence: word(56),
            start_batch: word(64),
        };
        superblock.validate()?;
        Ok(Some(superblock))
    }

    fn validate(&self) -> Result<()> {
        let fault = |field, value| {
            let (kind, message) = (
                FormatErrorKind::Invalid,
                "The write log's superblock is invalid",
            );
            Err(FormatError::new(kind, "write log", field, value, message))
        };
        if !(MIN_LEN_BYTES..=MAX_LEN_BYTES).contains(&self.len_bytes)
            || !self.len_bytes.is_multiple_of(BLOCK_BYTES)
        {
            return fault("len", self.len_bytes);
        }
        if !(RING_START_BYTES..self.len_bytes).contains(&self.start_bytes)
            || !self.start_bytes.is_multiple_of(BLOCK_BYTES)
        {
            return fault("start", self.start_bytes);
        }
        if self.generation >= GENERATIONS_END {
            return fault("generation", self.generation);
        }
        let numbers = [self.start_sequence, self.start_batch];
        match numbers.into_iter().find(|number| *number >= NUMBERS_END) {
            Some(number) => fault("number", number),
            None => Ok(()),
        }
    }

    /// The block.
    pub fn encode(&self) -> Vec<u8> {
        let mut block = alloc::vec![0; BLOCK_BYTES as usize];
        block[..8].copy_from_slice(&SUPERBLOCK_MAGIC);
        block[8..12].copy_from_slice(&VERSION.to_be_bytes());
        block[16..32].copy_from_slice(&self.id.0);
        let words = [
            self.len_bytes,
            self.generation,
            self.start_bytes,
            self.start_sequence,
            self.start_batch,
        ];
        for (place, word) in block[32..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        let crc = block.first_chunk().map_or(0, crc_of);
        block[SUPERBLOCK_CRC..][..4].copy_from_slice(&crc.to_be_bytes());
        block
    }
}

/// The checksum of a superblock, over all of it but the checksum.
fn crc_of(raw: &[u8; SUPERBLOCK_BYTES]) -> u32 {
    crc32c(&[&raw[..SUPERBLOCK_CRC], &raw[SUPERBLOCK_CRC + 4..]])
}

/// What a record does to its guest range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordKind {
    /// The payload is written.
    Data,
    /// Zeroes are written.
    Zeroes,
    /// As zeroes; the space may be given back.
    Discard,
}

impl RecordKind {
    const fn number(self) -> u8 {
        match self {
            RecordKind::Data => 1,
            RecordKind::Zeroes => 2,
            RecordKind::Discard => 3,
        }
    }

    const fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(RecordKind::Data),
            2 => Some(RecordKind::Zeroes),
            3 => Some(RecordKind::Discard),
            _ => None,
        }
    }
}

/// A record without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordHead {
    /// Which log this belongs to.
    pub id: LogId,
    /// One more than that of the record before.
    pub sequence: u64,
    /// The batch, one more than the one before.
    pub batch: u64,
    /// What becomes of the range.
    pub kind: RecordKind,
    /// No record of the batch follows.
    pub ends_batch: bool,
    /// That of the newest superblock that was durable when the batch was appended; below
    /// [`GENERATIONS_END`].
    pub generation: u64,
    /// First byte of the range.
    pub guest_offset_bytes: u64,
    /// Bytes of the range, and of the payload if there is one; 1 to [`MAX_RECORD_BYTES`].
    pub len_bytes: u64,
}

impl RecordHead {
    /// Bytes behind the head.
    pub const fn payload_bytes(&self) -> usize {
        match self.kind {
            RecordKind::Data => self.len_bytes as usize,
            RecordKind::Zeroes | RecordKind::Discard => 0,
        }
    }

    /// Bytes that a record with so much payload takes.
    pub const fn record_bytes(payload_bytes: usize) -> usize {
        bytes::padded(RECORD_HEAD_BYTES + payload_bytes)
    }

    /// Decodes the record at the start of `raw`; the payload lies behind the head. `None` if
    /// there is none that is whole: the log ends there.
    pub fn decode(raw: &[u8]) -> Option<Self> {
        let head = raw.first_chunk::<RECORD_HEAD_BYTES>()?;
        if head[..4] != RECORD_MAGIC {
            return None;
        }
        let record = RecordHead {
            id: LogId(bytes::array(head, 8)?),
            sequence: bytes::be64(head, 24)?,
            batch: bytes::be64(head, 32)?,
            guest_offset_bytes: bytes::be64(head, 40)?,
            len_bytes: bytes::be64(head, 48)?,
            kind: RecordKind::from_number(head[56])?,
            ends_batch: head[57] != 0,
            generation: bytes::be64(head, GENERATION)? % GENERATIONS_END,
        };
        let end = record.guest_offset_bytes.checked_add(record.len_bytes)?;
        if !(1..=MAX_RECORD_BYTES).contains(&record.len_bytes) || end > limits::MAX_SIZE_BYTES {
            return None;
        }
        let payload = raw
            .get(RECORD_HEAD_BYTES..)?
            .get(..record.payload_bytes())?;
        (bytes::be32(head, RECORD_CRC) == Some(crc_of_record(head, payload))).then_some(record)
    }

    /// Appends the record to a batch. `payload` is as long as [`RecordHead::payload_bytes`] says.
    pub fn encode(&self, payload: &[u8], out: &mut Vec<u8>) {
        debug_assert_eq!(payload.len(), self.payload_bytes());
        debug_assert!(self.generation < GENERATIONS_END);
        let mut head = [0; RECORD_HEAD_BYTES];
        head[..4].copy_from_slice(&RECORD_MAGIC);
        head[8..24].copy_from_slice(&self.id.0);
        let words = [
            self.sequence,
            self.batch,
            self.guest_offset_bytes,
            self.len_bytes,
        ];
        for (place, word) in head[24..56].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        head[GENERATION..].copy_from_slice(&self.generation.to_be_bytes());
        head[56] = self.kind.number();
        head[57] = u8::from(self.ends_batch);
        let crc = crc_of_record(&head, payload);
        head[RECORD_CRC..][..4].copy_from_slice(&crc.to_be_bytes());
        out.extend_from_slice(&head);
        out.extend_from_slice(payload);
        out.resize(bytes::padded(out.len()), 0);
    }
}

/// The checksum of a record, over all of it but the checksum and the padding.
fn crc_of_record(head: &[u8; RECORD_HEAD_BYTES], payload: &[u8]) -> u32 {
    crc32c(&[&head[..RECORD_CRC], &head[RECORD_CRC + 4..], payload])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: LogId = LogId(*b"0123456789abcdef");

    fn superblock() -> Superblock {
        Superblock {
            id: ID,
            len_bytes: MIN_LEN_BYTES,
            generation: 7,
            start_bytes: RING_START_BYTES + BLOCK_BYTES,
            start_sequence: 99,
            start_batch: 12,
        }
    }

    fn head(payload: &[u8]) -> RecordHead {
        RecordHead {
            id: ID,
            sequence: 5,
            batch: 3,
            kind: RecordKind::Data,
            ends_batch: true,
            generation: GENERATIONS_END - 2,
            guest_offset_bytes: 1 << 40,
            len_bytes: payload.len() as u64,
        }
    }

    #[test]
    fn the_checksum_is_castagnolis() {
        // The check value of the catalogue of CRCs.
        assert_eq!(crc32c(&[b"1234", b"56789"]), 0xe306_9283);
    }

    #[test]
    fn superblocks_come_back_as_they_were() {
        let block = superblock().encode();
        assert_eq!(block.len() as u64, BLOCK_BYTES);
        assert_eq!(Superblock::decode(&block), Ok(Some(superblock())));
        assert_eq!(Superblock::decode(&[]), Ok(None));
    }

    #[test]
    fn places_and_numbers_that_no_log_has_are_refused() {
        for wrong in [
            Superblock {
                len_bytes: MIN_LEN_BYTES - BLOCK_BYTES,
                ..superblock()
            },
            Superblock {
                len_bytes: MIN_LEN_BYTES + 1,
                ..superblock()
            },
            Superblock {
                len_bytes: MAX_LEN_BYTES + BLOCK_BYTES,
                ..superblock()
            },
            Superblock {
                start_bytes: BLOCK_BYTES,
                ..superblock()
            },
            Superblock {
                start_bytes: MIN_LEN_BYTES,
                ..superblock()
            },
            Superblock {
                start_bytes: RING_START_BYTES + 8,
                ..superblock()
            },
            Superblock {
                generation: GENERATIONS_END,
                ..superblock()
            },
            Superblock {
                start_sequence: NUMBERS_END,
                ..superblock()
            },
            Superblock {
                start_batch: u64::MAX,
                ..superblock()
            },
        ] {
            let refused = Superblock::decode(&wrong.encode()).unwrap_err();
            assert_eq!(refused.kind(), FormatErrorKind::Invalid, "{wrong:?}");
        }
    }

    #[test]
    fn extensions_come_back_as_they_were() {
        let extension = WriteLogExtension {
            id: ID,
            name: b"disk.log".to_vec(),
        };
        assert_eq!(
            WriteLogExtension::decode(&extension.encode()),
            Ok(extension)
        );
        assert!(WriteLogExtension::decode(&ID.0).is_err());
        assert!(WriteLogExtension::decode(&[0; 16 + MAX_NAME_LEN_BYTES + 1]).is_err());
    }

    proptest! {
        #[test]
        fn records_come_back_as_they_were(payload in prop::collection::vec(any::<u8>(), 1..600)) {
            let mut out = Vec::new();
            head(&payload).encode(&payload, &mut out);
            prop_assert_eq!(out.len(), RecordHead::record_bytes(payload.len()));
            prop_assert_eq!(RecordHead::decode(&out), Some(head(&payload)));
        }

        #[test]
        fn no_bit_of_a_record_changes_unnoticed(
            payload in prop::collection::vec(any::<u8>(), 1..600), bit in any::<prop::sample::Index>(),
        ) {
            let mut out = Vec::new();
            head(&payload).encode(&payload, &mut out);
            let bit = bit.index((RECORD_HEAD_BYTES + payload.len()) * 8);
            out[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(RecordHead::decode(&out), None);
        }

        #[test]
        fn no_bit_of_a_superblock_changes_unnoticed(bit in 0..SUPERBLOCK_BYTES * 8) {
            let mut block = superblock().encode();
            block[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Superblock::decode(&block), Ok(None));
        }

        #[test]
        fn any_bytes_are_decoded_without_a_panic(raw in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (RecordHead::decode(&raw), Superblock::decode(&raw), WriteLogExtension::decode(&raw));
        }
    }
}
