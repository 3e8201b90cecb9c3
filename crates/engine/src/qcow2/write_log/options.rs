//! [`WriteLogOptions`]: which write log an image is to get.

use std::sync::Arc;

use vellum_format::write_log::{MAX_LEN_BYTES, MIN_LEN_BYTES};
use vellum_storage::Storage;

/// A write log for an image that is opened for writing (`journal`, an option of our own).
#[derive(Debug, Clone)]
pub struct WriteLogOptions {
    pub(super) place: Place,
    pub(super) len_bytes: Option<u64>,
}

/// Where a log is to lie.
#[derive(Debug, Clone)]
pub(super) enum Place {
    /// In a file. It is made longer, and overwritten if it is empty or the log of no
    /// image; anything else in it is refused.
    File {
        storage: Arc<dyn Storage>,
        name: String,
    },
    /// In clusters of the image.
    Inside,
}

impl WriteLogOptions {
    /// The shortest log.
    pub const MIN_LEN_BYTES: u64 = MIN_LEN_BYTES;
    /// The longest log.
    pub const MAX_LEN_BYTES: u64 = MAX_LEN_BYTES;

    /// A log in `storage`. `name` is what the image calls it: whoever opens the image after a crash
    /// looks for the log by that name, relative to the image's folder.
    pub fn new(storage: Arc<dyn Storage>, name: impl Into<String>) -> Self {
        WriteLogOptions {
            place: Place::File {
                storage,
                name: name.into(),
            },
            len_bytes: None,
        }
    }

    /// A log in clusters of the image's own file, which are taken when the image is opened and given
    /// back when it is closed.
    pub fn inside() -> Self {
        WriteLogOptions {
            place: Place::Inside,
            len_bytes: None,
        }
    }

    /// How long the log is, in bytes: a multiple of 4096 between [`Self::MIN_LEN_BYTES`] and
    /// [`Self::MAX_LEN_BYTES`]; in the image whole clusters. Default: as long as the log that the
    /// file holds, or 256 MiB, or the length of a shorter block device; in the image 64 MiB.
    /// Unless it is given, the data cache gets a quarter of that.
    #[must_use]
    pub fn len_bytes(mut self, len_bytes: u64) -> Self {
        self.len_bytes = Some(len_bytes);
        self
    }
}
