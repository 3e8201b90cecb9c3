//! How requests run: lanes, the executor, owned buffers and errors.
//!
//! A [`lane`] is one thread's I/O backend (io_uring, or worker threads) with a
//! single-threaded [`executor`]. A request owns its [`Buffers`] and is waited for as an
//! [`Io`]. What a storage is stands in `vellum-storage`; nothing here knows of it.
//!
//! Invariants:
//! - A buffer handed to a request belongs to the request until its completion
//!   arrives; dropping an [`Io`] abandons a result, never an I/O.
//! - Nothing here knows about storages or image formats.

// What the model stands for is built and not used.
#![cfg_attr(shuttle, allow(dead_code, unused_imports))]
#![deny(clippy::missing_errors_doc)]

pub mod align;
#[doc(hidden)]
pub mod bits;
mod block;
pub mod buffer;
#[doc(hidden)]
pub mod changes;
pub mod error;
pub mod executor;
mod finish_all;
pub mod heap;
pub mod io;
pub mod lane;
mod pool;
pub mod program;
#[doc(hidden)]
pub mod range_lock;
mod setters;
pub mod shared_memory;
#[doc(hidden)]
pub mod sync;
mod sys;
#[doc(hidden)]
pub mod turns;

pub use buffer::{Buffer, Buffers, Loan};
pub use error::{Error, ErrorKind, Result};
pub use executor::{JoinHandle, spawn};
pub use finish_all::finish_all;
pub use io::Io;
pub use lane::spawn_to_completion;
