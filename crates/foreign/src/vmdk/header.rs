//! Headers of sparse extents: VMware's hosted ones (`KDMV`), which are most, and those of ESX's old
//! snapshots (`COWD`). Bytes in, values out; no I/O.
//!
//! ```text
//! KDMV    0 magic        4 version      8 flags       12 capacity     20 grain size
//!        28 descriptor  36 its size    44 entries of a grain table    48 redundant directory
//!        56 directory   64 overhead    72 unclean     73 "\n \r\n"    77 compression (2 bytes)
//! COWD    0 magic        4 version      8 flags       12 capacity     16 grain size
//!        20 directory   24 its entries 28 next free sector
//! ```
//! All little-endian; offsets and sizes in sectors of 512 bytes, 8 bytes long in `KDMV` and 4 in `COWD`.
//!
//! Invariant: a [`TableGeometry`] that was given out adds up without overflow: every guest offset, and
//! every offset of the directory, fits an `i64`.

use vellum::{Error, ErrorKind, Result};

/// Bytes of a sector, the unit of everything in these formats.
pub const SECTOR_BYTES: u64 = 512;

/// How `KDMV` extents begin.
pub const SPARSE_MAGIC: [u8; 4] = *b"KDMV";

/// How `COWD` extents begin.
pub const COW_MAGIC: [u8; 4] = *b"COWD";

/// The check bytes are there: an end of line in each convention.
pub const FLAG_NEWLINE_TEST: u32 = 1;
/// There is a second directory with tables of its own.
pub const FLAG_REDUNDANT: u32 = 1 << 1;
/// An entry of 1 says that a grain is zeroes.
pub const FLAG_ZERO_GRAIN: u32 = 1 << 2;
/// Grains are compressed.
pub const FLAG_COMPRESSED: u32 = 1 << 16;
/// Markers stand before grains, tables and the like.
pub const FLAG_MARKERS: u32 = 1 << 17;

/// The directory's offset is in the footer.
pub const DIRECTORY_AT_END: u64 = u64::MAX;

/// The one algorithm: deflate.
pub const COMPRESSION_DEFLATE: u16 = 1;

/// The largest grain in sectors: 1 GiB, QEMU's bound.
const MAX_GRAIN_SECTORS: u64 = 0x20_0000;

/// The largest grain of a compressed extent in sectors: such grains are in memory as a whole.
const MAX_COMPRESSED_GRAIN_SECTORS: u64 = 4096;

/// The most entries of a directory, QEMU's bound.
const MAX_DIRECTORY_ENTRIES: u64 = 32 << 20;

/// The most entries of a table, QEMU's bound.
const MAX_TABLE_ENTRIES: u32 = 512;

/// The check bytes: a text transfer changes at least one.
const NEWLINE_TEST: [u8; 4] = *b"\n \r\n";

/// Entries of a `COWD` extent's tables.
const COW_TABLE_ENTRIES: u32 = 4096;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

/// A piece of fixed length; zeroes where the bytes end before.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    for (to, from) in array.iter_mut().zip(bytes.iter().skip(at)) {
        *to = *from;
    }
    array
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// The header of a `KDMV` extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseHeader {
    /// 1; 2 with zero grains, 3 if streamed, or with tracked changes.
    pub version: u32,
    /// `FLAG_*`.
    pub flags: u32,
    /// Size of the extent's part of the disk.
    pub capacity_sectors: u64,
    /// What is allocated at once.
    pub grain_sectors: u64,
    /// Where a descriptor is inside of the extent; 0 without one.
    pub descriptor_sector: u64,
    /// What is kept for it.
    pub descriptor_sectors: u64,
    /// Entries of a grain table.
    pub table_entries: u32,
    /// Where the redundant directory is.
    pub redundant_sector: u64,
    /// Where the directory is, or [`DIRECTORY_AT_END`].
    pub directory_sector: u64,
    /// What comes before the first grain.
    pub overhead_sectors: u64,
    /// Somebody has it open, or did not close it.
    pub unclean: bool,
    /// [`COMPRESSION_DEFLATE`], or 0.
    pub compression: u16,
    newline_test: [u8; 4],
}

impl SparseHeader {
    /// Bytes of a header: a sector.
    pub const BYTES: usize = 512;

    /// Parses a header, whatever its values are; `None` for another magic.
    pub fn parse(bytes: &[u8]) -> Option<SparseHeader> {
        bytes.starts_with(&SPARSE_MAGIC).then(|| SparseHeader {
            version: u32_at(bytes, 4),
            flags: u32_at(bytes, 8),
            capacity_sectors: u64_at(bytes, 12),
            grain_sectors: u64_at(bytes, 20),
            descriptor_sector: u64_at(bytes, 28),
            descriptor_sectors: u64_at(bytes, 36),
            table_entries: u32_at(bytes, 44),
            redundant_sector: u64_at(bytes, 48),
            directory_sector: u64_at(bytes, 56),
            overhead_sectors: u64_at(bytes, 64),
            unclean: array::<1>(bytes, 72) != [0],
            newline_test: array(bytes, 73),
            compression: u16::from_le_bytes(array(bytes, 77)),
        })
    }

    /// The header as it is on disk.
    pub fn encode(&self) -> [u8; SparseHeader::BYTES] {
        let mut bytes = [0; SparseHeader::BYTES];
        let fields: [(usize, &[u8]); 14] = [
            (0, &SPARSE_MAGIC),
            (4, &self.version.to_le_bytes()),
            (8, &self.flags.to_le_bytes()),
            (12, &self.capacity_sectors.to_le_bytes()),
            (20, &self.grain_sectors.to_le_bytes()),
            (28, &self.descriptor_sector.to_le_bytes()),
            (36, &self.descriptor_sectors.to_le_bytes()),
            (44, &self.table_entries.to_le_bytes()),
            (48, &self.redundant_sector.to_le_bytes()),
            (56, &self.directory_sector.to_le_bytes()),
            (64, &self.overhead_sectors.to_le_bytes()),
            (72, &[u8::from(self.unclean)]),
            (73, &self.newline_test),
            (77, &self.compression.to_le_bytes()),
        ];
        for (at, field) in fields {
            for (to, from) in bytes.iter_mut().skip(at).zip(field) {
                *to = *from;
            }
        }
        bytes
    }

    /// Whether grains are compressed.
    pub fn is_compressed(&self) -> bool {
        self.compression == COMPRESSION_DEFLATE
    }

    /// Whether markers stand before grains.
    pub fn has_markers(&self) -> bool {
        self.flags & FLAG_MARKERS != 0
    }

    /// Why the extent can only be read, if that is so, in QEMU's words.
    pub fn read_only_reason(&self) -> Option<&'static str> {
        (self.version == 3 && !self.is_compressed()).then_some("VMDK version 3 must be read only")
    }

    /// Where the tables are and how they are laid out, after all checks, in QEMU's order and words.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] or [`ErrorKind::Unsupported`].
    pub fn geometry(&self, file_bytes: u64) -> Result<TableGeometry> {
        if self.version > 3 {
            let message = format!("Unsupported VMDK version {}", self.version);
            return Err(Error::new(ErrorKind::Unsupported, "open", message));
        }
        if self.table_entries > MAX_TABLE_ENTRIES {
            return Err(invalid("L2 table size too big"));
        }
        // As QEMU computes it, in 32 bits, so that the same objection comes first.
        #[expect(clippy::cast_possible_truncation)]
        let covered = u64::from(self.table_entries).wrapping_mul(self.grain_sectors) as u32;
        if covered == 0 {
            return Err(invalid("L1 entry size is invalid"));
        }
        if file_bytes.div_ceil(SECTOR_BYTES) < self.overhead_sectors {
            // QEMU's number has a sign.
            let expected = self
                .overhead_sectors
                .wrapping_mul(SECTOR_BYTES)
                .cast_signed();
            let message = format!("File truncated, expecting at least {expected} bytes");
            return Err(invalid(message));
        }
        if self.flags & FLAG_NEWLINE_TEST != 0 && self.newline_test != NEWLINE_TEST {
            let message = "The image was damaged by a transfer as text";
            return Err(invalid(message));
        }
        // In bytes, and in 64 bits, as for QEMU: what is 0 then is not there.
        let redundant_bytes = self.redundant_sector.wrapping_mul(SECTOR_BYTES);
        let redundant_sector = (self.flags & FLAG_REDUNDANT != 0 && redundant_bytes != 0)
            .then_some(redundant_bytes / SECTOR_BYTES);
        let geometry = TableGeometry {
            capacity_sectors: self.capacity_sectors,
            grain_sectors: self.grain_sectors,
            table_entries: self.table_entries,
            directory_entries: 0,
            directory_sector: self.directory_sector,
            redundant_sector,
            entries: Entries::Sectors {
                zero_grains: self.flags & FLAG_ZERO_GRAIN != 0,
            },
        };
        let most = if self.is_compressed() {
            MAX_COMPRESSED_GRAIN_SECTORS
        } else {
            MAX_GRAIN_SECTORS
        };
        geometry.checked(most, self.capacity_sectors.div_ceil(u64::from(covered)))
    }

    /// The header of a new extent, laid out as QEMU does it: descriptor, redundant directory and
    /// tables, directory and tables, grains.
    pub(crate) fn new(capacity_sectors: u64, compressed: bool, zero_grains: bool) -> SparseHeader {
        let flag = |is_set: bool, flags: u32| if is_set { flags } else { 0 };
        let mut header = SparseHeader {
            version: match (compressed, zero_grains) {
                (true, _) => 3,
                (false, true) => 2,
                (false, false) => 1,
            },
            flags: FLAG_REDUNDANT
                | FLAG_NEWLINE_TEST
                | flag(compressed, FLAG_COMPRESSED | FLAG_MARKERS)
                | flag(zero_grains, FLAG_ZERO_GRAIN),
            capacity_sectors,
            grain_sectors: 128,
            descriptor_sector: 1,
            descriptor_sectors: 20,
            table_entries: MAX_TABLE_ENTRIES,
            redundant_sector: 21,
            directory_sector: 0,
            overhead_sectors: 0,
            unclean: false,
            compression: if compressed { COMPRESSION_DEFLATE } else { 0 },
            newline_test: NEWLINE_TEST,
        };
        let copy_sectors = header.new_directory_sectors() + header.new_tables() * 4;
        header.directory_sector = header.redundant_sector + copy_sectors;
        header.overhead_sectors =
            (header.directory_sector + copy_sectors).next_multiple_of(header.grain_sectors);
        header
    }

    /// Grain tables of a new extent.
    pub(crate) fn new_tables(&self) -> u64 {
        let covered = self.grain_sectors * u64::from(self.table_entries);
        self.capacity_sectors.div_ceil(covered)
    }

    /// Sectors of one directory of a new extent.
    pub(crate) fn new_directory_sectors(&self) -> u64 {
        (self.new_tables() * 4).div_ceil(SECTOR_BYTES)
    }
}

/// What entries of tables look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entries {
    /// 4 bytes: the sector of a grain, 0 for none.
    Sectors {
        /// 1 stands for a grain of zeroes.
        zero_grains: bool,
    },
    /// 8 bytes, of `seSparse` extents.
    SeSparse {
        /// Where tables begin, for the directory's numbers.
        tables_sector: u64,
        /// Where grains begin, for the tables' numbers.
        grains_sector: u64,
    },
}

/// How the tables of a sparse extent are laid out: what all kinds of headers come down to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableGeometry {
    /// Size of the extent's part of the disk.
    pub capacity_sectors: u64,
    /// What is allocated at once; never 0.
    pub grain_sectors: u64,
    /// Entries of a grain table; never 0.
    pub table_entries: u32,
    /// Entries of the directory: enough for the capacity.
    pub directory_entries: u32,
    /// Where the directory is.
    pub directory_sector: u64,
    /// Where the second directory is.
    pub redundant_sector: Option<u64>,
    /// What entries look like.
    pub entries: Entries,
}

impl TableGeometry {
    /// Bytes of an entry, in directory and tables.
    pub fn entry_bytes(&self) -> usize {
        match self.entries {
            Entries::Sectors { .. } => 4,
            Entries::SeSparse { .. } => 8,
        }
    }

    /// Bytes of a grain table.
    pub fn table_bytes(&self) -> usize {
        self.table_entries as usize * self.entry_bytes()
    }

    /// Bytes of the directory.
    pub fn directory_bytes(&self) -> u64 {
        u64::from(self.directory_entries) * self.entry_bytes() as u64
    }

    /// Bytes of a grain.
    pub fn grain_bytes(&self) -> u64 {
        self.grain_sectors * SECTOR_BYTES
    }

    /// Checks what all kinds have in common, and takes the number of the directory's entries.
    pub(crate) fn checked(
        mut self,
        most_grain_sectors: u64,
        directory_entries: u64,
    ) -> Result<TableGeometry> {
        if self.grain_sectors == 0 || self.grain_sectors > MAX_GRAIN_SECTORS {
            return Err(invalid("Invalid granularity, image may be corrupt"));
        }
        if self.grain_sectors > most_grain_sectors {
            let message = format!("Unsupported grain size: {}", self.grain_sectors);
            return Err(Error::new(ErrorKind::Unsupported, "open", message));
        }
        if directory_entries > MAX_DIRECTORY_ENTRIES {
            return Err(invalid("L1 size too big"));
        }
        self.directory_entries = u32::try_from(directory_entries).unwrap_or(u32::MAX);
        let covered = u64::from(self.table_entries).checked_mul(self.grain_sectors);
        let reachable =
            covered.and_then(|covered| covered.checked_mul(u64::from(self.directory_entries)));
        let largest = i64::MAX as u64 / SECTOR_BYTES;
        if self.capacity_sectors > largest
            || reachable.is_none_or(|reachable| reachable < self.capacity_sectors)
        {
            return Err(invalid("Invalid capacity, image may be corrupt"));
        }
        let directories = [Some(self.directory_sector), self.redundant_sector];
        if directories.into_iter().flatten().any(|at| at > largest / 2) {
            return Err(invalid(
                "Invalid grain directory offset, image may be corrupt",
            ));
        }
        Ok(self)
    }
}

/// The header of a `COWD` extent, as much of it as reading needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CowHeader {
    /// Size of the extent's part of the disk.
    pub capacity_sectors: u32,
    /// What is allocated at once.
    pub grain_sectors: u32,
    /// Where the directory is.
    pub directory_sector: u32,
    /// Its entries.
    pub directory_entries: u32,
}

impl CowHeader {
    /// Parses a header, whatever its values are; `None` for another magic.
    pub fn parse(bytes: &[u8]) -> Option<CowHeader> {
        bytes.starts_with(&COW_MAGIC).then(|| CowHeader {
            capacity_sectors: u32_at(bytes, 12),
            grain_sectors: u32_at(bytes, 16),
            directory_sector: u32_at(bytes, 20),
            directory_entries: u32_at(bytes, 24),
        })
    }

    /// Where the tables are, after all checks.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`].
    pub fn geometry(&self) -> Result<TableGeometry> {
        let geometry = TableGeometry {
            capacity_sectors: self.capacity_sectors.into(),
            grain_sectors: self.grain_sectors.into(),
            table_entries: COW_TABLE_ENTRIES,
            directory_entries: 0,
            directory_sector: self.directory_sector.into(),
            redundant_sector: None,
            entries: Entries::Sectors { zero_grains: false },
        };
        geometry.checked(MAX_GRAIN_SECTORS, self.directory_entries.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_new_header_lies_where_qemu_puts_it() {
        // qemu-img create -f vmdk -o subformat=streamOptimized: 5 GiB.
        let header = SparseHeader::new(0xa0_0000, true, false);
        let bytes = header.encode();
        assert_eq!(header.redundant_sector, 0x15);
        assert_eq!(header.directory_sector, 0x297);
        assert_eq!(header.overhead_sectors, 0x580);
        assert_eq!(
            &bytes[..20],
            b"KDMV\x03\0\0\0\x03\0\x03\0\0\0\xa0\0\0\0\0\0"
        );
        assert_eq!(&bytes[72..80], b"\0\n \r\n\x01\0\0");
        assert_eq!(SparseHeader::parse(&bytes), Some(header));
        assert!(header.geometry(0x580 * 512).is_ok());
    }

    #[test]
    fn objects_in_qemus_words() {
        let header = SparseHeader::new(1 << 20, false, false);
        let file_bytes = header.overhead_sectors * SECTOR_BYTES;
        let message = |change: fn(&mut SparseHeader)| {
            let mut changed = header;
            change(&mut changed);
            let error = changed.geometry(file_bytes).unwrap_err();
            error.message().to_owned()
        };
        let granularity = message(|header| header.grain_sectors = u64::MAX);
        assert_eq!(granularity, "Invalid granularity, image may be corrupt");
        let entries = message(|header| header.table_entries = u32::MAX);
        assert_eq!(entries, "L2 table size too big");
        let capacity = message(|header| header.capacity_sectors = u64::MAX);
        assert_eq!(capacity, "L1 size too big");
        assert_eq!(
            message(|header| header.version = 4),
            "Unsupported VMDK version 4"
        );
        assert_eq!(
            message(|header| header.grain_sectors = 0),
            "L1 entry size is invalid"
        );
        let truncated = header.geometry(0).unwrap_err();
        let expected = format!("File truncated, expecting at least {file_bytes} bytes");
        assert_eq!(truncated.message(), expected);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_an_error(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..600),
            small in any::<bool>(),
            file_bytes in any::<u64>(),
        ) {
            for magic in [SPARSE_MAGIC, COW_MAGIC] {
                for (to, from) in bytes.iter_mut().zip(magic) {
                    *to = from;
                }
                if small {
                    // So that some pass.
                    bytes.iter_mut().skip(4).enumerate().filter(|(at, _)| at % 4 != 0)
                        .for_each(|(_, byte)| *byte = 0);
                }
                let geometries = [
                    SparseHeader::parse(&bytes).map(|header| header.geometry(file_bytes)),
                    CowHeader::parse(&bytes).map(|header| header.geometry()),
                ];
                for geometry in geometries.into_iter().flatten().flatten() {
                    let covered = geometry.grain_sectors * u64::from(geometry.table_entries);
                    let all = covered * u64::from(geometry.directory_entries);
                    prop_assert!(all >= geometry.capacity_sectors);
                    prop_assert!(geometry.capacity_sectors <= i64::MAX as u64 / SECTOR_BYTES);
                }
            }
        }
    }
}
