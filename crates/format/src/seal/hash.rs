//! What each hash of a seal is taken of. All are BLAKE3 with a key, and each kind of thing has a
//! key of its own, so that no bytes can stand for two things.

use super::superblock::HEADER_FAULT;
use super::{Hash, LEAF_BYTES, NOTHING, fault};
use crate::bytes;
use crate::error::Result;
use crate::extension::kind;
use crate::features::Autoclear;
use crate::header::{Header, field};

const LEAF_KEY: &[u8; 32] = b"vellum seal 1: leaf             ";
const PART_KEY: &[u8; 32] = b"vellum seal 1: part of a leaf   ";
const MAPPING_KEY: &[u8; 32] = b"vellum seal 1: slice of mapping ";
const HASHES_KEY: &[u8; 32] = b"vellum seal 1: hash node        ";
const INDEX_KEY: &[u8; 32] = b"vellum seal 1: index node       ";
const HEADER_KEY: &[u8; 32] = b"vellum seal 1: header           ";
const SUPERBLOCK_KEY: &[u8; 32] = b"vellum seal 1: superblock       ";
/// From the key of an encrypted image's volume to the key of its leaves.
const SECRET_CONTEXT: &str = "vellum seal 1 2026-11 leaves of an encrypted image";

/// Hashes the leaves of one disk.
#[derive(Debug, Clone)]
pub struct LeafHasher {
    size_bytes: u64,
    unit_bytes: u64,
    secret: Option<Hash>,
    zeroes: Hash,
}

impl LeafHasher {
    /// For a disk of `size_bytes`, of which `unit_bytes` are held together or not at all, and
    /// which is encrypted with `volume_key`, or is not.
    pub fn new(size_bytes: u64, unit_bytes: u32, volume_key: Option<&[u8]>) -> LeafHasher {
        LeafHasher {
            size_bytes,
            unit_bytes: u64::from(unit_bytes).clamp(LEAF_BYTES / 8, LEAF_BYTES),
            secret: volume_key.map(|key| blake3::derive_key(SECRET_CONTEXT, key)),
            zeroes: keyed(LEAF_KEY, &[0; LEAF_BYTES as usize]),
        }
    }

    /// Bytes that are held together or not at all.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// A bit for each unit of a leaf, from the least significant on.
    pub fn whole(&self, number: u64) -> u8 {
        let start = number.saturating_mul(LEAF_BYTES);
        let inside = self.size_bytes.saturating_sub(start).min(LEAF_BYTES);
        let units = inside.div_ceil(self.unit_bytes);
        ((1_u32 << units) - 1) as u8
    }

    /// The hash of leaf `number`. `content` is its [`LEAF_BYTES`], zeroes behind the end of the
    /// disk; `held` has a bit for each of its units that the image holds itself, out of
    /// [`LeafHasher::whole`]. The others' content is not looked at.
    pub fn hash(&self, number: u64, content: &[u8], held: u8) -> Hash {
        debug_assert_eq!(content.len() as u64, LEAF_BYTES);
        if held == 0 {
            return NOTHING;
        }
        let Some(secret) = &self.secret else {
            if held == self.whole(number) {
                return keyed(LEAF_KEY, content);
            }
            let mut hasher = blake3::Hasher::new_keyed(PART_KEY);
            hasher.update(&[held]);
            return self.finish(hasher, content, held);
        };
        let mut hasher = blake3::Hasher::new_keyed(secret);
        hasher.update(&[held]).update(&number.to_be_bytes());
        self.finish(hasher, content, held)
    }

    fn finish(&self, mut hasher: blake3::Hasher, content: &[u8], held: u8) -> Hash {
        let units = content.chunks(self.unit_bytes as usize).enumerate();
        for (_, unit) in units.filter(|(index, _)| held >> index & 1 != 0) {
            hasher.update(unit);
        }
        *hasher.finalize().as_bytes()
    }

    /// The hash of a leaf that is all zeroes, and wholly the image's own.
    pub fn zeroes(&self, number: u64) -> Hash {
        match self.secret {
            None => self.zeroes,
            Some(_) => self.hash(number, &[0; LEAF_BYTES as usize], self.whole(number)),
        }
    }
}

/// The hash of a slice of an L2 table, to which the L1 entry `l1_entry` leads. The L1 entry is
/// taken as the file has it.
pub fn mapping_hash(l1_entry: u64, slice: &[u8]) -> Hash {
    let mut hasher = blake3::Hasher::new_keyed(MAPPING_KEY);
    hasher.update(&l1_entry.to_be_bytes());
    hasher.update(slice);
    *hasher.finalize().as_bytes()
}

/// The hash of a node, `level` levels above those that hold hashes.
pub fn node_hash(level: u32, node: &[u8]) -> Hash {
    match level {
        0 => keyed(HASHES_KEY, node),
        _ => keyed(INDEX_KEY, node),
    }
}

/// The checksum of a superblock.
pub(super) fn superblock_hash(bytes: &[u8]) -> Hash {
    keyed(SUPERBLOCK_KEY, bytes)
}

/// The hash of what the first cluster of an image says, but for what sealing changes and what
/// says nothing: the seal's autoclear bit and extension, the names of features, the place of the
/// backing file's name, and padding.
///
/// # Errors
/// As [`Header::decode`].
pub fn header_hash(first_cluster: &[u8]) -> Result<Hash> {
    let header = Header::decode(first_cluster)?;
    let len = match header.version {
        2 => crate::limits::HEADER_LEN_V2_BYTES as usize,
        _ => bytes::be32(first_cluster, field::HEADER_LENGTH).unwrap_or_default() as usize,
    };
    let mut fields = first_cluster
        .get(..len)
        .ok_or_else(|| fault("header", len as u64, HEADER_FAULT))?
        .to_vec();
    let mut clear = |at: usize, with: &dyn Fn(u64) -> u64| {
        let value = bytes::be64(&fields, at).unwrap_or_default();
        // A header of version 2 ends before.
        let _ = bytes::put_be64(&mut fields, Some(at), with(value));
    };
    clear(field::BACKING_FILE_OFFSET, &|_| 0);
    clear(field::AUTOCLEAR_FEATURES, &|bits| {
        Autoclear(bits).without(Autoclear::SEALED).bits()
    });
    let mut hasher = blake3::Hasher::new_keyed(HEADER_KEY);
    hasher.update(&fields);
    let mut record = alloc::vec::Vec::new();
    for extension in &header.extensions {
        if matches!(extension.kind(), kind::SEAL | kind::FEATURE_NAMES) {
            continue;
        }
        record.clear();
        extension.encode(&mut record);
        // Without the padding.
        let data = bytes::be32(&record, 4).unwrap_or_default() as usize;
        hasher.update(record.get(..8 + data).unwrap_or(&record));
    }
    hasher.update(header.backing_file.as_deref().unwrap_or_default());
    Ok(*hasher.finalize().as_bytes())
}

fn keyed(key: &[u8; 32], bytes: &[u8]) -> Hash {
    *blake3::keyed_hash(key, bytes).as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAF: [u8; 4096] = {
        let mut leaf = [0; 4096];
        leaf[0] = 1;
        leaf[4095] = 7;
        leaf
    };

    #[test]
    fn what_is_not_held_is_not_looked_at() {
        let hasher = LeafHasher::new(1 << 20, 512, None);
        let mut other = LEAF;
        other[600] = 3;
        let parts = |leaf: &[u8]| hasher.hash(0, leaf, 0b1000_0001);
        assert_eq!(parts(&LEAF), parts(&other));
        other[0] = 2;
        assert_ne!(parts(&LEAF), parts(&other));
        assert_eq!(hasher.hash(0, &LEAF, 0), NOTHING);
        assert_ne!(parts(&LEAF), hasher.hash(0, &LEAF, 0xff));
        assert_ne!(parts(&LEAF), hasher.hash(0, &LEAF, 0b1000_0000));
    }

    #[test]
    fn the_last_leaf_has_fewer_units() {
        let hasher = LeafHasher::new(4096 + 1536, 1024, None);
        assert_eq!(hasher.whole(0), 0b1111);
        assert_eq!(hasher.whole(1), 0b11);
        assert_eq!(hasher.whole(2), 0);
        let whole = LeafHasher::new(4096, 4096, None);
        assert_eq!(hasher.hash(1, &LEAF, 0b11), whole.hash(0, &LEAF, 1));
    }

    #[test]
    fn only_a_secret_tells_leaves_apart_by_their_number() {
        let with = |key: Option<&[u8]>| LeafHasher::new(1 << 20, 4096, key);
        let plain = with(None);
        assert_eq!(plain.hash(1, &LEAF, 1), plain.hash(2, &LEAF, 1));
        assert_eq!(plain.zeroes(5), plain.hash(2, &[0; 4096], 1));
        let secret = with(Some(b"key"));
        assert_ne!(secret.hash(1, &LEAF, 1), secret.hash(2, &LEAF, 1));
        assert_eq!(secret.zeroes(5), secret.hash(5, &[0; 4096], 1));
        let another = with(Some(b"another"));
        assert_ne!(secret.hash(1, &LEAF, 1), another.hash(1, &LEAF, 1));
    }

    #[test]
    fn kinds_of_nodes_cannot_be_mixed_up() {
        let block = [0; 4096];
        assert_ne!(node_hash(0, &block), node_hash(1, &block));
        assert_eq!(node_hash(1, &block), node_hash(2, &block));
        assert_ne!(mapping_hash(1, &block), mapping_hash(2, &block));
    }
}
