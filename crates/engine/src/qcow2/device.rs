//! [`Qcow2`]: an image as a block device.

use std::any::Any;
use std::future::Future;
use std::sync::Arc;

use tracing::trace;
use vellum_format::header::Header;
use vellum_io::shared_memory::SharedBuffer;
use vellum_io::{Buffer, Io, Result, heap};
use vellum_storage::Storage;

use crate::Preallocation;
use crate::gate::Gate;
use crate::qcow2::image::Image;
use crate::qcow2::open;
use crate::qcow2::options::{CacheOptions, OpenOptions};
use crate::qcow2::read::chain::Located;
use crate::qcow2::read::data::{read, read_into};
use crate::qcow2::read::status::block_status;
use crate::qcow2::write_log::log::WriteLogUsage;
use crate::{BlockDevice, DeviceInfo, DiskIdentity, Extent, RequestFlags, ZeroRequest};

/// Memory of the metadata caches, bookkeeping included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheUsage {
    /// What L2 tables take.
    pub l2_bytes: u64,
    /// What they may take now; without a size it adapts to the need.
    pub l2_limit_bytes: u64,
    /// What refcount blocks take.
    pub refcount_bytes: u64,
    /// What they may take.
    pub refcount_limit_bytes: u64,
    /// What the merged mapping of the backing chain takes.
    pub chain_index_bytes: u64,
}

/// What each cache of an image holds, and how often it had what was looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheCounts {
    /// L2 tables.
    pub l2: CacheCount,
    /// Refcount blocks.
    pub refcount: CacheCount,
    /// Decompressed clusters.
    pub compressed: CacheCount,
}

/// What was counted of one cache since the image was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheCount {
    /// Memory that it takes, in bytes.
    pub bytes: u64,
    /// Looks that found what they wanted.
    pub hits: u64,
    /// Looks that did not: it was loaded, or somebody was loading it.
    pub misses: u64,
}

impl CacheCount {
    fn new(bytes: usize, (hits, misses): (u64, u64)) -> CacheCount {
        CacheCount {
            bytes: bytes as u64,
            hits,
            misses,
        }
    }
}

/// An open qcow2 image.
///
/// Requests may be made from several lanes at once. Requests that change the
/// image run to their end even if their [`Io`] is dropped.
#[derive(Debug, Clone)]
pub struct Qcow2 {
    pub(super) image: Arc<Image>,
}

impl Qcow2 {
    /// Opens the image in `file`. Other files that the image names are opened
    /// through `gate` alone.
    ///
    /// Opened for writing, an image that was not closed cleanly (dirty bit) gets
    /// its refcounts repaired first, and unknown autoclear bits are cleared.
    ///
    /// # Errors
    /// [`vellum_io::ErrorKind::InvalidImage`] and [`vellum_io::ErrorKind::Corrupt`] for what the file
    /// holds, [`vellum_io::ErrorKind::Unsupported`] for features that are not known,
    /// [`vellum_io::ErrorKind::InvalidArgument`] for options that contradict each other, and
    /// whatever gate and storage report.
    pub async fn open(
        file: Arc<dyn Storage>,
        gate: Arc<dyn Gate>,
        options: OpenOptions,
    ) -> Result<Arc<Qcow2>> {
        let image = open::open(file, &*gate, options).await?;
        Ok(Arc::new(Qcow2 { image }))
    }

    /// The image's header as it was when the image was opened.
    pub fn header(&self) -> Arc<Header> {
        self.image.header()
    }

    /// The external data file, or the image file if there is none.
    pub fn data_storage(&self) -> Arc<dyn Storage> {
        self.image.data.clone()
    }

    /// Drops tables and decompressed clusters from the caches that were not used since the last call, as
    /// `cache-clean-interval` asks for, and gives their memory back to the system.
    pub fn clean_caches(&self) {
        self.image.l2.drop_unused();
        self.image.allocator.refcounts.cache.drop_unused();
        self.image.compressed_reads.cache.drop_unused();
        self.image.backing_chain.drop_unused();
        heap::trim();
    }

    /// Changes the budgets of the caches while the image is in use. What does not
    /// fit any more is dropped at once, except for what must be written first.
    ///
    /// `cache_clean_interval_s` is only checked: cleaning is up to the one who
    /// calls [`Qcow2::clean_caches`].
    ///
    /// # Errors
    /// [`vellum_io::ErrorKind::InvalidArgument`] for sizes that contradict each other, as when
    /// the image is opened; nothing has changed then.
    pub fn set_cache_sizes(&self, options: &CacheOptions) -> Result<()> {
        let image = &self.image;
        image
            .set_cache_sizes(options)
            .map_err(|error| image.name_error(error))
    }

    /// What the caches take now.
    pub fn cache_usage(&self) -> CacheUsage {
        let image = &self.image;
        let refcounts = &image.allocator.refcounts.cache;
        CacheUsage {
            l2_bytes: image.l2.used_bytes() as u64,
            l2_limit_bytes: image.l2.limit_bytes() as u64,
            refcount_bytes: refcounts.used_bytes() as u64,
            refcount_limit_bytes: refcounts.limit_bytes() as u64,
            chain_index_bytes: image.backing_chain.used_bytes() as u64,
        }
    }

    /// What was counted of the caches. No lock that requests take is taken for that.
    pub fn cache_counts(&self) -> CacheCounts {
        let image = &self.image;
        let refcounts = &image.allocator.refcounts.cache;
        let compressed = &image.compressed_reads.cache;
        CacheCounts {
            l2: CacheCount::new(image.l2.used_bytes(), image.l2.looks()),
            refcount: CacheCount::new(refcounts.used_bytes(), refcounts.looks()),
            compressed: CacheCount::new(compressed.counted_bytes(), compressed.looks()),
        }
    }

    /// How full the write log is; `None` if there is none. No lock that requests take is taken.
    pub fn write_log_usage(&self) -> Option<WriteLogUsage> {
        Some(self.image.write_log.get()?.usage())
    }

    /// Starts a change of the image that is not a guest's request: no record of the write log
    /// is live before it is done.
    pub(super) fn change<T: 'static, F>(
        &self,
        work: impl FnOnce(Arc<Image>) -> F + 'static,
    ) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        self.request(|image| async move {
            let _suspension = image.suspend_log().await?;
            image.free_before_change().await;
            work(image).await
        })
    }

    /// Starts a guest's request that changes the image.
    fn request<T: 'static, F>(&self, work: impl FnOnce(Arc<Image>) -> F + 'static) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        self.image.start_change(work)
    }
}

impl BlockDevice for Qcow2 {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            format: "qcow2",
            name: self.image.name.clone(),
            read_only: self.image.read_only,
            cluster_size_bytes: Some(self.image.geometry.cluster_size_bytes()),
            request_alignment_bytes: 1,
            discard_alignment_bytes: self.image.geometry.cluster_size_bytes(),
            has_zero_init: self.image.backing.is_none(),
            growable: false,
        }
    }

    fn size_bytes(&self) -> u64 {
        self.image.size.visible_bytes()
    }

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        trace!(name: "qcow2_readv_start_req", offset = offset_bytes, bytes = buffer.len());
        read(&self.image, offset_bytes, buffer)
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        trace!(name: "qcow2_writev_start_req", offset = offset_bytes, bytes = buffer.len());
        if let Err(error) = self
            .image
            .check_range("write", offset_bytes, buffer.len() as u64)
        {
            return Io::ready(Err(error));
        }
        self.request(
            move |image| async move { image.guest_write(offset_bytes, buffer, flags).await },
        )
    }

    fn read_into(&self, offset_bytes: u64, into: &[SharedBuffer]) -> Option<Io<()>> {
        read_into(&self.image, offset_bytes, into)
    }

    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: RequestFlags,
    ) -> Option<Io<()>> {
        if flags.fua || !self.image.may_overwrite_from(offset_bytes, from) {
            return None;
        }
        let from = from.into();
        Some(
            self.request(
                move |image| async move { image.guest_write_from(offset_bytes, from).await },
            ),
        )
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        let len_bytes = buffer.len() as u64;
        if let Err(error) = self
            .image
            .check_range("write compressed", offset_bytes, len_bytes)
        {
            return Io::ready(Err(error));
        }
        self.request(move |image| {
            // Taken here, so that the file holds the data in the order of the calls.
            let turn = image.compressed_writes.turns.take();
            let flushed = image.flushes_for(flags.fua);
            let flags = flags.fua(flags.fua && !flushed);
            async move {
                let written = image.write_compressed(offset_bytes, buffer, flags, turn);
                let range = offset_bytes..offset_bytes + len_bytes;
                image.guest_change(range, flushed, written).await
            }
        })
    }

    fn write_in_order(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        let len_bytes = buffer.len() as u64;
        if let Err(error) = self.image.check_range("write", offset_bytes, len_bytes) {
            return Io::ready(Err(error));
        }
        self.request(move |image| {
            // Taken here, so that the order is that of the calls.
            let turn = image.compressed_writes.turns.take();
            async move {
                let written = image.write_in_order(offset_bytes, buffer, turn);
                let range = offset_bytes..offset_bytes + len_bytes;
                image.guest_change(range, false, written).await
            }
        })
    }

    fn write_zeroes_in_order(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        request: ZeroRequest,
    ) -> Io<()> {
        let range = self
            .image
            .check_range("write zeroes", offset_bytes, len_bytes);
        if let Err(error) = range {
            return Io::ready(Err(error));
        }
        self.request(move |image| {
            let turn = image.compressed_writes.turns.take();
            let flushed = image.flushes_for(request.fua);
            let request = request.fua(request.fua && !flushed);
            async move {
                // Zeroes take a place only where a part of a cluster is zeroed.
                turn.wait().await;
                let zeroed = image.zero(offset_bytes, len_bytes, request);
                let range = offset_bytes..offset_bytes + len_bytes;
                image.guest_change(range, flushed, zeroed).await
            }
        })
    }

    fn write_shared(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        storage: Arc<dyn Storage>,
        from_bytes: u64,
    ) -> Io<()> {
        if let Err(error) = self.image.check_range("write", offset_bytes, len_bytes) {
            return Io::ready(Err(error));
        }
        let source = Located {
            storage,
            offset_bytes: from_bytes,
            len_bytes,
        };
        self.request(move |image| async move {
            let written = image.write_shared(offset_bytes, source);
            let range = offset_bytes..offset_bytes + len_bytes;
            image.guest_change(range, false, written).await
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        trace!(name: "qcow2_pwrite_zeroes_start_req", offset = offset_bytes, bytes = len_bytes);
        if let Err(error) = self
            .image
            .check_range("write zeroes", offset_bytes, len_bytes)
        {
            return Io::ready(Err(error));
        }
        self.request(move |image| async move {
            image.guest_zero(offset_bytes, len_bytes, request).await
        })
    }

    fn copy_up(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        if let Err(error) = self.image.check_range("copy up", offset_bytes, len_bytes) {
            return Io::ready(Err(error));
        }
        self.request(move |image| async move { image.copy_up(offset_bytes, len_bytes).await })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        trace!(name: "qcow2_discard_start_req", offset = offset_bytes, bytes = len_bytes);
        if let Err(error) = self.image.check_range("discard", offset_bytes, len_bytes) {
            return Io::ready(Err(error));
        }
        self.request(move |image| async move {
            let discarded = image.discard(offset_bytes, len_bytes);
            match image.discards.enabled {
                true => {
                    let range = offset_bytes..offset_bytes + len_bytes;
                    image.guest_change(range, false, discarded).await
                }
                false => discarded.await,
            }
        })
    }

    fn flush(&self) -> Io<()> {
        if self.image.read_only {
            return Io::ready(Ok(()));
        }
        self.request(move |image| async move { image.guest_flush().await })
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        Io::start(block_status(
            self.image.clone(),
            offset_bytes,
            len_bytes,
            max_depth,
        ))
    }

    fn truncate(&self, size_bytes: u64) -> Io<()> {
        self.resize(size_bytes, Preallocation::Off)
    }

    fn resize(&self, size_bytes: u64, preallocation: Preallocation) -> Io<()> {
        self.change(move |image| async move { image.resize(size_bytes, preallocation).await })
    }

    fn close(&self) -> Io<()> {
        self.image
            .start_alone(|image| async move { image.close().await })
    }

    fn clear(&self) -> Io<()> {
        self.change(move |image| async move { image.clear().await })
    }

    fn identity(&self) -> Option<DiskIdentity> {
        Some(DiskIdentity::of(&*self.image))
    }

    fn backing(&self) -> Option<Arc<dyn BlockDevice>> {
        self.image.backing.clone()
    }

    fn storage(&self) -> Option<Arc<dyn Storage>> {
        Some(self.image.file.clone())
    }

    fn format_device(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn transparent_device(&self) -> Option<&dyn Any> {
        // Who watches events would miss them, and who verifies reads the reads; and what a write log
        // holds is not in the mapping.
        let is_mapped = !self.image.read_only || self.image.write_buffer.is_empty();
        let is_plain = self.image.listener.is_none() && self.image.seal.is_none();
        (is_mapped && is_plain).then_some(self as &dyn Any)
    }
}

/// Devices that may be qcow2 images.
pub trait AsQcow2: BlockDevice {
    /// This device as a qcow2 image, where it is one or stands around one.
    fn as_qcow2(&self) -> Option<&Qcow2>;
}

impl<T: BlockDevice + ?Sized> AsQcow2 for T {
    fn as_qcow2(&self) -> Option<&Qcow2> {
        self.format_device()?.downcast_ref()
    }
}
