//! Images on other machines as storages: [`RemoteStorage`], files of web servers and objects of
//! object stores, to be read; and disks in registries of containers, to be got and put as a whole.
//!
//! Only `graph` uses this crate, in its feature `remote`. What speaks the protocols are crates
//! that want tokio; that runs on threads of this crate's own, and lanes wait for what it has
//! fetched as they wait for anything of another thread.
//!
//! Invariants:
//! - No thread is there before the first storage is opened, and none after the last is dropped.
//! - Bytes of one storage are bytes of one version of the file: what its first answer has said of
//!   the version, every other answer is asked for and compared with.
//! - Memory is bounded: by the cache of each storage, and twice what its readers have asked for.
#![deny(clippy::missing_errors_doc)]

#[cfg(any(feature = "rbd", feature = "ssh"))]
mod beyond_end;
mod blocking;
mod blocks;
mod cache;
mod connection;
#[cfg(any(feature = "rbd", feature = "ssh"))]
mod failed_flush;
mod failure;
mod fetch;
mod http;
#[cfg(feature = "s3")]
mod object;
#[cfg(feature = "oci")]
pub mod oci;
#[cfg(feature = "rbd")]
mod rbd;
mod runtime;
#[cfg(any(feature = "oci", feature = "s3"))]
mod sending;
#[cfg(feature = "ssh")]
mod ssh;
mod storage;
mod streams;
mod temporary;

pub use cache::{CacheOptions, CacheStorage, Found};
pub use connection::{ConnectionOptions, Login};
pub use http::{Credentials, HttpOptions};
#[cfg(feature = "s3")]
pub use object::{Bucket, BucketObject, ObjectCredentials, ObjectOptions, Upload, upload};
#[cfg(feature = "rbd")]
pub use rbd::{Encryption, EncryptionFormat, RbdOptions, RbdStorage, create_image, remove_image};
#[cfg(feature = "ssh")]
pub use ssh::{HashKind, HostKeyCheck, SshOptions, SshStorage};
pub use storage::RemoteStorage;
