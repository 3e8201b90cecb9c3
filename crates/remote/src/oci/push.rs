//! Putting a disk into a registry.

use std::fs::File;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE};
use reqwest::{Method, Url};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc::{Receiver, channel};
use vellum_io::{Error, ErrorKind, Result};

use super::layer::{Content, Layer, Packing, pack};
use super::manifest::{self, Blob};
use super::reference::Reference;
use super::registry::{Registry, location};
use super::{OciOptions, digest_text};
use crate::blocking;
use crate::runtime::Runtime;
use crate::sending::{Moved, Watched};

/// Pieces between the file and the network.
const PIECES: usize = 8;

/// How a disk is put into a registry.
pub struct Push {
    /// Its name in `disk/`: `disk.qcow2`, say.
    pub name: String,
    /// How its layer is packed.
    pub packing: Packing,
    /// Is told how many bytes of how many of the layer are there.
    pub progress: Arc<dyn Fn(u64, u64) + Send + Sync>,
}

impl std::fmt::Debug for Push {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Push")
            .field("name", &self.name)
            .field("packing", &self.packing)
            .finish_non_exhaustive()
    }
}

/// Makes an image of a file that nobody changes meanwhile, in the place of one of that name; the digest of its manifest. On a
/// lane.
///
/// # Errors
/// If the file cannot be read, the name is a digest, or the registry does not take it; what was there
/// before stays then.
pub async fn push(
    file: File,
    reference: Reference,
    options: OciOptions,
    push: Push,
) -> Result<String> {
    if reference.digest().is_some() {
        let message = "an image gets a tag, and its digest follows from what it holds";
        return Err(Error::new(ErrorKind::InvalidArgument, "push", message));
    }
    let registry = Registry::new(&reference, &options)?;
    let runtime = Runtime::shared()?;
    let work = async move {
        let file = Arc::new(file);
        let (packed, name, packing) = (file.clone(), push.name.clone(), push.packing);
        let layer = blocking::run_io(move || pack(packed, &name, packing));
        let layer = layer
            .await
            .map_err(|error| Error::from_io("make layer", &error))?;
        let Layer {
            blob,
            archive_digest,
            content,
        } = layer;
        let pusher = Pusher { registry };
        pusher.put(&blob, content, push.progress).await?;
        let config = manifest::config(&options.architecture, &archive_digest);
        let config_blob = blob_of(&config);
        let silent = Arc::new(|_, _| ());
        pusher
            .put(&config_blob, Content::of(config, file), silent)
            .await?;
        let manifest = manifest::manifest(&config_blob, &blob, push.packing.suffix());
        pusher.name(&reference.version, manifest).await
    };
    runtime.run(work).await
}

fn blob_of(bytes: &[u8]) -> Blob {
    Blob {
        digest: digest_text(Sha256::digest(bytes)),
        len_bytes: bytes.len() as u64,
    }
}

struct Pusher {
    registry: Registry,
}

impl Pusher {
    /// Puts bytes there, if they are not there already.
    async fn put(
        &self,
        blob: &Blob,
        content: Content,
        progress: Arc<dyn Fn(u64, u64) + Send + Sync>,
    ) -> Result<()> {
        let registry = &self.registry;
        let place = registry.place(&format!("blobs/{}", blob.digest))?;
        let known = registry
            .ask(Method::HEAD, &place, |request| request)
            .await?;
        if known.status().is_success() {
            progress(blob.len_bytes, blob.len_bytes);
            return Ok(());
        }
        let place = registry.place("blobs/uploads/")?;
        let empty = |request: reqwest::RequestBuilder| request.header(CONTENT_LENGTH, 0);
        let begun = registry.ask(Method::POST, &place, empty).await?;
        let begun = registry.good(begun).await?;
        let to = location(begun.headers()).map(|to| registry.place(to));
        let mut to: Url =
            to.unwrap_or_else(|| Err(registry.error("the registry does not say where to")))?;
        to.query_pairs_mut().append_pair("digest", &blob.digest);
        let (sender, receiver) = channel(PIECES);
        let started = blocking::start(move || content.send(&sender));
        started.map_err(|error| Error::from_io("send layer", &error))?;
        let upload = Upload {
            receiver,
            sent_bytes: 0,
            len_bytes: blob.len_bytes,
            progress,
        };
        // It is sent once: who asks has been shown already.
        let moved = Moved::new();
        let upload = Watched::new(upload, moved.clone());
        let body = Mutex::new(Some(reqwest::Body::wrap(upload)));
        let sent = registry.put(&to, &moved, |request| {
            let request = request
                .header(CONTENT_TYPE, "application/octet-stream")
                .header(CONTENT_LENGTH, blob.len_bytes);
            match body.lock().take() {
                Some(body) => request.body(body),
                None => request,
            }
        });
        registry.good(sent.await?).await.map(drop)
    }

    /// Gives a manifest its name; its digest.
    async fn name(&self, version: &str, bytes: Vec<u8>) -> Result<String> {
        let place = self.registry.place(&format!("manifests/{version}"))?;
        let put = self.registry.ask(Method::PUT, &place, |request| {
            request
                .header(CONTENT_TYPE, manifest::MANIFEST)
                .body(bytes.clone())
        });
        self.registry.good(put.await?).await?;
        Ok(digest_text(Sha256::digest(&bytes)))
    }
}

/// Bytes on their way from a file.
struct Upload {
    receiver: Receiver<io::Result<Bytes>>,
    sent_bytes: u64,
    len_bytes: u64,
    progress: Arc<dyn Fn(u64, u64) + Send + Sync>,
}

impl Body for Upload {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let piece = std::task::ready!(self.receiver.poll_recv(context));
        Poll::Ready(piece.map(|piece| {
            let piece = piece?;
            self.sent_bytes += piece.len() as u64;
            (self.progress)(self.sent_bytes, self.len_bytes);
            Ok(Frame::data(piece))
        }))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.len_bytes.saturating_sub(self.sent_bytes))
    }
}
