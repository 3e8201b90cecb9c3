//! The engine under test, seen from outside.

use std::fmt;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_io::Io;
use vellum_storage::Storage;

use crate::scenario::ImageOptions;

/// What an image is opened from.
#[derive(Debug, Clone)]
pub struct Files {
    /// The image itself.
    pub image: Arc<dyn Storage>,
    /// Its external data file.
    pub data: Option<Arc<dyn Storage>>,
    /// Its write log.
    pub log: Option<Arc<dyn Storage>>,
    /// Its checksums.
    pub sums: Option<Arc<dyn Storage>>,
    /// What stands below it.
    pub backing: Option<Arc<dyn BlockDevice>>,
}

/// What a check of an image found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// Damage.
    pub corruptions: u64,
    /// Places that could not be checked.
    pub check_errors: u64,
    /// Clusters that are counted and not used: harmless.
    pub leaks: u64,
    /// What the check says.
    pub messages: Vec<String>,
}

/// An engine that makes, opens and checks images.
pub trait ImageEngine: Send + Sync + fmt::Debug {
    /// Makes an image.
    fn create(&self, files: Files, options: &ImageOptions) -> Io<()>;

    /// Opens an image for writing.
    fn open(&self, files: Files, options: &ImageOptions) -> Io<Arc<dyn BlockDevice>>;

    /// Opens an image that stands below another, for reading only.
    fn open_backing(&self, files: Files, options: &ImageOptions) -> Io<Arc<dyn BlockDevice>>;

    /// Checks an image that is not open.
    fn check(&self, files: Files) -> Io<Findings>;

    /// Whether images are qcow2, so that the simulator can look into them itself.
    fn is_qcow2(&self) -> bool {
        true
    }

    /// Repairs an image that is not open; an engine that cannot only checks it.
    fn repair(&self, files: Files) -> Io<Findings> {
        self.check(files)
    }
}
