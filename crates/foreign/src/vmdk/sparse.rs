//! [`Sparse`]: an extent with tables, opened: where its grains are, and where new ones go.
//!
//! Called by `open`, by the layout and by checks. Reads headers, directories and tables, and writes nothing of them.
//!
//! Invariants:
//! - The memory of a directory is bounded by the file's length, and by QEMU's bound.
//! - A sector that is given out lies behind everything that was in the file when it was
//!   opened, so no table and no grain is in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vellum::{Buffer, Error, ErrorKind, Result, Storage};
use vellum_io::turns::Turns;

use super::header::{
    CowHeader, DIRECTORY_AT_END, Entries, SECTOR_BYTES, SparseHeader, TableGeometry, u32_at, u64_at,
};
use super::marker::{FOOTER_BYTES, parse_footer};
use super::sesparse::{self, ConstHeader, Grain};
use super::tables::{Key, Tables};
use crate::fields::read_at;
use crate::layout::{Place, Run};
use crate::places::FreePlaces;

/// Directories are read in pieces of this size.
const READ_BYTES: u64 = 1 << 20;

/// Grains are found by 32 bits.
const MAX_SECTORS: u64 = 1 << 32;

/// An entry of a directory that says nothing known.
const BAD_TABLE: u32 = u32::MAX;

/// Why an extent cannot be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReadOnly {
    pub reason: &'static str,
    /// QEMU does not even open it to write.
    pub at_once: bool,
}

/// An extent with tables.
#[derive(Debug)]
pub(super) struct Sparse {
    pub geometry: TableGeometry,
    pub compressed: bool,
    pub markers: bool,
    /// Of the `KDMV` kind.
    pub is_hosted: bool,
    /// Why it cannot be changed.
    pub read_only: Option<ReadOnly>,
    /// The sector of each table; 0 for none.
    directory: Vec<u32>,
    /// The same of the second copies; empty if there are none, or none are needed.
    redundant: Vec<u32>,
    /// Bytes of the file when it was opened.
    file_bytes: u64,
    /// The first sector behind everything that is in use.
    next_sector: AtomicU64,
    /// Sectors before it where grains begin that are not in use.
    free: Mutex<FreePlaces>,
    /// It may be changed: then no entry may lead to where new grains are put.
    writable: bool,
    /// Who compresses.
    pub turns: Arc<Turns>,
}

/// The header of a sparse extent that counts, and the one at its beginning if it is of that kind.
pub(super) struct Opened {
    pub geometry: TableGeometry,
    /// Of a `KDMV` extent.
    pub header: Option<SparseHeader>,
    /// The directory is behind all grains, so that nothing can be put there.
    directory_at_end: bool,
}

/// Reads and checks the header of a `KDMV` or `COWD` extent.
pub(super) async fn read_header(file: &dyn Storage) -> Result<Opened> {
    let file_bytes = file.len_bytes()?;
    let first = read_at(file, 0, SparseHeader::BYTES).await?;
    if let Some(cow) = CowHeader::parse(&first) {
        return Ok(Opened {
            geometry: cow.geometry()?,
            header: None,
            directory_at_end: false,
        });
    }
    let Some(mut header) = SparseHeader::parse(&first) else {
        let message = "Image not in VMDK format";
        return Err(Error::new(ErrorKind::InvalidImage, "open", message));
    };
    let directory_at_end = header.directory_sector == DIRECTORY_AT_END;
    if directory_at_end {
        let whole_bytes = file_bytes.next_multiple_of(SECTOR_BYTES);
        let at = whole_bytes.saturating_sub(FOOTER_BYTES as u64);
        header = parse_footer(&read_at(file, at, FOOTER_BYTES).await?)?;
    }
    Ok(Opened {
        geometry: header.geometry(file_bytes)?,
        header: Some(header),
        directory_at_end,
    })
}

impl Sparse {
    /// Opens a `KDMV` or `COWD` extent.
    pub(super) async fn open(file: &dyn Storage, writable: bool) -> Result<Sparse> {
        let opened = read_header(file).await?;
        let read_only = match opened.header {
            None => Some(ReadOnly {
                reason: "No write support for COWD extents available",
                at_once: false,
            }),
            Some(header) => header
                .read_only_reason()
                .map(|reason| ReadOnly {
                    reason,
                    at_once: true,
                })
                .or(opened.directory_at_end.then_some(ReadOnly {
                    reason: "No write support for streams that end with their tables available",
                    at_once: false,
                })),
        };
        let mut sparse = Sparse::with_geometry(file, opened.geometry, read_only).await?;
        if let Some(header) = opened.header {
            sparse.compressed = header.is_compressed();
            sparse.markers = header.has_markers();
            sparse.is_hosted = true;
            sparse.writable = writable;
        }
        if let Some(sector) = opened.geometry.redundant_sector
            && writable
        {
            sparse.redundant = read_directory(file, &opened.geometry, sector).await?;
        }
        Ok(sparse)
    }

    /// Opens a `seSparse` extent.
    pub(super) async fn open_se(file: &dyn Storage) -> Result<Sparse> {
        let header = ConstHeader::parse(&read_at(file, 0, 512).await?)?;
        let at = header.volatile_sector.saturating_mul(SECTOR_BYTES);
        let volatile = match at.checked_add(512) {
            Some(end) if end <= i64::MAX as u64 => read_at(file, at, 512).await?,
            _ => Buffer::zeroed(512),
        };
        sesparse::check_volatile(&volatile)?;
        let read_only = Some(ReadOnly {
            reason: "No write support for seSparse images available",
            at_once: true,
        });
        Sparse::with_geometry(file, header.geometry()?, read_only).await
    }

    async fn with_geometry(
        file: &dyn Storage,
        geometry: TableGeometry,
        read_only: Option<ReadOnly>,
    ) -> Result<Sparse> {
        let file_bytes = file.len_bytes()?;
        let directory = read_directory(file, &geometry, geometry.directory_sector).await?;
        Ok(Sparse {
            geometry,
            compressed: false,
            markers: false,
            is_hosted: false,
            read_only,
            directory,
            redundant: Vec::new(),
            file_bytes,
            next_sector: AtomicU64::new(file_bytes.div_ceil(SECTOR_BYTES)),
            free: Mutex::default(),
            writable: false,
            turns: Arc::default(),
        })
    }

    /// Bytes of the guest that a table tells of.
    fn covered_bytes(&self) -> u64 {
        self.geometry.grain_bytes() * u64::from(self.geometry.table_entries)
    }

    pub(super) fn has_zero_grains(&self) -> bool {
        self.geometry.entries == Entries::Sectors { zero_grains: true }
    }

    /// Which table tells of an offset inside the extent, and which entry of it.
    pub(super) fn indices(&self, inside_bytes: u64) -> (u32, usize) {
        let table = inside_bytes / self.covered_bytes();
        let index = inside_bytes % self.covered_bytes() / self.geometry.grain_bytes();
        (
            u32::try_from(table).unwrap_or(u32::MAX),
            usize::try_from(index).unwrap_or(usize::MAX),
        )
    }

    fn corrupt(inside_bytes: u64) -> Error {
        let message = "an entry of the grain tables leads nowhere";
        Error::new(ErrorKind::Corrupt, "read", message).at(inside_bytes)
    }

    /// Where a table is, in bytes of the file; 0 if there is none.
    pub(super) fn table_bytes(&self, table: u32, inside_bytes: u64) -> Result<u64> {
        match self.directory.get(table as usize) {
            None => Ok(0),
            Some(&BAD_TABLE) => Err(Self::corrupt(inside_bytes)),
            Some(&sector) => Ok(u64::from(sector) * SECTOR_BYTES),
        }
    }

    /// Where the copies of a table are that a change has to reach.
    pub(super) fn copies(&self, table: u32) -> impl Iterator<Item = u64> {
        let copies = [&self.directory, &self.redundant];
        let sectors = copies.map(|copy| copy.get(table as usize).copied());
        let inside = |at: &u64| self.is_inside(*at);
        let sectors = sectors.into_iter().flatten();
        sectors
            .map(|sector| u64::from(sector) * SECTOR_BYTES)
            .filter(inside)
    }

    /// Whether a table lies where one can be: behind the header, and in what the file had at first.
    fn is_inside(&self, at_bytes: u64) -> bool {
        at_bytes != 0 && at_bytes + self.geometry.table_bytes() as u64 <= self.file_bytes
    }

    /// The table whose entries are about to change has to be one.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] or [`ErrorKind::Unsupported`].
    pub(super) fn check_table(&self, table: u32, inside_bytes: u64) -> Result<()> {
        let at_bytes = self.table_bytes(table, inside_bytes)?;
        if at_bytes == 0 {
            let message = "the extent has no grain table for this place";
            return Err(Error::new(ErrorKind::Unsupported, "write", message).at(inside_bytes));
        }
        match self.is_inside(at_bytes) {
            true => Ok(()),
            false => Err(Self::corrupt(inside_bytes)),
        }
    }

    /// What the entry of a grain says.
    pub(super) fn grain(&self, table: &[u8], index: usize) -> Option<Grain> {
        let at = index.checked_mul(self.geometry.entry_bytes())?;
        match self.geometry.entries {
            Entries::Sectors { zero_grains } => Some(match u32_at(table, at) {
                0 => Grain::Absent,
                1 if zero_grains => Grain::Zero,
                sector => Grain::Sector(sector.into()),
            }),
            Entries::SeSparse { grains_sector, .. } => {
                sesparse::grain(u64_at(table, at), grains_sector)
            }
        }
    }

    /// The run at an offset inside the extent; `None` if the table has to be read first.
    pub(super) fn lookup(
        &self,
        tables: &Tables,
        extent: u32,
        file: usize,
        inside_bytes: u64,
        len_bytes: u64,
    ) -> Result<Option<Run>> {
        let (table, index) = self.indices(inside_bytes);
        if self.table_bytes(table, inside_bytes)? == 0 {
            // No further than the request goes.
            let most = usize::try_from(len_bytes / self.covered_bytes()).unwrap_or(usize::MAX);
            let without = self.directory.iter().skip(table as usize);
            let without = without.take(most.saturating_add(2));
            let without = without.take_while(|&&sector| sector == 0).count() as u64;
            let reach = match (table as usize) < self.directory.len() {
                true => (u64::from(table) + without).saturating_mul(self.covered_bytes()),
                false => u64::MAX,
            };
            return Ok(Some(Run {
                len_bytes: len_bytes.min(reach.saturating_sub(inside_bytes)),
                place: Place::Absent,
            }));
        }
        let key = Key { extent, table };
        let run = tables.read(key, |bytes| {
            self.run_in(bytes, index, file, inside_bytes, len_bytes)
        });
        match run {
            None => Ok(None),
            Some(Some(run)) => Ok(Some(run)),
            Some(None) => Err(Self::corrupt(inside_bytes)),
        }
    }

    /// The run in one table.
    fn run_in(
        &self,
        table: &[u8],
        index: usize,
        file: usize,
        inside_bytes: u64,
        len_bytes: u64,
    ) -> Option<Run> {
        let grain_bytes = self.geometry.grain_bytes();
        let in_grain = inside_bytes % grain_bytes;
        let first = self.grain(table, index)?;
        let mut run_bytes = grain_bytes - in_grain;
        let end_sector = match self.writable {
            true => self.end_sector(),
            false => u64::MAX,
        };
        let mut sector_after = match first {
            Grain::Sector(sector) if sector >= end_sector => return None,
            Grain::Sector(sector) => sector.checked_add(self.geometry.grain_sectors)?,
            Grain::Absent | Grain::Zero => 0,
        };
        for next in index + 1..self.geometry.table_entries as usize {
            let goes_on = match (first, self.grain(table, next)) {
                (Grain::Sector(_), Some(Grain::Sector(sector))) => {
                    sector < end_sector && (self.compressed || sector == sector_after)
                }
                (first, next) => next == Some(first),
            };
            if run_bytes >= len_bytes || !goes_on {
                break;
            }
            run_bytes += grain_bytes;
            sector_after = sector_after.saturating_add(self.geometry.grain_sectors);
        }
        let place = match first {
            Grain::Absent => Place::Absent,
            Grain::Zero => Place::Zero,
            Grain::Sector(_) if self.compressed => Place::Compressed,
            Grain::Sector(sector) => Place::Data {
                file,
                offset_bytes: sector.checked_mul(SECTOR_BYTES)?.checked_add(in_grain)?,
            },
        };
        Some(Run {
            len_bytes: run_bytes.min(len_bytes),
            place,
        })
    }

    /// Gives out the sectors of a grain, and whether they read as zeroes.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] where no entry could lead there.
    pub(super) fn take_grain(&self, file: &dyn Storage) -> Result<(u64, bool)> {
        if let Some(sector) = self.free.lock().take() {
            return Ok((sector, false));
        }
        let grain_sectors = self.geometry.grain_sectors;
        let sector = self.take_sectors(grain_sectors, grain_sectors)?;
        Ok((sector, self.is_fresh(file, sector)))
    }

    /// Takes back the sectors of a grain that no entry leads to.
    pub(super) fn give_back(&self, sector: u64) {
        self.free.lock().give_back(sector);
    }

    /// Cuts off what was given back at the end of the file. Nobody takes sectors meanwhile.
    pub(super) async fn cut(&self, file: &dyn Storage) -> Result<()> {
        if !file.capabilities().growable {
            return Ok(());
        }
        let before = self.end_sector();
        let end = self.free.lock().cut(before, self.geometry.grain_sectors);
        if end == before {
            return Ok(());
        }
        self.continue_at(end);
        let end_bytes = end * SECTOR_BYTES;
        match file.len_bytes()? > end_bytes {
            true => file.truncate(end_bytes).await,
            false => Ok(()),
        }
    }

    /// Gives out `sectors` at a multiple of `alignment_sectors`.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] where no entry could lead there.
    pub(super) fn take_sectors(&self, sectors: u64, alignment_sectors: u64) -> Result<u64> {
        let first = |next: u64| next.next_multiple_of(alignment_sectors.max(1));
        let end = |next: u64| first(next).saturating_add(sectors);
        let taken = self
            .next_sector
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                (first(next) < MAX_SECTORS).then(|| end(next))
            });
        taken.map(first).map_err(|_| {
            let message = "the extent has no room for more grains";
            Error::new(ErrorKind::NoSpace, "write", message)
        })
    }

    /// The first sector that was not given out.
    pub(super) fn end_sector(&self) -> u64 {
        self.next_sector.load(Ordering::Relaxed)
    }

    /// The end of what is in use is before that of the file.
    pub(super) fn continue_at(&self, sector: u64) {
        self.next_sector.store(sector, Ordering::Relaxed);
    }

    /// Where the tables are, in bytes of the file.
    pub(super) fn all_tables(&self) -> impl Iterator<Item = u64> {
        let sectors = self.directory.iter().copied();
        let sectors = sectors.filter(|&sector| sector != 0 && sector != BAD_TABLE);
        sectors.map(|sector| u64::from(sector) * SECTOR_BYTES)
    }

    /// Whether a range behind the end of what was in the file reads as zeroes.
    fn is_fresh(&self, file: &dyn Storage, sector: u64) -> bool {
        let capabilities = file.capabilities();
        capabilities.has_zero_init
            && capabilities.growable
            && sector.saturating_mul(SECTOR_BYTES) >= self.file_bytes
    }
}

/// Reads as much of a directory as the capacity needs.
async fn read_directory(
    file: &dyn Storage,
    geometry: &TableGeometry,
    sector: u64,
) -> Result<Vec<u32>> {
    let covered = geometry.grain_sectors * u64::from(geometry.table_entries);
    let needed = geometry.capacity_sectors.div_ceil(covered);
    let needed = needed.min(geometry.directory_entries.into());
    let entry_bytes = geometry.entry_bytes();
    let at_bytes = sector * SECTOR_BYTES;
    // Beyond the end of the file there are zeroes, which need no memory.
    let there_bytes = file.len_bytes()?.saturating_sub(at_bytes);
    let there = there_bytes.div_ceil(entry_bytes as u64);
    let len_bytes = needed.min(there) * entry_bytes as u64;
    let mut sectors = Vec::new();
    let mut at = 0;
    while at < len_bytes {
        let piece_bytes = READ_BYTES.min(len_bytes - at);
        let piece = read_at(file, at_bytes + at, piece_bytes as usize).await?;
        sectors.extend(
            piece
                .chunks_exact(entry_bytes)
                .map(|entry| match geometry.entries {
                    Entries::Sectors { .. } => match u32_at(entry, 0) {
                        // No file has a table there, nor one before it.
                        BAD_TABLE => BAD_TABLE - 1,
                        sector => sector,
                    },
                    Entries::SeSparse { tables_sector, .. } => {
                        sesparse::table_sector(u64_at(entry, 0), tables_sector).unwrap_or(BAD_TABLE)
                    }
                }),
        );
        at += piece_bytes;
    }
    Ok(sectors)
}
