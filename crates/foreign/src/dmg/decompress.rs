//! Decompression of whole chunks.

use std::io::Read;

use bzip2::read::BzDecoder;
use lzfse_rust::LzfseRingDecoder;
use lzma_rust2::XzReader;

use super::Kind;
use crate::inflate::{Wrapper, inflate};

/// What the dictionary of an LZMA stream may take. A chunk has at most 64 MiB, so a larger one is of no use.
pub(super) const MOST_DICTIONARY_KB: u32 = 80 << 10;

/// A chunk of exactly `len` bytes; `None` if it does not decompress to that, or is of no such kind.
pub(super) fn decompress(kind: Kind, stored: &[u8], len: usize) -> Option<Vec<u8>> {
    match kind {
        Kind::Zlib => inflate(stored, len, Wrapper::Zlib),
        Kind::Bzip2 => read_exactly(BzDecoder::new(stored), len),
        Kind::Lzfse => read_exactly(LzfseRingDecoder::default().reader_bytes(stored), len),
        Kind::Xz => {
            let reader = XzReader::new_mem_limit(stored, false, MOST_DICTIONARY_KB);
            read_exactly(reader, len)
        }
        Kind::Zero | Kind::Raw | Kind::Unknown(_) => None,
    }
}

/// All of a stream that has a length.
fn read_exactly(reader: impl Read, len: usize) -> Option<Vec<u8>> {
    let mut chunk = Vec::with_capacity(len);
    // One more, which must not be there, has the stream's end looked at.
    let mut reader = reader.take(len as u64 + 1);
    reader.read_to_end(&mut chunk).ok()?;
    (chunk.len() == len).then_some(chunk)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;
    use std::sync::LazyLock;

    const KINDS: [Kind; 4] = [Kind::Zlib, Kind::Bzip2, Kind::Lzfse, Kind::Xz];

    fn compress(kind: Kind, bytes: &[u8]) -> Vec<u8> {
        match kind {
            Kind::Zlib => {
                let level = flate2::Compression::default();
                let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), level);
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
            Kind::Bzip2 => {
                let level = bzip2::Compression::default();
                let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), level);
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
            Kind::Lzfse => {
                let mut compressed = Vec::new();
                lzfse_rust::encode_bytes(bytes, &mut compressed).unwrap();
                compressed
            }
            _ => {
                let options = lzma_rust2::XzOptions::with_preset(1);
                let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
        }
    }

    static COMPRESSED: LazyLock<Vec<(Kind, Vec<u8>)>> = LazyLock::new(|| {
        let content = content();
        KINDS.map(|kind| (kind, compress(kind, &content))).into()
    });

    fn content() -> Vec<u8> {
        (0..20_000u32).map(|at| (at * at / 7000) as u8).collect()
    }

    #[test]
    fn what_was_compressed_decompresses() {
        for &(kind, ref compressed) in &*COMPRESSED {
            let chunk = decompress(kind, compressed, 20_000);
            assert!(chunk.as_deref() == Some(&content()[..]), "{kind:?}");
            for len in [0, 19_999, 20_001] {
                assert_eq!(decompress(kind, compressed, len), None, "{kind:?}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn any_bytes_give_a_chunk_or_nothing(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            changes in proptest::collection::vec(any::<(u16, u8)>(), 1..4),
        ) {
            for (kind, mut compressed) in COMPRESSED.clone() {
                decompress(kind, &bytes, 512);
                for &(at, byte) in &changes {
                    let len = compressed.len();
                    compressed[at as usize % len] = byte;
                }
                decompress(kind, &compressed, 20_000);
            }
        }
    }
}
