//! [`ChecksumOptions`]: what the user wants of checksums.

use std::sync::Arc;

use vellum_storage::Storage;

/// Checksums of an image's file (`checksums`, an option of our own).
#[derive(Debug, Clone)]
pub enum ChecksumOptions {
    /// Keep them in a file. An image that has none yet gets them, if it is opened for writing:
    /// what is written from then on has checksums.
    Keep {
        /// The file. It is overwritten if it is empty, or if its checksums were this image's
        /// before; anything else in it is refused.
        storage: Arc<dyn Storage>,
        /// What the image calls it: whoever opens the image looks for the checksums by that
        /// name, relative to the image's folder.
        name: String,
    },
    /// Give them up, durably, if the image is opened for writing; else only do not look at them.
    GiveUp,
}
