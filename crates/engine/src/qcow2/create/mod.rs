//! Makes new images.
//!
//! | file | what it does |
//! | --- | --- |
//! | `options`, `request` | what to make, checked; the order of the writes |
//! | `layout` | where everything in a new image lies; pure |
//! | `write` | writes it: large writes in the order of the file |
//! | `stream` | an image as one stream of bytes, for a pipe |
//! | `encrypted` | the LUKS header of a new image |
//!
//! Invariant: the header's first sector is written last, behind a barrier. Whatever
//! fails before, and a crash at any point, leaves a file that nobody takes for an
//! image.

mod encrypted;
mod layout;
mod options;
mod request;
mod stream;
#[cfg(test)]
mod tests;
pub(crate) mod write;

pub use encrypted::Encryption;
pub use options::{CreateOptions, DEFAULT_CLUSTER_SIZE_BYTES};
pub use request::{create, create_over};
pub use stream::{ClusterSet, ImageStream};
