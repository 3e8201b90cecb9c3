//! Walking over a device's extents, merged as `qemu-img map` merges them.

use std::sync::Arc;

use vellum::{BlockDevice, Extent, Result};

/// A merged run of extents of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapEntry {
    /// Where it begins in the device, in bytes.
    pub start_bytes: u64,
    /// What it is; its length is the merged one.
    pub extent: Extent,
}

impl MapEntry {
    /// Whether `next` continues this entry, on the host too.
    fn continues(&self, next: &Extent) -> bool {
        let contiguous = match (&self.extent.host, &next.host) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                a.storage == b.storage && a.offset_bytes + self.extent.len_bytes == b.offset_bytes
            }
            _ => false,
        };
        let alike = self.extent.kind == next.kind && self.extent.depth == next.depth;
        alike && contiguous
    }
}

/// Tells all entries of `start_bytes..end_bytes` in order. A range beyond the
/// device has no entries.
///
/// # Errors
/// As [`BlockDevice::block_status`]; what was found before has been told.
pub async fn map(
    device: &Arc<dyn BlockDevice>,
    start_bytes: u64,
    end_bytes: u64,
    mut tell: impl FnMut(MapEntry),
) -> Result<()> {
    let mut current: Option<MapEntry> = None;
    let mut at = start_bytes;
    while at < end_bytes {
        let next = device.block_status(at, end_bytes - at, u32::MAX).await?;
        let len_bytes = next.len_bytes.max(1);
        match &mut current {
            Some(entry) if entry.continues(&next) => entry.extent.len_bytes += len_bytes,
            _ => {
                if let Some(done) = current.replace(MapEntry {
                    start_bytes: at,
                    extent: next,
                }) {
                    tell(done);
                }
            }
        }
        at += len_bytes;
    }
    current.into_iter().for_each(tell);
    Ok(())
}
