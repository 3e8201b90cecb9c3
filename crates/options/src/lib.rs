//! Options: what a user writes about an image, taken apart without opening anything.
//!
//! A user names an image by a plain file name, by `json:{...}` or by `key=value,...` options ([`ImageSpec`]), and says how
//! to use it ([`OpenFlags`]). All of these become one flat set of [`Options`], by the rules of each protocol's names. Used by
//! the crates above that open nodes, make images and speak to clients.
//!
//! Invariants:
//! - Nothing here opens an image. Only a name that may be a package's or a repository's is looked up on the host.
//! - Messages are QEMU's where QEMU has some; [`error_text()`] gives the text that stands after `qemu-img: `.
#![deny(clippy::missing_errors_doc)]

pub mod cache;
pub mod create_options;
mod error_text;
pub mod filename;
pub mod flags;
pub mod ini;
pub mod json;
pub mod json_text;
pub mod nbd_name;
pub mod options;
pub mod ova_name;
pub mod rbd_name;
pub mod repository_name;
pub mod similar;
pub mod size;
pub mod spec;
pub mod ssh_name;
pub mod url_name;

pub use cache::CacheMode;
pub use error_text::error_text;
pub use flags::{Aio, DetectZeroes, OpenFlags};
pub use options::{Options, Scalar};
pub use spec::{ImageSpec, Source};

/// The refusal of what a user has written.
fn invalid(message: impl Into<String>) -> vellum::Error {
    vellum::Error::new(vellum::ErrorKind::InvalidArgument, "open", message)
}
