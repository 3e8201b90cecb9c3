//! Opens disk images of Apple.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};

use crate::MappedDevice;
use crate::fields::read_at;

use super::chunk::{self, Chunk};
use super::layout::DmgLayout;
use super::list;
use super::trailer::{self, Trailer};

/// Lists of tables are read up to this size; those of real images are some 10 KiB for each GiB.
const MOST_LIST_BYTES: u64 = 16 << 20;

/// Whether the name of a file says that it is such an image: nothing at its beginning does.
pub fn probe_name(name: &str) -> bool {
    name.len() > 4 && name.ends_with(".dmg")
}

/// Opens an image, read-only.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] for what is no such image; else what the storage says.
pub async fn open(file: Arc<dyn Storage>) -> Result<Arc<MappedDevice<DmgLayout>>> {
    let read = read(&*file).await;
    let (trailer, chunks) = read.map_err(|error| error.target(file.name()))?;
    let layout = DmgLayout::new(file, trailer.size_bytes, chunks);
    Ok(MappedDevice::new(layout, None, true))
}

pub(crate) async fn read(file: &dyn Storage) -> Result<(Trailer, Vec<Chunk>)> {
    let len_bytes = file.len_bytes()?;
    let (start, len) = trailer::search_range(len_bytes)?;
    let bytes = read_at(file, start, len).await?;
    let trailer = Trailer::find(&bytes, start)?;
    let invalid = |message| Error::new(ErrorKind::InvalidImage, "open", message);
    let list = trailer.resource_fork.or(trailer.property_list);
    let list = list.ok_or_else(|| invalid("the UDIF trailer leads to no list of chunks"))?;
    if list.len_bytes > MOST_LIST_BYTES {
        return Err(invalid("the list of chunks is too large"));
    }
    let bytes = read_at(file, list.start_bytes, list.len_bytes as usize).await?;
    let tables = match trailer.resource_fork {
        Some(_) => list::from_resource_fork(&bytes)?,
        None => list::from_property_list(&bytes)?,
    };
    let mut chunks = Vec::new();
    for table in tables {
        chunk::read_table(&table, trailer.data_bytes, &mut chunks)?;
    }
    chunks.sort_by_key(|chunk| chunk.start_bytes);
    Ok((trailer, chunks))
}
