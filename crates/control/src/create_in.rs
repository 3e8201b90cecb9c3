//! Making images as `blockdev-create` does: a file, or an image in a node that is there.

use std::sync::Arc;

use vellum::qcow2::create;
use vellum::{Buffer, Buffers, Error, ErrorKind, Preallocation, Result, Storage};
use vellum_storage::WriteFlags;

use crate::create::{create_file, fill_raw, preallocation, qcow2_options};
use crate::create_options::CreateSettings;
use crate::encryption;

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
pub(crate) async fn file(path: &str, settings: &CreateSettings) -> Result<()> {
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
pub(crate) async fn qcow2(
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

/// Makes a luks volume in a storage.
///
/// # Errors
/// As [`qcow2`].
pub(crate) async fn luks(storage: Arc<dyn Storage>, settings: &CreateSettings) -> Result<()> {
    let volume = encryption::new_volume(settings).await?;
    let header_bytes = volume.header_bytes();
    let whole = settings.integer("size").unwrap_or(0);
    let whole = whole.checked_add(header_bytes);
    let whole = whole
        .filter(|&whole| whole <= i64::MAX as u64)
        .ok_or_else(|| invalid("The requested file size is too large"))?;
    storage.truncate(whole).await?;
    match preallocation(settings)? {
        Preallocation::Falloc | Preallocation::Full => storage.allocate(0, whole).await?,
        Preallocation::Off | Preallocation::Metadata => {}
    }
    let header = Buffers::from_iter([Buffer::copy_of(&volume.bytes)]);
    storage.write(0, header, WriteFlags::default()).await?;
    storage.flush().await
}
