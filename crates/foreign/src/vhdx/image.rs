//! Reads what an image says of itself.

use std::sync::Arc;

use vellum::{Buffer, Result, Storage};

use super::bat::Shape;
use super::header::{self, Header};
use super::invalid;
use super::metadata::{Item, Items, Parameters, TABLE_BYTES};
use super::parent::ParentLocator;
use super::region::{self, Region, Regions};
use super::replay::{OnLog, replay};
use super::writer::Writer;
use crate::fields;

/// The table is read in pieces of this size.
const READ_BYTES: u64 = 1 << 20;
/// Of what the log writes at once: the table's pages, in bytes.
pub(super) const PAGE_BYTES: u64 = 4096;

/// An image without its table.
#[derive(Debug)]
pub(super) struct Image {
    pub file: Arc<dyn Storage>,
    pub writer: Writer,
    pub regions: Regions,
    pub parameters: Parameters,
    pub parent: Option<ParentLocator>,
    /// The log had to be replayed.
    pub was_replayed: bool,
}

impl Image {
    /// Reads headers, log, regions and metadata.
    pub(super) async fn read(file: Arc<dyn Storage>, on_log: OnLog) -> Result<Image> {
        if !fields::read_at(&*file, 0, 8)
            .await?
            .starts_with(header::SIGNATURE)
        {
            return Err(invalid("the file is no VHDX image"));
        }
        let mut headers = [None, None];
        for (header, at_bytes) in headers.iter_mut().zip(header::OFFSETS_BYTES) {
            let bytes = fields::read_at(&*file, at_bytes, header::LEN_BYTES).await?;
            *header = Header::decode(&bytes);
        }
        let [first, second] = headers;
        let (slot, header) =
            header::newer(first, second).ok_or_else(|| invalid("No valid VHDX header found"))?;
        let mut writer = Writer::new(file.clone(), slot, header);
        let was_replayed = replay(&file, &mut writer, on_log).await?;
        let regions = read_regions(&*file, writer.header()).await?;
        let (parameters, parent) = read_metadata(&*file, regions.metadata).await?;
        Ok(Image {
            file,
            writer,
            regions,
            parameters,
            parent,
            was_replayed,
        })
    }

    /// The table's shape and its entries, up to the end of the page that has the last one.
    pub(super) async fn read_table(&self) -> Result<(Shape, Vec<u64>)> {
        let shape = Shape::new(&self.parameters);
        let bat = self.regions.bat;
        shape.check(bat.len_bytes)?;
        let len_bytes = u64::from(bat.len_bytes);
        if !bat.offset_bytes.is_multiple_of(PAGE_BYTES) || !len_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(invalid("the VHDX block allocation table is not aligned"));
        }
        let needed_bytes = shape.entries * 8;
        // A table has to be there to be read into memory.
        if bat.offset_bytes + needed_bytes > self.file.len_bytes()? {
            return Err(invalid("the VHDX block allocation table is cut off"));
        }
        let len_bytes = needed_bytes.next_multiple_of(PAGE_BYTES);
        let mut entries = Vec::with_capacity((len_bytes / 8) as usize);
        let mut at = 0;
        while at < len_bytes {
            let piece_bytes = READ_BYTES.min(len_bytes - at) as usize;
            let piece = fields::read_at(&*self.file, bat.offset_bytes + at, piece_bytes).await?;
            let (numbers, _) = piece.as_chunks::<8>();
            entries.extend(numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)));
            at += piece_bytes as u64;
        }
        Ok((shape, entries))
    }
}

async fn read_regions(file: &dyn Storage, header: &Header) -> Result<Regions> {
    let log = Region {
        offset_bytes: header.log_offset_bytes,
        len_bytes: header.log_len_bytes,
    };
    for at_bytes in region::OFFSETS_BYTES {
        let bytes = fields::read_at(file, at_bytes, region::LEN_BYTES).await?;
        if let Some(regions) = Regions::decode(&bytes, log)? {
            return Ok(regions);
        }
    }
    Err(invalid("No valid VHDX region table found"))
}

async fn read_metadata(
    file: &dyn Storage,
    region: Region,
) -> Result<(Parameters, Option<ParentLocator>)> {
    if region.offset_bytes >= file.len_bytes()? {
        return Err(invalid("the VHDX metadata lie beyond the image"));
    }
    let table = fields::read_at(file, region.offset_bytes, TABLE_BYTES).await?;
    let items = Items::decode(&table, region.len_bytes)?;
    let parameters = Parameters::decode(
        &read_item(file, region, items.file_parameters).await?,
        &read_item(file, region, items.virtual_disk_size).await?,
        &read_item(file, region, items.logical_sector_size).await?,
    )?;
    let parent = match (parameters.has_parent, items.parent_locator) {
        (false, _) => None,
        (true, None) => return Err(invalid("the VHDX image has a parent, but no name of it")),
        (true, Some(item)) => Some(ParentLocator::decode(
            &read_item(file, region, item).await?,
        )?),
    };
    Ok((parameters, parent))
}

/// An item, which [`Items::decode`] has found to lie inside its region.
async fn read_item(file: &dyn Storage, region: Region, item: Item) -> Result<Buffer> {
    let at_bytes = region.offset_bytes + u64::from(item.offset_bytes);
    fields::read_at(file, at_bytes, item.len_bytes as usize).await
}
