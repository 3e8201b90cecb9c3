//! Control: from what a user writes to a graph of block devices.
//!
//! A user names an image by a plain file name, by `json:{...}` or by
//! `key=value,...` options ([`ImageSpec`]), and says how to use it
//! ([`OpenFlags`]); [`open_device`] makes the device. What an image itself names
//! (its backing file, its data file) goes through the gate of this crate.
//!
//! Invariant: messages are QEMU's where QEMU has some; [`error_text`] gives the
//! text that stands after `qemu-img: `.
#![deny(clippy::missing_errors_doc)]

pub mod amend;
mod amend_keys;
pub mod audit;
#[cfg(feature = "tls")]
mod authz;
mod backing;
pub mod cache;
mod cache_cleaner;
pub mod chain;
mod checksums;
pub mod compact;
mod compressing;
mod config;
pub mod create;
mod create_in;
pub mod create_options;
mod created_elsewhere;
pub mod daemon;
pub mod display;
mod drivers;
pub mod encryption;
mod file_node;
pub mod filename;
pub mod files;
pub mod flags;
pub mod foreign;
pub mod format_specific;
pub mod gate;
mod graph;
pub mod ini;
pub mod json;
mod json_text;
mod keyring;
pub mod layer_files;
pub mod measure;
pub mod minisign;
mod nbd_name;
mod node_bitmap;
pub mod nodes;
#[cfg(feature = "oci")]
pub mod oci;
pub mod open;
pub mod options;
pub mod ova;
pub mod overlay;
pub mod probe;
pub mod probed_raw;
mod qcow2_node;
pub mod qemu_repair;
pub mod qmp;
mod rbd_name;
pub mod reopen;
pub mod repository;
pub mod scrub;
pub mod secret;
pub mod shown_bitmaps;
pub mod similar;
pub mod size;
pub mod spec;
mod ssh_name;
pub mod stderr;
pub mod throttle_groups;
#[cfg(feature = "tls")]
pub mod tls;
#[cfg(not(feature = "tls"))]
#[path = "no_tls.rs"]
pub mod tls;
pub mod upload;
mod url_name;
pub mod wrap;
mod write_log;

pub use cache::CacheMode;
pub use config::CONFIG_HELP;
pub use drivers::option_names;
pub use drivers::{driver_names, is_protocol};
pub use flags::{Aio, DetectZeroes, OpenFlags};
pub use nodes::Nodes;
pub use open::{open_device, open_device_with};
pub use options::{Options, Scalar};
pub use spec::{ImageSpec, Source};

/// The text of an error as QEMU prints it after the program's name: messages
/// from the outermost to the cause, joined by colons.
pub fn error_text(error: &vellum::Error) -> String {
    let mut text = error.message().to_owned();
    let mut next = std::error::Error::source(error);
    while let Some(source) = next {
        let message = match source.downcast_ref::<vellum::Error>() {
            Some(inner) => inner.message().to_owned(),
            None => source.to_string(),
        };
        if !message.is_empty() {
            text.push_str(": ");
            text.push_str(&message);
        }
        next = source.source();
    }
    text
}
