//! The header section: the file identifier and the two headers, of which the newer valid one counts.

use super::guid::Guid;
use super::le;

/// What a VHDX begins with.
pub(super) const SIGNATURE: &[u8; 8] = b"vhdxfile";
/// Where the two headers lie, in bytes.
pub(super) const OFFSETS_BYTES: [u64; 2] = [64 << 10, 128 << 10];
/// What a header takes, and what its checksum is over.
pub(super) const LEN_BYTES: usize = 4096;

/// A header: where the log is, and what changes when the file does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    /// Of two valid headers the one with the larger number counts.
    pub sequence: u64,
    /// Changes when anything is written to the file.
    pub file_write: Guid,
    /// Changes when what the guest sees may: differencing images know their parent by it.
    pub data_write: Guid,
    /// Which entries of the log count; [`Guid::NIL`]: none, the log is empty.
    pub log: Guid,
    /// Must be 0 for a log that is to be read.
    pub log_version: u16,
    /// Of the log, in bytes.
    pub log_len_bytes: u32,
    /// Of the log in the file, in bytes.
    pub log_offset_bytes: u64,
}

impl Header {
    /// A header that is valid, or `None`: then it does not count, as after a torn write.
    pub(super) fn decode(bytes: &[u8]) -> Option<Header> {
        let bytes = bytes.get(..LEN_BYTES)?;
        let is_ours = bytes.starts_with(b"head") && le::le16(bytes, 66)? == 1;
        if !is_ours || !le::checksum_is_right(bytes) {
            return None;
        }
        Some(Header {
            sequence: le::le64(bytes, 8)?,
            file_write: Guid::at(bytes, 16)?,
            data_write: Guid::at(bytes, 32)?,
            log: Guid::at(bytes, 48)?,
            log_version: le::le16(bytes, 64)?,
            log_len_bytes: le::le32(bytes, 68)?,
            log_offset_bytes: le::le64(bytes, 72)?,
        })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN_BYTES];
        le::put(&mut bytes, 0, b"head");
        le::put(&mut bytes, 8, &self.sequence.to_le_bytes());
        le::put(&mut bytes, 16, &self.file_write.0);
        le::put(&mut bytes, 32, &self.data_write.0);
        le::put(&mut bytes, 48, &self.log.0);
        le::put(&mut bytes, 64, &self.log_version.to_le_bytes());
        le::put(&mut bytes, 66, &1u16.to_le_bytes());
        le::put(&mut bytes, 68, &self.log_len_bytes.to_le_bytes());
        le::put(&mut bytes, 72, &self.log_offset_bytes.to_le_bytes());
        le::put_checksum(&mut bytes);
        bytes
    }
}

/// Which of the two headers counts, and its slot.
pub(super) fn newer(first: Option<Header>, second: Option<Header>) -> Option<(usize, Header)> {
    match (first, second) {
        (Some(first), None) => Some((0, first)),
        (None, Some(second)) => Some((1, second)),
        (Some(first), Some(second)) if first.sequence > second.sequence => Some((0, first)),
        (Some(first), Some(second)) if first.sequence < second.sequence => Some((1, second)),
        // Disk2vhd writes one header twice.
        (Some(first), Some(second)) if first == second => Some((0, first)),
        _ => None,
    }
}

/// The file identifier of an image of ours: the signature, and who made it, in UTF-16.
pub(super) fn file_identifier(creator: &str) -> Vec<u8> {
    let mut bytes = SIGNATURE.to_vec();
    bytes.extend(creator.encode_utf16().take(256).flat_map(u16::to_le_bytes));
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(sequence: u64) -> Header {
        Header {
            sequence,
            file_write: Guid::BAT_REGION,
            data_write: Guid::METADATA_REGION,
            log: Guid::NIL,
            log_version: 0,
            log_len_bytes: 1 << 20,
            log_offset_bytes: 1 << 20,
        }
    }

    #[test]
    fn a_header_goes_there_and_back_and_a_torn_one_does_not_count() {
        let mut bytes = header(7).encode();
        assert_eq!(Header::decode(&bytes), Some(header(7)));
        bytes[100] ^= 1;
        assert_eq!(Header::decode(&bytes), None);
        assert_eq!(Header::decode(&bytes[..10]), None);
    }

    #[test]
    fn the_newer_valid_header_counts() {
        let (old, new) = (header(1), header(2));
        assert_eq!(
            newer(Some(old.clone()), Some(new.clone())),
            Some((1, new.clone()))
        );
        assert_eq!(
            newer(Some(new.clone()), Some(old.clone())),
            Some((0, new.clone()))
        );
        assert_eq!(newer(None, Some(old.clone())), Some((1, old.clone())));
        assert_eq!(
            newer(Some(new.clone()), Some(new.clone())),
            Some((0, new.clone()))
        );
        let mut other = new.clone();
        other.log = Guid::BAT_REGION;
        assert_eq!(newer(Some(new), Some(other)), None);
        assert_eq!(newer(None, None), None);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_header_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let _ = Header::decode(&bytes);
        }
    }
}
