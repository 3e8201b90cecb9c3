//! Objects of repositories: whoever can write to a store can put anything there.

use vellum_repository::TagName;
use vellum_repository::codec::manifest::{Entry, piece_chunks};
use vellum_repository::codec::piece::Piece;
use vellum_repository::codec::segment::{Footer, SegmentIndex, decompress};
use vellum_repository::codec::{CHUNK_BYTES, hash_list};

/// The first byte says what the others are taken for; what can be read says the same again.
///
/// # Panics
/// If something is read that cannot be, or does not come back.
pub fn check_repository(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else {
        return;
    };
    match kind % 6 {
        0 => {
            let count = bytes.len() as u32 / 36;
            if let Ok(index) = SegmentIndex::decode(bytes, count) {
                assert_eq!(index.encode(), bytes);
                let all = index.range(0..count).expect("it has them");
                assert_eq!(all, 0..u64::from(index.data_bytes()));
            }
        }
        1 => {
            if let Ok(footer) = Footer::decode(bytes) {
                assert_eq!(footer.encode(), bytes);
                assert!(footer.index_range().end < footer.segment_bytes());
            }
        }
        2 => {
            let chunks = u64::from(kind / 6) * 400;
            if let Ok(piece) = Piece::decode(bytes, chunks) {
                assert_eq!(piece.encode(), bytes);
                let mut next = 0;
                while let Some(run) = piece.find(next) {
                    next += run.chunks;
                }
                assert_eq!(u64::from(next), chunks);
            }
        }
        3 => {
            let hash = *blake3::hash(bytes).as_bytes();
            drop(hash_list::decode(&[bytes, &hash].concat()));
        }
        4 => {
            let tag = TagName::default();
            let hash = blake3::hash(bytes).to_hex();
            let text = [bytes, b"\nblake3 ", hash.as_bytes(), b"\n"].concat();
            if let Ok(entry) = Entry::decode(&text, &tag, 1) {
                let again = entry.encode().expect("it was read");
                assert_eq!(
                    Entry::decode(&again, &tag, 1).expect("it was written"),
                    entry
                );
                if let Entry::Manifest(manifest) = entry {
                    let pieces = 0..manifest.pieces.len() as u64;
                    let chunks = pieces.map(|piece| piece_chunks(manifest.disk_bytes, piece));
                    let covered = chunks.sum::<u64>() * CHUNK_BYTES;
                    assert!(covered >= manifest.disk_bytes);
                }
            }
        }
        _ => drop(decompress(bytes, &[0; 32])),
    }
}
