//! The header of a qcow image, and its entries.

use vellum::luks::CryptMethod;
use vellum::{Error, ErrorKind, Result};

use crate::fields::{array, be32, be64};
use crate::layout::Place;
use crate::two_level::corrupt;

/// What the header takes.
pub(super) const HEADER_BYTES: usize = 48;
const MAGIC: u32 = 0x5146_49fb;
const VERSION: u32 = 1;
/// The bit of an entry whose cluster is compressed.
const COMPRESSED: u64 = 1 << 63;
const MOST_NAME_BYTES: u32 = 1023;
/// What QEMU reads of the first table.
const MOST_L1: u64 = i32::MAX as u64 / 8;

/// What the header says, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Where the name of the backing file is, in bytes; 0 if there is none.
    pub backing_offset_bytes: u64,
    /// Its length in bytes.
    pub backing_len_bytes: u32,
    /// The virtual size in bytes.
    pub size_bytes: u64,
    /// The size of a cluster is two to this power, 9 to 16.
    pub cluster_bits: u8,
    /// The entries of a leaf are two to this power, 6 to 13.
    pub l2_bits: u8,
    /// How the guest's data is encrypted: not at all, or with AES.
    pub crypt_method: CryptMethod,
    /// Where the first table begins, in bytes.
    pub l1_offset_bytes: u64,
}

pub(super) fn has_magic(bytes: &[u8]) -> bool {
    bytes.len() >= HEADER_BYTES && be32(bytes, 0) == Some(MAGIC) && be32(bytes, 4) == Some(VERSION)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

fn crypt_method(number: u32) -> Result<CryptMethod> {
    let known = [CryptMethod::None, CryptMethod::Aes];
    let mut known = known.into_iter();
    known
        .find(|method| method.number() == number)
        .ok_or_else(|| invalid("invalid encryption method in qcow header"))
}

impl Header {
    /// Reads a header.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for all that QEMU refuses, in its words; [`ErrorKind::Unsupported`] for other
    /// versions.
    pub fn decode(bytes: &[u8]) -> Result<Header> {
        let word = |at| be32(bytes, at).ok_or_else(|| invalid("Image not in qcow format"));
        let long = |at| be64(bytes, at).ok_or_else(|| invalid("Image not in qcow format"));
        if word(0)? != MAGIC {
            return Err(invalid("Image not in qcow format"));
        }
        let version = word(4)?;
        if version != VERSION {
            let message = format!("qcow (v1) does not support qcow version {version}");
            return Err(Error::new(ErrorKind::Unsupported, "open", message));
        }
        let [cluster_bits, l2_bits] = array(bytes, 32).unwrap_or_default();
        let header = Header {
            backing_offset_bytes: long(8)?,
            backing_len_bytes: word(16)?,
            size_bytes: long(24)?,
            cluster_bits,
            l2_bits,
            crypt_method: CryptMethod::None,
            l1_offset_bytes: long(40)?,
        };
        header.check()?;
        Ok(Header {
            size_bytes: header.size_bytes & !511,
            crypt_method: crypt_method(word(36)?)?,
            ..header
        })
    }

    fn check(&self) -> Result<()> {
        if self.size_bytes <= 1 {
            let message = "Image size is too small (must be at least 2 bytes)";
            return Err(invalid(message));
        }
        if !(9..=16).contains(&self.cluster_bits) {
            return Err(invalid("Cluster size must be between 512 and 64k"));
        }
        if !(6..=13).contains(&self.l2_bits) {
            return Err(invalid("L2 table size must be between 512 and 64k"));
        }
        let leaf_bytes = self.cluster_bytes() << self.l2_bits;
        let is_too_large = self.size_bytes > u64::MAX - leaf_bytes
            || self.l1_len() > MOST_L1
            || self.l1_offset_bytes > i64::MAX as u64 - MOST_L1 * 8;
        match is_too_large {
            true => Err(invalid("Image too large")),
            false => Ok(()),
        }
    }

    /// Where the name of the backing file is and how long it is, in bytes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for a name that is too long.
    pub fn backing_name_at(&self) -> Result<Option<(u64, usize)>> {
        match self.backing_offset_bytes {
            0 => Ok(None),
            _ if self.backing_len_bytes > MOST_NAME_BYTES => {
                Err(invalid("Backing file name too long"))
            }
            at if i64::try_from(at).is_err() => Err(invalid("Could not read backing file name")),
            at => Ok(Some((at, self.backing_len_bytes as usize))),
        }
    }

    /// The size of a cluster in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The entries of the first table.
    pub fn l1_len(&self) -> u64 {
        self.size_bytes
            .div_ceil(self.cluster_bytes() << self.l2_bits)
    }

    /// The bytes of a new image's header.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC.to_be_bytes());
        bytes.extend(VERSION.to_be_bytes());
        bytes.extend(self.backing_offset_bytes.to_be_bytes());
        bytes.extend(self.backing_len_bytes.to_be_bytes());
        // The time at which the backing file was changed, which nobody writes.
        bytes.extend(0u32.to_be_bytes());
        bytes.extend(self.size_bytes.to_be_bytes());
        bytes.extend([self.cluster_bits, self.l2_bits, 0, 0]);
        bytes.extend(self.crypt_method.number().to_be_bytes());
        bytes.extend(self.l1_offset_bytes.to_be_bytes());
        bytes
    }

    /// The place of a cluster with an entry.
    pub(super) fn place(&self, entry: u64) -> Result<Place> {
        match entry {
            0 => Ok(Place::Absent),
            _ if entry & COMPRESSED != 0 => Ok(Place::Compressed),
            _ if !entry.is_multiple_of(512) || entry > i64::MAX as u64 - (1 << 20) => Err(corrupt(
                "read",
                format!("cluster offset {entry:#x} is invalid"),
            )),
            offset_bytes => Ok(Place::Data {
                file: 0,
                offset_bytes,
            }),
        }
    }

    /// Where a compressed cluster lies and how long it is, in bytes.
    pub(super) fn compressed(&self, entry: u64) -> Option<(u64, usize)> {
        if entry & COMPRESSED == 0 {
            return None;
        }
        let shift = 63 - u32::from(self.cluster_bits);
        let len = (entry >> shift) & (self.cluster_bytes() - 1);
        Some((entry & ((1 << shift) - 1), len as usize))
    }

    /// The entry of a compressed cluster; `None` where it does not fit.
    pub(super) fn compressed_entry(&self, offset_bytes: u64, len: usize) -> Option<u64> {
        let shift = 63 - u32::from(self.cluster_bits);
        let len = len as u64;
        let fits = offset_bytes < 1 << shift && len < self.cluster_bytes();
        fits.then_some(COMPRESSED | len << shift | offset_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header {
            backing_offset_bytes: 48,
            backing_len_bytes: 3,
            size_bytes: 1 << 30,
            cluster_bits: 12,
            l2_bits: 9,
            crypt_method: CryptMethod::Aes,
            l1_offset_bytes: 56,
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let bytes = header().encode();
        assert_eq!(bytes.len(), HEADER_BYTES);
        assert!(has_magic(&bytes));
        assert_eq!(Header::decode(&bytes).unwrap(), header());
        let entry = header().compressed_entry(12345, 678).unwrap();
        assert_eq!(header().compressed(entry), Some((12345, 678)));
        assert_eq!(header().place(entry).unwrap(), Place::Compressed);
        assert_eq!(header().compressed_entry(1 << 51, 678), None);
    }

    #[test]
    fn what_qemu_refuses_is_refused_in_its_words() {
        let changed = |at: usize, with: &[u8]| {
            let mut bytes = header().encode();
            bytes[at..at + with.len()].copy_from_slice(with);
            Header::decode(&bytes).unwrap_err().message().to_owned()
        };
        assert_eq!(changed(0, &[0]), "Image not in qcow format");
        assert_eq!(
            changed(7, &[2]),
            "qcow (v1) does not support qcow version 2"
        );
        let small = "Image size is too small (must be at least 2 bytes)";
        assert_eq!(changed(24, &1u64.to_be_bytes()), small);
        assert_eq!(
            changed(32, &[8]),
            "Cluster size must be between 512 and 64k"
        );
        assert_eq!(
            changed(33, &[14]),
            "L2 table size must be between 512 and 64k"
        );
        assert_eq!(changed(24, &[0x7f]), "Image too large");
        assert_eq!(changed(24, &[0xff; 8]), "Image too large");
        assert_eq!(
            changed(39, &[2]),
            "invalid encryption method in qcow header"
        );
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_header_or_an_error(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..60),
            good in 0usize..48,
            entry: u64,
        ) {
            let start = header().encode();
            let len = good.min(bytes.len());
            bytes[..len].copy_from_slice(&start[..len]);
            if let Ok(header) = Header::decode(&bytes) {
                header.l1_len();
                let _ = (header.backing_name_at(), header.place(entry));
                header.compressed(entry);
            }
        }
    }
}
