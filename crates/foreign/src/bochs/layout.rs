//! [`BochsLayout`]: where the sectors of a Bochs image lie.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{Error, ErrorKind, Result, Storage};

use super::Header;
use crate::fields::read_at;
use crate::paged::{PagedTables, Table, Width};
use crate::{Layout, NewBlock, Place, Run};

/// The entry of an extent that the file does not have.
const NO_EXTENT: u64 = 0xffff_ffff;
const SECTOR_BYTES: u64 = 512;
const CATALOG_BUDGET_BYTES: u64 = 1 << 20;
/// Bitmaps that are kept; each has at most 2 KiB.
const MOST_BITMAPS: usize = 1024;

/// Where the sectors of an image lie.
#[derive(Debug)]
pub struct BochsLayout {
    files: [Arc<dyn Storage>; 1],
    header: Header,
    catalog: PagedTables,
    /// Bitmaps by the extent's number in the file.
    bitmaps: Mutex<HashMap<u32, Arc<Vec<u8>>>>,
}

impl BochsLayout {
    pub(super) fn new(file: Arc<dyn Storage>, header: Header) -> BochsLayout {
        BochsLayout {
            catalog: PagedTables::new(file.clone(), Width::Le32, CATALOG_BUDGET_BYTES),
            files: [file],
            header,
            bitmaps: Mutex::default(),
        }
    }

    fn table(&self) -> Table {
        Table {
            start_bytes: self.header.catalog_bytes,
            len: self.header.extents.into(),
        }
    }

    /// The sectors of an extent that a bitmap has bits for.
    fn bitmap_len(&self) -> usize {
        (u64::from(self.header.extent_bytes) / SECTOR_BYTES).div_ceil(8) as usize
    }

    /// The run from a byte of an extent on, by its bitmap.
    fn run_in_extent(&self, number: u32, bitmap: &[u8], from_bytes: u64, len_bytes: u64) -> Run {
        let has = |sector: u64| {
            let byte = bitmap.get((sector / 8) as usize).copied();
            byte.unwrap_or(0) >> (sector % 8) & 1 == 1
        };
        let first = from_bytes / SECTOR_BYTES;
        let is_data = has(first);
        let end_bytes = from_bytes + len_bytes;
        let mut sector = first + 1;
        while sector * SECTOR_BYTES < end_bytes && has(sector) == is_data {
            sector += 1;
        }
        let data_bytes = self.header.bitmap_offset_bytes(number) + self.header.bitmap_bytes;
        Run {
            len_bytes: (sector * SECTOR_BYTES).min(end_bytes) - from_bytes,
            place: match is_data {
                true => Place::Data {
                    file: 0,
                    offset_bytes: data_bytes + from_bytes,
                },
                false => Place::Absent,
            },
        }
    }
}

impl Layout for BochsLayout {
    type Changes = ();

    fn format(&self) -> &'static str {
        "bochs"
    }

    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.files
    }

    fn size_bytes(&self) -> u64 {
        self.header.size_bytes
    }

    fn block_bytes(&self) -> u64 {
        self.header.extent_bytes.into()
    }

    fn cluster_size_bytes(&self) -> Option<u64> {
        None
    }

    fn has_backing_files(&self) -> bool {
        false
    }

    fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>> {
        let extent_bytes = self.block_bytes();
        let from_bytes = offset_bytes % extent_bytes;
        let len_bytes = len_bytes.min(extent_bytes - from_bytes);
        let Some(number) = self.catalog.get(self.table(), offset_bytes / extent_bytes) else {
            return Ok(None);
        };
        if number == NO_EXTENT {
            let place = Place::Absent;
            return Ok(Some(Run { len_bytes, place }));
        }
        let number = number as u32;
        let bitmaps = self.bitmaps.lock();
        let bitmap = bitmaps.get(&number);
        Ok(bitmap.map(|bitmap| self.run_in_extent(number, bitmap, from_bytes, len_bytes)))
    }

    async fn load(&self, offset_bytes: u64) -> Result<()> {
        let index = offset_bytes / self.block_bytes();
        let number = self.catalog.fetch(self.table(), index).await?;
        if number == NO_EXTENT {
            return Ok(());
        }
        let number = number as u32;
        let at = self.header.bitmap_offset_bytes(number);
        let [file] = &self.files;
        let bitmap = read_at(&**file, at, self.bitmap_len()).await?;
        let mut bitmaps = self.bitmaps.lock();
        if bitmaps.len() >= MOST_BITMAPS {
            bitmaps.clear();
        }
        bitmaps.insert(number, Arc::new(bitmap.to_vec()));
        Ok(())
    }

    async fn allocate(&self, _offset_bytes: u64) -> Result<NewBlock> {
        let message = "images of this format are read only";
        Err(Error::new(ErrorKind::ReadOnly, "write", message))
    }

    fn link(&self, _offset_bytes: u64, _block: NewBlock) -> Result<()> {
        Ok(())
    }

    fn take_changes(&self) -> Option<()> {
        None
    }

    async fn write_changes(&self, _changes: &()) -> Result<()> {
        Ok(())
    }
}
