//! Version 2 to 3. The entries of version 3's snapshot table say how large the disk
//! was; where those of the image do not, a new table is made, and the switch to
//! version 3 is the switch to that table.

use vellum_format::snapshot::encode_table;
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::{Buffer, Buffers, ErrorKind, Result};
use vellum_storage::WriteFlags;

use super::work::Work;
use super::work::refuse;
use crate::qcow2::header::load;

pub(super) async fn upgrade(work: &Work) -> Result<()> {
    work.progress.report(0, 2);
    let header = work.header().await?;
    let old = load::snapshots(&work.closed.file, &header).await?;
    let mut entries = old.entries;
    let mut incomplete = false;
    for entry in &mut entries {
        incomplete |= entry.disk_size_bytes.is_none();
        entry
            .disk_size_bytes
            .get_or_insert(header.guest_size_bytes());
    }
    if !incomplete {
        work.progress.report(1, 2);
        work.switch(|header| header.version = 3).await?;
        work.progress.report(2, 2);
        return Ok(());
    }
    let table = encode_table(&entries).map_err(|error| {
        let message = format!("Failed to update the snapshot table: {}", error.message());
        refuse(ErrorKind::InvalidImage, message)
    })?;
    let image = work.open_metadata().await?;
    let clusters = image.geometry.clusters_for(table.len() as u64);
    let offset = image.allocate_side_by_side(clusters).await?;
    let bytes = Buffers::from_iter([Buffer::copy_of(&table)]);
    image
        .file
        .write(offset.bytes(), bytes, WriteFlags::default())
        .await?;
    // Makes the table and its refcounts durable.
    image.close_image().await?;
    work.progress.report(1, 2);
    let switched = work.switch(|header| {
        header.version = 3;
        header.snapshots_offset = offset;
    });
    switched.await?;
    let clusters = header.geometry().clusters_for(old.size_bytes);
    release(work, header.snapshots_offset, clusters).await?;
    work.progress.report(2, 2);
    Ok(())
}

/// Gives clusters back that nothing on disk uses any more.
async fn release(work: &Work, start: HostOffset, clusters: u64) -> Result<()> {
    let image = work.open_metadata().await?;
    let first: HostCluster = start.cluster(&image.geometry);
    image.allocator.release(first, clusters).await?;
    image.close_image().await
}
