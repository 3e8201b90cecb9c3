//! The indexes of many segments of one push in one object.

use vellum_io::Result;

use super::piece::SegmentRef;
use super::segment::{Footer, SegmentIndex, index_bytes};
use super::{Hash, PushId, SEGMENT_CHUNKS, be32, be64, damaged};

const MAGIC: &[u8; 8] = b"VELLIDX1";
/// Number and chunks of a segment.
const ENTRY_BYTES: usize = 8;
/// The hash of all before it: whoever is led by a list that was damaged gets to no chunk.
const HASH_BYTES: usize = 32;
/// Segments of one list at most.
pub const MOST_SEGMENTS: usize = 512;
/// More bytes than a list can have.
pub const MOST_LIST_BYTES: u64 = 8
    + HASH_BYTES as u64
    + MOST_SEGMENTS as u64 * (ENTRY_BYTES as u64 + SEGMENT_CHUNKS as u64 * 36);

/// A segment in such a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its number.
    pub number: u32,
    /// What it holds.
    pub index: SegmentIndex,
    /// What its end says.
    pub footer: Footer,
}

impl Listed {
    /// What leads to it, as one of the segments of a push.
    pub(crate) fn segment(&self, push: PushId) -> SegmentRef {
        SegmentRef {
            push,
            number: self.number,
            footer: self.footer,
        }
    }
}

/// Puts segments into a list: numbers and indexes.
pub fn encode(segments: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    for (number, index) in segments {
        let chunks = index.len() as u64 / index_bytes(1);
        bytes.extend(number.to_be_bytes());
        bytes.extend((chunks as u32).to_be_bytes());
        bytes.extend(index);
    }
    let hash = *blake3::hash(&bytes).as_bytes();
    bytes.extend(hash);
    bytes
}

/// Reads a list.
///
/// # Errors
/// If the bytes are none.
pub fn decode(bytes: &[u8]) -> Result<Vec<Listed>> {
    let wrong = || damaged("no list of segments");
    if be64(bytes, 0) != Some(u64::from_be_bytes(*MAGIC)) {
        return Err(wrong());
    }
    let (content, hash) = bytes.split_last_chunk::<HASH_BYTES>().ok_or_else(wrong)?;
    if blake3::hash(content) != *hash {
        return Err(damaged("a list of segments that is not what was written"));
    }
    let mut rest = content.get(8..).ok_or_else(wrong)?;
    let mut listed = Vec::new();
    while !rest.is_empty() {
        let head = be32(rest, 0).zip(be32(rest, 4));
        let (number, chunks) = head.ok_or_else(wrong)?;
        let len_bytes = index_bytes(chunks) as usize;
        let index = rest
            .get(ENTRY_BYTES..ENTRY_BYTES + len_bytes)
            .ok_or_else(wrong)?;
        rest = &rest[ENTRY_BYTES + len_bytes..];
        let hash: Hash = *blake3::hash(index).as_bytes();
        let index = SegmentIndex::decode(index, chunks)?;
        let footer = Footer::of(&index, hash);
        listed.push(Listed {
            number,
            index,
            footer,
        });
        if listed.len() > MOST_SEGMENTS {
            return Err(wrong());
        }
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::segment::StoredChunk;
    use super::*;

    #[test]
    fn lists_come_back() {
        let chunk = |stored_bytes| StoredChunk {
            hash: [1; 32],
            stored_bytes,
        };
        let indexes = [vec![chunk(1)], vec![chunk(2), chunk(3)]];
        let indexes = indexes.map(|chunks| SegmentIndex::new(chunks).unwrap());
        let bytes = encode(&[(4, indexes[0].encode()), (9, indexes[1].encode())]);
        let listed = decode(&bytes).unwrap();
        assert_eq!(listed.len(), 2);
        assert_eq!((listed[1].number, &listed[1].index), (9, &indexes[1]));
        assert_eq!(listed[1].footer.data_bytes, 5);
        assert!(decode(&bytes[..bytes.len() - 1]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_list_or_an_error(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&body);
            let content = [MAGIC.to_vec(), body].concat();
            let hash = *blake3::hash(&content).as_bytes();
            let _ = decode(&[content, hash.to_vec()].concat());
        }
    }
}
