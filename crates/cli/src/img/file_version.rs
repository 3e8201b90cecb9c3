//! [`FileVersion`]: what a file of this host is known by, and what changes when its bytes do.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};

/// Which file it is, how long, and when it was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileVersion {
    device: u64,
    inode: u64,
    len_bytes: u64,
    modified_seconds: i64,
    modified_nanoseconds: i64,
}

impl FileVersion {
    /// Of what the system says of a file; `None` for anything but a regular file: of a device nobody knows when it
    /// was changed.
    pub fn of(file: &Metadata) -> Option<FileVersion> {
        file.is_file().then(|| FileVersion {
            device: file.dev(),
            inode: file.ino(),
            len_bytes: file.len(),
            modified_seconds: file.mtime(),
            modified_nanoseconds: file.mtime_nsec(),
        })
    }

    /// Of the file of a name, as [`FileVersion::of`].
    pub fn of_name(name: &str) -> Option<FileVersion> {
        FileVersion::of(&std::fs::metadata(name).ok()?)
    }

    /// All of it.
    pub fn all(&self) -> Value {
        let (seconds, nanoseconds) = (self.modified_seconds, self.modified_nanoseconds);
        json!([
            self.device,
            self.inode,
            self.len_bytes,
            seconds,
            nanoseconds
        ])
    }

    /// Which file it is, whatever it holds.
    pub fn file(&self) -> Value {
        json!([self.device, self.inode])
    }

    /// What changes with what it holds.
    pub fn change(&self) -> Value {
        json!([
            self.len_bytes,
            self.modified_seconds,
            self.modified_nanoseconds
        ])
    }
}

impl fmt::Display for FileVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} {} {} {}",
            self.device,
            self.inode,
            self.len_bytes,
            self.modified_seconds,
            self.modified_nanoseconds
        )
    }
}
