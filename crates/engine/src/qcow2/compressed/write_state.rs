//! [`CompressedWrites`]: what the compressed writes of an image share.

use super::appending::Appender;
use super::compress::Codec;
use std::sync::Arc;
use vellum_format::geometry::Geometry;
use vellum_format::limits::COMPRESSED_SECTOR_BYTES;
use vellum_format::types::HostCluster;
use vellum_io::turns::Turns;
use vellum_storage::Storage;

/// What the compressed writes of an image share.
#[derive(Debug)]
pub(crate) struct CompressedWrites {
    pub(crate) codec: Codec,
    /// In the order of the calls. A request waits for its turn before it holds a guest range, and
    /// ends it as soon as all of its clusters have a place, before its data is written.
    pub(crate) turns: Arc<Turns>,
    pub(crate) appender: Appender,
    pub(super) open: async_lock::Mutex<Option<OpenCluster>>,
    /// Held shared from before data is placed until the mapping points at it, and alone
    /// by whoever must know of all counts. Taken before any guest range.
    pub(crate) placing: async_lock::RwLock<()>,
}

/// A host cluster of which the packer holds a reference.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenCluster {
    pub(super) cluster: HostCluster,
    pub(super) used_bytes: u64,
}

impl CompressedWrites {
    /// For an image in `file` without compressed data of its own yet.
    pub(crate) fn new(geometry: &Geometry, file: &Arc<dyn Storage>, codec: Codec) -> Self {
        let wanted = u64::from(file.capabilities().request_alignment_bytes);
        let unit_bytes = wanted
            .max(COMPRESSED_SECTOR_BYTES)
            .min(geometry.cluster_size_bytes());
        CompressedWrites {
            codec,
            turns: Arc::default(),
            appender: Appender::new(file.clone(), unit_bytes),
            open: async_lock::Mutex::default(),
            placing: async_lock::RwLock::default(),
        }
    }
}
