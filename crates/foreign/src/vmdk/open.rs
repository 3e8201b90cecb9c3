//! Opens images: the descriptor first, then, with the files that it names, the device.
//!
//! Called by whoever opens an image, who opens the files of [`Descriptor::extents`] in between: nothing
//! here opens a file.

use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Result, Storage, target_of};
use vellum_io::finish_all;

use super::descriptor::{Descriptor, EMBEDDED_BYTES, ExtentLine, ExtentType, MAX_TEXT_BYTES};
use super::extent::{Extent, Kind};
use super::header::{COW_MAGIC, SECTOR_BYTES, SPARSE_MAGIC};
use super::layout::{Parent, VmdkLayout};
use super::sparse::{Sparse, read_header};
use crate::device::{ForeignImage, MappedDevice};
use crate::facts::Fact;
use crate::fields::read_at;

/// Where QEMU looks for the descriptor inside an extent.
const EMBEDDED_AT_BYTES: u64 = 512;

/// Headers that are read side by side.
const EXTENTS_AT_ONCE: usize = 16;

/// Memory for grain tables: those of 256 GiB, at VMware's grains of 64 KiB.
const TABLES_BYTES: usize = 16 << 20;

vellum_io::with_setters! {
    /// How an image is to be opened.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct OpenOptions {
        /// Writes are refused.
        pub read_only: bool,
        /// The parent's identifier, where the backing device does not tell it itself.
        pub parent_cid: Option<u32>,
        /// Memory for grain tables that are as on disk.
        pub tables_bytes: usize,
    }
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            read_only: false,
            parent_cid: None,
            tables_bytes: TABLES_BYTES,
        }
    }
}

/// Whether the first bytes of a file (some 2 KiB of them) are those of a VMDK image, as QEMU tells it.
pub fn probe(bytes: &[u8]) -> bool {
    if bytes.starts_with(&SPARSE_MAGIC) || bytes.starts_with(&COW_MAGIC) {
        return true;
    }
    for line in bytes.split_inclusive(|&byte| byte == b'\n') {
        let is_whole = line.ends_with(b"\n");
        let text = line.strip_suffix(b"\n").unwrap_or(line);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        let is_blank = !text.is_empty() && text.iter().all(|&byte| byte == b' ');
        if !text.starts_with(b"#") && !is_blank {
            return is_whole && matches!(text, b"version=1" | b"version=2" | b"version=3");
        }
    }
    false
}

/// Reads the descriptor of an image: the file itself, or from inside of a sparse extent.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] or [`ErrorKind::Unsupported`] for what cannot be opened; what the storage
/// says.
pub async fn read_descriptor(file: &dyn Storage) -> Result<Descriptor> {
    let found = find_descriptor(file).await;
    found.map_err(|error| error.target(file.name()))
}

async fn find_descriptor(file: &dyn Storage) -> Result<Descriptor> {
    let file_bytes = file.len_bytes()?;
    if file_bytes < 4 {
        let message = "File is too small, not a valid image";
        return Err(Error::new(ErrorKind::InvalidImage, "open", message));
    }
    let first = read_at(file, 0, 512).await?;
    if !first.starts_with(&SPARSE_MAGIC) && !first.starts_with(&COW_MAGIC) {
        let text = read_at(file, 0, text_bytes(file_bytes)).await?;
        return Descriptor::parse(&text);
    }
    if let Some(header) = super::header::SparseHeader::parse(&first)
        && header.capacity_sectors == 0
        && header.descriptor_sector != 0
    {
        // A descriptor of other files that has a header of its own.
        let at_bytes = header.descriptor_sector.saturating_mul(SECTOR_BYTES);
        let rest_bytes = file_bytes.saturating_sub(at_bytes);
        let text = match rest_bytes {
            0 => return Descriptor::parse(&[]),
            rest_bytes => read_at(file, at_bytes, text_bytes(rest_bytes)).await?,
        };
        return Descriptor::parse(&text).map(|descriptor| descriptor.at(at_bytes));
    }
    read_header(file).await?;
    let text = read_at(file, EMBEDDED_AT_BYTES, EMBEDDED_BYTES).await?;
    let descriptor = Descriptor::parse_embedded(&text)?;
    Ok(descriptor.at(EMBEDDED_AT_BYTES))
}

/// How much is read where so much is there: enough to see that a text is too long.
fn text_bytes(there_bytes: u64) -> usize {
    let most = MAX_TEXT_BYTES + 1;
    usize::try_from(there_bytes).unwrap_or(most).min(most)
}

/// Opens an image whose descriptor was read. `extents` are the files of [`Descriptor::extents`], one for
/// each; `backing` is the parent, if it is to be there.
///
/// A parent that has another identifier than the image says is refused where its bytes would be needed,
/// as QEMU does it.
///
/// # Errors
/// [`ErrorKind::InvalidImage`], [`ErrorKind::Unsupported`]; [`ErrorKind::ReadOnly`] for kinds of
/// extents that cannot be written; what the storage says.
pub async fn open(
    file: Arc<dyn Storage>,
    descriptor: Descriptor,
    extents: Vec<Arc<dyn Storage>>,
    backing: Option<Arc<dyn BlockDevice>>,
    options: &OpenOptions,
) -> Result<Arc<MappedDevice<VmdkLayout>>> {
    let layout = open_layout(file.clone(), descriptor, extents, backing.as_ref(), options).await;
    let layout = layout.map_err(|error| error.target(file.name()))?;
    Ok(MappedDevice::new(layout, backing, options.read_only))
}

/// The layout of an image, for checks.
pub(super) async fn open_layout(
    file: Arc<dyn Storage>,
    descriptor: Descriptor,
    extents: Vec<Arc<dyn Storage>>,
    backing: Option<&Arc<dyn BlockDevice>>,
    options: &OpenOptions,
) -> Result<VmdkLayout> {
    if extents.len() != descriptor.extents().len() {
        let message = "the files are not those that the descriptor names";
        return Err(Error::new(ErrorKind::InvalidArgument, "open", message));
    }
    if extents.is_empty() && !descriptor.is_own_extent() {
        // QEMU does not survive it.
        let message = "the descriptor names no extent";
        return Err(Error::new(ErrorKind::InvalidImage, "open", message));
    }
    let mut files = vec![file];
    files.extend(extents);
    let writable = !options.read_only;
    let opened = if descriptor.is_own_extent() {
        let sparse = Sparse::open(&*files[0], writable).await?;
        vec![Extent {
            file: 0,
            start_bytes: 0,
            len_bytes: sparse.geometry.capacity_sectors * SECTOR_BYTES,
            extent_type: None,
            kind: Kind::Sparse(Box::new(sparse)),
        }]
    } else {
        let lines = descriptor.extents().iter().enumerate();
        let opening = lines.map(|(number, line)| open_extent(&files, number + 1, line, writable));
        one_behind_the_other(finish_all(EXTENTS_AT_ONCE, opening).await?)?
    };
    if writable && let Some(reason) = refusal(&opened) {
        return Err(Error::new(ErrorKind::ReadOnly, "open", reason));
    }
    let parent = match backing {
        None => Parent::None,
        Some(backing) => {
            let cid = options.parent_cid.or_else(|| cid_of(&**backing));
            match cid == Some(descriptor.parent_cid()) {
                true => Parent::Matches,
                false => Parent::Differs,
            }
        }
    };
    VmdkLayout::new(files, descriptor, opened, parent, options.tables_bytes)
}

async fn open_extent(
    files: &[Arc<dyn Storage>],
    file: usize,
    line: &ExtentLine,
    writable: bool,
) -> Result<Extent> {
    let Some(storage) = files.get(file) else {
        let message = "the image has no such file";
        return Err(Error::new(ErrorKind::InvalidArgument, "open", message));
    };
    let opened = match line.extent_type {
        ExtentType::Flat | ExtentType::Vmfs => Ok(Kind::Flat {
            offset_bytes: line.offset_sectors.saturating_mul(SECTOR_BYTES),
        }),
        ExtentType::Sparse | ExtentType::VmfsSparse => Sparse::open(&**storage, writable)
            .await
            .map(Box::new)
            .map(Kind::Sparse),
        ExtentType::SeSparse => Sparse::open_se(&**storage)
            .await
            .map(Box::new)
            .map(Kind::Sparse),
    };
    let kind = opened.map_err(|error| error.target(storage.name()))?;
    let sectors = match &kind {
        Kind::Flat { .. } => line.sectors,
        // As QEMU: the header counts, whatever the line says.
        Kind::Sparse(sparse) => sparse.geometry.capacity_sectors,
    };
    Ok(Extent {
        file,
        start_bytes: 0,
        len_bytes: sectors.saturating_mul(SECTOR_BYTES),
        extent_type: Some(line.extent_type),
        kind,
    })
}

/// Puts extents one behind the other.
fn one_behind_the_other(mut extents: Vec<Extent>) -> Result<Vec<Extent>> {
    let mut end_bytes = 0u64;
    for extent in &mut extents {
        extent.start_bytes = end_bytes;
        end_bytes = end_bytes
            .checked_add(extent.len_bytes)
            .filter(|&end| end <= i64::MAX as u64)
            .ok_or_else(|| {
                let message = "the extents are larger than a disk can be";
                Error::new(ErrorKind::InvalidImage, "open", message)
            })?;
    }
    Ok(extents)
}

/// What QEMU refuses to open for writing.
fn refusal(extents: &[Extent]) -> Option<&'static str> {
    let reasons = extents
        .iter()
        .filter_map(|extent| extent.sparse()?.read_only);
    let mut at_once = reasons.filter(|it| it.at_once);
    at_once.next().map(|it| it.reason)
}

/// The identifier that a device of this crate tells, or one that stands for it.
fn cid_of(device: &dyn BlockDevice) -> Option<u32> {
    let target = target_of(device);
    let facts = ForeignImage::of(target.as_deref().unwrap_or(device))?.facts();
    let found = facts.specific.iter().find_map(|(name, fact)| match fact {
        Fact::Number(number) if *name == "cid" => Some(*number),
        _ => None,
    });
    u32::try_from(found?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_told_from_other_texts() {
        for text in [
            "# Disk DescriptorFile\nversion=1\nCID=1",
            "# x\n  \n \r\nversion=2\n",
            "version=3\r\n",
            "KDMV",
            "COWD",
        ] {
            assert!(probe(text.as_bytes()), "{text:?}");
        }
        for text in [
            "",
            "version=4\n",
            "version=1",
            "\nversion=1\n",
            "x\nversion=1\n",
        ] {
            assert!(!probe(text.as_bytes()), "{text:?}");
        }
    }
}
