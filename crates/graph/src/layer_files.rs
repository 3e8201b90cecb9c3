//! Which storages a layer of a disk consists of, for those who want to know whether it was changed.

use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::{BlockDevice, Storage, target_of};
use vellum_foreign::ForeignImage;

/// The storages that hold what a device holds itself, without its backing file: the one that it is
/// named by first, then an external data file, or the extents of a `vmdk`. None for a device
/// whose storage nobody knows.
pub fn layer_files(device: &dyn BlockDevice) -> Vec<Arc<dyn Storage>> {
    let target = target_of(device);
    let device = target.as_deref().unwrap_or(device);
    if let Some(image) = ForeignImage::of(device) {
        return image.files();
    }
    let mut files = Vec::new();
    files.extend(device.storage());
    if let Some(image) = device.as_qcow2()
        && image.header().geometry().external_data
    {
        files.push(image.data_storage());
    }
    files
}
