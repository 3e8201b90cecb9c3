//! What is done to images while nobody uses them: `create`, `amend`, `measure`, `audit`, `compact`, `scrub`, and disks that go to
//! and come from registries and object stores.
//!
//! For the program and for the daemon's jobs. Images are opened by `vellum_graph`, which knows nothing of this crate.
//!
//! Invariant: messages are QEMU's where QEMU has some.
#![deny(clippy::missing_errors_doc)]

pub mod amend;
pub mod amend_keys;
pub mod audit;
pub mod chain;
pub mod compact;
pub mod create;
pub mod create_in;
pub mod create_options;
pub mod created_elsewhere;
pub mod format_specific;
pub mod measure;
pub mod minisign;
#[cfg(feature = "oci")]
pub mod oci;
pub mod overlay;
pub mod scrub;
pub mod upload;
