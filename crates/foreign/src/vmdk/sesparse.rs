//! Headers of `seSparse` extents, which ESXi's snapshots of large disks are. Read only: the
//! format is not documented, and what is checked here is as strict as in QEMU. No I/O.

use vellum::{Error, ErrorKind, Result};

use super::header::{Entries, SECTOR_BYTES, TableGeometry, u64_at};

const CONST_MAGIC: u64 = 0xcafe_babe;
const VOLATILE_MAGIC: u64 = 0xcafe_cafe;
const VERSION: u64 = 0x2_0000_0001;

/// Sectors of a grain and of a grain table: the only ones there are.
const GRAIN_SECTORS: u64 = 8;
const TABLE_SECTORS: u64 = 64;

fn unsupported(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, "open", message)
}

/// The header that never changes: the first sector of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConstHeader {
    capacity_sectors: u64,
    /// Where the other header is, in sectors.
    pub volatile_sector: u64,
    directory_sector: u64,
    directory_sectors: u64,
    tables_sector: u64,
    grains_sector: u64,
}

impl ConstHeader {
    /// Parses and checks the header.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] or [`ErrorKind::Unsupported`].
    pub fn parse(bytes: &[u8]) -> Result<ConstHeader> {
        let field = |index: usize| u64_at(bytes, index * 8);
        if field(0) != CONST_MAGIC {
            let message = format!("Bad const header magic: 0x{:016x}", field(0));
            return Err(Error::new(ErrorKind::InvalidImage, "open", message));
        }
        if field(1) != VERSION {
            return Err(unsupported(format!(
                "Unsupported version: 0x{:016x}",
                field(1)
            )));
        }
        if field(3) != GRAIN_SECTORS {
            return Err(unsupported(format!("Unsupported grain size: {}", field(3))));
        }
        if field(4) != TABLE_SECTORS {
            let message = format!("Unsupported grain table size: {}", field(4));
            return Err(unsupported(message));
        }
        if field(5) != 0 {
            return Err(unsupported(format!(
                "Unsupported flags: 0x{:016x}",
                field(5)
            )));
        }
        let reserved = [field(6), field(7), field(8), field(9)];
        if reserved != [0; 4] {
            let shown: Vec<_> = reserved.iter().map(|it| format!(" 0x{it:016x}")).collect();
            return Err(unsupported(format!(
                "Unsupported reserved bits:{}",
                shown.concat()
            )));
        }
        if !is_zero_from(bytes, 208) {
            let message = "Unsupported non-zero const header padding".to_owned();
            return Err(unsupported(message));
        }
        Ok(ConstHeader {
            capacity_sectors: field(2),
            volatile_sector: field(10),
            directory_sector: field(16),
            directory_sectors: field(17),
            tables_sector: field(18),
            grains_sector: field(24),
        })
    }

    /// Where the tables are, after all checks.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`].
    pub fn geometry(&self) -> Result<TableGeometry> {
        let geometry = TableGeometry {
            capacity_sectors: self.capacity_sectors,
            grain_sectors: GRAIN_SECTORS,
            table_entries: 4096,
            directory_entries: 0,
            directory_sector: self.directory_sector,
            redundant_sector: None,
            entries: Entries::SeSparse {
                tables_sector: self.tables_sector,
                grains_sector: self.grains_sector,
            },
        };
        let directory_entries = self.directory_sectors.saturating_mul(SECTOR_BYTES / 8);
        geometry.checked(GRAIN_SECTORS, directory_entries)
    }
}

/// Checks the header that changes: an image that was not closed has a journal to play.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] or [`ErrorKind::Unsupported`].
pub fn check_volatile(bytes: &[u8]) -> Result<()> {
    let magic = u64_at(bytes, 0);
    if magic != VOLATILE_MAGIC {
        let message = format!("Bad volatile header magic: 0x{magic:016x}");
        return Err(Error::new(ErrorKind::InvalidImage, "open", message));
    }
    if u64_at(bytes, 24) != 0 {
        let message = "Image is dirty, Replaying journal not supported".to_owned();
        return Err(unsupported(message));
    }
    if !is_zero_from(bytes, 32) {
        let message = "Unsupported non-zero volatile header padding".to_owned();
        return Err(unsupported(message));
    }
    Ok(())
}

fn is_zero_from(bytes: &[u8], at: usize) -> bool {
    bytes.iter().skip(at).take(512 - at).all(|&byte| byte == 0)
}

/// The sector of the table that an entry of the directory leads to: 0 for none, `None` for an entry
/// that says nothing known.
pub(crate) fn table_sector(entry: u64, tables_sector: u64) -> Option<u32> {
    if entry == 0 {
        return Some(0);
    }
    if entry & 0xffff_ffff_0000_0000 != 0x1000_0000_0000_0000 {
        return None;
    }
    let inside = (entry & 0xffff_ffff).checked_mul(TABLE_SECTORS)?;
    u32::try_from(tables_sector.checked_add(inside)?).ok()
}

/// What an entry of a table says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grain {
    Absent,
    Zero,
    Sector(u64),
}

/// What an entry of a table says; `None` for what says nothing known.
pub(crate) fn grain(entry: u64, grains_sector: u64) -> Option<Grain> {
    match entry >> 60 {
        0 if entry == 0 => Some(Grain::Absent),
        // Unmapped by the guest, and written as zeroes.
        1 | 2 => Some(Grain::Zero),
        3 => {
            let number = (entry & 0x0fff_0000_0000_0000) >> 48 | (entry & 0xffff_ffff_ffff) << 12;
            let sector = grains_sector.checked_add(number.checked_mul(GRAIN_SECTORS)?)?;
            (sector <= i64::MAX as u64 / SECTOR_BYTES).then_some(Grain::Sector(sector))
        }
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A header of an extent with one table, as far as reading goes.
    pub(crate) fn const_header(capacity_sectors: u64) -> Vec<u8> {
        let mut fields = [0u64; 64];
        fields[..5].copy_from_slice(&[CONST_MAGIC, VERSION, capacity_sectors, 8, 64]);
        fields[10..12].copy_from_slice(&[1, 1]);
        fields[16..20].copy_from_slice(&[2, 1, 8, 64]);
        fields[24] = 128;
        fields
            .iter()
            .flat_map(|field| field.to_le_bytes())
            .collect()
    }

    #[test]
    fn a_plain_header_passes_and_each_deviation_does_not() {
        let header = const_header(1 << 15);
        let geometry = ConstHeader::parse(&header).unwrap().geometry().unwrap();
        assert_eq!(geometry.directory_entries, 64);
        for field in [0, 1, 3, 4, 5, 6, 9, 26, 63] {
            let mut changed = header.clone();
            changed[field * 8] ^= 0x40;
            assert!(ConstHeader::parse(&changed).is_err(), "field {field}");
        }
    }

    #[test]
    fn entries_say_what_they_say() {
        assert_eq!(table_sector(0x1000_0000_0000_0001, 8), Some(72));
        assert_eq!(table_sector(0x2000_0000_0000_0001, 8), None);
        assert_eq!(
            grain(0x3001_0000_0000_0002, 128),
            Some(Grain::Sector(128 + 8 * 0x2001))
        );
        assert_eq!(grain(0x2000_0000_0000_0000, 128), Some(Grain::Zero));
        assert_eq!(grain(5, 128), None);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..600),
            entry in any::<u64>(),
            sector in any::<u64>(),
        ) {
            let mut header = const_header(sector);
            for (at, byte) in bytes.iter().enumerate().take(200).skip(80) {
                header[at] = *byte;
            }
            if let Ok(header) = ConstHeader::parse(&header) {
                let _ = header.geometry();
            }
            let _ = (ConstHeader::parse(&bytes), check_volatile(&bytes));
            let _ = (table_sector(entry, sector), grain(entry, sector));
        }
    }
}
