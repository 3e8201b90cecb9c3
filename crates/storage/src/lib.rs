//! Storage: where the bytes of an image live.
//!
//! This crate holds the [`Storage`] trait, the backends that implement it, the
//! nodes that stand on other storages, and the wrappers that tests put around them.
//! How their requests run is the business of `vellum-io`.
//!
//! Invariant: nothing here knows about image formats.
#![deny(clippy::missing_errors_doc)]

pub mod copy_journal;
mod delegate;
mod disk_identity;
pub mod event;
pub mod file;
mod identity;
pub mod lock;
pub mod mem;
#[doc(hidden)]
pub mod mutants;
pub mod nodes;
mod read_only;
pub mod secret;
mod source_version;
mod storage;
mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod wrap;

pub use disk_identity::DiskIdentity;
pub use event::{Event, EventListener};
pub use file::{AsFile, FileOptions, FileStorage, Locks};
pub use identity::StorageIdentity;
pub use mem::MemStorage;
pub use source_version::{SourceVersion, tells_version};
pub use storage::{BlockStatus, Capabilities, Storage, StorageExtent, WriteFlags, ZeroFlags};
