//! The graph: from what a user writes to block devices that stand on each other, and change while they are used.
//!
//! An image as a user names it ([`vellum_options::ImageSpec`]), with how to use it ([`vellum_options::OpenFlags`]), becomes a
//! device by [`open_device`]. What an image itself names (its backing file, its data file) goes through the gate of this crate.
//!
//! Invariant: messages are QEMU's where QEMU has some.
#![deny(clippy::missing_errors_doc)]

#[cfg(feature = "tls")]
mod authz;
mod cache_cleaner;
pub mod change;
mod checksums;
mod compressing;
pub mod config;
mod device;
pub mod drivers;
pub mod encryption;
pub mod files;
mod keyring;
pub mod layer_files;
pub mod live;
pub mod merged_options;
pub mod name_of_options;
pub mod node;
pub mod node_bitmap;
pub mod open;
pub mod ova;
pub mod probe;
pub mod probed_raw;
pub mod qemu_repair;
pub mod repository;
pub mod secret;
pub mod stderr;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod throttle_groups;
#[cfg(feature = "tls")]
pub mod tls;
#[cfg(not(feature = "tls"))]
#[path = "no_tls.rs"]
pub mod tls;
pub mod wrap;
mod write_log;

pub use checksums::own_beside as checksums_beside;
pub use config::CONFIG_HELP;
pub use device::{ImageFile, check_options, open_device, open_device_with, open_file};
pub use drivers::option_names;
pub use drivers::{driver_names, foreign};
pub use live::Nodes;
