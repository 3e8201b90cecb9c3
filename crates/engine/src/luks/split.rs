//! The anti-forensic splitter: a key becomes many pieces, all of which are needed to
//! have it back. Whoever erases one of them has erased the key.

use vellum_format::luks::names::Hash;
use zeroize::Zeroizing;

use super::hash::{diffuse, random};
use crate::Result;

/// Splits a key into `stripes` pieces.
pub(super) fn split(hash: Hash, key: &[u8], stripes: u32) -> Result<Zeroizing<Vec<u8>>> {
    let mut pieces = Zeroizing::new(vec![0; key.len() * stripes as usize]);
    let last = pieces.len() - key.len();
    random(&mut pieces[..last])?;
    let sum = sum(hash, &pieces[..last], key.len());
    for (piece, (sum, key)) in pieces[last..].iter_mut().zip(sum.iter().zip(key)) {
        *piece = sum ^ key;
    }
    Ok(pieces)
}

/// The key that `pieces` were made of.
pub(super) fn merge(hash: Hash, pieces: &[u8], key_bytes: usize) -> Zeroizing<Vec<u8>> {
    let (most, last) = pieces.split_at(pieces.len() - key_bytes);
    let mut key = sum(hash, most, key_bytes);
    xor(&mut key, last);
    key
}

fn sum(hash: Hash, pieces: &[u8], key_bytes: usize) -> Zeroizing<Vec<u8>> {
    let mut sum = Zeroizing::new(vec![0; key_bytes]);
    for piece in pieces.chunks_exact(key_bytes) {
        xor(&mut sum, piece);
        diffuse(hash, &mut sum);
    }
    sum
}

fn xor(bytes: &mut [u8], other: &[u8]) {
    for (byte, other) in bytes.iter_mut().zip(other) {
        *byte ^= other;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pieces_are_needed() {
        for (hash, key_bytes) in [(Hash::Sha256, 64), (Hash::Sha1, 24), (Hash::Sha512, 16)] {
            let key: Vec<u8> = (0..key_bytes).collect();
            let mut pieces = split(hash, &key, 40).unwrap();
            assert_eq!(*merge(hash, &pieces, key.len()), key);
            pieces[3] ^= 1;
            assert_ne!(*merge(hash, &pieces, key.len()), key);
        }
    }
}
