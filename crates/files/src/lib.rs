//! What lies on a disk: its partitions, and the files of file systems in them, to be read.
//!
//! `partitions` finds partitions, `detect` tells what a volume holds, `ext`, `fat`, `iso` and
//! `xfs` are the file systems that can be read, behind one trait, [`FileSystem`]. `lookup` remembers where
//! names are in long directories. `source` is where the bytes come from, with a cache.
//!
//! Invariants:
//! - Every byte of a disk is hostile: each number is checked before it is used, a loop ends,
//!   and memory does not depend on what the disk says.
//! - Nothing is written.
//! - File systems keep nothing for a file: an [`Id`] leads to it anew, so whoever uses one needs
//!   no table of what is open.

#![forbid(unsafe_code)]

mod bytes;
mod detect;
mod error;
mod ext;
mod fat;
mod file_system;
mod iso;
mod lookup;
pub mod partitions;
mod source;
mod xfs;

pub use detect::{Contents, Volume, detect};
pub use error::{Error, Result};
pub use file_system::{Attributes, Entry, FileSystem, Id, Kind, ROOT, Time};
pub use source::{ReadAt, Source};

/// Opens the file system in a volume, which `contents` tells.
///
/// # Errors
/// [`Error::Unsupported`] if there is no reader for it, or if it uses what that does not know;
/// [`Error::Damaged`]; [`Error::Io`].
pub fn open(volume: Source, contents: Contents) -> Result<std::sync::Arc<dyn FileSystem>> {
    match contents {
        Contents::Ext(_) => Ok(std::sync::Arc::new(ext::Ext::open(volume)?)),
        Contents::Fat => Ok(std::sync::Arc::new(fat::Fat::open(volume)?)),
        Contents::Iso => Ok(std::sync::Arc::new(iso::Iso::open(volume)?)),
        Contents::Xfs => Ok(std::sync::Arc::new(xfs::Xfs::open(volume)?)),
        other => Err(Error::Unsupported(other.name().to_owned())),
    }
}
