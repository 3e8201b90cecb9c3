//! What has changed of a disk since it was pushed: by a bitmap that the push leaves in the image, and that
//! is named for what was pushed, so that it cannot be taken for another one's.

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use vellum::qcow2::info::ImageInfo;
use vellum::qcow2::{AsQcow2, BitmapOptions, Bitmaps};
use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_io::lane;
use vellum_options::{ImageSpec, OpenFlags, Options, Source};
use vellum_repository::{CHUNK_BYTES, PushId, TagName};
use vellum_storage::SourceVersion;

use super::Named;
use crate::layer_files::layer_files;
use crate::open_device;

/// How long a server may take to open the connection that reads a bitmap.
const BITMAP_LIMIT: Duration = Duration::from_secs(10);

/// The bitmaps of pushes of one disk to one tag of one repository.
///
/// A bitmap notes what changes in its own image. So its name also tells which file that is, and what it
/// stands on: of a copy, or where another backing file is there or it was changed, nothing is known.
#[derive(Debug)]
pub struct Tracking {
    bitmaps: Bitmaps,
    prefix: String,
    /// `None`: a change of a layer below would go unnoticed.
    identity: Option<String>,
}

impl Tracking {
    /// Those of an image; `None` if its format has no bitmaps, or others write to its data past it.
    ///
    /// # Errors
    /// If the image's header cannot be read.
    pub async fn of(device: &dyn BlockDevice, repository: &Named) -> Result<Option<Self>> {
        let (Some(image), Some(file)) = (device.as_qcow2(), device.storage()) else {
            return Ok(None);
        };
        // What is written to such a file by itself, no bitmap notes.
        if ImageInfo::read(file).await?.data_file_raw {
            return Ok(None);
        }
        let bitmaps = image.bitmaps();
        let tag: &TagName = &repository.disk.tag;
        let hash = vellum_repository::name_hash(repository.objects.name());
        Ok(Some(Tracking {
            bitmaps,
            prefix: format!("push/{hash}/{tag}/"),
            identity: identity_of(device).await,
        }))
    }

    /// Whether the versions of all layers below are known. What changes in a layer whose version is not would be in no
    /// bitmap.
    pub fn is_possible(&self) -> bool {
        self.identity.is_some()
    }

    fn name(&self, push: PushId) -> Option<String> {
        let identity = self.identity.as_ref()?;
        Some(format!("{}{push}{identity}", self.prefix))
    }

    /// What has changed since a push; `None` if that is not known.
    ///
    /// # Errors
    /// If the bitmaps cannot be read.
    pub async fn since(&self, push: PushId) -> Result<Option<Vec<Range<u64>>>> {
        let Some(name) = self.name(push) else {
            return Ok(None);
        };
        let listed = self.bitmaps.list().await?;
        let Some(info) = listed.into_iter().find(|info| info.name == name) else {
            return Ok(None);
        };
        // One that was switched off, or was in use in a crash, does not know all changes.
        if !info.auto || !info.consistent {
            return Ok(None);
        }
        let dirty = self.bitmaps.read(&name).await?;
        Ok(Some(dirty.ranges().collect()))
    }

    /// Begins to note what changes from now on, for a push of what there is now; nothing, where that is not
    /// [possible](Tracking::is_possible).
    ///
    /// # Errors
    /// If the image has no room for a bitmap, or is read-only.
    pub async fn begin(&self, push: PushId) -> Result<()> {
        let Some(name) = self.name(push) else {
            return Ok(());
        };
        let options = BitmapOptions::default().granularity_bytes(Some(CHUNK_BYTES));
        self.bitmaps.add(&name, options).await
    }

    /// The push has come to nothing: its bitmap goes.
    pub async fn give_up(&self, push: PushId) {
        if let Some(name) = self.name(push) {
            // One that stays goes with the next push.
            let _ = self.bitmaps.remove(&name).await;
        }
    }

    /// The push has succeeded: all other bitmaps of the tag go.
    ///
    /// # Errors
    /// If the image cannot be changed.
    pub async fn keep_only(&self, push: PushId) -> Result<()> {
        let kept = self.name(push);
        for info in self.bitmaps.list().await? {
            if info.name.starts_with(&self.prefix) && Some(&info.name) != kept.as_ref() {
                self.bitmaps.remove(&info.name).await?;
            }
        }
        Ok(())
    }
}

/// What tells an image's file, and the layers below it as they are now, from others; `None` where that is unknown.
async fn identity_of(device: &dyn BlockDevice) -> Option<String> {
    let mut told = String::new();
    if let Some(file) = device
        .storage()
        .and_then(|storage| std::fs::metadata(storage.name()).ok())
    {
        // A copy of the image is another one, whose bitmap may be of another moment than its content.
        let made = file.created().ok();
        told += &format!("{} {made:?}\n", file.ino());
    }
    let mut next = device.backing();
    while let Some(layer) = next {
        let (info, size_bytes) = (layer.info(), layer.size_bytes());
        told += &format!("{} {} {size_bytes}", info.name, info.format);
        let storages = layer_files(&*layer);
        if storages.is_empty() {
            return None;
        }
        for storage in storages {
            let version = SourceVersion::of_storage(&*storage).await.known()?;
            told += &format!(" {version}");
        }
        told += "\n";
        next = layer.backing();
    }
    Some(format!("/{}", vellum_repository::name_hash(&told)))
}

/// What a bitmap of the user's says: one of the image's, or one that an NBD server exports
/// (`qemu:dirty-bitmap:NAME`).
///
/// # Errors
/// If there is none of that name, or it does not know all changes.
pub async fn dirty_of(
    spec: &ImageSpec,
    device: &dyn BlockDevice,
    name: &str,
) -> Result<Vec<Range<u64>>> {
    if let Some(image) = device.as_qcow2() {
        if !image.bitmaps().find(name).await?.auto {
            let message = format!(
                "the bitmap '{name}' is disabled, and does not know what has changed since"
            );
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "read bitmap",
                message,
            ));
        }
        let dirty = image.bitmaps().read(name).await?;
        return Ok(dirty.ranges().collect());
    }
    let Some(mut server) = nbd_options(spec)? else {
        let message = "a bitmap is in a qcow2 image, or exported by an NBD server";
        return Err(Error::new(ErrorKind::Unsupported, "read bitmap", message));
    };
    server.set_text("x-dirty-bitmap", format!("qemu:dirty-bitmap:{name}"));
    let mut options = Options::new();
    options.set_text("driver", "raw");
    options.set_group("file", server);
    let bitmap = ImageSpec {
        source: Source::Options(options),
        format: None,
        added: Options::new(),
        name: spec.name.clone(),
    };
    let bitmap = open_beside(&bitmap).await?;
    let dirty = dirty_over_nbd(&*bitmap).await;
    let closed = bitmap.close().await;
    let dirty = dirty?;
    closed.map(|()| dirty)
}

/// Opens a server's bitmap while the disk is open already: a connection of its own, which a server that serves one
/// client at a time (as qemu-nbd does, unless it is told otherwise) accepts, and never greets.
async fn open_beside(bitmap: &ImageSpec) -> Result<Arc<dyn BlockDevice>> {
    let flags = OpenFlags::default();
    let opening = pin!(open_device(bitmap, &flags));
    let limit = pin!(lane::sleep(BITMAP_LIMIT));
    match select(opening, limit).await {
        Either::Left((opened, _)) => opened,
        Either::Right(_) => {
            let message = format!(
                "the server has not answered a second client for {} seconds, which reads the bitmap beside the disk: \
                 have it serve two clients at a time or more ('qemu-nbd --shared=2')",
                BITMAP_LIMIT.as_secs()
            );
            let error = Error::new(ErrorKind::Io, "read bitmap", message);
            Err(error.with_errno(libc::ETIMEDOUT))
        }
    }
}

/// The options of the NBD client that an image is, as it is or below a raw node.
fn nbd_options(spec: &ImageSpec) -> Result<Option<Options>> {
    let mut options = spec.options()?;
    let is_nbd = |options: &Options| options.get_text("driver") == Some("nbd");
    if is_nbd(&options) {
        return Ok(Some(options));
    }
    let below = options.take_group("file");
    Ok(is_nbd(&below).then_some(below))
}

/// With such a context a client shows what is dirty as if it were not there.
async fn dirty_over_nbd(bitmap: &dyn BlockDevice) -> Result<Vec<Range<u64>>> {
    let mut dirty = Vec::new();
    let (mut at, end) = (0, bitmap.size_bytes());
    while at < end {
        let extent = bitmap.block_status(at, end - at, u32::MAX).await?;
        let next = at + extent.len_bytes.max(1);
        if !extent.kind.is_data() {
            dirty.push(at..next);
        }
        at = next;
    }
    Ok(dirty)
}
