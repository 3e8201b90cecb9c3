//! What an open image of a format of other programs (`vellum-foreign`) says of itself, whichever format that is.

use std::sync::Arc;

use vellum::qcow2::MemoryBitmap;
use vellum::{BlockDevice, Error, ErrorKind, Result, target_of};
use vellum_foreign::{BackingName, Facts, ForeignImage};

/// What an image of one of these formats says of itself; `None` for any other device.
pub fn facts(device: &dyn BlockDevice) -> Option<Arc<Facts>> {
    ForeignImage::of(device).map(ForeignImage::facts)
}

/// Whether images of a format tell how large their clusters are, and whether they are dirty: QEMU's do not in
/// some formats.
pub fn tells_clusters(name: &str) -> bool {
    !matches!(name, "bochs" | "cloop" | "dmg" | "parallels")
}

/// Whether an image says that it is dirty, where images of its format, which is told by its name, say
/// that. QEMU's driver of `qed` has repaired the image by then, and never tells it.
pub fn told_dirty(name: &str, facts: &Facts) -> Option<bool> {
    tells_clusters(name).then_some(facts.is_dirty && name != "qed")
}

/// Has an image of these formats name another backing file, or none.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the device is none, or the format does not do that; else as
/// [`ForeignImage::set_backing_file`].
pub async fn set_backing_file(
    device: &dyn BlockDevice,
    backing: Option<vellum::qcow2::BackingName>,
) -> Result<()> {
    let Some(image) = ForeignImage::of(device) else {
        let message = "Operation not supported";
        return Err(Error::new(ErrorKind::Unsupported, "rebase", message));
    };
    let backing = backing.map(|backing| BackingName {
        name: backing.name,
        format: backing.format,
    });
    image.set_backing_file(backing).await
}

/// As [`ForeignImage::keep_identity`], of a device that may be any.
pub fn keep_identity(device: &dyn BlockDevice) {
    let target = target_of(device);
    if let Some(image) = ForeignImage::of(target.as_deref().unwrap_or(device)) {
        image.keep_identity();
    }
}

/// As [`ForeignImage::change_identity`], of a device that may be any.
///
/// # Errors
/// As there.
pub async fn change_identity(device: &dyn BlockDevice) -> Result<()> {
    let target = target_of(device);
    match ForeignImage::of(target.as_deref().unwrap_or(device)) {
        Some(image) => image.change_identity().await,
        None => Ok(()),
    }
}

/// The dirty bitmaps that an image of these formats holds. They record nothing.
pub fn stored_bitmaps(device: &dyn BlockDevice) -> Vec<Arc<MemoryBitmap>> {
    let facts = facts(device).unwrap_or_default();
    let kept = facts.bitmaps.iter().map(|bitmap| {
        let (size_bytes, granularity_bytes) = (device.size_bytes(), bitmap.granularity_bytes);
        let kept = MemoryBitmap::new(&bitmap.name, size_bytes, granularity_bytes, false);
        kept.set(&bitmap.dirty);
        kept
    });
    kept.collect()
}
