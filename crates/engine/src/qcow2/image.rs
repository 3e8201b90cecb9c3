//! An open image: its parts, and the state that all requests share.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vellum_format::features::Autoclear;
use vellum_format::geometry::Geometry;
use vellum_format::header::Header;
use vellum_format::types::{GuestOffset, HostCluster, HostOffset};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};
use vellum_storage::nodes::debug::Debugger;
use vellum_storage::{Event, Storage, WriteFlags};

use crate::BlockDevice;
use crate::qcow2::alloc::allocator::{Allocation, Allocator};
use crate::qcow2::alloc::lazy::LazyRefcounts;
use crate::qcow2::alloc::unwritten::UnwrittenSubclusters;
use crate::qcow2::bitmap::state::BitmapState;
use crate::qcow2::commit::epochs::Epochs;
use crate::qcow2::commit::write_order::Commits;
use crate::qcow2::compressed::read_state::CompressedReads;
use crate::qcow2::compressed::write_state::CompressedWrites;
use crate::qcow2::encryption::Encryption;
use crate::qcow2::header::load::SnapshotTable;
use crate::qcow2::integrity::fail_stop::FailStop;
use crate::qcow2::integrity::overlap::{OverlapMap, refused_for};
use crate::qcow2::mapping::l1::L1Table;
use crate::qcow2::mapping::lookup::{L2Cache, Lookup, Mapper, MappingRun, Slice, View};
use crate::qcow2::messages::Messages;
use crate::qcow2::options::{CacheOptions, PassDiscards};
use crate::qcow2::read::layers::BackingChain;
use crate::qcow2::resize::size::Size;
use crate::qcow2::table_cache::cache::Budget;
use crate::qcow2::table_cache::readahead::Readahead;
use crate::qcow2::write_buffer::buffer::WriteBuffer;
use crate::range_lock::{Mode, RangeGuard, RangeLock};

/// Everything that the requests on one image share.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) name: String,
    /// Who wants to be told of events, if somebody does.
    pub(crate) debugger: Option<Arc<Debugger>>,
    pub(crate) geometry: Geometry,
    pub(crate) size: Size,
    /// One at a time changes the size, or the snapshots.
    pub(crate) resizing: async_lock::Mutex<()>,
    pub(crate) read_only: bool,
    pub(crate) discard: bool,
    pub(crate) discard_no_unref: bool,
    pub(crate) pass_discards: PassDiscards,
    pub(crate) header: Mutex<Arc<Header>>,
    pub(crate) snapshots: Mutex<Arc<SnapshotTable>>,
    /// One at a time writes to the header on disk.
    pub(crate) header_writes: async_lock::Mutex<()>,
    /// The image file: all metadata, and the data unless there is a data file.
    pub(crate) file: Arc<dyn Storage>,
    /// The name of what holds the data clusters, for all who ask where bytes lie.
    pub(crate) data_name: Arc<str>,
    /// What holds the data clusters, as the guest sees them where LUKS encrypts them;
    /// it refuses writes that would hit metadata.
    pub(crate) data: Arc<dyn Storage>,
    /// The same without a guard, for those who open the image anew: the metadata that
    /// is guarded here may have moved for them.
    pub(crate) unguarded_data: Arc<dyn Storage>,
    pub(crate) encryption: Encryption,
    pub(crate) backing: Option<Arc<dyn BlockDevice>>,
    /// What lies below, seen as one mapping.
    pub(crate) backing_chain: BackingChain,
    pub(crate) l1: L1Table,
    pub(crate) l2: L2Cache,
    /// How the sizes of the caches follow from the size of the device.
    pub(crate) cache_options: Mutex<CacheOptions>,
    pub(crate) readahead: Readahead,
    pub(crate) allocator: Arc<Allocator>,
    pub(crate) compressed_reads: CompressedReads,
    pub(crate) compressed_writes: CompressedWrites,
    pub(crate) lazy_refcounts: LazyRefcounts,
    /// Guest ranges of running changing requests, in bytes.
    pub(crate) guest_ranges: Arc<RangeLock>,
    /// L1 indexes whose L2 table is being made.
    pub(crate) l1_entries: Arc<RangeLock>,
    pub(crate) read_epochs: Arc<Epochs>,
    pub(crate) write_buffer: WriteBuffer,
    pub(crate) unwritten: UnwrittenSubclusters,
    pub(crate) bitmaps: BitmapState,
    pub(crate) commits: Commits,
    /// Where metadata lies, which no data may hit.
    pub(crate) overlap: Arc<OverlapMap>,
    pub(crate) messages: Messages,
    pub(crate) fail_stop: FailStop,
    /// What must happen once before the first change has happened.
    pub(crate) prepared: AtomicBool,
    pub(crate) preparing: async_lock::Mutex<()>,
    /// Whether data may lie in holes of the file, once that is known.
    pub(crate) preallocated: std::sync::OnceLock<bool>,
}

impl Image {
    /// Tells the debugger, if there is one, of an event, and waits as long as it holds us.
    #[inline]
    pub(crate) async fn emit(&self, event: Event) {
        if let Some(debugger) = &self.debugger
            && let Some(suspension) = debugger.event(event)
        {
            Box::pin(suspension.resumed()).await;
        }
    }

    /// The tables of a lookup.
    pub(crate) fn mapper(&self) -> Mapper<'_> {
        Mapper {
            geometry: &self.geometry,
            l1: &self.l1,
            l2: &self.l2,
            to_write: false,
        }
    }

    pub(crate) fn has_external_data(&self) -> bool {
        self.geometry.external_data
    }

    /// Whether the data file, read as raw, must show what the guest sees.
    pub(crate) fn data_is_raw(&self) -> bool {
        self.header()
            .autoclear
            .contains(Autoclear::RAW_EXTERNAL_DATA)
    }

    /// Brings an L2 slice into memory.
    pub(crate) async fn load_slice(&self, slice: Slice) -> Result<()> {
        self.emit(Event::L2Load).await;
        let read = self.read_slices(slice.key, self.l2.table_bytes() as u64);
        self.l2.load(slice.key, read).await
    }

    /// A view that begins at `guest` and is not empty, loading what it needs.
    pub(crate) async fn view(&self, guest: GuestOffset, len_bytes: u64) -> Result<View> {
        self.view_of(self.mapper(), guest, len_bytes).await
    }

    /// As [`Image::view`], for one who is going to write there.
    pub(crate) async fn view_to_write(&self, guest: GuestOffset, len_bytes: u64) -> Result<View> {
        let mapper = Mapper {
            to_write: true,
            ..self.mapper()
        };
        self.view_of(mapper, guest, len_bytes).await
    }

    async fn view_of(
        &self,
        mapper: Mapper<'_>,
        guest: GuestOffset,
        len_bytes: u64,
    ) -> Result<View> {
        loop {
            match mapper.view(guest, len_bytes) {
                Ok(Lookup::Hit(view)) => return Ok(view),
                Ok(Lookup::Miss(slice)) => self.load_slice_at(guest, slice).await?,
                Err(error) => return Err(self.mark_corrupt(error).await),
            }
        }
    }

    /// The first run of a range, which may end before the range does.
    pub(crate) async fn first_run(&self, guest: GuestOffset, len_bytes: u64) -> Result<MappingRun> {
        loop {
            match self.mapper().first_run(guest, len_bytes) {
                Ok(Lookup::Hit(run)) => return Ok(run),
                Ok(Lookup::Miss(slice)) => self.load_slice_at(guest, slice).await?,
                Err(error) => return Err(self.mark_corrupt(error).await),
            }
        }
    }

    /// Allocates host clusters; refcounts that contradict the rest of the metadata
    /// mark the image corrupt.
    pub(crate) async fn allocate(&self, want: u64) -> Result<Allocation> {
        self.allocate_near(want, None).await
    }

    /// As [`Image::allocate`]; `after`: where the data of the guest cluster before
    /// these ends.
    pub(crate) async fn allocate_near(
        &self,
        want: u64,
        after: Option<HostOffset>,
    ) -> Result<Allocation> {
        self.begin_lazy_refcounts().await?;
        self.emit(Event::ClusterAlloc).await;
        match self.allocator.allocate_near(want, after).await {
            Ok(allocation) => Ok(allocation),
            Err(error) => Err(self.mark_corrupt(error).await),
        }
    }

    /// As [`Image::allocate_near`], one cluster for something that has a name.
    pub(crate) async fn allocate_for(
        &self,
        what: &str,
        after: Option<HostOffset>,
    ) -> Result<Allocation> {
        self.begin_lazy_refcounts().await?;
        self.emit(Event::ClusterAlloc).await;
        match self.allocator.allocate_near(1, after).await {
            Ok(allocation) => Ok(allocation),
            Err(error) => Err(self.mark_corrupt(refused_for(what, error)).await),
        }
    }

    /// Where the data of the guest cluster before `guest` ends, as far as memory
    /// knows.
    pub(crate) fn end_of_data_before(&self, guest: u64) -> Option<HostOffset> {
        let cluster = self.geometry.cluster_size_bytes();
        let before = GuestOffset(guest.checked_sub(cluster)?);
        match self.mapper().cluster(before) {
            Ok(Lookup::Hit(mapping)) => mapping
                .host()
                .map(|host| HostOffset(host.bytes() + cluster)),
            _ => None,
        }
    }

    /// The refcount of a host cluster.
    pub(crate) async fn refcount(&self, cluster: HostCluster) -> Result<u64> {
        loop {
            match self.allocator.refcounts.get(cluster)? {
                Lookup::Hit(count) => return Ok(count),
                Lookup::Miss(slice) => self.allocator.refcounts.load(slice.key).await?,
            }
        }
    }

    /// Names this image in an error that names nothing yet.
    pub(crate) fn name_error(&self, error: Error) -> Error {
        error.target(self.name.clone())
    }

    /// Refuses a range that is not inside the device.
    pub(crate) fn check_range(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.size.visible_bytes() => Ok(()),
            _ => Err(Error::new(
                ErrorKind::OutOfRange,
                operation,
                format!(
                    "{len_bytes} bytes reach beyond the end of the device ({})",
                    self.size.visible_bytes()
                ),
            )
            .target(self.name.clone())
            .at(offset_bytes)),
        }
    }

    /// The size that the engine works with: the guest's, or more while that grows.
    #[inline]
    pub(crate) fn size_bytes(&self) -> u64 {
        self.size.addressable_bytes()
    }

    /// Sizes the metadata caches for the device as it is now.
    ///
    /// # Errors
    /// Where the options contradict themselves; nothing has changed then.
    pub(crate) fn set_cache_sizes(&self, options: &CacheOptions) -> Result<()> {
        let mut current = self.cache_options.lock();
        let sizes = options.resolve(&self.geometry, self.size.visible_bytes())?;
        *current = *options;
        self.l2.set_budget(sizes.l2);
        self.allocator.refcounts.cache.set_budget(Budget {
            max_bytes: sizes.refcount_bytes,
            adaptive: false,
        });
        Ok(())
    }

    /// Takes the guest range that covers whole clusters around `range`.
    pub(crate) async fn lock_clusters(&self, range: Range<u64>, mode: Mode) -> Result<RangeGuard> {
        let cluster = self.geometry.cluster_size_bytes();
        let start = self.geometry.cluster_start(range.start);
        let end = range.end.div_ceil(cluster).saturating_mul(cluster);
        let guard = self.guest_ranges.acquire(start..end, mode).await;
        self.check_still_inside(range)?;
        Ok(guard)
    }

    /// Refuses a range, held by now, that the image has lost by shrinking since the
    /// request began.
    pub(crate) fn check_still_inside(&self, range: Range<u64>) -> Result<()> {
        if range.end <= self.size_bytes() {
            return Ok(());
        }
        let message = "the device became smaller while the request waited";
        Err(Error::new(ErrorKind::OutOfRange, "write", message)
            .target(self.name.clone())
            .at(range.start))
    }

    /// Must be called before anything changes: refuses where changes are not
    /// allowed, and once tells other programs through the header that this image
    /// is changing.
    pub(crate) async fn begin_change(&self, operation: &'static str) -> Result<()> {
        self.check_changeable(operation)?;
        if self.prepared.load(Ordering::Acquire) {
            return Ok(());
        }
        let _one = self.preparing.lock().await;
        if !self.prepared.load(Ordering::Acquire) {
            // Whoever came first may have failed.
            self.check_changeable(operation)?;
            self.map_metadata().await?;
            self.begin_tracking().await?;
            self.prepared.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Refuses where changes are not allowed.
    pub(crate) fn check_changeable(&self, operation: &'static str) -> Result<()> {
        if !self.read_only {
            return self.check_not_stopped();
        }
        let message = "the image is open read-only";
        Err(Error::new(ErrorKind::ReadOnly, operation, message).target(self.name.clone()))
    }

    /// The header as it is now.
    pub(crate) fn header(&self) -> Arc<Header> {
        self.header.lock().clone()
    }

    /// Changes the header in memory.
    pub(crate) fn change_header(&self, change: impl FnOnce(&mut Header)) {
        let mut header = self.header.lock();
        change(Arc::make_mut(&mut header));
    }

    /// Writes one field of the header in place. The known fields all lie in the
    /// first 512 bytes, so a crash leaves the old or the new value.
    pub(crate) async fn write_header_field(&self, offset_bytes: usize, bytes: &[u8]) -> Result<()> {
        let _one = self.header_writes.lock().await;
        let buffers = Buffers::from_iter([Buffer::copy_of(bytes)]);
        self.file
            .write(offset_bytes as u64, buffers, WriteFlags::default())
            .await?;
        self.file.flush().await
    }

    /// As [`Image::write_header_field`], for fields that lead to other metadata from now
    /// on. If they cannot be written, the `old` ones are written once more.
    ///
    /// # Errors
    /// The first one. The image goes on as it was before if the old fields are there
    /// again; if even that is not known, it accepts no more changes.
    pub(crate) async fn switch_header_fields(
        &self,
        offset_bytes: usize,
        old: &[u8],
        new: &[u8],
    ) -> Result<()> {
        let _one = self.header_writes.lock().await;
        let write = |bytes: &[u8]| {
            let buffers = Buffers::from_iter([Buffer::copy_of(bytes)]);
            self.file
                .write(offset_bytes as u64, buffers, WriteFlags::default())
        };
        let Err(error) = write(new).await else {
            let flushed = self.file.flush().await;
            return flushed.inspect_err(|error| self.stop_changes(error.clone()));
        };
        let taken_back = async {
            write(old).await?;
            self.file.flush().await
        };
        if taken_back.await.is_err() {
            self.stop_changes(error.clone());
        }
        Err(error)
    }

    /// Writes back everything; afterwards all requests that change something fail.
    pub(crate) async fn close(self: &Arc<Self>) -> Result<()> {
        let closed = self.close_image().await;
        // A node below may have something left to write, however this ended.
        let file = self.file.close().await;
        let data = match self.has_external_data() {
            true => self.data.close().await,
            false => Ok(()),
        };
        closed.and(file).and(data)
    }

    /// Closes the image, but not the files that it lies in.
    pub(crate) async fn close_image(self: &Arc<Self>) -> Result<()> {
        if self.read_only || self.has_ended() {
            return Ok(());
        }
        if !self.prepared.load(Ordering::Acquire) && !self.has_kept_bitmaps() {
            // Nothing was ever changed, so there is nothing to write or to flush.
            self.end_use();
            return Ok(());
        }
        self.allow_retry();
        self.check_not_stopped()?;
        // What could not be written back is lost, and reported; all else is kept.
        let written_back = self.write_back_all().await;
        self.seal_packed().await?;
        self.commit().await?;
        // Else they stay in use, and are kept as after a crash.
        let bitmaps = self.close_bitmaps().await;
        self.resume_refcounts();
        self.release_all_dropped().await?;
        self.allocator.release_reserve().await?;
        // Writes the counts that have gone down, and those of clusters counted ahead.
        self.commit().await?;
        self.end_lazy_refcounts().await?;
        self.end_use();
        written_back.and(bitmaps)
    }
}
