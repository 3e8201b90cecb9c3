//! What may open the files that an image names, and the gate that refuses all of them.

use std::fmt;
use std::sync::Arc;

use vellum_io::{Error, ErrorKind, Io};
use vellum_storage::Storage;

use crate::BlockDevice;

/// What an image asks for, in its own words: nothing in it is trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRequest {
    /// The image that asks (its path or node name), for relative names and messages.
    pub image: String,
    /// The name that stands in the image.
    pub name: String,
    /// The format that stands in the image, if any.
    pub format: Option<String>,
    /// The file is to be opened for writing (a data file of a writable image).
    pub writable: bool,
}

impl FileRequest {
    /// For a file that holds a part of the image in `image`, so that it has no format.
    pub(crate) fn for_part(image: &str, name: &[u8], writable: bool) -> Self {
        FileRequest {
            image: image.to_owned(),
            name: String::from_utf8_lossy(name).into_owned(),
            format: None,
            writable,
        }
    }
}

/// Opens, or refuses, the files that an image names. Embedders may implement it.
pub trait Gate: Send + Sync + fmt::Debug {
    /// Opens a backing file, read-only.
    ///
    /// # Errors
    /// [`ErrorKind::Denied`] for a file that may not be opened, else why it cannot be.
    fn open_backing(&self, request: FileRequest) -> Io<Arc<dyn BlockDevice>>;

    /// Opens an external data file.
    ///
    /// # Errors
    /// As [`Gate::open_backing`].
    fn open_data_file(&self, request: FileRequest) -> Io<Arc<dyn Storage>>;

    /// Opens the write log that holds the last writes of an image, for reading. Refused unless
    /// a gate says otherwise.
    fn open_write_log(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        DenyAll::refuse("write log", &request)
    }

    /// Opens the checksums of an image. Refused unless a gate says otherwise.
    fn open_checksums(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        DenyAll::refuse("checksums", &request)
    }
}

/// A gate that refuses everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct DenyAll;

impl DenyAll {
    fn refuse<T>(what: &str, request: &FileRequest) -> Io<T> {
        Io::ready(Err(Error::new(
            ErrorKind::Denied,
            "open",
            format!(
                "the image asks for the {what} '{}', and the policy allows no other files",
                request.name
            ),
        )
        .target(request.image.clone())))
    }
}

impl Gate for DenyAll {
    fn open_backing(&self, request: FileRequest) -> Io<Arc<dyn BlockDevice>> {
        Self::refuse("backing file", &request)
    }

    fn open_data_file(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        Self::refuse("data file", &request)
    }
}
