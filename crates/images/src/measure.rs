//! How much space an image would take (`measure`).

use std::sync::Arc;

use vellum::Preallocation;
use vellum::qcow2::AsQcow2;
use vellum::qcow2::create::{CreateOptions, Encryption};
use vellum::qcow2::info::{BitmapInfo, ImageInfo};
use vellum::{BlockDevice, Error, ErrorKind, Result, luks};
use vellum_graph::{encryption, foreign};
use vellum_options::create_options::CreateSettings;

use crate::create::qcow2_options;
use crate::create_options;

const SECTOR_BYTES: u64 = 512;

/// Bytes of a bitmap directory entry before its name, and its alignment.
const BITMAP_ENTRY_BYTES: u64 = 24;
const BITMAP_ENTRY_ALIGNMENT_BYTES: u64 = 8;

/// Bytes of an entry of the L1, refcount or bitmap table.
const TABLE_ENTRY_BYTES: u64 = 8;

/// What a new image would take, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measure {
    /// For what the source holds.
    pub required_bytes: u64,
    /// If all of it were written.
    pub full_bytes: u64,
    /// For the source's bitmaps, where there could be some.
    pub bitmaps_bytes: Option<u64>,
}

/// What is to be measured.
#[derive(Debug, Clone, Copy)]
pub enum MeasureSource<'a> {
    /// A device of that size without content.
    Size(u64),
    /// A device with what it holds.
    Device(&'a Arc<dyn BlockDevice>),
}

impl MeasureSource<'_> {
    fn size_bytes(&self) -> u64 {
        match self {
            MeasureSource::Size(bytes) => bytes.next_multiple_of(SECTOR_BYTES),
            MeasureSource::Device(device) => device.size_bytes().next_multiple_of(SECTOR_BYTES),
        }
    }
}

/// Measures an image of a format made with `settings` to hold `source`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for settings that no image can have; what reading the source
/// reports.
pub async fn measure(
    source: MeasureSource<'_>,
    format: &str,
    settings: &CreateSettings,
) -> Result<Measure> {
    let size_bytes = source.size_bytes();
    if format == "luks" {
        // A given size is not rounded.
        let payload_bytes = match source {
            MeasureSource::Size(bytes) => bytes,
            MeasureSource::Device(_) => size_bytes,
        };
        let bytes = payload_bytes + encryption::overhead_bytes(settings)?;
        return Ok(Measure {
            required_bytes: bytes,
            full_bytes: bytes,
            bitmaps_bytes: None,
        });
    }
    if foreign::find(format).is_some() {
        let message = format!("Block driver '{format}' does not support size measurement");
        return Err(Error::new(ErrorKind::Unsupported, "measure", message));
    }
    if format != "qcow2" {
        return Ok(Measure {
            required_bytes: size_bytes,
            full_bytes: size_bytes,
            bitmaps_bytes: None,
        });
    }
    let options = (qcow2_options(settings)?).size_bytes(size_bytes);
    // A backing file is only named here: nobody has to know its format.
    let checked = options.clone().backing_file(None).backing_format(None);
    checked.validate().map_err(|error| {
        // Here QEMU does not say for which format.
        let message = error.message().replace(" for file format 'qcow2'", "");
        Error::new(error.kind(), "measure", message).with_errno(error.errno())
    })?;
    let cluster = options.cluster_size_bytes;
    let virtual_bytes = size_bytes.next_multiple_of(cluster);
    let everything = options.backing_file.is_some()
        || matches!(
            options.preallocation,
            Preallocation::Full | Preallocation::Falloc
        );
    let used_bytes = match source {
        _ if everything => virtual_bytes,
        MeasureSource::Size(_) => 0,
        MeasureSource::Device(device) => allocated_bytes(device, cluster).await?,
    };
    let encryption_bytes = match &options.encryption {
        Some(Encryption::Luks { options, .. }) => {
            luks::header_size_bytes(options)?.next_multiple_of(cluster)
        }
        Some(Encryption::LegacyAes(_)) | None => 0,
    };
    let uncounted_bytes = virtual_bytes + tables_bytes(&options, virtual_bytes) + encryption_bytes;
    let full_bytes = uncounted_bytes + refcount_bytes(&options, uncounted_bytes);
    Ok(Measure {
        // Metadata is counted as for the full image: a little too much.
        required_bytes: full_bytes - virtual_bytes + used_bytes.min(virtual_bytes),
        full_bytes,
        bitmaps_bytes: match source {
            MeasureSource::Device(device) if options.version >= 3 => {
                let bitmaps_bytes = bitmaps_bytes(device, cluster).await?;
                bitmaps_bytes
                    .map(|bytes| counted_bytes(&options, full_bytes, uncounted_bytes + bytes))
            }
            _ => None,
        },
    })
}

/// Bytes of the clusters that hold data.
async fn allocated_bytes(device: &Arc<dyn BlockDevice>, cluster: u64) -> Result<u64> {
    let size_bytes = device.size_bytes();
    let mut used_bytes = 0;
    let mut at = 0;
    while at < size_bytes {
        let extent = device.block_status(at, size_bytes - at, u32::MAX).await?;
        let mut end = at + extent.len_bytes.max(1);
        if extent.kind.needs_reading() {
            end = end.next_multiple_of(cluster);
            used_bytes += end - at / cluster * cluster;
        }
        at = end;
    }
    Ok(used_bytes)
}

/// Bytes of the header, the L1 table and the L2 tables of a full image.
fn tables_bytes(options: &CreateOptions, virtual_bytes: u64) -> u64 {
    let cluster = options.cluster_size_bytes;
    let l2_entry_bytes = if options.extended_l2 { 16 } else { 8 };
    let l2_entries = (virtual_bytes / cluster).next_multiple_of(cluster / l2_entry_bytes);
    let l2_bytes = l2_entries * l2_entry_bytes;
    let l1_entries = (l2_bytes / cluster).next_multiple_of(cluster / TABLE_ENTRY_BYTES);
    cluster + l2_bytes + l1_entries * TABLE_ENTRY_BYTES
}

/// Bytes of the refcount table and blocks that count `uncounted_bytes` and themselves. QEMU leaves
/// the LUKS header and bitmaps out of these bytes, and images with small clusters then have no room for their
/// refcounts.
fn refcount_bytes(options: &CreateOptions, uncounted_bytes: u64) -> u64 {
    let cluster = options.cluster_size_bytes;
    let clusters = uncounted_bytes / cluster;
    let counts_per_block = cluster * 8 / options.refcount_bits;
    let (mut table, mut blocks) = (0, 0);
    loop {
        let total = clusters + table + blocks;
        blocks = total.div_ceil(counts_per_block);
        table = blocks.div_ceil(cluster / TABLE_ENTRY_BYTES);
        if clusters + table + blocks == total {
            return (blocks + table) * cluster;
        }
    }
}

/// By how much an image of `full_bytes` grows with what makes `uncounted_bytes` of it without its refcounts.
fn counted_bytes(options: &CreateOptions, full_bytes: u64, uncounted_bytes: u64) -> u64 {
    uncounted_bytes + refcount_bytes(options, uncounted_bytes) - full_bytes
}

/// Bytes for copies of a qcow2 image's bitmaps.
async fn bitmaps_bytes(device: &Arc<dyn BlockDevice>, cluster: u64) -> Result<Option<u64>> {
    let (Some(_), Some(storage)) = (device.as_qcow2(), device.storage()) else {
        return Ok(None);
    };
    let info = ImageInfo::read(storage).await?;
    if info.version < 3 {
        return Ok(None);
    }
    // As in QEMU also those that cannot be copied.
    let all: &[BitmapInfo] = &info.bitmaps;
    let directory: u64 = all
        .iter()
        .map(|bitmap| BITMAP_ENTRY_BYTES + bitmap.name.len() as u64)
        .map(|bytes| bytes.next_multiple_of(BITMAP_ENTRY_ALIGNMENT_BYTES))
        .sum();
    let bitmaps: u64 = all
        .iter()
        .map(|bitmap| {
            let bits = info.size_bytes.div_ceil(bitmap.granularity_bytes);
            let clusters = bits.div_ceil(8).div_ceil(cluster);
            clusters * cluster + (clusters * TABLE_ENTRY_BYTES).next_multiple_of(cluster)
        })
        .sum();
    Ok(Some(bitmaps + directory.next_multiple_of(cluster)))
}

/// Settings to measure a format with.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a format that cannot be measured, and as
/// [`CreateSettings::parse`].
pub fn settings(format: &str, options: Option<&str>) -> Result<CreateSettings> {
    let unknown = || {
        let message = format!("Unknown file format '{format}'");
        Error::new(ErrorKind::InvalidArgument, "measure", message)
    };
    let mut settings = create_options::settings(format).ok_or_else(unknown)?;
    if let Some(options) = options {
        settings.parse(options)?;
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_count_themselves() {
        let options = CreateOptions::default();
        // A gibibyte: one table and one block.
        assert_eq!(refcount_bytes(&options, 1 << 30), 2 * 65536);
        assert_eq!(tables_bytes(&options, 1 << 30), 262_144);
    }

    /// A block counts 256 clusters of 512 bytes.
    #[test]
    fn what_is_added_to_a_full_image_is_counted_too() {
        let options = CreateOptions::default().cluster_size_bytes(512);
        let uncounted_bytes = 254 * 512;
        let full_bytes = uncounted_bytes + refcount_bytes(&options, uncounted_bytes);
        assert_eq!(full_bytes, 256 * 512);
        let with =
            |clusters: u64| counted_bytes(&options, full_bytes, uncounted_bytes + clusters * 512);
        assert_eq!([with(0), with(1), with(3)], [0, 2 * 512, 4 * 512]);
    }

    /// The fully allocated size, as `measure` reports it.
    fn fully_allocated(options: &CreateOptions) -> u64 {
        let cluster = options.cluster_size_bytes;
        let virtual_bytes = options.size_bytes.next_multiple_of(cluster);
        let header_bytes = match &options.encryption {
            Some(Encryption::Luks { options, .. }) => luks::header_size_bytes(options),
            _ => Ok(0),
        };
        let header_bytes = header_bytes
            .expect("a known cipher")
            .next_multiple_of(cluster);
        let uncounted_bytes = virtual_bytes + tables_bytes(options, virtual_bytes) + header_bytes;
        uncounted_bytes + refcount_bytes(options, uncounted_bytes)
    }

    fn encryption() -> Encryption {
        Encryption::Luks {
            options: luks::FormatOptions::default(),
            passphrase: luks::Passphrase::from("word"),
        }
    }

    #[test]
    fn the_fully_allocated_size_is_what_an_image_needs_when_its_disk_is_full() {
        let mut checked = 0;
        for bits in [9, 10, 12, 14, 16, 17, 21] {
            for refcount_bits in [1, 2, 4, 8, 16, 32, 64] {
                for (extended, encrypted) in [(false, false), (bits >= 14, false), (false, true)] {
                    for size in (9..42).flat_map(|bits| [1 << bits, (1 << bits) + 512, 3 << bits]) {
                        let options = CreateOptions::default()
                            .size_bytes(size)
                            .cluster_size_bytes(1 << bits)
                            .refcount_bits(refcount_bits)
                            .extended_l2(extended)
                            .encryption(encrypted.then(encryption));
                        let Ok(needed) = options.full_size_bytes() else {
                            continue;
                        };
                        assert_eq!(fully_allocated(&options), needed, "{options:?}");
                        checked += 1;
                    }
                }
            }
        }
        assert!(checked > 5000, "{checked}");
    }
}
