//! The drivers that nodes may name: one file each, and one line each in the table (`table.rs`).

mod blkdebug;
mod blklogwrites;
mod blkverify;
mod compress;
pub mod copy_before_write;
mod copy_on_read;
mod file;
pub mod foreign;
#[cfg(feature = "remote")]
mod http;
mod luks;
mod nbd;
#[cfg(not(all(feature = "rbd", feature = "remote", feature = "s3", feature = "ssh")))]
mod no_remote;
mod null;
#[cfg(feature = "s3")]
mod object;
mod ova;
mod preallocate;
pub(crate) mod qcow2;
mod quorum;
mod raw;
#[cfg(feature = "rbd")]
mod rbd;
#[cfg(feature = "remote")]
mod remote_cache;
#[cfg(not(feature = "remote"))]
#[path = "no_remote_cache.rs"]
mod remote_cache;
mod repository;
#[cfg(feature = "remote")]
mod server_options;
#[cfg(feature = "ssh")]
mod ssh;
mod table;
mod throttle;

#[cfg(not(feature = "remote"))]
use no_remote as http;
#[cfg(not(feature = "s3"))]
use no_remote as object;
#[cfg(not(feature = "rbd"))]
use no_remote as rbd;
#[cfg(not(feature = "ssh"))]
use no_remote as ssh;
#[cfg(feature = "s3")]
pub use object::take as object_options;
#[cfg(feature = "rbd")]
pub use rbd::{create as create_rbd, remove as remove_rbd};
#[cfg(feature = "ssh")]
pub use ssh::create as create_ssh;
pub(crate) use table::all;
pub use table::{driver_names, facts, option_names};
