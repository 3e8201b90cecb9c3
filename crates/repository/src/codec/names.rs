//! Sizes, hashes and names that all objects of a repository have in common.

use std::fmt;

use serde::{Deserialize, Serialize};
use vellum_io::{Error, ErrorKind};

/// What a disk is cut into: a chunk is stored once, whichever disks it is in.
pub const CHUNK_BYTES: u64 = 64 << 10;

/// Chunks of a segment at most: 16 MiB of a disk.
pub const SEGMENT_CHUNKS: u32 = 256;

/// Chunks of a piece: 1 GiB of a disk.
pub const PIECE_CHUNKS: u64 = 16 << 10;

/// The largest disk, in bytes: a manifest lists its pieces.
pub const MOST_DISK_BYTES: u64 = 1 << 47;

/// A BLAKE3 hash.
pub type Hash = [u8; 32];

/// What names a push, and all objects that it makes: 16 random bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PushId(pub [u8; 16]);

impl fmt::Display for PushId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for PushId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The bytes of a hexadecimal text of exactly their length, in lower case.
pub(crate) fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if digits.len() != 2 * N || !digits.iter().all(is_digit) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

impl PushId {
    /// The id of a text, if it is one.
    pub fn parse(text: &str) -> Option<PushId> {
        from_hex(text).map(PushId)
    }
}

impl Serialize for PushId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PushId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        PushId::parse(&text).ok_or_else(|| serde::de::Error::custom("no id of a push"))
    }
}

/// A hash as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HexHash(pub Hash);

impl Serialize for HexHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl<'de> Deserialize<'de> for HexHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let hash = from_hex(&text).map(HexHash);
        hash.ok_or_else(|| serde::de::Error::custom("no hash"))
    }
}

/// Bytes that are not what they should be. Whoever knows the object's name adds it.
pub(crate) fn damaged(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, "read", message)
}

/// The `N` bytes at `at`, if all of them are there.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_in_one_way() {
        let id = PushId([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
        assert_eq!(id.to_string(), "000102030405060708090a0b0c0d0eff");
        assert_eq!(PushId::parse(&id.to_string()), Some(id));
        for wrong in [
            "",
            "00",
            "000102030405060708090A0B0C0D0EFF",
            "+0010203040506070809a0b0c0d0eff0",
        ] {
            assert_eq!(PushId::parse(wrong), None, "{wrong}");
        }
    }
}
