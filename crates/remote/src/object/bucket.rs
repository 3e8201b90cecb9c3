//! [`Bucket`]: objects below a place in a store, made, listed and removed.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::StreamExt;
use object_store::path::Path;
use object_store::{
    Error as StoreError, GetOptions, GetRange, GetResult, ObjectStoreExt, PutMode, PutOptions,
    PutPayload,
};
use tokio::time::{Instant, timeout_at};
use vellum_io::{Error, ErrorKind, Result};

use super::options::ObjectOptions;
use super::source::Source;
use super::store_failure;
use crate::blocks::BLOCK_BYTES;
use crate::failure::{self, Failure};
use crate::fetch::{PATIENCE, Retries};
use crate::runtime::Runtime;

/// An object of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketObject {
    /// Its key, behind the bucket's own.
    pub key: String,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// When it was made, in seconds since 1970 by the store's clock.
    pub changed_seconds: u64,
}

/// Objects below a place in a store. Requests are tried again as reads are; they run on threads of this
/// crate's own, and may be awaited on any lane.
#[derive(Clone)]
pub struct Bucket {
    source: Arc<Source>,
    runtime: Arc<Runtime>,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bucket({})", self.source.name())
    }
}

impl Bucket {
    /// The objects whose keys begin with that of `options` and a slash.
    ///
    /// # Errors
    /// If the options make no sense.
    pub fn new(options: &ObjectOptions) -> Result<Self> {
        Ok(Bucket {
            source: Arc::new(Source::new(options)?),
            runtime: Runtime::shared()?,
        })
    }

    /// The URL of the place.
    pub fn name(&self) -> &str {
        self.source.name()
    }

    /// Reads an object of `limit_bytes` bytes at most.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none; what the store says.
    pub async fn get(&self, key: &str, limit_bytes: u64) -> Result<Vec<u8>> {
        self.run(
            key,
            move |at| async move { at.get(None, limit_bytes).await },
        )
        .await
    }

    /// Reads a range, not empty, which is inside the object.
    ///
    /// # Errors
    /// As [`Bucket::get`].
    pub async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let len_bytes = range.end.saturating_sub(range.start);
        self.run(key, move |at| async move {
            at.get(Some(range), len_bytes).await
        })
        .await
    }

    /// Makes an object, in the place of one that was there.
    ///
    /// # Errors
    /// What the store says.
    pub async fn put(&self, key: &str, content: Vec<u8>) -> Result<()> {
        let put = move |at: At| async move { at.put(content.into(), PutMode::Overwrite).await };
        self.run(key, put).await.map(drop)
    }

    /// Makes an object if there is none of that key; `false`: there is one, maybe that of this very call.
    ///
    /// # Errors
    /// What the store says.
    pub async fn put_new(&self, key: &str, content: Vec<u8>) -> Result<bool> {
        let put = move |at: At| async move { at.put(content.into(), PutMode::Create).await };
        self.run(key, put).await
    }

    /// The objects whose keys begin with `prefix`, which ends with a slash, by key.
    ///
    /// # Errors
    /// What the store says.
    pub async fn list(&self, prefix: &str) -> Result<Vec<BucketObject>> {
        self.run(prefix, |at| async move { at.list().await }).await
    }

    /// Removes an object; there may be none.
    ///
    /// # Errors
    /// What the store says.
    pub async fn remove(&self, key: &str) -> Result<()> {
        self.run(key, |at| async move { at.remove().await }).await
    }

    async fn run<T: Send + 'static, F>(&self, key: &str, work: impl FnOnce(At) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let root = &self.source.path;
        let at = At {
            path: Path::from_iter(root.parts().chain(Path::from(key).parts())),
            root_len: root.as_ref().len() + 1,
            name: format!("{}/{key}", self.name()),
            source: self.source.clone(),
        };
        self.runtime.run(work(at)).await
    }
}

/// An object, or where a list begins.
struct At {
    source: Arc<Source>,
    path: Path,
    /// What of a key is the bucket's own.
    root_len: usize,
    name: String,
}

impl At {
    /// As [`Source::again`]; what fails names the object.
    async fn again<'a, T>(
        &'a self,
        operation: &'static str,
        sends: bool,
        request: impl Fn() -> BoxFuture<'a, Result<T, StoreError>>,
    ) -> Result<T> {
        let done = self.source.again(operation, sends, request).await;
        done.map_err(|error| error.target(&self.name))
    }

    async fn get(self, range: Option<Range<u64>>, limit_bytes: u64) -> Result<Vec<u8>> {
        let mut retries = Retries::new(PATIENCE * self.source.timeout());
        loop {
            let failure = match self.try_get(range.clone(), limit_bytes).await {
                Ok(content) => return Ok(content),
                Err(failure) => failure,
            };
            let waited = retries.wait_after(failure).await;
            waited.map_err(|error| error.target(&self.name))?;
        }
    }

    async fn try_get(
        &self,
        range: Option<Range<u64>>,
        limit_bytes: u64,
    ) -> Result<Vec<u8>, Failure> {
        let wanted = range.clone().map(GetRange::Bounded);
        let options = GetOptions::new().with_range(wanted);
        let answer = self.source.store.get_opts(&self.path, options).await;
        let answer = answer.map_err(|error| self.source.failure("read", &error))?;
        let wrong = |message: String| Error::new(ErrorKind::Protocol, "read", message);
        if range.is_some_and(|range| answer.range != range) {
            let message = "the object is shorter than it should be".to_owned();
            return Err(Failure::Final(wrong(message)));
        }
        let len_bytes = answer.range.end - answer.range.start;
        if len_bytes > limit_bytes {
            let message =
                format!("the object has {len_bytes} bytes: too many for what it should be");
            return Err(Failure::Final(wrong(message)));
        }
        let content = self.collect(answer, len_bytes).await?;
        match content.len() as u64 == len_bytes {
            true => Ok(content),
            false => {
                let message = "the answer has another length than it says".to_owned();
                Err(Failure::Passing(wrong(message), None))
            }
        }
    }

    async fn collect(&self, answer: GetResult, len_bytes: u64) -> Result<Vec<u8>, Failure> {
        let mut content = Vec::with_capacity(len_bytes as usize);
        let mut stream = answer.into_stream();
        let silence = self.source.timeout();
        // Bytes that only drip in are as good as none.
        let (mut blocks, mut until) = (0, Instant::now() + PATIENCE / 2 * silence);
        loop {
            let silent = Instant::now() + silence;
            let chunk = timeout_at(silent.min(until), stream.next()).await;
            let chunk = chunk.map_err(|_| failure::too_slow(&self.name))?;
            let Some(chunk) = chunk else {
                return Ok(content);
            };
            content.extend_from_slice(&chunk.map_err(|error| self.source.failure("read", &error))?);
            if content.len() as u64 > len_bytes {
                return Ok(content);
            }
            if content.len() as u64 / BLOCK_BYTES > blocks {
                blocks = content.len() as u64 / BLOCK_BYTES;
                until = Instant::now() + PATIENCE / 2 * silence;
            }
        }
    }

    async fn put(self, content: Bytes, mode: PutMode) -> Result<bool> {
        let put = || {
            let options = PutOptions {
                mode: mode.clone(),
                ..PutOptions::default()
            };
            let payload = PutPayload::from_bytes(content.clone());
            let put = self.source.store.put_opts(&self.path, payload, options);
            put.map(|put| match put {
                Ok(_) => Ok(true),
                Err(error) if store_failure::is_conflict(&error) => Err(error),
                Err(StoreError::AlreadyExists { .. }) => Ok(false),
                Err(error) => Err(error),
            })
            .boxed()
        };
        self.again("write", true, put).await
    }

    async fn list(self) -> Result<Vec<BucketObject>> {
        let list = || {
            let listed = self.source.store.list(Some(&self.path));
            async move {
                let mut found = Vec::new();
                let mut listed = listed;
                while let Some(object) = listed.next().await {
                    found.push(object?);
                }
                Ok(found)
            }
            .boxed()
        };
        let listed = self.again("list", false, list).await?;
        let mut objects = Vec::with_capacity(listed.len());
        for object in listed {
            let Some(key) = object.location.as_ref().get(self.root_len..) else {
                continue;
            };
            objects.push(BucketObject {
                key: key.to_owned(),
                len_bytes: object.size,
                changed_seconds: u64::try_from(object.last_modified.timestamp())
                    .unwrap_or_default(),
            });
        }
        objects.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(objects)
    }

    async fn remove(self) -> Result<()> {
        let remove = || {
            let removed = self.source.store.delete(&self.path);
            removed
                .map(|removed| match removed {
                    Err(StoreError::NotFound { .. }) => Ok(()),
                    removed => removed,
                })
                .boxed()
        };
        self.again("remove", false, remove).await
    }
}
