//! New Parallels images.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_storage::ZeroFlags;

use super::header::{Header, MOST_CLUSTER_SECTORS, MOST_ENTRIES, SECTOR_BYTES, first_data_sector};
use crate::fields::write_at;

vellum_io::with_setters! {
    /// What a new image is to be.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct CreateOptions {
        /// The virtual size in bytes, rounded up to whole sectors.
        pub size_bytes: u64,
        /// The size of a cluster in bytes, rounded up to whole sectors.
        pub cluster_size_bytes: u64,
    }
}

impl Default for CreateOptions {
    fn default() -> Self {
        CreateOptions {
            size_bytes: 0,
            cluster_size_bytes: 1 << 20,
        }
    }
}

/// The header of a new image, or what is wrong with the options.
fn header(options: &CreateOptions) -> std::result::Result<Header, &'static str> {
    let cluster_sectors = options.cluster_size_bytes.div_ceil(SECTOR_BYTES);
    let cluster_sectors = u32::try_from(cluster_sectors).unwrap_or(u32::MAX);
    if cluster_sectors > MOST_CLUSTER_SECTORS {
        return Err("Cluster size is too large");
    }
    let sectors = options.size_bytes.div_ceil(SECTOR_BYTES);
    if cluster_sectors == 0 || sectors >> 32 >= cluster_sectors.into() {
        return Err("Image size is too large for this cluster size");
    }
    let entries = sectors.div_ceil(cluster_sectors.into()) as u32;
    if entries > MOST_ENTRIES {
        return Err("Catalog too large");
    }
    let data_sectors = first_data_sector(entries, cluster_sectors, false);
    Ok(Header {
        size_bytes: sectors * SECTOR_BYTES,
        cluster_sectors,
        entries,
        is_old: false,
        is_in_use: false,
        data_sectors: u32::try_from(data_sectors).map_err(|_| "Catalog too large")?,
        has_good_data_offset: true,
        extension_sectors: 0,
    })
}

/// Makes an image in an empty file.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for what an image cannot have, in QEMU's words; else what the storage says.
pub async fn create(file: &Arc<dyn Storage>, options: &CreateOptions) -> Result<()> {
    let header = header(options).map_err(|message| {
        let error = Error::new(ErrorKind::InvalidArgument, "create", message);
        error.target(file.name())
    })?;
    let zeroes = file.write_zeroes(0, header.data_bytes(), ZeroFlags::default());
    zeroes.await?;
    write_at(&**file, 0, &header.encode()).await?;
    file.flush().await
}
