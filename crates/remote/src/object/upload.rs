//! A file becomes an object: its parts go side by side, and it is there when all of them are.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::FutureExt;
use futures_util::stream::{self, StreamExt};
use object_store::multipart::PartId;
use object_store::{ObjectMeta, ObjectStoreExt, PutOptions, PutPayload};
use vellum_io::{Error, ErrorKind, Result};

use super::options::ObjectOptions;
use super::source::Source;
use crate::blocking;
use crate::failure::Failure;
use crate::fetch::{PATIENCE, Retries};
use crate::runtime::Runtime;
use crate::temporary;

/// What an object is made of, where there is no reason for more.
const PART_BYTES: u64 = 8 << 20;
/// Stores take 10,000 parts of an object.
const MOST_PARTS: u64 = 9_000;
/// Parts on their way at once.
const PARTS_AT_ONCE: usize = 8;
/// What a store puts together in a second at least.
const JOINED_BYTES_PER_SECOND: u64 = 64 << 20;

/// How a file is put into a store.
pub struct Upload {
    /// Where it is to be.
    pub to: ObjectOptions,
    /// Is told, after each part, how many bytes are there.
    pub progress: Box<dyn Fn(u64) + Send + Sync>,
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upload")
            .field("to", &self.to.url)
            .finish_non_exhaustive()
    }
}

/// Makes an object of a file, in the place of one that was there. Nobody sees it before all of it is
/// there; if it fails, what was there stays. On a lane.
///
/// # Errors
/// If the file cannot be read, or the store does not take it.
pub async fn upload(file: File, upload: Upload) -> Result<()> {
    let metadata = file.metadata();
    let len_bytes = metadata
        .map_err(|error| Error::from_io("read", &error))?
        .len();
    let source = Source::new(&upload.to)?;
    let runtime = Runtime::shared()?;
    let parts = Parts {
        file: Arc::new(file),
        len_bytes,
        part_bytes: part_bytes(len_bytes),
        source,
        progress: upload.progress,
    };
    runtime.run(parts.send()).await
}

fn part_bytes(len_bytes: u64) -> u64 {
    let least = len_bytes.div_ceil(MOST_PARTS).next_multiple_of(1 << 20);
    least.max(PART_BYTES)
}

/// What there is under the name of an object.
enum There {
    Nothing,
    Object(Box<ObjectMeta>),
    Unknown,
}

struct Parts {
    file: Arc<File>,
    len_bytes: u64,
    part_bytes: u64,
    source: Source,
    progress: Box<dyn Fn(u64) + Send + Sync>,
}

impl Parts {
    async fn send(self) -> Result<()> {
        temporary::make_durable(&self.file, self.source.name()).await?;
        if self.len_bytes <= self.part_bytes {
            let content = self.content(0).await?;
            let Source { store, path, .. } = &self.source;
            let put = || {
                let payload = PutPayload::from_bytes(content.clone());
                store.put_opts(path, payload, PutOptions::default())
            };
            self.source.again("write", true, put).await?;
            (self.progress)(self.len_bytes);
            return Ok(());
        }
        let Source { store, path, .. } = &self.source;
        let before = self.there().await;
        let begin = || store.create_multipart(path);
        let id = self.source.again("write", false, begin).await?;
        let sent = match self.send_parts(&id).await {
            Ok(parts) => self.finish(&id, parts, &before).await,
            Err(error) => Err(error),
        };
        if sent.is_err() {
            // What was sent costs space until it is given up; the first error says more.
            let _ = store.abort_multipart(path, &id).await;
        }
        sent
    }

    async fn send_parts(&self, id: &String) -> Result<Vec<PartId>> {
        let count = self.len_bytes.div_ceil(self.part_bytes);
        let sent = (0..count).map(|index| self.send_part(id, index).boxed());
        let mut sent = stream::iter(sent).buffered(PARTS_AT_ONCE);
        let (mut parts, mut done) = (Vec::new(), 0);
        while let Some(part) = sent.next().await {
            let (part, len) = part?;
            parts.push(part);
            done += len;
            (self.progress)(done);
        }
        Ok(parts)
    }

    /// Makes the object of its parts. The store may have done it when its answer is lost: then there is no
    /// such upload any more, and the object tells.
    async fn finish(&self, id: &String, parts: Vec<PartId>, before: &There) -> Result<()> {
        let Source { store, path, .. } = &self.source;
        // The more there is, the longer a store may take to put it together.
        let more = Duration::from_secs(self.len_bytes / JOINED_BYTES_PER_SECOND);
        let mut retries = Retries::new(PATIENCE * self.source.timeout() + more);
        let mut may_be_done = false;
        loop {
            let ended = store.complete_multipart(path, id, parts.clone()).await;
            let Err(error) = ended else { return Ok(()) };
            let failure = self.source.failure("write", &error);
            let is_final = matches!(failure, Failure::Final(_));
            if is_final && may_be_done && self.is_made(before).await {
                return Ok(());
            }
            may_be_done |= matches!(failure, Failure::Passing(..));
            retries.wait_after(failure).await?;
        }
    }

    /// What is there under the object's name.
    async fn there(&self) -> There {
        let Source { store, path, .. } = &self.source;
        match self
            .source
            .again("open", false, || store.head(path).boxed())
            .await
        {
            Ok(meta) => There::Object(Box::new(meta)),
            Err(error) if error.kind() == ErrorKind::NotFound => There::Nothing,
            // Whoever may write there may not be allowed to look.
            Err(_) => There::Unknown,
        }
    }

    /// Whether the object is there that was to be made, and was not before.
    async fn is_made(&self, before: &There) -> bool {
        let There::Object(now) = self.there().await else {
            return false;
        };
        let is_new = match before {
            There::Nothing => true,
            There::Object(old) => {
                (&old.e_tag, old.last_modified) != (&now.e_tag, now.last_modified)
            }
            There::Unknown => false,
        };
        is_new && now.size == self.len_bytes
    }

    async fn send_part(&self, id: &String, index: u64) -> Result<(PartId, u64)> {
        let content = self.content(index).await?;
        let Source { store, path, .. } = &self.source;
        let put = || {
            let payload = PutPayload::from_bytes(content.clone());
            store.put_part(path, id, index as usize, payload)
        };
        let part = self.source.again("write", true, put).await?;
        Ok((part, content.len() as u64))
    }

    async fn content(&self, index: u64) -> Result<Bytes> {
        let start = index * self.part_bytes;
        let len = (self.len_bytes - start).min(self.part_bytes) as usize;
        let file = self.file.clone();
        let read = blocking::run_io(move || {
            let mut content = vec![0; len];
            file.read_exact_at(&mut content, start).map(|()| content)
        });
        let read = read
            .await
            .map_err(|error| Error::from_io("read", &error).at(start))?;
        Ok(read.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_few_enough_for_a_store() {
        assert_eq!(part_bytes(0), PART_BYTES);
        assert_eq!(part_bytes(70 << 30), PART_BYTES);
        for len in [1_u64 << 40, 5 << 40] {
            assert!(len.div_ceil(part_bytes(len)) <= 10_000);
            assert!(part_bytes(len).is_multiple_of(1 << 20));
        }
    }
}
