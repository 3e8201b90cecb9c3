//! The first sector, and where everything is.
//!
//! ```text
//! 0b bytes of a sector     10 tables                24 sectors of a table, FAT32
//! 0d sectors of a cluster  11 entries of the root   28 which table counts, FAT32
//! 0e sectors before        13 sectors               2c the root's first cluster, FAT32
//!    the first table       16 sectors of a table    30 the sector of free clusters, FAT32
//!                          20 sectors, if 13 is 0
//! ```

use crate::bytes::{has, le16, le32, u8_at};
use crate::detect;
use crate::error::{Error, Result};
use crate::source::Source;

const SLOT_BYTES: u64 = 32;
/// Below so many clusters it is FAT12.
const FAT16_CLUSTERS_MIN: u32 = 4085;
/// From so many clusters on it is FAT32.
const FAT32_CLUSTERS_MIN: u32 = 65_525;
const CLUSTERS_MAX: u32 = 0x0fff_fff5;

/// How long an entry of the table is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    Bits12,
    Bits16,
    Bits32,
}

/// Where the root directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Root {
    /// Behind the tables.
    Fixed { start_bytes: u64, len_bytes: u64 },
    /// In clusters, from that one on.
    Chain(u32),
}

/// Where everything is.
#[derive(Debug)]
pub(super) struct Boot {
    pub(super) width: Width,
    pub(super) cluster_bytes: u32,
    /// Those that hold data. They are numbered from 2.
    pub(super) clusters: u32,
    pub(super) root: Root,
    /// The table that counts.
    pub(super) table_bytes: u64,
    data_bytes: u64,
    /// Where the number of free clusters is; 0 for nowhere.
    information_bytes: u64,
}

impl Boot {
    pub(super) fn read(source: &Source) -> Result<Boot> {
        let sector = source.head(512)?;
        let damaged = |structure, at| Error::damaged(structure, at);
        if !detect::is_fat(&sector) {
            return Err(damaged("the boot sector", 0));
        }
        let sector_bytes = u64::from(le16(&sector, 0x0b));
        let cluster_bytes = sector_bytes as u32 * u32::from(u8_at(&sector, 0x0d));
        let either = |narrow: u16, wide: u32| match narrow {
            0 => u64::from(wide),
            narrow => u64::from(narrow),
        };
        let sectors = either(le16(&sector, 0x13), le32(&sector, 0x20));
        let table_sectors = either(le16(&sector, 0x16), le32(&sector, 0x24));
        let tables = u64::from(u8_at(&sector, 0x10));
        let root_bytes = u64::from(le16(&sector, 0x11)) * SLOT_BYTES;
        let first_table = u64::from(le16(&sector, 0x0e));
        let root_sector = first_table + tables * table_sectors;
        let data_sector = root_sector + root_bytes.div_ceil(sector_bytes);
        let there = (source.len_bytes() / sector_bytes).min(sectors);
        let Some(data_sectors) = sectors.checked_sub(data_sector) else {
            return Err(damaged("the size of the file system", 0x13));
        };
        let clusters = data_sectors * sector_bytes / u64::from(cluster_bytes);
        let clusters = u32::try_from(clusters).unwrap_or(u32::MAX);
        if data_sector >= there || clusters > CLUSTERS_MAX {
            return Err(damaged("the size of the file system", 0x13));
        }
        let width = match clusters {
            FAT32_CLUSTERS_MIN.. => Width::Bits32,
            _ if le16(&sector, 0x16) == 0 => Width::Bits32,
            FAT16_CLUSTERS_MIN.. => Width::Bits16,
            _ => Width::Bits12,
        };
        let mut table_sector = first_table;
        if width == Width::Bits32 && le16(&sector, 0x28) & 0x80 != 0 {
            let active = u64::from(le16(&sector, 0x28) & 0xf).min(tables - 1);
            table_sector += active * table_sectors;
        }
        // A table may be too short for all clusters: the others are out of reach.
        let in_table = match width {
            Width::Bits12 => table_sectors * sector_bytes * 2 / 3,
            Width::Bits16 => table_sectors * sector_bytes / 2,
            Width::Bits32 => table_sectors * sector_bytes / 4,
        };
        Ok(Boot {
            width,
            cluster_bytes,
            clusters: clusters.min(u32::try_from(in_table.saturating_sub(2)).unwrap_or(u32::MAX)),
            root: match width {
                Width::Bits32 => Root::Chain(le32(&sector, 0x2c)),
                _ => Root::Fixed {
                    start_bytes: root_sector * sector_bytes,
                    len_bytes: root_bytes,
                },
            },
            table_bytes: table_sector * sector_bytes,
            data_bytes: data_sector * sector_bytes,
            information_bytes: match width {
                Width::Bits32 => u64::from(le16(&sector, 0x30)) * sector_bytes,
                _ => 0,
            },
        })
    }

    /// Where a cluster begins; its number is one that there is.
    pub(super) fn cluster_place(&self, cluster: u32) -> u64 {
        self.data_bytes + u64::from(cluster.saturating_sub(2)) * u64::from(self.cluster_bytes)
    }

    /// How many clusters are free, as far as the file system keeps count.
    pub(super) fn free_clusters(&self, source: &Source) -> u64 {
        let mut sector = [0; 512];
        if self.information_bytes == 0 || source.read(self.information_bytes, &mut sector).is_err()
        {
            return 0;
        }
        let free = le32(&sector, 488);
        let is_sound = has(&sector, 0, b"RRaA") && has(&sector, 484, b"rrAa");
        match is_sound && free <= self.clusters {
            true => free.into(),
            false => 0,
        }
    }
}
