//! Objects of object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure.
//!
//! `object_store` speaks with them ([`client`] opens a store); this module decides what a failure
//! means ([`store_failure`]), which version is read ([`source`]), and how a file becomes an object
//! ([`upload()`]).
//!
//! Invariants:
//! - Each range is asked for by the entity tag of the version that was opened.
//! - An object is there as a whole or not at all: an upload that ends early shows nothing.
//! - Credentials go to the store's endpoint alone; nobody is led on elsewhere.

mod bucket;
mod client;
mod options;
mod source;
mod store_failure;
mod upload;

pub use bucket::{Bucket, BucketObject};
pub use options::{ObjectCredentials, ObjectOptions};
pub(crate) use source::{READ_ONLY, Source, Version, open};
pub use upload::{Upload, upload};
