//! Making images as `blockdev-create` does: a file, or an image in a node that is there.

use std::sync::Arc;

use vellum::qcow2::create;
use vellum::{Buffer, Buffers, Error, ErrorKind, Preallocation, Result, Storage};
use vellum_graph::encryption;
use vellum_options::create_options::CreateSettings;
use vellum_storage::WriteFlags;

use crate::create::{create_file, fill_raw, preallocation, qcow2_options};

const SECTOR_BYTES: u64 = 512;
/// What a node of QEMU's has at most: whole GiB below the end of its offsets.
const MOST_BYTES: u64 = i64::MAX as u64 / (1 << 30) * (1 << 30);

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "create", message)
}

/// Makes a file of the host, or empties one that is there.
///
/// # Errors
/// For a preallocation that files do not have, and what making it meets.
pub async fn file(path: &str, settings: &CreateSettings) -> Result<()> {
    let preallocation = preallocation(settings)?;
    if preallocation == Preallocation::Metadata {
        return Err(invalid("Unsupported preallocation mode: metadata"));
    }
    let file = create_file(path).await?;
    let size_bytes = settings.integer("size").unwrap_or(0);
    if i64::try_from(size_bytes).is_err() {
        return Err(invalid("Could not resize file: Invalid argument"));
    }
    fill_raw(&file, size_bytes, preallocation).await?;
    file.flush().await
}

/// Makes a qcow2 image in a storage, whatever it held.
///
/// # Errors
/// For options that cannot be, before anything is written; and what writing it meets.
pub async fn qcow2(
    storage: Arc<dyn Storage>,
    data: Option<Arc<dyn Storage>>,
    settings: &CreateSettings,
) -> Result<()> {
    let size_bytes = settings.integer("size").unwrap_or(0);
    if !size_bytes.is_multiple_of(SECTOR_BYTES) {
        return Err(invalid("Image size must be a multiple of 512 bytes"));
    }
    let options = qcow2_options(settings)?;
    let valid = options.validate();
    valid.map_err(|error| too_large(size_bytes, error))?;
    create::create_over(storage, data, &options).await
}

/// QEMU makes an empty image, and says why that cannot have the size.
fn too_large(size_bytes: u64, error: Error) -> Error {
    let why = match size_bytes {
        _ if error.errno() != libc::EFBIG => return error,
        size if i64::try_from(size).is_err() => "Image size cannot be negative".to_owned(),
        size if size > MOST_BYTES => format!("offset({size}) exceeds maximum({MOST_BYTES})"),
        _ => "Failed to grow the L1 table: File too large".to_owned(),
    };
    invalid(format!("Could not resize image: {why}"))
}

/// The files of a luks volume: with a header of its own the payload may be left out.
#[derive(Debug, Default)]
pub struct LuksFiles {
    /// Takes the encrypted payload, after the header where that has no file of its own.
    pub file: Option<Arc<dyn Storage>>,
    /// Takes the LUKS header alone.
    pub header: Option<Arc<dyn Storage>>,
}

/// Makes a luks volume, which has a header of its own where the settings say so.
///
/// # Errors
/// As [`qcow2`].
pub async fn luks(files: LuksFiles, settings: &CreateSettings) -> Result<()> {
    let preallocation = preallocation(settings)?;
    let (storage, payload) = match files {
        LuksFiles {
            file,
            header: Some(header),
        } => (header, file),
        LuksFiles {
            file: Some(file),
            header: None,
        } => (file, None),
        LuksFiles {
            file: None,
            header: None,
        } => {
            return Err(invalid(
                "Either the parameter 'header' or 'file' must be specified",
            ));
        }
    };
    let is_apart = encryption::has_detached_header(settings);
    if is_apart && payload.is_none() && preallocation != Preallocation::Off {
        return Err(invalid(
            "Parameter 'preallocation' requires 'file' to be specified for formatting LUKS disk",
        ));
    }
    let volume = encryption::new_volume(settings).await?;
    let header_bytes = volume.header_bytes();
    let size_bytes = settings.integer("size").unwrap_or(0);
    if is_apart {
        if let Some(payload) = payload {
            make_room(&*payload, Some(size_bytes), preallocation).await?;
            payload.flush().await?;
        }
        make_room(&*storage, Some(header_bytes), Preallocation::Off).await?;
    } else {
        let whole_bytes = size_bytes.checked_add(header_bytes);
        make_room(&*storage, whole_bytes, preallocation).await?;
    }
    let header = Buffers::from_iter([Buffer::copy_of(&volume.bytes)]);
    storage.write(0, header, WriteFlags::default()).await?;
    storage.flush().await
}

/// Gives a storage its size; without one it would be too large to count.
async fn make_room(
    storage: &dyn Storage,
    size_bytes: Option<u64>,
    preallocation: Preallocation,
) -> Result<()> {
    let size_bytes = size_bytes
        .filter(|&bytes| bytes <= i64::MAX as u64)
        .ok_or_else(|| invalid("The requested file size is too large"))?;
    storage.truncate(size_bytes).await?;
    match preallocation {
        Preallocation::Falloc | Preallocation::Full => storage.allocate(0, size_bytes).await,
        Preallocation::Off | Preallocation::Metadata => Ok(()),
    }
}
