//! Opening: an [`ImageSpec`] and [`OpenFlags`] in, a [`BlockDevice`] out.

use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Result};

use crate::{CacheMode, ImageSpec};

/// How requests on files run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aio {
    /// Blocking calls on threads.
    Threads,
    /// Linux AIO; served like io_uring here.
    Native,
    /// io_uring.
    IoUring,
}

impl Aio {
    /// The backend of a name as `-i` and `--aio` take it.
    pub fn parse(name: &str) -> Option<Aio> {
        match name {
            "threads" => Some(Aio::Threads),
            "native" => Some(Aio::Native),
            "io_uring" => Some(Aio::IoUring),
            _ => None,
        }
    }
}

/// What to do with writes of zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DetectZeroes {
    /// Write them like anything else.
    #[default]
    Off,
    /// Turn them into zero requests.
    On,
    /// Turn them into zero requests that may give space back.
    Unmap,
}

impl DetectZeroes {
    /// The mode of a name as `--detect-zeroes` takes it.
    pub fn parse(name: &str) -> Option<DetectZeroes> {
        match name {
            "off" => Some(DetectZeroes::Off),
            "on" => Some(DetectZeroes::On),
            "unmap" => Some(DetectZeroes::Unmap),
            _ => None,
        }
    }
}

/// How an image is to be used. Options of the image itself (`--image-opts`,
/// `json:`) win over these.
#[derive(Debug, Clone, Default)]
pub struct OpenFlags {
    /// Writes are wanted.
    pub writable: bool,
    /// The cache mode.
    pub cache: CacheMode,
    /// How requests run; `None` takes the default.
    pub aio: Option<Aio>,
    /// Discards give space back (`discard=unmap`) rather than doing nothing.
    pub discard: bool,
    /// What to do with writes of zeroes.
    pub detect_zeroes: DetectZeroes,
    /// Take no lock that another process could conflict with (`-U`).
    pub force_share: bool,
    /// Leave the backing file alone (`info`, `check` of one layer).
    pub no_backing: bool,
}

/// Opens an image with everything it stands on.
///
/// Errors carry the text that QEMU prints after `Could not open 'name': `; see
/// [`crate::error_text`].
pub async fn open_device(spec: &ImageSpec, flags: &OpenFlags) -> Result<Arc<dyn BlockDevice>> {
    let _ = flags;
    Err(Error::new(ErrorKind::Unsupported, "open", "no driver is built in").target(&spec.name))
}
