//! The header of a QED image, and what may stand in its tables.

use vellum::{Error, ErrorKind, Result};

use crate::fields::{le32, le64};
use crate::layout::Place;
use crate::two_level::corrupt;

/// What the header takes, without what is behind it in its cluster.
pub(super) const HEADER_BYTES: usize = 64;
const MAGIC: u32 = u32::from_le_bytes(*b"QED\0");

const HAS_BACKING: u64 = 1;
const NEEDS_CHECK: u64 = 2;
const BACKING_IS_RAW: u64 = 4;
const KNOWN: u64 = HAS_BACKING | NEEDS_CHECK | BACKING_IS_RAW;

pub(super) const MIN_CLUSTER_BYTES: u32 = 4 << 10;
pub(super) const MAX_CLUSTER_BYTES: u32 = 64 << 20;
pub(super) const MAX_TABLE_CLUSTERS: u32 = 16;
const MOST_NAME_BYTES: u32 = 4095;

/// The entry of a cluster that reads as zeroes.
pub(super) const ZERO: u64 = 1;

/// What the header says, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The size of a cluster in bytes, a power of two.
    pub cluster_bytes: u32,
    /// The size of a table in clusters, a power of two.
    pub table_clusters: u32,
    /// What the header takes, in clusters.
    pub header_clusters: u32,
    /// Features that a program has to know.
    pub features: u64,
    /// Features that a program need not know.
    pub compatible_features: u64,
    /// Features that a program that does not know them takes back when it writes.
    pub autoclear_features: u64,
    /// Where the first table begins, in bytes.
    pub l1_offset_bytes: u64,
    /// The virtual size in bytes.
    pub size_bytes: u64,
    /// Where the name of the backing file is, in bytes.
    pub backing_offset_bytes: u32,
    /// Its length in bytes.
    pub backing_len_bytes: u32,
}

pub(super) fn has_magic(bytes: &[u8]) -> bool {
    bytes.len() >= HEADER_BYTES && le32(bytes, 0) == Some(MAGIC)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

/// The largest virtual size that tables of a size lead to.
pub(super) fn max_size_bytes(cluster_bytes: u32, table_clusters: u32) -> u64 {
    let entries = u64::from(cluster_bytes) * u64::from(table_clusters) / 8;
    // As QEMU computes it: where that does not fit into 64 bits it opens no such image.
    let in_leaf = entries.wrapping_mul(cluster_bytes.into());
    in_leaf.wrapping_mul(entries).min(i64::MAX as u64 & !511)
}

pub(super) fn is_cluster_size(bytes: u32) -> bool {
    bytes.is_power_of_two() && (MIN_CLUSTER_BYTES..=MAX_CLUSTER_BYTES).contains(&bytes)
}

pub(super) fn is_table_size(clusters: u32) -> bool {
    clusters.is_power_of_two() && clusters <= MAX_TABLE_CLUSTERS
}

impl Header {
    /// Reads a header; where its tables are is another matter.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for all that QEMU refuses, in its words; [`ErrorKind::Unsupported`] for
    /// features that are not known.
    pub fn decode(bytes: &[u8]) -> Result<Header> {
        let word = |at| le32(bytes, at).ok_or_else(|| invalid("Failed to read QED header"));
        let long = |at| le64(bytes, at).ok_or_else(|| invalid("Failed to read QED header"));
        if word(0)? != MAGIC {
            return Err(invalid("Image not in QED format"));
        }
        let header = Header {
            cluster_bytes: word(4)?,
            table_clusters: word(8)?,
            header_clusters: word(12)?,
            features: long(16)?,
            compatible_features: long(24)?,
            autoclear_features: long(32)?,
            l1_offset_bytes: long(40)?,
            size_bytes: long(48)?,
            backing_offset_bytes: word(56)?,
            backing_len_bytes: word(60)?,
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<()> {
        let unknown = self.features & !KNOWN;
        if unknown != 0 {
            let message = format!("Unsupported QED features: {unknown:x}");
            return Err(Error::new(ErrorKind::Unsupported, "open", message));
        }
        if !is_cluster_size(self.cluster_bytes) {
            return Err(invalid("QED cluster size is invalid"));
        }
        if !is_table_size(self.table_clusters) {
            return Err(invalid("QED table size is invalid"));
        }
        match self.may_have_size(self.size_bytes) {
            true => Ok(()),
            false => Err(invalid("QED image size is invalid")),
        }
    }

    /// Whether the image can have a virtual size.
    pub(super) fn may_have_size(&self, size_bytes: u64) -> bool {
        let max = max_size_bytes(self.cluster_bytes, self.table_clusters);
        size_bytes.is_multiple_of(512) && size_bytes <= max
    }

    /// Checks where the first table is, in a file whose clusters end at `end_bytes`.
    pub(super) fn check_places(&self, end_bytes: u64) -> Result<()> {
        if !self.is_table_place(self.l1_offset_bytes, end_bytes) {
            return Err(invalid("QED table offset is invalid"));
        }
        match self.header_bytes() <= u32::MAX.into() {
            true => Ok(()),
            false => Err(invalid("QED header size is too large")),
        }
    }

    /// Where whole clusters of a file of a length end: what is behind is left of a change that was cut off.
    pub fn end_bytes(&self, len_bytes: u64) -> u64 {
        len_bytes - len_bytes % u64::from(self.cluster_bytes)
    }

    /// The bytes of a table.
    pub fn table_bytes(&self) -> u64 {
        u64::from(self.cluster_bytes) * u64::from(self.table_clusters)
    }

    /// The entries of a table.
    pub fn table_len(&self) -> u64 {
        self.table_bytes() / 8
    }

    /// What the header takes, in bytes.
    pub(super) fn header_bytes(&self) -> u64 {
        u64::from(self.header_clusters) * u64::from(self.cluster_bytes)
    }

    /// Whether a cluster may be at an offset of a file whose clusters end at `end_bytes`.
    pub(super) fn is_cluster_place(&self, offset_bytes: u64, end_bytes: u64) -> bool {
        offset_bytes.is_multiple_of(self.cluster_bytes.into())
            && (self.header_bytes()..end_bytes).contains(&offset_bytes)
    }

    /// As [`Header::is_cluster_place`] for a table.
    pub(super) fn is_table_place(&self, offset_bytes: u64, end_bytes: u64) -> bool {
        let last = offset_bytes.checked_add(self.table_bytes() - u64::from(self.cluster_bytes));
        self.is_cluster_place(offset_bytes, end_bytes)
            && last.is_some_and(|last| self.is_cluster_place(last, end_bytes))
    }

    /// The place of a cluster with an entry.
    pub(super) fn place(&self, entry: u64, end_bytes: u64) -> Result<Place> {
        match entry {
            0 => Ok(Place::Absent),
            ZERO => Ok(Place::Zero),
            _ if self.is_cluster_place(entry, end_bytes) => Ok(Place::Data {
                file: 0,
                offset_bytes: entry,
            }),
            _ => Err(corrupt(
                "read",
                format!("cluster offset {entry:#x} is invalid"),
            )),
        }
    }

    /// Whether the image was left in disorder.
    pub fn needs_check(&self) -> bool {
        self.features & NEEDS_CHECK != 0
    }

    pub(super) fn set_needs_check(&mut self, needs_check: bool) {
        self.features &= !NEEDS_CHECK;
        if needs_check {
            self.features |= NEEDS_CHECK;
        }
    }

    /// Forgets what a program that does not know it has to forget; whether there was anything.
    pub(super) fn forget_unknown(&mut self) -> bool {
        std::mem::take(&mut self.autoclear_features) != 0
    }

    /// Whether the image says that its backing file is not to be probed.
    pub fn backing_is_raw(&self) -> bool {
        self.features & BACKING_IS_RAW != 0
    }

    /// Has the image name a backing file, whose name is at an offset of the header's clusters.
    pub(super) fn set_backing(&mut self, at_bytes: u32, name: &str, is_raw: bool) {
        self.features |= HAS_BACKING | if is_raw { BACKING_IS_RAW } else { 0 };
        self.backing_offset_bytes = at_bytes;
        self.backing_len_bytes = name.len() as u32;
    }

    /// Has the image stand on nothing.
    pub(super) fn forget_backing(&mut self) {
        self.features &= !(HAS_BACKING | BACKING_IS_RAW);
        (self.backing_offset_bytes, self.backing_len_bytes) = (0, 0);
    }

    /// Where in the header's clusters a name has room beside the one that is there, so that both are whole
    /// until the header is written; `None` if nowhere.
    pub(super) fn place_for_name(&self, len_bytes: usize) -> Option<u32> {
        let len_bytes = u32::try_from(len_bytes)
            .ok()
            .filter(|&len| len <= MOST_NAME_BYTES)?;
        let old_end = self
            .backing_offset_bytes
            .checked_add(self.backing_len_bytes)?;
        let first = HEADER_BYTES as u32;
        let is_free = self.features & HAS_BACKING == 0
            || first.checked_add(len_bytes)? <= self.backing_offset_bytes;
        let at = if is_free { first } else { old_end.max(first) };
        let end = u64::from(at) + u64::from(len_bytes);
        (end <= self.header_bytes()).then_some(at)
    }

    /// Where the name of the backing file is and how long it is, in bytes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] for a name that is not in the header.
    pub fn backing_name_at(&self) -> Result<Option<(u64, usize)>> {
        if self.features & HAS_BACKING == 0 {
            return Ok(None);
        }
        let start = u64::from(self.backing_offset_bytes);
        if start + u64::from(self.backing_len_bytes) > self.header_bytes() {
            return Err(invalid("QED backing filename offset is invalid"));
        }
        match self.backing_len_bytes <= MOST_NAME_BYTES {
            true => Ok(Some((start, self.backing_len_bytes as usize))),
            false => Err(invalid("Failed to read backing filename")),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend(self.cluster_bytes.to_le_bytes());
        bytes.extend(self.table_clusters.to_le_bytes());
        bytes.extend(self.header_clusters.to_le_bytes());
        bytes.extend(self.features.to_le_bytes());
        bytes.extend(self.compatible_features.to_le_bytes());
        bytes.extend(self.autoclear_features.to_le_bytes());
        bytes.extend(self.l1_offset_bytes.to_le_bytes());
        bytes.extend(self.size_bytes.to_le_bytes());
        bytes.extend(self.backing_offset_bytes.to_le_bytes());
        bytes.extend(self.backing_len_bytes.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header {
            cluster_bytes: 65536,
            table_clusters: 4,
            header_clusters: 1,
            features: HAS_BACKING,
            compatible_features: 5,
            autoclear_features: 6,
            l1_offset_bytes: 65536,
            size_bytes: 1 << 30,
            backing_offset_bytes: 64,
            backing_len_bytes: 3,
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let bytes = header().encode();
        assert_eq!(bytes.len(), HEADER_BYTES);
        assert_eq!(Header::decode(&bytes).unwrap(), header());
        assert_eq!(header().backing_name_at().unwrap(), Some((64, 3)));
    }

    #[test]
    fn what_qemu_refuses_is_refused_in_its_words() {
        let changed = |at: usize, with: &[u8]| {
            let mut bytes = header().encode();
            bytes[at..at + with.len()].copy_from_slice(with);
            Header::decode(&bytes).unwrap_err().message().to_owned()
        };
        assert_eq!(changed(0, &[0]), "Image not in QED format");
        assert_eq!(changed(17, &[0x80]), "Unsupported QED features: 8000");
        assert_eq!(changed(4, &[1]), "QED cluster size is invalid");
        assert_eq!(changed(8, &[3]), "QED table size is invalid");
        assert_eq!(changed(48, &[1]), "QED image size is invalid");
        assert_eq!(changed(54, &[1]), "QED image size is invalid");
    }

    #[test]
    fn places_have_to_be_in_the_file() {
        let header = header();
        let end = 10 << 16;
        for (offset, is_place) in [
            (0, false),
            (1 << 16, true),
            (6 << 16, true),
            (7 << 16, false),
        ] {
            assert_eq!(header.is_table_place(offset, end), is_place, "{offset}");
        }
        let large = Header {
            header_clusters: 1 << 16,
            l1_offset_bytes: 1 << 40,
            ..header
        };
        let said = large.check_places(1 << 41).unwrap_err();
        assert_eq!(said.message(), "QED header size is too large");
        assert!(large.check_places(end).is_err());
        assert!(header.is_cluster_place(9 << 16, end) && !header.is_cluster_place(end, end));
        assert!(!header.is_cluster_place(3 << 15, end));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_header_or_an_error(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..80),
            good in 0usize..64,
            entry: u64,
            end: u64,
        ) {
            let start = header().encode();
            let len = good.min(bytes.len());
            bytes[..len].copy_from_slice(&start[..len]);
            if let Ok(header) = Header::decode(&bytes) {
                let end = header.end_bytes(end);
                let _ = (header.check_places(end), header.backing_name_at());
                let _ = (header.place(entry, end), header.is_table_place(entry, end));
            }
        }
    }
}
