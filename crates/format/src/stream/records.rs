//! The records of a stream, written and read.

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};

use super::header::{Header, StreamId};

/// Bytes of a record before its payload.
pub const HEAD_BYTES: usize = 64;

/// Most bytes of the disk that one record of data holds.
pub const MAX_DATA_BYTES: u32 = 1 << 20;

/// What all offsets and lengths are multiples of.
pub const SECTOR_BYTES: u64 = 512;

/// `"VLSR"`
const RECORD_MAGIC: [u8; 4] = *b"VLSR";

/// Where the checksum lies in a head, and where what it is taken of goes on.
const CRC: usize = 4;

const BEHIND_CRC: usize = 8;

const KIND_DATA: u8 = 1;

const KIND_ZSTD: u8 = 2;

const KIND_ZEROES: u8 = 3;

const KIND_CHECKPOINT: u8 = 4;

const KIND_END: u8 = 5;

/// What a record says. Offsets and lengths are in bytes of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// Bytes of the disk, which follow.
    Data {
        /// Where they begin.
        offset_bytes: u64,
        /// How many they are; not 0, and at most [`MAX_DATA_BYTES`].
        len_bytes: u32,
        /// How many bytes follow: as many, or fewer that are a frame of zstd.
        payload_bytes: u32,
        /// The BLAKE3 of what follows.
        hash: [u8; 32],
    },
    /// A range that reads as zeroes.
    Zeroes {
        /// Where it begins.
        offset_bytes: u64,
        /// How long it is; not 0.
        len_bytes: u64,
    },
    /// Whatever the stream says of the disk before here has been said.
    Checkpoint {
        /// Up to where.
        offset_bytes: u64,
    },
    /// The stream is whole.
    End {
        /// The number of records before this one.
        records: u64,
    },
}

impl Record {
    /// Whether its payload, if it has one, is a frame of zstd.
    pub fn is_packed(&self) -> bool {
        matches!(self, Record::Data { len_bytes, payload_bytes, .. } if payload_bytes < len_bytes)
    }

    /// How many bytes follow the head.
    pub fn payload_bytes(&self) -> usize {
        match self {
            Record::Data { payload_bytes, .. } => *payload_bytes as usize,
            _ => 0,
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Record::Data { .. } if self.is_packed() => KIND_ZSTD,
            Record::Data { .. } => KIND_DATA,
            Record::Zeroes { .. } => KIND_ZEROES,
            Record::Checkpoint { .. } => KIND_CHECKPOINT,
            Record::End { .. } => KIND_END,
        }
    }
}

/// The hash of a payload, as heads have it.
pub fn payload_hash(payload: &[u8]) -> [u8; 32] {
    *blake3::hash(payload).as_bytes()
}

/// How far one side is with a stream: the other side's is the same at the same record.
#[derive(Debug, Clone)]
struct Progress {
    id: StreamId,
    size_bytes: u64,
    /// Where the next record may begin.
    position_bytes: u64,
    records: u64,
    digest: blake3::Hasher,
    is_over: bool,
}

impl Progress {
    fn new(header: &Header) -> Result<Progress> {
        let mut digest = blake3::Hasher::new();
        digest.update(&header.encode()?);
        Ok(Progress {
            id: header.id,
            size_bytes: header.size_bytes,
            position_bytes: header.start_bytes,
            records: 0,
            digest,
            is_over: false,
        })
    }

    /// The checksum of a head, as the next of this stream.
    fn crc(&self, head: &[u8]) -> u32 {
        let crc = crc32c::crc32c(&self.id.0);
        let crc = crc32c::crc32c_append(crc, &self.records.to_be_bytes());
        crc32c::crc32c_append(crc, head.get(BEHIND_CRC..).unwrap_or_default())
    }

    /// Refuses a record that cannot be the next one.
    fn check(&self, record: &Record) -> Result<()> {
        if self.is_over {
            return invalid("kind", record.kind().into(), "There is more behind the end");
        }
        let (offset, len) = match *record {
            Record::Data {
                offset_bytes,
                len_bytes,
                payload_bytes,
                ..
            } => {
                if len_bytes == 0 || len_bytes > MAX_DATA_BYTES {
                    return invalid("length", len_bytes.into(), "So much data is in no record");
                }
                if payload_bytes == 0 || payload_bytes > len_bytes {
                    let value = payload_bytes.into();
                    return invalid("payload", value, "The payload's length is wrong");
                }
                (offset_bytes, len_bytes.into())
            }
            Record::Zeroes { len_bytes: 0, .. } => {
                return invalid("length", 0, "Zeroes of no length");
            }
            Record::Zeroes {
                offset_bytes,
                len_bytes,
            } => (offset_bytes, len_bytes),
            Record::Checkpoint { offset_bytes } => (offset_bytes, 0),
            Record::End { records } if records == self.records => return Ok(()),
            Record::End { records } => {
                return invalid("records", records, "Records are missing");
            }
        };
        if !offset.is_multiple_of(SECTOR_BYTES) || offset < self.position_bytes {
            return invalid("offset", offset, "The record is out of its order");
        }
        let end = offset
            .checked_add(len)
            .filter(|end| *end <= self.size_bytes);
        if end.is_none() || !len.is_multiple_of(SECTOR_BYTES) {
            return invalid("length", len, "The record goes beyond the disk");
        }
        Ok(())
    }

    /// A record whose head is this has been met.
    fn advance(&mut self, record: &Record, head: &[u8]) {
        self.digest.update(head);
        self.records += 1;
        match *record {
            Record::Data {
                offset_bytes,
                len_bytes,
                ..
            } => self.position_bytes = offset_bytes + u64::from(len_bytes),
            Record::Zeroes {
                offset_bytes,
                len_bytes,
            } => self.position_bytes = offset_bytes + len_bytes,
            Record::Checkpoint { offset_bytes } => self.position_bytes = offset_bytes,
            Record::End { .. } => {
                self.position_bytes = self.size_bytes;
                self.is_over = true;
            }
        }
    }
}

/// The sender's side: makes heads.
#[derive(Debug, Clone)]
pub struct Writer(Progress);

impl Writer {
    /// A stream that begins with this header.
    ///
    /// # Errors
    /// As [`Header::encode`].
    pub fn new(header: &Header) -> Result<Writer> {
        Progress::new(header).map(Writer)
    }

    /// The number of records so far.
    pub fn records(&self) -> u64 {
        self.0.records
    }

    /// The head of the next record.
    ///
    /// # Errors
    /// [`FormatErrorKind::Invalid`] for a record that no reader would take.
    pub fn head(&mut self, record: &Record) -> Result<[u8; HEAD_BYTES]> {
        self.0.check(record)?;
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&RECORD_MAGIC);
        head[8] = record.kind();
        let (offset, len, hash) = match *record {
            Record::Data {
                offset_bytes,
                len_bytes,
                hash,
                ..
            } => (offset_bytes, len_bytes.into(), hash),
            Record::Zeroes {
                offset_bytes,
                len_bytes,
            } => (offset_bytes, len_bytes, [0; 32]),
            Record::Checkpoint { offset_bytes } => (offset_bytes, 0, self.digest()),
            Record::End { records } => (self.0.size_bytes, records, self.digest()),
        };
        let payload = record.payload_bytes() as u32;
        head[12..16].copy_from_slice(&payload.to_be_bytes());
        head[16..24].copy_from_slice(&offset.to_be_bytes());
        head[24..32].copy_from_slice(&len.to_be_bytes());
        head[32..].copy_from_slice(&hash);
        let crc = self.0.crc(&head);
        head[CRC..BEHIND_CRC].copy_from_slice(&crc.to_be_bytes());
        self.0.advance(record, &head);
        Ok(head)
    }

    fn digest(&self) -> [u8; 32] {
        *self.0.digest.finalize().as_bytes()
    }
}

/// The receiver's side: understands heads.
#[derive(Debug, Clone)]
pub struct Reader(Progress);

impl Reader {
    /// The records of a stream that begins with this header.
    ///
    /// # Errors
    /// As [`Header::encode`].
    pub fn new(header: &Header) -> Result<Reader> {
        Progress::new(header).map(Reader)
    }

    /// Where the next record may begin: what the stream says of the disk before here has been said.
    pub fn position_bytes(&self) -> u64 {
        self.0.position_bytes
    }

    /// Understands the next head.
    ///
    /// # Errors
    /// [`FormatErrorKind::Corrupt`] for bytes that are not the next head of this stream,
    /// [`FormatErrorKind::Invalid`] for one that says what cannot be. Neither changes anything.
    pub fn head(&mut self, raw: &[u8; HEAD_BYTES]) -> Result<Record> {
        let corrupt = |field, value, message| {
            FormatError::new(FormatErrorKind::Corrupt, "record", field, value, message)
        };
        let magic = bytes::be32(raw, 0).unwrap_or_default();
        let crc = bytes::be32(raw, CRC).unwrap_or_default();
        if raw[..4] != RECORD_MAGIC || crc != self.0.crc(raw) {
            let message = "The stream is damaged: this is not its next record";
            return Err(corrupt("magic", magic.into(), message));
        }
        let record = decode(raw)?;
        self.0.check(&record)?;
        let is_sum = matches!(record, Record::Checkpoint { .. } | Record::End { .. });
        if is_sum && raw[32..] != *self.0.digest.finalize().as_bytes() {
            let message = "The stream is damaged: what came is not what was sent";
            return Err(corrupt("hash", self.0.records, message));
        }
        self.0.advance(&record, raw);
        Ok(record)
    }
}

/// The fields of a head whose checksum agrees.
pub(crate) fn decode(raw: &[u8; HEAD_BYTES]) -> Result<Record> {
    let (offset_bytes, len) = (be64(raw, 16), be64(raw, 24));
    let payload_bytes = bytes::be32(raw, 12).unwrap_or_default();
    let reserved = bytes::be32(raw, 8).unwrap_or_default() & 0xff_ffff;
    if reserved != 0 {
        return invalid(
            "reserved",
            reserved.into(),
            "A field that is not known is set",
        );
    }
    let record = match raw[8] {
        KIND_DATA | KIND_ZSTD => Record::Data {
            offset_bytes,
            len_bytes: u32::try_from(len).unwrap_or(u32::MAX),
            payload_bytes,
            hash: bytes::array(raw, 32).unwrap_or_default(),
        },
        KIND_ZEROES => Record::Zeroes {
            offset_bytes,
            len_bytes: len,
        },
        KIND_CHECKPOINT => Record::Checkpoint { offset_bytes },
        KIND_END => Record::End { records: len },
        kind => {
            return Err(FormatError::new(
                FormatErrorKind::Unsupported,
                "record",
                "kind",
                kind.into(),
                "A record of this kind is not known",
            ));
        }
    };
    if raw[8] != record.kind() || payload_bytes as usize != record.payload_bytes() {
        let value = payload_bytes.into();
        return invalid("payload", value, "The payload's length is wrong");
    }
    Ok(record)
}

pub(crate) fn be64(raw: &[u8], at: usize) -> u64 {
    bytes::be64(raw, at).unwrap_or_default()
}

pub(crate) fn invalid<T>(field: &'static str, value: u64, message: &'static str) -> Result<T> {
    let kind = FormatErrorKind::Invalid;
    Err(FormatError::new(kind, "record", field, value, message))
}

#[cfg(test)]
mod tests;
