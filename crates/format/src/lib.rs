//! Codecs of every structure that a qcow2 image keeps on disk.
//!
//! Bytes in, values out, and back again: no I/O, no allocation beyond what a
//! decoded value holds, no unsafe code. `docs/FORMAT.md` draws the structures
//! and numbers the rules (I1, I2, …) that this crate refers to.
//!
//! Invariants:
//! - Rule 12: no input makes a decoder panic, overflow or allocate more than a small
//!   multiple of the input's length.
//! - Whatever a decoder accepts is within [`limits`], and
//!   `decode(encode(decode(bytes))) == decode(bytes)`.
//! - What a decoder does not know but may keep (header extensions, the header's
//!   tail, extra data of snapshots and bitmaps) survives a rewrite.
#![no_std]
#![forbid(unsafe_code)]
#![deny(clippy::missing_errors_doc)]

extern crate alloc;

mod bytes;

pub mod bitmap;
pub mod checksums;
pub mod compressed;
pub mod crypto;
pub mod error;
pub mod extension;
pub mod features;
pub mod geometry;
pub mod header;
pub mod l1;
pub mod l2;
pub mod limits;
pub mod luks;
pub mod refcount;
pub mod seal;
pub mod snapshot;
pub mod stream;
pub mod types;
pub mod write_log;

pub use compressed::CompressedDescriptor;
pub use error::{FormatError, FormatErrorKind, Result};
pub use extension::Extension;
pub use geometry::Geometry;
pub use header::Header;
pub use l1::L1Entry;
pub use l2::{L2Entry, Mapping};
pub use types::{GuestCluster, GuestOffset, HostCluster, HostOffset};
