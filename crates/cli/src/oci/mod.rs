//! `vellum oci`: disks in registries of containers. The work is that of [`vellum_images::oci`]; here
//! are the command line, the disk's file and its name.
//!
//! Invariant: a disk that is pulled has its name only when it is complete and what its digests say.

mod arguments;
#[cfg(feature = "oci")]
mod disks;
mod program;

pub use arguments::SPEC;
pub use program::main;
