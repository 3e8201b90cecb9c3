//! Storage: where the bytes of an image live, and how requests on them run.
//!
//! This crate holds the [`Storage`] trait with owned, aligned [`Buffer`]s, the
//! backends that implement it, the wrappers that tests put around them, and the
//! machinery that runs requests: the single-threaded [`executor`] and the lane
//! built on it.
//!
//! Invariants:
//! - A buffer handed to a request belongs to the request until its completion
//!   arrives; dropping an [`Io`] abandons a result, never an I/O.
//! - Nothing here knows about image formats.

// What the model stands for is built and not used.
#![cfg_attr(shuttle, allow(dead_code, unused_imports))]

mod align;
mod block;
pub mod buffer;
pub mod error;
pub mod event;
pub mod executor;
pub mod file;
pub mod heap;
pub mod io;
pub mod lane;
pub mod lock;
pub mod mem;
#[doc(hidden)]
pub mod mutants;
pub mod nbd;
pub mod nodes;
mod pass_on;
mod pool;
pub mod program;
pub mod secret;
mod storage;
#[doc(hidden)]
pub mod sync;
mod sys;
mod together;
pub mod wrap;

pub use buffer::{Buffer, Buffers};
pub use error::{Error, ErrorKind, Result};
pub use event::Event;
pub use executor::{JoinHandle, spawn, spawn_lingering};
pub use file::{FileOptions, FileStorage, Locks};
pub use io::Io;
pub use mem::MemStorage;
pub use storage::{BlockStatus, Capabilities, Storage, StorageExtent, WriteFlags, ZeroFlags};
pub use together::finish_all;
