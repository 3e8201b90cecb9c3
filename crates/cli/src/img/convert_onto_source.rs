//! Refuses a copy onto a file that it reads, under whatever name: a new target empties that first, and locks tell only
//! where the source has any (`-U` takes none).

use std::fs::FileType;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use vellum::{BlockDevice, ErrorKind, Storage};
use vellum_graph::layer_files::layer_files;
use vellum_options::filename;
use vellum_storage::StorageIdentity;
use vellum_storage::file::{FileOptions, FileStorage, Locks};

use super::command::{Failure, fail};
use super::common::layers;
use crate::report;

/// Refuses targets by name, before anything is made there. What is not there yet, or holds no bytes, is none of the
/// sources.
pub fn refuse_names<'a>(
    sources: &[Arc<dyn BlockDevice>],
    names: impl IntoIterator<Item = &'a str>,
) -> Result<(), Failure> {
    for name in names {
        let Ok(path) = filename::local_path(name) else {
            continue;
        };
        let path = Path::new(&path);
        let holds_bytes = |kind: FileType| kind.is_file() || kind.is_block_device();
        if !std::fs::metadata(path).is_ok_and(|found| holds_bytes(found.file_type())) {
            continue;
        }
        // Looked at only.
        let options = FileOptions::default()
            .read_only(true)
            .locks(Locks::Unlocked);
        if let Ok(file) = FileStorage::open(path, &options)
            && !refuses_by_lock(path)
        {
            refuse(sources, StorageIdentity::of(&*file), name)?;
        }
    }
    Ok(())
}

/// Whether the locks of the sources keep a target from being made, which QEMU's words are for then.
fn refuses_by_lock(path: &Path) -> bool {
    if report::is_own_name(report::program()) {
        return false;
    }
    let opened = FileStorage::open(path, &FileOptions::default());
    opened.is_err_and(|error| error.kind() == ErrorKind::Locked)
}

/// Refuses a target that is open, before anything is written to it.
pub fn refuse_device(
    sources: &[Arc<dyn BlockDevice>],
    target: &Arc<dyn BlockDevice>,
) -> Result<(), Failure> {
    for storage in layer_files(&**target) {
        refuse(sources, StorageIdentity::of(&*storage), storage.name())?;
    }
    Ok(())
}

fn refuse(
    sources: &[Arc<dyn BlockDevice>],
    target: StorageIdentity,
    name: &str,
) -> Result<(), Failure> {
    for layer in sources.iter().flat_map(layers) {
        let mut files = layer_files(&*layer).into_iter();
        let is_target = |file: &Arc<dyn Storage>| StorageIdentity::of(&**file) == target;
        if let Some(file) = files.find(is_target) {
            return fail(format!(
                "'{name}' is the same file as '{}', which is read: the copy would destroy it. Name another target",
                file.name()
            ));
        }
    }
    Ok(())
}
