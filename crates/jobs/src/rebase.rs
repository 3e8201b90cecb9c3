//! Rebase: makes an image independent of what is different in another backing file.

use std::sync::Arc;

use vellum::{BlockDevice, Error, Result};

use crate::copy::{CopyError, CopyOptions, Observer, Step, copy};
use crate::scope::{Differences, Scope};
use crate::stretched::Stretched;

/// How the differences are copied.
#[derive(Debug, Clone)]
pub struct RebaseOptions {
    /// How many pieces are in flight at once.
    pub parallel: usize,
    /// The grain in which the backing files are compared, in bytes: what the image
    /// allocates at once.
    pub unit_bytes: u64,
}

/// Copies into `image` whatever the backing files `old` and `new` show differently where
/// the image holds nothing itself (without one: zeroes), and makes it durable. From then
/// on the image shows the same on top of both, and may be made to name `new`
/// ([`vellum::qcow2::Qcow2::set_backing_file`]).
///
/// `old` is what the image shows now; nobody may write to any of the three meanwhile.
pub async fn rebase(
    image: &Arc<dyn BlockDevice>,
    old: Option<&Arc<dyn BlockDevice>>,
    new: Option<&Arc<dyn BlockDevice>>,
    options: &RebaseOptions,
    observer: &mut dyn Observer,
) -> Result<(), CopyError> {
    let size_bytes = image.size_bytes();
    let old: Arc<dyn BlockDevice> = Stretched::new(old, size_bytes);
    let copying = CopyOptions {
        scope: Scope::Differences(Differences {
            shown: Stretched::new(new, size_bytes),
            unit_bytes: options.unit_bytes.max(1),
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
