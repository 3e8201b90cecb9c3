//! A segment: up to [`SEGMENT_CHUNKS`] chunks one behind the other, each compressed by itself, then the
//! *index* of them (hash and stored length of each), then a footer of fixed length.
//!
//! Whoever is led here by a map knows the index's hash; the footer is for those who find a segment of
//! which nothing else tells (a push that is taken up again).

use std::ops::Range;

use vellum_io::Result;

use super::{CHUNK_BYTES, Hash, SEGMENT_CHUNKS, array, be32, damaged};

/// What a footer begins with.
const MAGIC: &[u8; 8] = b"VELLSEG1";
/// Hash and length of a chunk.
const ENTRY_BYTES: usize = 36;
/// Magic, number of chunks, bytes of chunks, hash of the index.
pub const FOOTER_BYTES: u64 = 48;

/// A chunk as it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredChunk {
    /// Of its [`CHUNK_BYTES`] bytes; what lies beyond the end of a disk counts as zeroes.
    pub hash: Hash,
    /// Bytes that it takes: [`CHUNK_BYTES`], as they are, or fewer, a zstd frame.
    pub stored_bytes: u32,
}

/// What a segment holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentIndex {
    chunks: Vec<StoredChunk>,
    /// Where each chunk ends.
    ends: Vec<u32>,
}

impl SegmentIndex {
    /// An index of these chunks.
    ///
    /// # Errors
    /// If there are none, or too many, or one is longer than it can be.
    pub fn new(chunks: Vec<StoredChunk>) -> Result<Self> {
        if chunks.is_empty() || chunks.len() > SEGMENT_CHUNKS as usize {
            return Err(damaged(format!("a segment of {} chunks", chunks.len())));
        }
        let mut end = 0;
        let mut ends = Vec::with_capacity(chunks.len());
        for chunk in &chunks {
            if chunk.stored_bytes == 0 || u64::from(chunk.stored_bytes) > CHUNK_BYTES {
                return Err(damaged(format!("a chunk of {} bytes", chunk.stored_bytes)));
            }
            end += chunk.stored_bytes;
            ends.push(end);
        }
        Ok(SegmentIndex { chunks, ends })
    }

    /// Reads an index of `count` chunks.
    ///
    /// # Errors
    /// If the bytes are not that.
    pub fn decode(bytes: &[u8], count: u32) -> Result<Self> {
        let expected = u64::from(count) * ENTRY_BYTES as u64;
        if count > SEGMENT_CHUNKS || bytes.len() as u64 != expected {
            return Err(damaged("the list of chunks has another length"));
        }
        let entries = bytes.chunks_exact(ENTRY_BYTES).map(|entry| {
            let (hash, length) = (array(entry, 0), be32(entry, 32));
            let hash = hash.unwrap_or_default();
            let stored_bytes = length.unwrap_or_default();
            StoredChunk { hash, stored_bytes }
        });
        SegmentIndex::new(entries.collect())
    }

    /// As [`SegmentIndex::decode`] reads it.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.chunks.len() * ENTRY_BYTES);
        for chunk in &self.chunks {
            bytes.extend(chunk.hash);
            bytes.extend(chunk.stored_bytes.to_be_bytes());
        }
        bytes
    }

    /// The chunks, in order.
    pub fn chunks(&self) -> &[StoredChunk] {
        &self.chunks
    }

    /// Where the chunks `chunks` lie in the segment; `None` if it has no such.
    pub fn range(&self, chunks: Range<u32>) -> Option<Range<u64>> {
        let end = *self.ends.get(chunks.end.checked_sub(1)? as usize)?;
        let start = match chunks.start {
            0 => 0,
            first => *self.ends.get(first as usize - 1)?,
        };
        (chunks.start < chunks.end).then_some(u64::from(start)..u64::from(end))
    }

    /// Bytes of all chunks.
    pub fn data_bytes(&self) -> u32 {
        self.ends.last().copied().unwrap_or_default()
    }
}

/// Bytes of an index.
pub fn index_bytes(chunks: u32) -> u64 {
    u64::from(chunks) * ENTRY_BYTES as u64
}

/// What the end of a segment says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footer {
    /// How many chunks there are.
    pub chunks: u32,
    /// How many bytes they take.
    pub data_bytes: u32,
    /// The hash of the index.
    pub index_hash: Hash,
}

impl Footer {
    /// The footer of a segment with this index.
    pub fn of(index: &SegmentIndex, index_hash: Hash) -> Self {
        Footer {
            chunks: index.chunks.len() as u32,
            data_bytes: index.data_bytes(),
            index_hash,
        }
    }

    /// Reads a footer.
    ///
    /// # Errors
    /// If the bytes are none.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let whole = bytes.len() as u64 == FOOTER_BYTES && bytes.starts_with(MAGIC);
        let fields = || Some((be32(bytes, 8)?, be32(bytes, 12)?, array(bytes, 16)?));
        match fields().filter(|_| whole) {
            Some((chunks, data_bytes, index_hash)) => Ok(Footer {
                chunks,
                data_bytes,
                index_hash,
            }),
            None => Err(damaged("no segment ends like this")),
        }
    }

    /// As [`Footer::decode`] reads it.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.chunks.to_be_bytes());
        bytes.extend(self.data_bytes.to_be_bytes());
        bytes.extend(self.index_hash);
        bytes
    }

    /// Where the index lies in the segment.
    pub fn index_range(&self) -> Range<u64> {
        let start = u64::from(self.data_bytes);
        start..start + index_bytes(self.chunks)
    }

    /// The length of the whole segment in bytes.
    pub fn segment_bytes(&self) -> u64 {
        self.index_range().end + FOOTER_BYTES
    }
}

/// Compresses a chunk; as it is where that makes it no smaller.
///
/// # Errors
/// What the codec says.
pub fn compress(chunk: &[u8], level: i32) -> Result<Vec<u8>> {
    let frame = zstd::bulk::compress(chunk, level);
    let frame = frame.map_err(|error| damaged(format!("cannot compress: {error}")))?;
    Ok(if frame.len() < chunk.len() {
        frame
    } else {
        chunk.to_vec()
    })
}

/// The bytes of a chunk, compared with its hash.
///
/// # Errors
/// If they are not what was stored.
pub fn decompress(stored: &[u8], hash: &Hash) -> Result<Vec<u8>> {
    let chunk = match stored.len() as u64 == CHUNK_BYTES {
        true => stored.to_vec(),
        false => {
            let chunk = zstd::bulk::decompress(stored, CHUNK_BYTES as usize);
            chunk.map_err(|error| damaged(format!("cannot decompress a chunk: {error}")))?
        }
    };
    if chunk.len() as u64 != CHUNK_BYTES || blake3::hash(&chunk) != *hash {
        return Err(damaged("a chunk is not what was stored"));
    }
    Ok(chunk)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chunk(stored_bytes: u32) -> StoredChunk {
        StoredChunk {
            hash: [stored_bytes as u8; 32],
            stored_bytes,
        }
    }

    #[test]
    fn an_index_tells_where_chunks_lie() {
        let index = SegmentIndex::new(vec![chunk(10), chunk(1), chunk(65536)]).unwrap();
        assert_eq!(index.range(0..1), Some(0..10));
        assert_eq!(index.range(1..3), Some(10..65547));
        assert_eq!(index.range(2..4), None);
        assert_eq!(index.range(2..2), None);
        assert_eq!(SegmentIndex::decode(&index.encode(), 3).unwrap(), index);
        assert!(SegmentIndex::decode(&index.encode(), 2).is_err());
        let footer = Footer::of(&index, [7; 32]);
        assert_eq!(Footer::decode(&footer.encode()).unwrap(), footer);
        assert_eq!(footer.segment_bytes(), 65547 + 3 * 36 + 48);
        for wrong in [
            vec![],
            vec![chunk(0)],
            vec![chunk(65537)],
            vec![chunk(1); 257],
        ] {
            assert!(SegmentIndex::new(wrong).is_err());
        }
    }

    #[test]
    fn chunks_come_back_or_are_refused() {
        let text = vec![7; CHUNK_BYTES as usize];
        let stored = compress(&text, 3).unwrap();
        let hash = *blake3::hash(&text).as_bytes();
        assert!(stored.len() < 1000);
        assert_eq!(decompress(&stored, &hash).unwrap(), text);
        assert!(decompress(&stored[1..], &hash).is_err());
        assert!(decompress(&stored, &[0; 32]).is_err());
        // Whatever a frame says of its length, it gets no more memory than a chunk.
        let long = zstd::bulk::compress(&vec![0; 1 << 20], 3).unwrap();
        assert!(decompress(&long, &hash).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_index_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..400), count in 0..12_u32) {
            if let Ok(index) = SegmentIndex::decode(&bytes, count) {
                prop_assert_eq!(index.encode(), bytes.clone());
            }
            if let Ok(footer) = Footer::decode(&bytes) {
                prop_assert_eq!(footer.encode(), bytes);
            }
        }
    }
}
