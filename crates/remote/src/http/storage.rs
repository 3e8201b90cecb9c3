//! [`HttpStorage`]: a file on a web server as a storage.

use std::fs::File;
use std::sync::Arc;

use tokio::time::timeout;
use vellum_io::{Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::file::{FileOptions, FileStorage};
use vellum_storage::{Capabilities, Storage, WriteFlags, ZeroFlags};

use super::answer::{Content, Version};
use super::source::{Answer, Failure, Source};
use super::{HttpOptions, spool};
use crate::fetch::{FIRST_BYTES, Fetcher, PATIENCE, Retries};
use crate::runtime::Runtime;

/// A file on a web server. It may only be read; its length is that of the version that was opened.
#[derive(Debug)]
pub struct HttpStorage {
    access: Access,
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

/// What the first answer has brought.
enum First {
    Bytes(Vec<u8>),
    /// All of them.
    File(File),
}

impl HttpStorage {
    /// Asks the server for the file.
    ///
    /// # Errors
    /// If there is no such server or file, it does not let this user read it, or does not answer in
    /// time; if the options make no sense.
    pub async fn open(options: HttpOptions) -> Result<Arc<Self>> {
        let readahead_bytes = options.readahead_bytes;
        let source = Source::new(options)?;
        let runtime = Runtime::shared()?;
        let (source, first, len_bytes) = runtime.run(open(source)).await?;
        let access = match first {
            First::Bytes(first) => {
                let handle = runtime.handle().clone();
                let fetcher = Fetcher::new(source, len_bytes, readahead_bytes, handle);
                fetcher.put_first(&first);
                Access::Ranges { fetcher, runtime }
            }
            First::File(file) => {
                let name = source.name().to_owned();
                let options = FileOptions::default().read_only(true);
                Access::Copy {
                    file: FileStorage::from_descriptor(file.into(), name.clone(), &options)?,
                    name,
                    len_bytes,
                }
            }
        };
        Ok(Arc::new(HttpStorage { access }))
    }

    /// Whether the server gives parts of the file; if not, all of it was copied when it was opened.
    pub fn has_ranges(&self) -> bool {
        matches!(self.access, Access::Ranges { .. })
    }

    fn refuse<T>(&self, operation: &'static str) -> Io<T> {
        let message = "curl driver does not support writes";
        let error = Error::new(ErrorKind::ReadOnly, operation, message);
        Io::ready(Err(error.target(self.name())))
    }
}

/// Asks until there is an answer with bytes, or no hope.
async fn open(source: Source) -> Result<(Source, First, u64)> {
    let mut retries = Retries::new(source.timeout());
    loop {
        let failure = match open_once(&source).await {
            Ok((first, len_bytes)) => return Ok((source, first, len_bytes)),
            // Whoever mistypes a name wants to know now.
            Err(Failure::Unreachable(error)) => Failure::Final(error),
            Err(failure) => failure,
        };
        let waited = retries.wait_after(failure).await;
        waited.map_err(|error| error.context("open", "Error opening file"))?;
    }
}

async fn open_once(source: &Source) -> Result<(First, u64), Failure> {
    let answer = source.ask(&(0..FIRST_BYTES)).await?;
    let headers = answer.response.headers();
    let (end, total) = match answer.content {
        // Of a copy no second answer is ever compared.
        Content::Whole(_) => {
            let (file, len_bytes) = spool::spool(source, answer).await?;
            return Ok((First::File(file), len_bytes));
        }
        Content::Beyond(total) => (0, total),
        Content::Part {
            start: 0,
            end,
            total,
        } => (end, total),
        Content::Part { start, .. } => {
            let message =
                format!("the first bytes were asked for, and the server sends those from {start}");
            let error = Error::new(ErrorKind::Protocol, "open", message);
            return Err(Failure::Passing(error.target(source.name()), None));
        }
    };
    let version = Version::of(headers, total);
    let first = match end {
        0 => Vec::new(),
        _ => {
            let first = read_first(source, answer, end.min(FIRST_BYTES));
            let first = timeout(PATIENCE * source.timeout(), first).await;
            first.unwrap_or_else(|_| Err(source.too_slow()))?
        }
    };
    source.set_version(version);
    Ok((First::Bytes(first), total))
}

async fn read_first(source: &Source, answer: Answer, len_bytes: u64) -> Result<Vec<u8>, Failure> {
    let mut response = answer.response;
    let mut first = Vec::new();
    while (first.len() as u64) < len_bytes {
        match response
            .chunk()
            .await
            .map_err(|error| source.broken(&error))?
        {
            Some(chunk) => first.extend_from_slice(&chunk),
            None => {
                let error = Error::new(ErrorKind::Protocol, "open", "the answer ends too early");
                return Err(Failure::Passing(error.target(source.name()), None));
            }
        }
    }
    first.truncate(len_bytes as usize);
    Ok(first)
}

impl Storage for HttpStorage {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: true,
            ..Capabilities::default()
        }
    }

    fn name(&self) -> &str {
        match &self.access {
            Access::Ranges { fetcher, .. } => fetcher.name(),
            Access::Copy { name, .. } => name,
        }
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

    fn write(&self, _offset_bytes: u64, _buffers: Buffers, _flags: WriteFlags) -> Io<Buffers> {
        self.refuse("write")
    }

    fn write_zeroes(&self, _offset_bytes: u64, _len_bytes: u64, _flags: ZeroFlags) -> Io<()> {
        self.refuse("write zeroes")
    }

    fn discard(&self, _offset_bytes: u64, _len_bytes: u64) -> Io<()> {
        self.refuse("discard")
    }

    fn flush(&self) -> Io<()> {
        Io::ready(Ok(()))
    }

    fn truncate(&self, _len_bytes: u64) -> Io<()> {
        self.refuse("truncate")
    }

    fn close(&self) -> Io<()> {
        if let Access::Ranges { fetcher, .. } = &self.access {
            fetcher.close();
        }
        Io::ready(Ok(()))
    }
}
