//! The header of a Parallels image.

use vellum::{Error, ErrorKind, Result};

use crate::fields::{le32, le64};
use crate::paged::Table;

/// What the header takes; the table of clusters is behind it.
pub(super) const HEADER_BYTES: usize = 64;
pub(super) const SECTOR_BYTES: u64 = 512;
/// Where the header's fields from the number of entries to the start of the data begin.
pub(super) const ENTRIES_AT: u64 = 32;
pub(super) const IN_USE_AT: u64 = 44;
pub(super) const DATA_OFFSET_AT: u64 = 48;

const OLD_MAGIC: &[u8; 16] = b"WithoutFreeSpace";
const NEW_MAGIC: &[u8; 16] = b"WithouFreSpacExt";
const VERSION: u32 = 2;
/// What stands in the header while the image is open.
pub(super) const IN_USE: u32 = 0x746f_6e59;

/// So that a cluster and a sector have fewer bytes than an `int` can tell.
pub(super) const MOST_CLUSTER_SECTORS: u32 = i32::MAX as u32 / 513;
pub(super) const MOST_ENTRIES: u32 = i32::MAX as u32 / 4;

/// What the header says, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The virtual size in bytes.
    pub size_bytes: u64,
    /// The size of a cluster in sectors, a power of two or not.
    pub cluster_sectors: u32,
    /// Entries of the table: one for each cluster of the disk.
    pub entries: u32,
    /// Entries count sectors, and the size has 32 bits.
    pub is_old: bool,
    /// The image is open elsewhere, or was not closed.
    pub is_in_use: bool,
    /// Where the data begins, in sectors; where it should begin if the header is wrong about that.
    pub data_sectors: u32,
    /// The header says nothing wrong of where the data begins.
    pub has_good_data_offset: bool,
    /// Where the format extension is, in sectors; 0 if there is none.
    pub extension_sectors: u64,
}

pub(super) fn has_magic(bytes: &[u8]) -> bool {
    let magic = bytes.first_chunk::<16>();
    bytes.len() >= HEADER_BYTES
        && (magic == Some(OLD_MAGIC) || magic == Some(NEW_MAGIC))
        && le32(bytes, 16) == Some(VERSION)
}

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

/// The first sector behind a table, at which the data may begin.
pub(super) fn first_data_sector(entries: u32, cluster_sectors: u32, is_old: bool) -> u64 {
    let table_end = HEADER_BYTES as u64 + 4 * u64::from(entries);
    let sectors = table_end.div_ceil(SECTOR_BYTES);
    match is_old {
        true => sectors,
        false => sectors.next_multiple_of(u64::from(cluster_sectors).max(1)),
    }
}

impl Header {
    /// Reads the header of an image in a file of a length.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for all that QEMU refuses, in its words.
    pub fn decode(bytes: &[u8], len_bytes: u64) -> Result<Header> {
        let not_ours = || invalid("Image not in Parallels format");
        if !has_magic(bytes) {
            return Err(not_ours());
        }
        let word = |at: u64| le32(bytes, at as usize).ok_or_else(not_ours);
        let long = |at| le64(bytes, at).ok_or_else(not_ours);
        let is_old = bytes.first_chunk::<16>() == Some(OLD_MAGIC);
        let cluster_sectors = word(28)?;
        let entries = word(ENTRIES_AT)?;
        let extension_sectors = long(56)?;
        if cluster_sectors == 0 {
            return Err(invalid("Invalid image: Zero sectors per track"));
        }
        if cluster_sectors > MOST_CLUSTER_SECTORS {
            return Err(invalid("Invalid image: Too big cluster"));
        }
        if entries > MOST_ENTRIES {
            return Err(invalid("Catalog too large"));
        }
        if extension_sectors >= i64::MAX as u64 / SECTOR_BYTES {
            return Err(invalid("Invalid image: Too big offset"));
        }
        let sectors = match is_old {
            true => word(36)?.into(),
            false => long(36)?,
        };
        if u64::from(entries) * u64::from(cluster_sectors) < sectors {
            let message = "Invalid image: Catalog size too small for advertised disk size";
            return Err(invalid(message));
        }
        let least = first_data_sector(entries, cluster_sectors, is_old);
        let data_offset = word(DATA_OFFSET_AT)?;
        let is_told = data_offset != 0 || !is_old;
        let is_good = (least..=len_bytes.div_ceil(SECTOR_BYTES)).contains(&data_offset.into());
        Ok(Header {
            size_bytes: sectors.checked_mul(SECTOR_BYTES).ok_or_else(not_ours)?,
            cluster_sectors,
            entries,
            is_old,
            is_in_use: word(IN_USE_AT)? == IN_USE,
            data_sectors: match is_told && is_good {
                true => data_offset,
                // Some 2^22 sectors of table and a cluster of as many.
                false => least as u32,
            },
            has_good_data_offset: is_good || !is_told,
            extension_sectors,
        })
    }

    /// The header of a new image.
    pub(super) fn encode(&self) -> Vec<u8> {
        let sectors = self.size_bytes / SECTOR_BYTES;
        let cylinders = u32::try_from(sectors / 16 / 32).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(if self.is_old { OLD_MAGIC } else { NEW_MAGIC });
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(16u32.to_le_bytes());
        bytes.extend(cylinders.to_le_bytes());
        bytes.extend(self.cluster_sectors.to_le_bytes());
        bytes.extend(self.entries.to_le_bytes());
        bytes.extend(sectors.to_le_bytes());
        bytes.extend(if self.is_in_use { IN_USE } else { 0 }.to_le_bytes());
        bytes.extend(self.data_sectors.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(self.extension_sectors.to_le_bytes());
        bytes
    }

    /// The size of a cluster in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        u64::from(self.cluster_sectors) * SECTOR_BYTES
    }

    /// Where the data begins, in bytes.
    pub fn data_bytes(&self) -> u64 {
        u64::from(self.data_sectors) * SECTOR_BYTES
    }

    /// The table of clusters.
    pub(super) fn table(&self) -> Table {
        Table {
            start_bytes: HEADER_BYTES as u64,
            len: self.entries.into(),
        }
    }

    /// The bytes of the table that are in a file of a length. What is behind its end is all zeroes, and
    /// nobody needs to look at it.
    pub(super) fn table_bytes(&self, file_bytes: u64) -> u64 {
        let there = file_bytes.saturating_sub(HEADER_BYTES as u64);
        (u64::from(self.entries) * 4).min(there.next_multiple_of(4))
    }

    /// What entries count, in bytes.
    fn entry_unit_bytes(&self) -> u64 {
        match self.is_old {
            true => SECTOR_BYTES,
            false => self.cluster_bytes(),
        }
    }

    /// Where the cluster with an entry lies, in bytes of the file.
    pub(super) fn offset_bytes(&self, entry: u64) -> u64 {
        // Below 2^32 times 2^31.
        entry * self.entry_unit_bytes()
    }

    /// The entry of a cluster; `None` if there is none.
    pub(super) fn entry(&self, offset_bytes: u64) -> Option<u32> {
        let unit = self.entry_unit_bytes();
        let entry = u32::try_from(offset_bytes / unit).ok();
        entry.filter(|_| offset_bytes.is_multiple_of(unit))
    }

    /// Whether a cluster may be at an offset of a file that ends at `end_bytes`.
    pub(super) fn is_place(&self, offset_bytes: u64, end_bytes: u64) -> bool {
        let end = offset_bytes.checked_add(self.cluster_bytes());
        offset_bytes >= self.data_bytes() && end.is_some_and(|end| end <= end_bytes)
    }

    /// The number of a cluster among those of the data.
    pub(super) fn cluster_at(&self, offset_bytes: u64) -> u64 {
        offset_bytes.saturating_sub(self.data_bytes()) / self.cluster_bytes()
    }

    /// Where the cluster with a number lies, in bytes.
    pub(super) fn cluster_offset_bytes(&self, cluster: u64) -> u64 {
        let from_data = cluster.saturating_mul(self.cluster_bytes());
        self.data_bytes().saturating_add(from_data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header {
            size_bytes: 100 << 20,
            cluster_sectors: 2048,
            entries: 100,
            is_old: false,
            is_in_use: false,
            data_sectors: 2048,
            has_good_data_offset: true,
            extension_sectors: 0,
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let bytes = header().encode();
        assert_eq!(bytes.len(), HEADER_BYTES);
        assert_eq!(Header::decode(&bytes, 1 << 20).unwrap(), header());
        let cut = Header::decode(&bytes, 512).unwrap();
        assert!(!cut.has_good_data_offset && cut.data_sectors == 2048);
    }

    #[test]
    fn what_qemu_refuses_is_refused_in_its_words() {
        let changed = |at: usize, with: &[u8]| {
            let mut bytes = header().encode();
            bytes[at..at + with.len()].copy_from_slice(with);
            Header::decode(&bytes, 1 << 20)
                .unwrap_err()
                .message()
                .to_owned()
        };
        assert_eq!(changed(0, b"w"), "Image not in Parallels format");
        assert_eq!(changed(16, &[1]), "Image not in Parallels format");
        assert_eq!(
            changed(28, &[0; 4]),
            "Invalid image: Zero sectors per track"
        );
        assert_eq!(changed(28, &[0xff; 4]), "Invalid image: Too big cluster");
        assert_eq!(changed(32, &[0xff; 4]), "Catalog too large");
        assert_eq!(changed(56, &[0xff; 8]), "Invalid image: Too big offset");
        assert!(changed(32, &[1, 0, 0, 0]).contains("Catalog size too small"));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_header_or_an_error(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..80),
            good in 0usize..64,
            entry: u32,
            len: u64,
        ) {
            let start = header().encode();
            let good = good.min(bytes.len());
            bytes[..good].copy_from_slice(&start[..good]);
            if let Ok(header) = Header::decode(&bytes, len) {
                let offset = header.offset_bytes(entry.into());
                header.is_place(offset, len);
                header.cluster_offset_bytes(header.cluster_at(offset));
                header.encode();
            }
        }
    }
}
