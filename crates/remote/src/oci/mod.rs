//! Disks in registries of containers: images of one layer, an archive with the disk as
//! `disk/disk.qcow2`, as KubeVirt has them (`containerDisk`).
//!
//! [`pull()`] streams a layer: bytes are hashed as they arrive, and unpacked beside that (`layer`,
//! `tar`); [`push()`] makes one. `registry` speaks with the server, `manifest` and `reference`
//! are what is said.
//!
//! Invariants:
//! - What was pulled is complete, and has the SHA-256 that the manifest says, or it is an error.
//! - It is the file that a container of the image would see (`union`), or it is an error.
//! - Nothing that a registry or an archive says becomes the name of a file.
//! - Memory is bounded: some chunks of a layer, and 4 MiB of a manifest.

mod layer;
mod manifest;
mod options;
mod pull;
mod push;
mod reference;
mod registry;
mod tar;
mod union;

pub use layer::Packing;
pub use options::OciOptions;
pub(crate) use options::digest_text;
pub use pull::{Pull, Pulled, pull};
pub use push::{Push, push};
pub use reference::Reference;
