//! Rebase: makes an image independent of what is different in another backing file.
//!
//! Invariant: the image names the new backing file only after it holds every difference, durably:
//! the caller does so in the end ([`vellum::qcow2::Qcow2::set_backing_file`]).

use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::{BlockDevice, Error, Result};

use crate::copy::{CopyError, CopyOptions, Observer, Step, copy};
use crate::padded::Padded;
use crate::scope::{Differences, Scope};

/// How the differences are copied.
#[derive(Debug, Clone)]
pub struct RebaseOptions {
    /// How many pieces are in flight at once.
    pub parallel: usize,
    /// The grain in which the backing files are compared, in bytes: what the image
    /// allocates at once.
    pub unit_bytes: u64,
    /// Write the differences compressed; `unit_bytes` must be the image's cluster size.
    pub compress: bool,
}

/// Copies into `image` whatever the backing files `old` and `new` show differently where
/// the image holds nothing itself (without one: zeroes), and makes it durable. From then
/// on the image shows the same on top of both, and may be made to name `new`
/// ([`vellum::qcow2::Qcow2::set_backing_file`]).
///
/// `old` is what the image shows now; nobody may write to any of the three meanwhile.
///
/// ```
/// use std::sync::Arc;
///
/// use vellum::gate::DenyAll;
/// use vellum::qcow2::create::{CreateOptions, create};
/// use vellum::qcow2::{Backing, OpenOptions, Qcow2};
/// use vellum::{BlockDevice, Buffer, Raw, RawOptions};
/// use vellum_jobs::copy::Silent;
/// use vellum_jobs::rebase::{RebaseOptions, rebase};
/// use vellum_io::lane;
/// use vellum_storage::MemStorage;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// lane::block_on(async {
///     let below = Arc::new(MemStorage::with_bytes(vec![7; 1 << 20]));
///     let old: Arc<dyn BlockDevice> = Raw::open(below, RawOptions::default())?;
///     let file = Arc::new(MemStorage::new());
///     let options = CreateOptions::default().size_bytes(1 << 20);
///     create(file.clone(), None, &options).await?;
///     let over = OpenOptions::default().backing(Backing::Given(old.clone()));
///     let image = Qcow2::open(file.clone(), Arc::new(DenyAll), over).await?;
///
///     // Make the image stand alone: first the bytes, then the name in its header.
///     let device: Arc<dyn BlockDevice> = image.clone();
///     let options = RebaseOptions { parallel: 8, unit_bytes: 64 << 10, compress: false };
///     rebase(&device, Some(&old), None, &options, &mut Silent).await?;
///     image.set_backing_file(None).await?;
///     image.close().await?;
///
///     let alone = Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default()).await?;
///     let bytes = alone.read(0, Buffer::for_read(1 << 20)).await?;
///     assert!(bytes.iter().all(|&byte| byte == 7));
///     alone.close().await?;
///     Ok(())
/// })
/// # }
/// ```
///
/// # Errors
/// As [`copy`]. The image shows the same as before, on top of `old`.
pub async fn rebase(
    image: &Arc<dyn BlockDevice>,
    old: Option<&Arc<dyn BlockDevice>>,
    new: Option<&Arc<dyn BlockDevice>>,
    options: &RebaseOptions,
    observer: &mut dyn Observer,
) -> Result<(), CopyError> {
    let size_bytes = image.size_bytes();
    // Without a backing file so far zeroes would only unmap what `new` shows then.
    let is_old = image
        .as_qcow2()
        .is_some_and(|image| image.header().geometry().version < 3);
    let source_end_bytes = match is_old {
        true => size_bytes,
        false => old.map_or(0, |old| old.size_bytes()),
    };
    let old: Arc<dyn BlockDevice> = Padded::new(old, size_bytes);
    let copying = CopyOptions {
        scope: Scope::Differences(Differences {
            shown: Padded::new(new, size_bytes),
            unit_bytes: options.unit_bytes.max(1),
            source_end_bytes,
            compress: options.compress,
        }),
        parallel: options.parallel,
        ..CopyOptions::default()
    };
    copy(&[old], image, &copying, observer).await?;
    image.flush().await.map_err(|cause: Error| CopyError {
        step: Step::Write,
        offset_bytes: 0,
        cause,
    })
}
