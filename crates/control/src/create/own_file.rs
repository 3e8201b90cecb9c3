//! Refuses to make an image in a file of its own backing chain, which creating would empty.

use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use vellum::{BlockDevice, Error, Result, Storage};
use vellum_storage::AsFile;
use vellum_storage::file::{FileOptions, FileStorage, Locks};

use super::invalid;
use crate::filename;
use crate::layer_files::layer_files;

/// Refuses a backing file that is the new image's own file by another name: creating would empty it.
pub(super) fn refuse_own_file(filename: &str, backing: &str) -> Result<()> {
    let below = filename::resolve(filename, backing).ok();
    match below.and_then(|full| file_of(&full)) {
        Some(below) if file_of(filename) == Some(below) => Err(own_file(filename, backing)),
        _ => Ok(()),
    }
}

/// As [`refuse_own_file`], of all files of the open backing file and of those below it.
pub(super) fn refuse_own_files(
    filename: &str,
    backing: &str,
    device: &Arc<dyn BlockDevice>,
) -> Result<()> {
    let Some(own) = file_of(filename) else {
        return Ok(());
    };
    let layers = std::iter::successors(Some(device.clone()), |layer| layer.backing());
    let mut files = layers.flat_map(|layer| layer_files(&*layer));
    let is_own = |storage: Arc<dyn Storage>| {
        let file = storage.as_file();
        file.is_some_and(|file| file.device_and_inode() == own)
    };
    match files.any(is_own) {
        true => Err(own_file(filename, backing)),
        false => Ok(()),
    }
}

/// What tells a file from others, as [`FileStorage::device_and_inode`].
fn file_of(name: &str) -> Option<(u64, u64)> {
    let path = filename::local_path(name).ok()?;
    let options = FileOptions::default()
        .read_only(true)
        .locks(Locks::Unlocked);
    let found = std::fs::metadata(&path).ok()?.file_type();
    if !found.is_file() && !found.is_block_device() {
        return None;
    }
    let file = FileStorage::open(path, &options).ok()?;
    Some(file.device_and_inode())
}

fn own_file(filename: &str, backing: &str) -> Error {
    invalid(format!(
        "'{filename}' is the same file as the backing file '{backing}', or as one below it: creating the image would \
         destroy it. Choose another name"
    ))
}
