//! Making qcow2 images, also on storages of fixed length.

use std::sync::Arc;

use vellum::qcow2::create::{self, CreateOptions};
use vellum::{Preallocation, Result, Storage};
use vellum_options::create_options::CreateSettings;
use vellum_options::filename;
use vellum_storage::file::FileStorage;

use super::{
    SECTOR_BYTES, Target, allocate_first_block, create_file, invalid, qcow2_options,
    remove_after_failure,
};

/// A storage of fixed length (a block device, an NBD export) that is too short for an image on it
/// whose disk is written as a whole. To create it is no mistake where the storage is extended as
/// the image fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortStorage {
    /// Its length.
    pub len_bytes: u64,
    /// What the image needs: see [`CreateOptions::full_size_bytes`].
    pub full_bytes: u64,
}

impl ShortStorage {
    /// `None` if the storage grows, or holds all of the image.
    fn find(storage: &dyn Storage, options: &CreateOptions) -> Result<Option<Self>> {
        if storage.capabilities().growable {
            return Ok(None);
        }
        let short = ShortStorage {
            len_bytes: storage.len_bytes()?,
            full_bytes: options.full_size_bytes()?,
        };
        Ok((short.len_bytes < short.full_bytes).then_some(short))
    }
}

pub(super) async fn make(name: &str, settings: &CreateSettings) -> Result<Option<ShortStorage>> {
    let options = qcow2_options(settings)?;
    let whole_bytes = options.size_bytes.checked_next_multiple_of(SECTOR_BYTES);
    if whole_bytes.is_none_or(|bytes| i64::try_from(bytes).is_err()) {
        return Err(invalid(
            "Could not resize image: Image size cannot be negative",
        ));
    }
    options.validate()?;
    let target = Target::open(name, settings).await?;
    let short = ShortStorage::find(&*target.storage(), &options);
    let filled = async |target: &Target| fill(target, &options).await;
    target.fill(name, filled).await?;
    short
}

async fn fill(target: &Target, options: &CreateOptions) -> Result<()> {
    let Some(name) = &options.data_file else {
        return create::create(target.storage(), None, options).await;
    };
    let path = filename::local_path(name)?;
    let is_new = std::fs::symlink_metadata(&path).is_err();
    let data = create_file(&path).await?;
    let made = fill_with_data(target, &data, options).await;
    match is_new {
        true => remove_after_failure(&path, made),
        // It was there before: it is not ours to remove.
        false => made,
    }
}

async fn fill_with_data(
    target: &Target,
    data: &Arc<FileStorage>,
    options: &CreateOptions,
) -> Result<()> {
    create::create(target.storage(), Some(data.clone()), options).await?;
    let reserved = matches!(
        options.preallocation,
        Preallocation::Falloc | Preallocation::Full
    );
    match reserved || data.is_device() {
        true => Ok(()),
        false => allocate_first_block(data, options.size_bytes).await,
    }
}
