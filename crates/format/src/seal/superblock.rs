//! The first block of a seal: what leads to both trees, with the signature of it.

use super::hash::superblock_hash;
use super::tree::{Root, Shape};
use super::{Hash, LEAF_BYTES, NODE_BYTES, fault, unsupported};
use crate::bytes;
use crate::error::Result;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt::Write;

const MAGIC: &[u8; 8] = b"VELSEAL1";
const VERSION: u32 = 1;
const KEYED: u32 = 1;
const DETACHED: u32 = 2;
const SIGNATURE_AT: usize = 512;
const MAX_SIGNATURE_BYTES: usize = 2048;
const CHECKSUM_AT: usize = NODE_BYTES - 32;
pub(super) const HEADER_FAULT: &str = "the header is longer than its cluster";

/// What a seal says, and where its trees are. Offsets count from the superblock on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// The virtual size of what is sealed.
    pub size_bytes: u64,
    /// Guest bytes that are held together or not at all, at most [`LEAF_BYTES`].
    pub unit_bytes: u32,
    /// The hashes of leaves have a secret key: the image is encrypted.
    pub keyed: bool,
    /// A manifest beside an image of any format; it says nothing of mapping and header.
    pub detached: bool,
    /// Bytes of the area, this block included.
    pub length_bytes: u64,
    /// The tree over the content; `None`: the image holds nothing.
    pub content: Option<Root>,
    /// The tree over the mapping; `None`: no L2 table is there.
    pub mapping: Option<Root>,
    /// Slices that the mapping has: as many as all L1 entries lead to.
    pub mapping_slices: u64,
    /// Bytes of such a slice.
    pub slice_bytes: u32,
    /// The hash of the header ([`super::header_hash`]).
    pub header: Hash,
    /// The text of minisign's signature file over [`Superblock::statement`], or nothing.
    pub signature: Vec<u8>,
}

impl Superblock {
    /// The shape of the tree over the content.
    pub fn content_shape(&self) -> Shape {
        Shape::new(self.size_bytes.div_ceil(LEAF_BYTES))
    }

    /// The shape of the tree over the mapping.
    pub fn mapping_shape(&self) -> Shape {
        Shape::new(self.mapping_slices)
    }

    /// The text that a signature is made of: everything that is vouched for.
    pub fn statement(&self) -> String {
        let mut text = format!("vellum seal {VERSION}\nsize {}\n", self.size_bytes);
        let mut line = |name: &str, value: &str| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name} {value}");
        };
        line("leaf", &format!("{LEAF_BYTES}"));
        line("unit", &format!("{}", self.unit_bytes));
        line("keyed", if self.keyed { "yes" } else { "no" });
        line("content", &root_text(self.content));
        if !self.detached {
            line("mapping", &root_text(self.mapping));
            line("header", &hex(&self.header));
        }
        text
    }

    /// The checksum that stands in the last 32 bytes of a block, as it must be for the others.
    pub fn checksum(block: &[u8]) -> Hash {
        superblock_hash(block.get(..CHECKSUM_AT).unwrap_or_default())
    }

    /// Decodes a superblock.
    ///
    /// # Errors
    /// [`FormatErrorKind::Unsupported`](crate::FormatErrorKind::Unsupported) for another version,
    /// [`FormatErrorKind::Invalid`](crate::FormatErrorKind::Invalid) for what is no superblock, or
    /// whose checksum or fields are wrong.
    pub fn decode(block: &[u8]) -> Result<Superblock> {
        let block = block.get(..NODE_BYTES).unwrap_or_default();
        if block.get(..8) != Some(MAGIC) {
            return Err(fault("magic", 0, "no superblock of a seal is there"));
        }
        let word = |at| bytes::be32(block, at).unwrap_or_default();
        if word(8) != VERSION {
            return Err(unsupported("version", word(8).into()));
        }
        let sum = bytes::array(block, CHECKSUM_AT);
        if sum != Some(Superblock::checksum(block)) {
            return Err(fault(
                "checksum",
                0,
                "the superblock of the seal is damaged",
            ));
        }
        if word(12) & !(KEYED | DETACHED) != 0 {
            return Err(unsupported("flags", word(12).into()));
        }
        let long = |at| bytes::be64(block, at).unwrap_or_default();
        let length_bytes = long(24);
        let root = |at| Root::decode(block, at, length_bytes);
        let signature_len = word(152) as usize;
        let signature = (signature_len <= MAX_SIGNATURE_BYTES)
            .then(|| block.get(SIGNATURE_AT..SIGNATURE_AT + signature_len))
            .flatten();
        let superblock = Superblock {
            size_bytes: long(16),
            unit_bytes: word(36),
            keyed: word(12) & KEYED != 0,
            detached: word(12) & DETACHED != 0,
            length_bytes,
            content: root(40)?,
            mapping: root(80)?,
            mapping_slices: long(160),
            slice_bytes: word(156),
            header: bytes::array(block, 120).unwrap_or_default(),
            signature: signature
                .ok_or_else(|| fault("signature", signature_len as u64, "too long"))?
                .to_vec(),
        };
        superblock.check(word(32))?;
        Ok(superblock)
    }

    fn check(&self, leaf_bytes: u32) -> Result<()> {
        if u64::from(leaf_bytes) != LEAF_BYTES {
            return Err(unsupported("leaf size", leaf_bytes.into()));
        }
        let unit = self.unit_bytes;
        if !unit.is_power_of_two() || !(512..=LEAF_BYTES as u32).contains(&unit) {
            return Err(fault("unit", unit.into(), "no size of a unit"));
        }
        let slice = self.slice_bytes;
        if !slice.is_power_of_two() || !(512..=4096).contains(&slice) {
            return Err(fault("slice", slice.into(), "no size of a slice"));
        }
        if self.size_bytes > i64::MAX as u64 || self.mapping_slices > 1 << 40 {
            return Err(fault("size", self.size_bytes, "too large"));
        }
        let is_whole = self.length_bytes.is_multiple_of(NODE_BYTES as u64);
        if !is_whole || self.length_bytes == 0 || self.length_bytes > i64::MAX as u64 {
            return Err(fault("length", self.length_bytes, "no length of a seal"));
        }
        Ok(())
    }

    /// The block.
    ///
    /// # Errors
    /// For a signature that is too long.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut block = vec![0; NODE_BYTES];
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(place) = block.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        };
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        let flags = flag(self.keyed, KEYED) | flag(self.detached, DETACHED);
        put(0, MAGIC);
        put(8, &VERSION.to_be_bytes());
        put(12, &flags.to_be_bytes());
        put(16, &self.size_bytes.to_be_bytes());
        put(24, &self.length_bytes.to_be_bytes());
        put(32, &(LEAF_BYTES as u32).to_be_bytes());
        put(36, &self.unit_bytes.to_be_bytes());
        for (at, root) in [(40, self.content), (80, self.mapping)] {
            if let Some(root) = root {
                put(at, &root.offset_bytes.to_be_bytes());
                put(at + 8, &root.hash);
            }
        }
        put(120, &self.header);
        put(152, &(self.signature.len() as u32).to_be_bytes());
        put(156, &self.slice_bytes.to_be_bytes());
        put(160, &self.mapping_slices.to_be_bytes());
        if self.signature.len() > MAX_SIGNATURE_BYTES {
            let len = self.signature.len() as u64;
            return Err(fault("signature", len, "the signature is too long"));
        }
        put(SIGNATURE_AT, &self.signature);
        let sum = Superblock::checksum(&block);
        if let Some(place) = block.get_mut(CHECKSUM_AT..) {
            place.copy_from_slice(&sum);
        }
        Ok(block)
    }
}

fn root_text(root: Option<Root>) -> String {
    root.map_or_else(|| String::from("nothing"), |root| hex(&root.hash))
}

fn hex(hash: &Hash) -> String {
    let mut text = String::with_capacity(64);
    for byte in hash {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn example() -> Superblock {
        Superblock {
            size_bytes: 1 << 30,
            unit_bytes: 4096,
            keyed: false,
            detached: false,
            length_bytes: 0x5000,
            content: Some(Root {
                offset_bytes: 0x2000,
                hash: [7; 32],
            }),
            mapping: None,
            mapping_slices: 32,
            slice_bytes: 4096,
            header: [9; 32],
            signature: b"signed".to_vec(),
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let superblock = example();
        let block = superblock.encode().unwrap();
        assert_eq!(Superblock::decode(&block).as_ref(), Ok(&superblock));
        for bit in 0..block.len() * 8 {
            let mut broken = block.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&broken).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_manifest_states_nothing_of_the_mapping() {
        let mut superblock = example();
        assert!(
            superblock
                .statement()
                .contains("\nmapping nothing\nheader 0909")
        );
        superblock.detached = true;
        let statement = superblock.statement();
        let content = "content 0707070707070707070707070707070707070707070707070707070707070707\n";
        assert!(statement.ends_with(content), "{statement}");
    }

    #[test]
    fn a_signature_has_a_longest_length() {
        let mut superblock = example();
        superblock.signature = vec![b'x'; MAX_SIGNATURE_BYTES];
        assert!(superblock.encode().is_ok());
        superblock.signature.push(b'x');
        assert!(superblock.encode().is_err());
    }
}
