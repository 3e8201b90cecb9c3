//! Files and block devices.
//!
//! A request that is aligned as the file wants it is a slot of the calling
//! thread's lane and nothing else; what takes several steps (unaligned direct
//! I/O, zeroes with fallbacks) runs as a task of the lane.
//!
//! | file | what it does |
//! | --- | --- |
//! | `options` | how a file is opened |
//! | `open`, `held_locks` | opening: locks, kinds, what direct I/O wants; the locks held |
//! | `renewal` | the same file opened anew, which stays locked |
//! | `as_file` | the file that a storage is |
//! | `times` | when a file was changed, and whether that tells its content |
//! | `bounce` | requests that direct I/O wants aligned |
//! | `last_block` | what direct I/O would make the file longer by |
//! | `truncate` | another length |
//! | `zero`, `extents`, `clone` | zeroes and holes; where there is data; blocks that files share |
//! | `drop_behind` | large files that a job reads once leave the page cache again |
//!
//! Invariant: who opens a file takes its locks with it ([`Locks::Image`], the default) and keeps them
//! to the last byte written; [`Locks::Unlocked`] is the exception, with the reason beside it.

mod as_file;
mod bounce;
mod clone;
mod drop_behind;
mod extents;
mod held_locks;
mod last_block;
mod open;
mod options;
mod renewal;
mod storage;
pub(crate) mod times;
mod truncate;
mod zero;

pub use as_file::AsFile;
pub use drop_behind::large_file_bytes;
pub use options::{Create, FileKind, FileOptions, Locks};
pub use storage::FileStorage;
pub(crate) use storage::{Device, File, Supports};
