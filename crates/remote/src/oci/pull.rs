//! Getting a disk from a registry.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{ACCEPT, CONTENT_RANGE, RANGE};
use reqwest::{Method, StatusCode};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc::{Sender, channel};
use vellum_io::{Error, Result};

use super::manifest::{Blob, Manifest, accepted, parse};
use super::reference::Reference;
use super::registry::Registry;
use super::tar::Found;
use super::union::Union;
use super::{OciOptions, digest_text, layer};
use crate::blocking;
use crate::runtime::Runtime;

/// Chunks between the network and what unpacks them.
const CHUNKS: usize = 32;
/// So often a layer is gone on with whose connection breaks without bringing anything.
const MOST_FAILURES: u32 = 4;

/// What is wanted of an image.
pub struct Pull {
    /// The path of the disk in it; without one, the first file in `disk/`.
    pub path: Option<String>,
    /// Is told how many bytes of how many of a layer are there.
    pub progress: Box<dyn Fn(u64, u64) + Send + Sync>,
}

impl std::fmt::Debug for Pull {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pull")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// What was got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// The disk's path in the image.
    pub path: String,
    /// Its length.
    pub len_bytes: u64,
    /// The digest of the image's manifest.
    pub digest: String,
}

/// Writes the disk of an image into an empty file. On a lane.
///
/// # Errors
/// If the registry does not give it, or it is not what its digests say, or holds no disk; the file
/// holds anything then.
pub async fn pull(
    reference: Reference,
    options: OciOptions,
    file: File,
    pull: Pull,
) -> Result<Pulled> {
    let registry = Registry::new(&reference, &options)?;
    let runtime = Runtime::shared()?;
    let work = async move {
        let puller = Puller {
            registry,
            file: Arc::new(file),
            pull,
        };
        let (digest, layers) = puller.layers(&reference, &options.architecture).await?;
        let union = Union::new(puller.pull.path.as_deref());
        let mut union = union.map_err(|error| puller.registry.error(error.to_string()))?;
        // What lies higher covers what is below.
        for layer in layers.iter().rev() {
            let (found, rest) = puller.unpack(layer, union).await?;
            if let Some(Found { path, len_bytes }) = found {
                return Ok(Pulled {
                    path,
                    len_bytes,
                    digest,
                });
            }
            union = rest;
        }
        let wanted = puller.pull.path.as_deref().unwrap_or("disk/...");
        let message = format!("The image holds no disk: there is no file '{wanted}' in it");
        Err(puller.registry.error(message))
    };
    runtime.run(work).await
}

struct Puller {
    registry: Registry,
    file: Arc<File>,
    pull: Pull,
}

/// Why a part of a layer did not come.
enum Broken {
    /// It may come once more.
    Passing(Error),
    Final(Error),
}

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        Broken::Final(error)
    }
}

impl Puller {
    /// The digest of the manifest, and the layers that it names.
    async fn layers(&self, reference: &Reference, machine: &str) -> Result<(String, Vec<Blob>)> {
        let (digest, bytes) = self
            .manifest(&reference.version, reference.digest())
            .await?;
        let (digest, bytes) = match parse(&bytes, machine)? {
            Manifest::Layers(layers) => return Ok((digest, layers)),
            Manifest::For(digest) => self.manifest(&digest, Some(&digest)).await?,
        };
        match parse(&bytes, machine)? {
            Manifest::Layers(layers) => Ok((digest, layers)),
            Manifest::For(_) => Err(self.registry.error("a list of images leads to another one")),
        }
    }

    async fn manifest(&self, version: &str, expected: Option<&str>) -> Result<(String, Vec<u8>)> {
        let place = self.registry.place(&format!("manifests/{version}"))?;
        let accepted = accepted();
        let asked = self.registry.ask(Method::GET, &place, |request| {
            request.header(ACCEPT, &accepted)
        });
        let answer = self.registry.good(asked.await?).await?;
        let bytes = self.registry.body(answer).await?;
        let digest = digest_text(Sha256::digest(&bytes));
        match expected {
            Some(expected) if expected != digest => Err(self
                .registry
                .error("the manifest is not what its digest says")),
            _ => Ok((digest, bytes)),
        }
    }

    /// Gets a layer, and the disk out of it, `None` if it holds none that higher layers let show; and what is hidden of
    /// the layers below.
    async fn unpack(&self, blob: &Blob, mut union: Union) -> Result<(Option<Found>, Union)> {
        let (sender, receiver) = channel(CHUNKS);
        let file = self.file.clone();
        let unpacking = blocking::run_io(move || {
            let found = layer::unpack(receiver, &mut union, &file)?;
            union.next_layer();
            Ok((found, union))
        });
        let fetched = self.fetch(blob, sender).await;
        let unpacked = unpacking.await;
        fetched?;
        unpacked.map_err(|error| match error.raw_os_error() {
            Some(_) => Error::from_io("write", &error),
            None => self
                .registry
                .error(format!("The layer cannot be unpacked: {error}")),
        })
    }

    /// Gets all of a layer, or as much as is taken.
    async fn fetch(&self, blob: &Blob, sender: Sender<Bytes>) -> Result<()> {
        let (mut at, mut digest, mut failures) = (0, Sha256::new(), 0);
        loop {
            let before = at;
            let fetched = self.fetch_on(blob, &mut at, &mut digest, &sender).await;
            let error = match fetched {
                Ok(true) => break,
                // Whoever unpacks it says why.
                Ok(false) => return Ok(()),
                Err(Broken::Final(error)) => return Err(error),
                Err(Broken::Passing(error)) => error,
            };
            failures = if at > before { 0 } else { failures + 1 };
            if failures >= MOST_FAILURES {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(200 << failures)).await;
        }
        match digest_text(digest.finalize()) == blob.digest {
            true => Ok(()),
            false => Err(self.registry.error("a layer is not what its digest says")),
        }
    }

    /// Gets what is left of a layer; whether all of it was taken.
    async fn fetch_on(
        &self,
        blob: &Blob,
        at: &mut u64,
        digest: &mut Sha256,
        sender: &Sender<Bytes>,
    ) -> Result<bool, Broken> {
        let place = self.registry.place(&format!("blobs/{}", blob.digest))?;
        let start = *at;
        let asked = self
            .registry
            .ask(Method::GET, &place, |request| match start {
                0 => request,
                start => request.header(RANGE, format!("bytes={start}-")),
            });
        let answer = asked.await.map_err(Broken::Passing)?;
        if answer.status().is_server_error() {
            return Err(match self.registry.good(answer).await {
                Err(error) => Broken::Passing(error),
                Ok(_) => Broken::Final(self.registry.error("an answer of no kind")),
            });
        }
        let mut answer = self.registry.good(answer).await?;
        let range = answer.headers().get(CONTENT_RANGE);
        let range = range
            .and_then(|range| range.to_str().ok())
            .unwrap_or_default();
        let goes_on = answer.status() == StatusCode::PARTIAL_CONTENT
            && range.starts_with(&format!("bytes {start}-"));
        if start > 0 && !goes_on {
            let message = "the connection broke, and the registry does not go on with a layer";
            return Err(self.registry.error(message).into());
        }
        loop {
            let chunk = answer.chunk().await;
            let chunk = chunk.map_err(|error| Broken::Passing(self.registry.broken(&error)))?;
            let Some(chunk) = chunk else {
                break;
            };
            *at += chunk.len() as u64;
            if *at > blob.len_bytes {
                return Err(self
                    .registry
                    .error("a layer is longer than its manifest says")
                    .into());
            }
            digest.update(&chunk);
            if sender.send(chunk).await.is_err() {
                return Ok(false);
            }
            (self.pull.progress)(*at, blob.len_bytes);
        }
        match *at == blob.len_bytes {
            true => Ok(true),
            false => Err(Broken::Passing(
                self.registry.error("a layer ends too early"),
            )),
        }
    }
}
