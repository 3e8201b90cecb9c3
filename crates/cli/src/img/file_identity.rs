//! Which file of this host a note speaks of, and whether it was left alone since.
//!
//! The version of a source is a matter of [`vellum_storage::SourceVersion`].

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};

/// Which file it is, whatever it holds; `None` for anything but a regular file.
pub fn file_identity(file: &Metadata) -> Option<Value> {
    file.is_file().then(|| json!([file.dev(), file.ino()]))
}

/// The length, and when the content was changed.
pub fn content_times(file: &Metadata) -> Value {
    json!([file.len(), file.mtime(), file.mtime_nsec()])
}

/// When the inode was changed: by every change of the content, also one whose time is set back.
pub fn inode_times(file: &Metadata) -> Value {
    json!([file.ctime(), file.ctime_nsec()])
}
