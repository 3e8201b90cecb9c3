//! Vellum: a qcow2 storage engine to embed.
//!
//! A [`BlockDevice`] is what a guest sees: bytes at guest offsets. [`Raw`] serves
//! a storage as it is; `qcow2::Qcow2` maps guest clusters to host clusters.
//!
//! Invariants:
//! - Opening an image never opens another file except through a [`gate::Gate`].
//! - No code of this crate is unsafe.
#![forbid(unsafe_code)]

mod debug_events;
mod delegate;
pub mod detect_zeroes;
pub mod device;
pub mod gate;
pub mod luks;
pub mod nodes;
mod preallocation;
pub mod qcow2;
mod range_lock;
pub mod raw;

pub use device::{BlockDevice, DeviceInfo, Extent, HostLocation, RequestFlags, ZeroRequest};
pub use preallocation::Preallocation;
pub use raw::{Raw, RawOptions};
pub use vellum_io as io;
pub use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result};
pub use vellum_storage as storage;
pub use vellum_storage::Storage;

/// The README's example, so that it compiles as long as it stands there.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
