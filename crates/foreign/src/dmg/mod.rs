//! Apple's disk images (UDIF), to be read.
//!
//! A file ends with a trailer of 512 bytes. It leads to a list of tables, one for each partition, in an XML property list or in
//! a resource fork. Their rows are chunks of the disk: zeroes, bytes as they are, or compressed ones, with zlib, bzip2,
//! LZFSE or LZMA (in xz's container). QEMU reads the last one not, and Apple's oldest, ADC, nobody does here.
//!
//! Chunks have any sizes up to 64 MiB; what the device sees are blocks of a fixed size, which are put together from
//! the chunks that they touch. Chunks are inflated on all cores, as many at a time as
//! there is room for, each once for all who ask for it meanwhile; the last one is kept.
//!
//! Images of this kind are never changed here, so there is nothing to say of a crash.

mod chunk;
mod decompress;
mod layout;
mod list;
mod trailer;

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};

pub use chunk::{Chunk, Kind};
pub use layout::DmgLayout;
pub use trailer::Trailer;

use crate::MappedDevice;
use crate::fields::read_at;

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

async fn read(file: &dyn Storage) -> Result<(Trailer, Vec<Chunk>)> {
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
