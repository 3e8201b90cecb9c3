//! Changing the options of an image after it was made: `qemu-img amend`.
//!
//! Whoever amends an image has it for himself: an amended image is closed first, and
//! its parts are then worked on in steps. Each step that needs the engine (to
//! allocate clusters, or to resize) opens the image anew for itself, because the
//! version and the width of refcounts are fixed for as long as an image is open.
//!
//! | file | what it does |
//! | --- | --- |
//! | `check` | what is refused before anything changes |
//! | `upgrade`, `downgrade`, `zeroes` | version 2 to 3 and back; zero clusters, which version 2 does not have |
//! | `width` | another width of refcounts |
//! | `encryption`, `keys` | key slots |
//! | `progress` | how far it is |
//!
//! Invariants:
//! - Each step makes what it needs, durably, and ends with one switch of the header
//!   (see `rewrite`). A crash leaves the image as it was before the step or after it;
//!   what was made for nothing is leaked.
//! - What can be refused is refused before anything changes, in QEMU's order.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_format::Header;
use vellum_format::extension::{Extension, kind};
use vellum_format::features::{Autoclear, Compatible};
use vellum_io::{Error, ErrorKind, Io, Result};

use crate::luks::KeyChange;
use crate::qcow2::Qcow2;
use crate::qcow2::header::rewrite::rewrite_header;
use crate::qcow2::image::Image;
use crate::qcow2::open;
use progress::Progress;

mod check;
mod downgrade;
pub(crate) mod encryption;
mod keys;
mod progress;
mod upgrade;
mod width;
mod zeroes;

vellum_io::with_setters! {
    /// What to change; what is `None` stays as it is.
    ///
    /// The names are those of `qemu-img amend -o`.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct AmendOptions {
        /// `compat`: version 2 (`0.10`) or 3 (`1.1`) of the format. Images with a data
        /// file, subclusters or zstd-compressed clusters, with refcounts of other widths
        /// than 16 bits, or with snapshots of other sizes stay at version 3.
        pub version: Option<u32>,
        /// `size`: the virtual size in bytes, a multiple of 512. What lies beyond is lost.
        pub size_bytes: Option<u64>,
        /// `backing_file`: must be what the image says; `rebase` changes it.
        pub backing_file: Option<String>,
        /// `backing_fmt`: must be what the image says.
        pub backing_format: Option<String>,
        /// `data_file`: the name of the external data file of an image that has one;
        /// empty: the name is removed, and must be given whenever the image is opened.
        pub data_file: Option<String>,
        /// `data_file_raw`: can be switched off, not on.
        pub data_file_raw: Option<bool>,
        /// `lazy_refcounts`
        pub lazy_refcounts: Option<bool>,
        /// `refcount_bits`: a power of two up to 64 that holds every refcount.
        pub refcount_bits: Option<u64>,
        /// `encrypt.*`: a change of the key slots.
        pub key_slots: Option<KeyChange>,
    }
}

/// Receives how much of how much is done; the unit is any.
pub type ProgressSink = Arc<dyn Fn(u64, u64) + Send + Sync>;

impl Qcow2 {
    /// Changes options of the image, one step after the other: version up, key
    /// slots, refcount width, data file, lazy refcounts, size, version down. Nobody
    /// else may use the image meanwhile, and this ends its use: **the image takes no
    /// changes afterwards**, whether or not the call succeeds once it has begun to change
    /// it; what is left to do is [`close`](crate::BlockDevice::close).
    ///
    /// ```
    /// use std::sync::Arc;
    /// use vellum::gate::DenyAll;
    /// use vellum::qcow2::amend::AmendOptions;
    /// use vellum::qcow2::create::{CreateOptions, create};
    /// use vellum::qcow2::{OpenOptions, Qcow2, read_header};
    /// use vellum_io::lane;
    /// use vellum_storage::{MemStorage, Storage};
    ///
    /// let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    /// # lane::block_on(async {
    /// let new = CreateOptions::default().size_bytes(1 << 20);
    /// create(file.clone(), None, &new).await?;
    /// let image = Qcow2::open(file.clone(), Arc::new(DenyAll), OpenOptions::default()).await?;
    /// let wider = AmendOptions::default().refcount_bits(Some(64));
    /// image.amend(wider, None).await?;
    /// assert_eq!(read_header(&file).await?.refcount_order, 6);
    /// # Ok::<(), vellum::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] or [`ErrorKind::Unsupported`], in QEMU's words,
    /// for what the image does not allow, with nothing changed. Resizing, or a
    /// refcount that does not fit its new width, may be refused after other changes.
    /// Otherwise what the storage reports; the image is then as one of the steps has
    /// left it.
    pub fn amend(&self, options: AmendOptions, progress: Option<ProgressSink>) -> Io<()> {
        self.image
            .start_alone(move |image| async move { amend(image, &options, progress).await })
    }
}

fn refuse(kind: ErrorKind, message: impl Into<String>) -> Error {
    Error::new(kind, "amend", message)
}

/// An image that is being amended: closed, with its parts still at hand.
struct Work {
    closed: Arc<Image>,
    progress: Progress,
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Work({})", self.closed.name)
    }
}

impl Work {
    /// The image as it is now, open for one step, which ends with
    /// [`Image::close_image`]: the files are of use for longer.
    async fn open(&self) -> Result<Arc<Image>> {
        open::reopen(&self.closed).await
    }

    /// The same for a step that changes nothing that a guest reads: bitmaps are not
    /// told.
    async fn open_metadata(&self) -> Result<Arc<Image>> {
        let image = self.open().await?;
        image.tell_of_leaks().await;
        image.sync_what_was_read().await?;
        image.preparation.is_over.store(true, Ordering::Release);
        Ok(image)
    }

    /// Switches to another header.
    async fn switch(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let rewritten = rewrite_header(&self.closed.file, |header| {
            change(header);
            Ok(())
        });
        rewritten.await.map(drop)
    }

    async fn header(&self) -> Result<Header> {
        open::read_header(&self.closed.file).await
    }
}

async fn amend(
    image: Arc<Image>,
    options: &AmendOptions,
    sink: Option<ProgressSink>,
) -> Result<()> {
    image.begin_change("amend").await?;
    let header = image.header();
    check::check(&image, options).await?;
    image.close_image().await?;
    let version = options.version.unwrap_or(header.version);
    let order = options.refcount_bits.map(u64::trailing_zeros);
    let order = order.filter(|&order| order != header.refcount_order);
    let operations = usize::from(version != header.version)
        + usize::from(order.is_some())
        + usize::from(options.key_slots.is_some());
    let mut work = Work {
        closed: image,
        progress: Progress::new(sink, operations as u64),
    };
    if version > header.version {
        work.progress.begin_operation();
        upgrade::upgrade(&work).await?;
    }
    if let Some(change) = &options.key_slots {
        work.progress.begin_operation();
        encryption::change(&work, change.clone()).await?;
    }
    if let Some(order) = order {
        work.progress.begin_operation();
        width::change_width(&work, order).await?;
    }
    change_fields(&work, options).await?;
    if let Some(size_bytes) = options.size_bytes.filter(|&bytes| bytes > 0) {
        resize(&work, size_bytes).await?;
    }
    if version < header.version {
        let image = work.open_metadata().await?;
        let checked = check::check_before_downgrade(&image).await;
        image.close_image().await?;
        checked?;
        work.progress.begin_operation();
        downgrade::downgrade(&work).await?;
    }
    Ok(())
}

/// What needs nothing but another header.
async fn change_fields(work: &Work, options: &AmendOptions) -> Result<()> {
    let header = work.header().await?;
    let mut changed = header.clone();
    if options.data_file_raw == Some(false) {
        changed.autoclear = changed.autoclear.without(Autoclear::RAW_EXTERNAL_DATA);
    }
    match &options.data_file {
        Some(name) if name.is_empty() => changed.remove_extension(kind::EXTERNAL_DATA_FILE),
        Some(name) => {
            let name = name.clone().into_bytes();
            changed.set_extension(Extension::ExternalDataFile(name));
        }
        None => {}
    }
    changed.compatible = match options.lazy_refcounts {
        Some(true) => changed.compatible.with(Compatible::LAZY_REFCOUNTS),
        Some(false) => changed.compatible.without(Compatible::LAZY_REFCOUNTS),
        None => changed.compatible,
    };
    match changed == header {
        true => Ok(()),
        false => work.switch(|header| *header = changed).await,
    }
}

async fn resize(work: &Work, size_bytes: u64) -> Result<()> {
    let image = work.open().await?;
    let resized = image.resize(size_bytes, Default::default()).await;
    let closed = image.close_image().await;
    resized.and(closed)
}
