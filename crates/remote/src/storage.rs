//! [`RemoteStorage`]: a file on another machine as a storage, to be read.

use std::sync::Arc;

use vellum_io::{Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::file::{FileOptions, FileStorage};
use vellum_storage::{SourceVersion, Storage};

use crate::fetch::{Fetcher, Source};
use crate::http::{self, HttpOptions};
#[cfg(feature = "s3")]
use crate::object::{self, ObjectOptions};
use crate::runtime::Runtime;

/// A file on another machine. It may only be read; its length is that of the version that was opened.
#[derive(Debug)]
pub struct RemoteStorage {
    access: Access,
    version: SourceVersion,
    /// Why nobody writes.
    read_only: &'static str,
}

#[derive(Debug)]
enum Access {
    Ranges {
        fetcher: Arc<Fetcher>,
        /// The threads that fetch.
        runtime: Arc<Runtime>,
    },
    /// All of it is here.
    Copy {
        name: String,
        len_bytes: u64,
        file: Arc<FileStorage>,
    },
}

impl RemoteStorage {
    /// Asks a web server for a file.
    ///
    /// # Errors
    /// If there is no such server or file, it does not let this user read it, or does not answer in
    /// time; if the options make no sense.
    pub async fn open_http(options: HttpOptions) -> Result<Arc<Self>> {
        let kept = (options.readahead_bytes, options.keep_bytes);
        let source = http::Source::new(options)?;
        let runtime = Runtime::shared()?;
        let (source, first, len_bytes) = runtime.run(http::open(source)).await?;
        let version = source.version().into();
        let access = match first {
            http::First::Bytes(first) => {
                let handle = runtime.handle().clone();
                let fetcher = Fetcher::new(Source::Http(Box::new(source)), len_bytes, kept, handle);
                fetcher.put_first(&first);
                Access::Ranges { fetcher, runtime }
            }
            http::First::File(file) => {
                let name = source.name().to_owned();
                let options = FileOptions::default().read_only(true);
                Access::Copy {
                    file: FileStorage::from_descriptor(file.into(), name.clone(), &options)?,
                    name,
                    len_bytes,
                }
            }
        };
        Ok(Arc::new(RemoteStorage {
            access,
            version,
            read_only: "curl driver does not support writes",
        }))
    }

    /// Asks an object store for an object.
    ///
    /// # Errors
    /// As for [`RemoteStorage::open_http`]; if there are no credentials where these are wanted.
    #[cfg(feature = "s3")]
    pub async fn open_object(options: ObjectOptions) -> Result<Arc<Self>> {
        let kept = (options.readahead_bytes, options.keep_bytes);
        let runtime = Runtime::shared()?;
        let (source, version) = runtime.run(object::open(options)).await?;
        let len_bytes = version.len_bytes;
        let tag = version.tag().into();
        let source = Source::Object(Box::new(source), version);
        let handle = runtime.handle().clone();
        let fetcher = Fetcher::new(source, len_bytes, kept, handle);
        Ok(Arc::new(RemoteStorage {
            access: Access::Ranges { fetcher, runtime },
            version: tag,
            read_only: object::READ_ONLY,
        }))
    }

    /// Whether the server gives parts of the file; if not, all of it was copied when it was opened.
    pub fn has_ranges(&self) -> bool {
        matches!(self.access, Access::Ranges { .. })
    }

    fn refuse<T>(&self, operation: &'static str) -> Io<T> {
        let error = Error::new(ErrorKind::ReadOnly, operation, self.read_only);
        Io::ready(Err(error.target(self.name())))
    }
}

impl Storage for RemoteStorage {
    vellum_storage::read_only!();

    fn name(&self) -> &str {
        match &self.access {
            Access::Ranges { fetcher, .. } => fetcher.name(),
            Access::Copy { name, .. } => name,
        }
    }

    fn version(&self) -> SourceVersion {
        self.version.clone()
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(match &self.access {
            Access::Ranges { fetcher, .. } => fetcher.len_bytes(),
            Access::Copy { len_bytes, .. } => *len_bytes,
        })
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        match &self.access {
            Access::Copy { file, .. } => file.read(offset_bytes, buffers),
            Access::Ranges { fetcher, runtime } => {
                let fetcher = fetcher.clone();
                // A request runs to its end, whoever drops the storage meanwhile.
                let runtime = runtime.clone();
                Io::start(async move {
                    let read = fetcher.read(offset_bytes, buffers).await;
                    drop(runtime);
                    read
                })
            }
        }
    }

    fn close(&self) -> Io<()> {
        if let Access::Ranges { fetcher, .. } = &self.access {
            fetcher.close();
        }
        Io::ready(Ok(()))
    }
}
