//! The request itself: one step after the other.

use std::sync::Arc;

use vellum_format::extension::{Extension, kind};
use vellum_format::features::{Autoclear, Compatible};
use vellum_io::{Io, Result};

use super::options::{AmendOptions, ProgressSink};
use super::progress::Progress;
use super::work::Work;
use super::{check, downgrade, encryption, upgrade, width};
use crate::qcow2::Qcow2;
use crate::qcow2::image::Image;

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
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) or
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported), in QEMU's words,
    /// for what the image does not allow, with nothing changed. Resizing, or a
    /// refcount that does not fit its new width, may be refused after other changes.
    /// Otherwise what the storage reports; the image is then as one of the steps has
    /// left it.
    pub fn amend(&self, options: AmendOptions, progress: Option<ProgressSink>) -> Io<()> {
        self.image
            .start_alone(move |image| async move { amend(image, &options, progress).await })
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
