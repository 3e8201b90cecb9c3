//! New QED images.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_storage::ZeroFlags;

use super::header::{
    HEADER_BYTES, Header, MAX_CLUSTER_BYTES, MAX_TABLE_CLUSTERS, MIN_CLUSTER_BYTES,
    is_cluster_size, is_table_size, max_size_bytes,
};
use crate::facts::BackingName;
use crate::fields::write_at;

vellum_io::with_setters! {
    /// What a new image is to be.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct CreateOptions {
        /// The virtual size in bytes, rounded up to whole sectors.
        pub size_bytes: u64,
        /// The size of a cluster in bytes.
        pub cluster_size_bytes: u32,
        /// The size of a table in clusters.
        pub table_size_clusters: u32,
        /// The backing file. Of formats only `raw` is written down.
        pub backing: Option<BackingName>,
    }
}

impl Default for CreateOptions {
    fn default() -> Self {
        CreateOptions {
            size_bytes: 0,
            cluster_size_bytes: 64 << 10,
            table_size_clusters: 4,
            backing: None,
        }
    }
}

/// What is wrong with the options.
fn refusal(options: &CreateOptions) -> Option<String> {
    let (cluster_bytes, table_clusters) = (options.cluster_size_bytes, options.table_size_clusters);
    if !is_cluster_size(cluster_bytes) {
        return Some(format!(
            "QED cluster size must be within range [{MIN_CLUSTER_BYTES}, {MAX_CLUSTER_BYTES}] and \
             power of 2"
        ));
    }
    if !is_table_size(table_clusters) {
        return Some(format!(
            "QED table size must be within range [1, {MAX_TABLE_CLUSTERS}] and power of 2"
        ));
    }
    let max = max_size_bytes(cluster_bytes, table_clusters);
    let size_bytes = options.size_bytes.checked_next_multiple_of(512);
    if size_bytes.is_none_or(|size_bytes| size_bytes > max) {
        return Some(format!(
            "QED image size must be a non-zero multiple of cluster size and less than {max} bytes"
        ));
    }
    let name = options.backing.as_ref().map(|backing| backing.name.len());
    let room = cluster_bytes as usize - HEADER_BYTES;
    (name.unwrap_or(0) > room.min(1023)).then(|| "Backing file name too long".to_owned())
}

/// Makes an image in an empty file.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for what an image cannot have, in QEMU's words; else what the storage says.
pub async fn create(file: &Arc<dyn Storage>, options: &CreateOptions) -> Result<()> {
    if let Some(message) = refusal(options) {
        let error = Error::new(ErrorKind::InvalidArgument, "create", message);
        return Err(error.target(file.name()));
    }
    let mut header = Header {
        cluster_bytes: options.cluster_size_bytes,
        table_clusters: options.table_size_clusters,
        header_clusters: 1,
        features: 0,
        compatible_features: 0,
        autoclear_features: 0,
        l1_offset_bytes: options.cluster_size_bytes.into(),
        size_bytes: options.size_bytes.next_multiple_of(512),
        backing_offset_bytes: 0,
        backing_len_bytes: 0,
    };
    let mut name = "";
    if let Some(backing) = &options.backing {
        name = &backing.name;
        header.set_backing(
            HEADER_BYTES as u32,
            name,
            backing.format.as_deref() == Some("raw"),
        );
    }
    let end_bytes = header.l1_offset_bytes + header.table_bytes();
    file.write_zeroes(0, end_bytes, ZeroFlags::default())
        .await?;
    let mut bytes = header.encode();
    bytes.extend(name.as_bytes());
    write_at(&**file, 0, &bytes).await?;
    file.flush().await
}
