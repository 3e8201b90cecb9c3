//! What is refused before anything changes, in QEMU's order and words.

use vellum_format::features::{Compatible, Incompatible};
use vellum_format::limits::DEFAULT_REFCOUNT_ORDER;
use vellum_format::{Header, header::CompressionType};
use vellum_io::{ErrorKind, Result};

use super::downgrade;
use super::encryption;
use super::options::AmendOptions;
use super::work::refuse;
use crate::qcow2::header::load;
use crate::qcow2::image::Image;

fn invalid<T>(message: impl Into<String>) -> Result<T> {
    Err(refuse(ErrorKind::InvalidArgument, message))
}

fn unsupported<T>(message: impl Into<String>) -> Result<T> {
    Err(refuse(ErrorKind::Unsupported, message))
}

/// Checks what is asked for against the image and in itself.
pub(super) async fn check(image: &Image, options: &AmendOptions) -> Result<()> {
    let header = image.header();
    check_values(&header, options)?;
    let version = options.version.unwrap_or(header.version);
    let order = options
        .refcount_bits
        .map_or(header.refcount_order, u64::trailing_zeros);
    if version < 3 && order != header.refcount_order && order != DEFAULT_REFCOUNT_ORDER {
        return invalid(
            "Refcount widths other than 16 bits require compatibility level 1.1 or above (use \
             compat=1.1 or greater)",
        );
    }
    check_backing(&header, options)?;
    let lazy = header.compatible.contains(Compatible::LAZY_REFCOUNTS);
    if version < 3 && !lazy && options.lazy_refcounts == Some(true) {
        return invalid(
            "Lazy refcounts only supported with compatibility level 1.1 and above (use compat=1.1 \
             or greater)",
        );
    }
    // Whether the snapshots have the disk's size is known once that has its new one.
    if version < header.version && options.size_bytes.is_none_or(|bytes| bytes == 0) {
        check_downgrade(image, &header, order, image.size_bytes()).await?;
    }
    Ok(())
}

/// Checks an image as it is right before it becomes one of version 2.
pub(super) async fn check_before_downgrade(image: &Image) -> Result<()> {
    let header = image.header();
    check_downgrade(image, &header, header.refcount_order, image.size_bytes()).await
}

/// Each value for itself.
fn check_values(header: &Header, options: &AmendOptions) -> Result<()> {
    if options.key_slots.is_some() {
        encryption::check(header)?;
    }
    if let Some(version) = options.version.filter(|version| !matches!(version, 2 | 3)) {
        return invalid(format!("Unknown compatibility level {version}"));
    }
    let has_data_file = header.incompatible.contains(Incompatible::EXTERNAL_DATA);
    if options.data_file.is_some() && !has_data_file {
        return invalid("data-file can only be set for images that use an external data file");
    }
    let raw = vellum_format::features::Autoclear::RAW_EXTERNAL_DATA;
    if options.data_file_raw == Some(true) && !header.autoclear.contains(raw) {
        return invalid("data-file-raw cannot be set on existing images");
    }
    match options.refcount_bits {
        Some(bits) if !bits.is_power_of_two() || bits > 64 => {
            invalid("Refcount width must be a power of two and may not exceed 64 bits")
        }
        _ => Ok(()),
    }
}

fn check_backing(header: &Header, options: &AmendOptions) -> Result<()> {
    let (file, format) = (&options.backing_file, &options.backing_format);
    let same = file.as_deref() == header.backing_file_text().as_deref()
        && format.as_deref() == header.backing_format().as_deref();
    match same || (file.is_none() && format.is_none()) {
        true => Ok(()),
        false => invalid("Cannot amend the backing file\nYou can use 'qemu-img rebase' instead."),
    }
}

async fn check_downgrade(
    image: &Image,
    header: &Header,
    refcount_order: u32,
    size_bytes: u64,
) -> Result<()> {
    if refcount_order != DEFAULT_REFCOUNT_ORDER {
        return unsupported("compat=0.10 requires refcount_bits=16");
    }
    if image.has_external_data() {
        return unsupported("Cannot downgrade an image with a data file");
    }
    for snapshot in load::snapshots(&image.file, header).await?.entries {
        let same_size = snapshot.disk_size_bytes.unwrap_or(size_bytes) == size_bytes;
        if snapshot.vm_state_size_bytes > u64::from(u32::MAX) || !same_size {
            return unsupported("Internal snapshots prevent downgrade of image");
        }
    }
    let removable = Incompatible::DIRTY | Incompatible::COMPRESSION;
    let left = header.incompatible.without(removable);
    if !left.is_empty() {
        return unsupported(format!(
            "Cannot downgrade an image with incompatible features {:#x} set",
            left.bits()
        ));
    }
    if header.compression_type != CompressionType::Zlib
        && downgrade::has_compressed_clusters(image, header).await?
    {
        return unsupported(
            "Cannot downgrade an image with zstd compression type and existing compressed clusters",
        );
    }
    Ok(())
}
