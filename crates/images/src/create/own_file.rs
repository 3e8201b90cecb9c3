//! Refuses to make an image, or its data file, in a file of its own backing chain: creating would
//! empty that file.

use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use vellum::{BlockDevice, Error, Result};
use vellum_graph::layer_files::layer_files;
use vellum_options::filename;
use vellum_storage::AsFile;
use vellum_storage::file::{FileOptions, FileStorage, Locks};

use super::invalid;

/// Refuses a backing file that is one of the files to be made by another name: creating would empty
/// it. `made` holds the names of these files, the image first, whose folder a relative backing name
/// starts from.
pub(super) fn refuse_own_file(made: &[&str], backing: &str) -> Result<()> {
    let Some(image) = made.first() else {
        return Ok(());
    };
    let below: Vec<_> = names_in(backing)
        .iter()
        .filter_map(|name| file_of(&filename::resolve(image, name).ok()?))
        .collect();
    let same = |name: &&&str| file_of(name).is_some_and(|made| below.contains(&made));
    match made.iter().find(same) {
        Some(name) => Err(own_file(name, backing)),
        None => Ok(()),
    }
}

/// The names of files in the name of a backing file, which may describe a graph: a file below a node that gives no file
/// away (`raw`, `blkdebug`) has one there.
fn names_in(backing: &str) -> Vec<String> {
    let Some(graph) = backing.strip_prefix("json:") else {
        return vec![backing.to_owned()];
    };
    let mut names = Vec::new();
    let mut nodes: Vec<serde_json::Value> = serde_json::from_str(graph).into_iter().collect();
    while let Some(node) = nodes.pop() {
        let serde_json::Value::Object(options) = node else {
            continue;
        };
        for (key, value) in options {
            match value {
                // `file.filename` is the flat form.
                serde_json::Value::String(name) if key.ends_with("filename") => names.push(name),
                other => nodes.push(other),
            }
        }
    }
    names
}

/// As [`refuse_own_file`], for all files of the open backing file and of those below it.
pub(super) fn refuse_own_files(
    made: &[&str],
    backing: &str,
    device: &Arc<dyn BlockDevice>,
) -> Result<()> {
    let made: Vec<_> = made
        .iter()
        .filter_map(|&name| Some((name, file_of(name)?)))
        .collect();
    let layers = std::iter::successors(Some(device.clone()), |layer| layer.backing());
    let mut files = layers.flat_map(|layer| layer_files(&*layer));
    let same = files.find_map(|storage| {
        let file = storage.as_file()?.device_and_inode();
        made.iter().find(|(_, made)| *made == file)
    });
    match same {
        Some((name, _)) => Err(own_file(name, backing)),
        None => Ok(()),
    }
}

/// The identity of a file, as [`FileStorage::device_and_inode`].
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
