//! Disks and backups as objects: a [`Repository`] in a store of objects holds disks by tags and
//! numbers, each chunk of 64 KiB once, whichever of them it is in.
//!
//! Only `graph` and `cli` use this crate. It knows no store: [`Objects`] is what it wants of one, and
//! [`FolderObjects`] a folder that is one.
//!
//! Invariants:
//! - Objects do not change, but for sessions, locks, and manifests that become tombstones.
//! - A manifest that can be read leads to nothing that is not there: everything is put before it, and
//!   what it leads to is removed only when no manifest leads there, and no push that runs can have seen
//!   one that did ([`gc()`]).
//! - Under a number of a tag there is one manifest at most, for ever; of two pushes one fails.
#![deny(clippy::missing_errors_doc)]

mod clock;
pub mod codec;
mod folder;
mod gc;
mod holder;
mod known;
mod lock;
mod names;
mod objects;
mod pieces;
mod prune;
mod push;
mod recent;
mod repository;
mod runs;
mod session;
mod sound;
mod storage;
mod verify;

pub use codec::manifest::{Cost, Manifest};
pub use codec::{CHUNK_BYTES, PushId};
pub use folder::{FolderObjects, check_folder};
pub use gc::{Collected, GcOptions, gc};
pub use holder::Holder;
pub use names::{DiskName, TagName, name_hash};
pub use objects::{ObjectInfo, Objects};
pub use prune::{Keep, PruneOptions, prune, remove_tag};
pub use push::{PushOptions, Pushed, Since, push};
pub use repository::Repository;
pub use storage::{READ_DISK, RepositoryStorage};
pub use verify::{Verified, verify};
