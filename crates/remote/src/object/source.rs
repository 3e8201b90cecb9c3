//! An object: its version, and ranges of it.

use std::ops::Range;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStoreExt};
use tokio::time::{Instant, timeout_at};
use vellum_io::{Error, ErrorKind, Result};

use super::client::{self, Store};
use super::options::ObjectOptions;
use super::store_failure;
use crate::failure::{self, Failure};
use crate::fetch::{PATIENCE, Retries};

/// Why nobody writes to an object.
pub(crate) const READ_ONLY: &str = "an object cannot be changed in place: make an overlay here and \
                                    write to that, or put a whole image there with 'convert'";

/// Which bytes an object has had when it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) len_bytes: u64,
    etag: Option<String>,
}

impl Version {
    fn of(meta: &ObjectMeta) -> Self {
        Version {
            len_bytes: meta.size,
            etag: meta.e_tag.clone(),
        }
    }

    /// What tells this version from others, if the store says anything that does.
    pub(crate) fn tag(&self) -> Option<String> {
        let etag = self.etag.as_ref()?;
        Some(format!("{} {etag}", self.len_bytes))
    }

    fn difference(&self, now: &Version) -> Option<String> {
        if self.len_bytes != now.len_bytes {
            let (old, new) = (self.len_bytes, now.len_bytes);
            return Some(format!("it had {old} bytes and has {new} now"));
        }
        let old = self.etag.as_deref()?;
        match now.etag.as_deref() {
            Some(new) if new == old => None,
            Some(new) => Some(format!("its entity tag was {old} and is {new} now")),
            None => Some(format!(
                "its entity tag was {old}, and the store says none now"
            )),
        }
    }
}

/// An object of a store.
#[derive(Debug)]
pub(crate) struct Source {
    pub(super) store: Store,
    pub(super) path: Path,
    name: String,
    timeout: Duration,
}

/// Finds an object.
pub(crate) async fn open(options: ObjectOptions) -> Result<(Source, Version)> {
    let source = Source::new(&options)?;
    let mut retries = Retries::new(source.timeout);
    loop {
        let failure = match source.find().await {
            Ok(version) => return Ok((source, version)),
            Err(failure) => failure,
        };
        let failure = match failure {
            // Whoever mistypes a name wants to know now.
            Failure::Unreachable(error) => Failure::Final(error),
            failure => failure,
        };
        let waited = retries.wait_after(failure).await;
        waited.map_err(|error| error.context("open", "Error opening file"))?;
    }
}

impl Source {
    pub(super) fn new(options: &ObjectOptions) -> Result<Self> {
        let place = options.place()?;
        let path = Path::parse(&place.key).map_err(|error| {
            let message = format!("'{}' names no object: {error}", options.url);
            Error::new(ErrorKind::InvalidArgument, "open", message)
        })?;
        Ok(Source {
            store: client::store(options, &place)?,
            path,
            name: options.url.clone(),
            timeout: options.connection.timeout,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The object's version.
    async fn find(&self) -> Result<Version, Failure> {
        let failure = match self.store.head(&self.path).await {
            Ok(meta) => return Ok(Version::of(&meta)),
            Err(error) if store_failure::has_answered(&error) => self.failure("open", &error),
            Err(error) => return Err(self.failure("open", &error)),
        };
        if !matches!(failure, Failure::Final(_)) {
            return Err(failure);
        }
        // A refusal of HEAD has no body, so no reason: the one of a byte that is asked for has.
        let first = GetOptions::new().with_range(Some(GetRange::Bounded(0..1)));
        match self.store.get_opts(&self.path, first).await {
            Ok(answer) => Ok(Version::of(&answer.meta)),
            Err(error) => Err(self.failure("open", &error)),
        }
    }

    pub(super) fn failure(&self, operation: &'static str, error: &object_store::Error) -> Failure {
        store_failure::failure(&self.name, self.timeout, operation, error)
    }

    /// Makes a request until it succeeds or there is no hope. `sends`: it has a body, which may take any time
    /// as long as something of it moves; only the rest counts.
    pub(super) async fn again<'a, T>(
        &self,
        operation: &'static str,
        sends: bool,
        request: impl Fn() -> BoxFuture<'a, object_store::Result<T>>,
    ) -> Result<T> {
        let mut retries = Retries::new(PATIENCE * self.timeout);
        loop {
            let begun = Instant::now();
            let error = match request().await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            if sends {
                let silence = store_failure::silence(&error).unwrap_or_default();
                retries.exclude(begun.elapsed().saturating_sub(silence));
            }
            retries.wait_after(self.failure(operation, &error)).await?;
        }
    }

    /// Reads a range of a version, and gives the pieces to `take` in order. Each call of `take`
    /// says until when the next bytes must be there.
    pub(crate) async fn read(
        &self,
        version: &Version,
        range: Range<u64>,
        mut take: impl FnMut(&[u8]) -> Instant + Send,
    ) -> Result<(), Failure> {
        let mut options = GetOptions::new().with_range(Some(GetRange::Bounded(range.clone())));
        // Weak tags never agree in a comparison that a store makes.
        let strong = version.etag.clone().filter(|etag| !etag.starts_with("W/"));
        options = options.with_if_match(strong);
        let answer = self.store.get_opts(&self.path, options).await;
        let answer = answer.map_err(|error| self.failure("read", &error))?;
        if let Some(how) = version.difference(&Version::of(&answer.meta)) {
            return Err(Failure::Final(failure::changed(&self.name, &how)));
        }
        if answer.range != range {
            let message = format!(
                "bytes {} to {} were asked for, and the store sends {} to {}",
                range.start, range.end, answer.range.start, answer.range.end
            );
            return Err(self.wrong(message));
        }
        let mut left = range.end - range.start;
        let mut until = take(&[]);
        let mut stream = answer.into_stream();
        while left > 0 {
            let chunk = timeout_at(until, stream.next()).await;
            let chunk = chunk.map_err(|_| failure::too_slow(&self.name))?;
            let Some(chunk) = chunk else {
                return Err(self.wrong(format!("the answer ends {left} bytes too early")));
            };
            let chunk = chunk.map_err(|error| self.failure("read", &error))?;
            if chunk.len() as u64 > left {
                return Err(self.wrong("the answer is longer than it says".to_owned()));
            }
            left -= chunk.len() as u64;
            until = take(&chunk);
        }
        Ok(())
    }

    fn wrong(&self, message: String) -> Failure {
        let error = Error::new(ErrorKind::Protocol, "read", message);
        Failure::Passing(error.target(self.name()), None)
    }
}
