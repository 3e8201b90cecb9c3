//! Persistent dirty bitmaps, as far as an image that is being changed without
//! maintaining them must care: each is marked *in use*, which tells every other
//! program that its content is not to be trusted (spec: bitmap directory, flags,
//! bit 0). Unlike clearing the autoclear bit, this loses neither the bitmaps'
//! names nor their clusters.

use vellum_format::bitmap::{BitmapFlags, decode_directory, encode_directory};
use vellum_format::error::FormatError;
use vellum_format::features::Autoclear;
use vellum_format::geometry::Geometry;
use vellum_storage::{Buffer, Buffers, Result, WriteFlags};

use super::fault::bad_format;
use super::image::Image;
use super::load::read_bytes;

impl Image {
    /// Marks every persistent bitmap as in use, durably.
    pub(crate) async fn mark_bitmaps_in_use(&self) -> Result<()> {
        let header = self.header();
        let Some(extension) = header.bitmaps() else {
            return Ok(());
        };
        if !header.autoclear.contains(Autoclear::BITMAPS) {
            return Ok(());
        }
        let offset = extension.directory_offset.bytes();
        let len_bytes = extension.directory_size_bytes;
        let directory = read_bytes(&self.file, offset, len_bytes).await?;
        let marked = mark_in_use(
            &directory,
            extension.count,
            &self.geometry,
            self.size_bytes(),
        )
        .map_err(|e| bad_format("write", &e).target(self.name.clone()))?;
        let marked = Buffer::copy_of(&marked);
        self.file
            .write(offset, Buffers::from_iter([marked]), WriteFlags::default())
            .await?;
        self.file.flush().await
    }
}

fn mark_in_use(
    directory: &[u8],
    count: u32,
    geometry: &Geometry,
    guest_size_bytes: u64,
) -> std::result::Result<Vec<u8>, FormatError> {
    let mut entries = decode_directory(directory, count, geometry, guest_size_bytes)?;
    for entry in &mut entries {
        entry.flags = entry.flags.with(BitmapFlags::IN_USE);
    }
    encode_directory(&entries, geometry, guest_size_bytes)
}
