//! An open image: its parts, and the state that all requests share.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures_util::TryFutureExt;
use parking_lot::Mutex;
use vellum_format::features::Autoclear;
use vellum_format::geometry::Geometry;
use vellum_format::types::{GuestOffset, HostCluster, HostOffset};
use vellum_io::{Error, ErrorKind, Io, Result, spawn_to_completion};
use vellum_storage::mutants::{self, Mutant};
use vellum_storage::{Event, EventListener, Storage};

use crate::luks::GuestEncryption;
use crate::qcow2::alloc::allocator::{Allocation, Allocator};
use crate::qcow2::alloc::host_room::HostRoom;
use crate::qcow2::alloc::lazy::LazyRefcounts;
use crate::qcow2::alloc::unwritten::UnwrittenSubclusters;
use crate::qcow2::bitmap::state::BitmapState;
use crate::qcow2::cache_budget::CacheShare;
use crate::qcow2::checksums::pages::Checksums;
use crate::qcow2::commit::barrier::BarrierFailure;
use crate::qcow2::commit::epochs::Epochs;
use crate::qcow2::commit::write_order::Commits;
use crate::qcow2::compressed::read_state::CompressedReads;
use crate::qcow2::compressed::write_state::CompressedWrites;
use crate::qcow2::header::load::SnapshotTable;
use crate::qcow2::header::state::HeaderState;
use crate::qcow2::integrity::fail_stop::FailStop;
use crate::qcow2::integrity::overlap::{OverlapMap, refused_for};
use crate::qcow2::mapping::l1::L1Table;
use crate::qcow2::mapping::lookup::{L2Cache, Lookup, Mapper, MappingRun, Slice, View};
use crate::qcow2::messages::Messages;
use crate::qcow2::options::{CacheOptions, Discards};
use crate::qcow2::read::layers::BackingChain;
use crate::qcow2::seal::state::SealedReads;
use crate::qcow2::snapshot::views::SnapshotViews;
use crate::qcow2::table_cache::readahead::Readahead;
use crate::qcow2::write_buffer::buffer::WriteBuffer;
use crate::qcow2::write_log::log::WriteLog;
use crate::{BlockDevice, HostLocation};
use vellum_io::changes::Changes;
use vellum_io::range_lock::{Mode, RangeGuard, RangeLock};

/// The virtual size of an open image.
#[derive(Debug)]
pub(crate) struct Size {
    /// What guests see and may ask for.
    visible_bytes: AtomicU64,
    /// What the engine itself may touch: more while the image grows.
    addressable_bytes: AtomicU64,
}

impl Size {
    /// A size that nobody is changing.
    pub(crate) fn new(size_bytes: u64) -> Self {
        Size {
            visible_bytes: AtomicU64::new(size_bytes),
            addressable_bytes: AtomicU64::new(size_bytes),
        }
    }

    /// What guests see.
    pub(crate) fn visible_bytes(&self) -> u64 {
        self.visible_bytes.load(Ordering::Acquire)
    }

    /// What may be touched.
    #[inline]
    pub(crate) fn addressable_bytes(&self) -> u64 {
        self.addressable_bytes.load(Ordering::Acquire)
    }

    pub(crate) fn set(&self, size_bytes: u64) {
        self.addressable_bytes.store(size_bytes, Ordering::Release);
        self.visible_bytes.store(size_bytes, Ordering::Release);
    }

    pub(crate) fn set_visible(&self, size_bytes: u64) {
        self.visible_bytes.store(size_bytes, Ordering::Release);
    }

    pub(crate) fn set_addressable(&self, size_bytes: u64) {
        self.addressable_bytes.store(size_bytes, Ordering::Release);
    }
}

/// What must happen once before the first change.
#[derive(Debug, Default)]
pub(crate) struct Preparation {
    pub(crate) is_over: AtomicBool,
    /// What this opening has read is durable.
    has_synced: AtomicBool,
    turn: async_lock::Mutex<()>,
}

/// Everything that the requests on one image share.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) name: String,
    /// Who wants to be told of events, if somebody does.
    pub(crate) listener: Option<Arc<dyn EventListener>>,
    pub(crate) geometry: Geometry,
    pub(crate) size: Size,
    /// One at a time changes the size, or the snapshots.
    pub(crate) resizing: async_lock::Mutex<()>,
    pub(crate) read_only: bool,
    pub(crate) discards: Discards,
    pub(crate) header: HeaderState,
    pub(crate) snapshots: Mutex<Arc<SnapshotTable>>,
    pub(crate) views: SnapshotViews,
    /// The image file: all metadata, and the data unless there is a data file.
    pub(crate) file: Arc<dyn Storage>,
    /// Where what holds the data clusters begins, for all who ask where bytes lie.
    pub(crate) data_start: HostLocation,
    /// What holds the data clusters, as the guest sees them where LUKS encrypts them;
    /// it refuses writes that would hit metadata.
    pub(crate) data: Arc<dyn Storage>,
    /// The same without a guard, for those who open the image anew: the metadata that
    /// is guarded here may have moved for them.
    pub(crate) unguarded_data: Arc<dyn Storage>,
    pub(crate) encryption: GuestEncryption,
    /// What reads are verified with, where they are.
    pub(crate) seal: Option<SealedReads>,
    /// Those of the image's file, which compares them by itself.
    pub(crate) checksums: Option<Arc<Checksums>>,
    pub(crate) backing: Option<Arc<dyn BlockDevice>>,
    /// What lies below, seen as one mapping.
    pub(crate) backing_chain: BackingChain,
    pub(crate) l1: L1Table,
    pub(crate) l2: L2Cache,
    /// Which pieces of L2 tables have their room.
    pub(crate) mapping_room: HostRoom,
    /// How the sizes of the caches follow from the size of the device.
    pub(crate) cache_options: Mutex<CacheOptions>,
    pub(crate) readahead: Readahead,
    pub(crate) allocator: Arc<Allocator>,
    pub(crate) compressed_reads: CompressedReads,
    pub(crate) compressed_writes: CompressedWrites,
    /// What a crash may leak, noted for the next opening.
    /// Commits set the header's bit for leaks while the image is changed: see `alloc/leaks`.
    pub(crate) tells_of_leaks: bool,
    /// `None`: refcounts are written by every commit.
    pub(crate) lazy_refcounts: Option<LazyRefcounts>,
    /// Guest ranges of running changing requests, in bytes.
    pub(crate) guest_ranges: Arc<RangeLock>,
    /// L1 indexes whose L2 table is being made.
    pub(crate) l1_entries: Arc<RangeLock>,
    pub(crate) read_epochs: Arc<Epochs>,
    pub(crate) write_buffer: WriteBuffer,
    /// `None`: flushes commit.
    pub(crate) write_log: std::sync::OnceLock<Box<WriteLog>>,
    pub(crate) unwritten: UnwrittenSubclusters,
    pub(crate) bitmaps: BitmapState,
    pub(crate) commits: Commits,
    /// Where metadata lies, which no data may hit.
    pub(crate) overlap: Arc<OverlapMap>,
    pub(crate) messages: Messages,
    pub(crate) fail_stop: FailStop,
    pub(crate) barrier_failure: BarrierFailure,
    /// The changes that run, of which none runs beside a close.
    pub(crate) changes: Changes,
    pub(crate) preparation: Preparation,
    /// Whether data may lie in holes of the file, once that is known.
    pub(crate) preallocated: std::sync::OnceLock<bool>,
    /// See `OpenOptions`.
    pub(crate) reproducible: bool,
    /// What the caches take of a bound for many images.
    pub(crate) cache_share: Arc<CacheShare>,
}

/// A change that has begun, until it is dropped.
#[derive(Debug)]
pub(crate) struct RunningChange(Arc<Image>);

impl RunningChange {
    /// Begins a change, after a close that runs.
    pub(crate) async fn begin(image: Arc<Image>) -> Self {
        image.changes.begin().await;
        RunningChange(image)
    }

    /// Begins a change, unless somebody is alone with the image.
    pub(crate) fn try_begin(image: &Arc<Image>) -> Option<Self> {
        let has_begun = image.changes.try_begin();
        has_begun.then(|| RunningChange(image.clone()))
    }

    fn run<T, F>(self, work: impl FnOnce(Arc<Image>) -> F) -> impl Future<Output = Result<T>>
    where
        F: Future<Output = Result<T>>,
    {
        let work = work(self.0.clone());
        // Boxed: every request would carry the room for an error's handling.
        work.or_else(|error| {
            Box::pin(async move {
                self.0.look_for_room(&error).await;
                Err(self.0.mark_corrupt(error).await)
            })
        })
    }
}

impl Drop for RunningChange {
    fn drop(&mut self) {
        self.0.changes.end();
    }
}

impl Image {
    /// Starts a request that changes the image: `work` is called, and its future run to its
    /// end, after a close that runs.
    pub(crate) fn start_change<T: 'static, F>(
        self: &Arc<Self>,
        work: impl FnOnce(Arc<Image>) -> F + 'static,
    ) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        let image = self.clone();
        Io::task(match image.changes.try_begin() {
            true => spawn_to_completion(RunningChange(image).run(work)),
            false => spawn_to_completion(async move {
                let change = RunningChange::begin(image).await;
                change.run(work).await
            }),
        })
    }

    /// As [`Image::start_change`], for work beside which no change may run.
    pub(crate) fn start_alone<T: 'static, F>(
        self: &Arc<Self>,
        work: impl FnOnce(Arc<Image>) -> F + 'static,
    ) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        let image = self.clone();
        Io::task(spawn_to_completion(async move {
            let _alone = image.changes.alone().await;
            match work(image.clone()).await {
                Err(error) => Err(image.mark_corrupt(error).await),
                done => done,
            }
        }))
    }

    /// Tells who listens, if somebody does, of an event, and waits as long as that holds us.
    #[inline]
    pub(crate) async fn emit(&self, event: Event) {
        if let Some(listener) = &self.listener {
            listener.emit(event).await;
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
        self.begin_allocation().await?;
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
        self.begin_allocation().await?;
        match self.allocator.allocate_near(1, after).await {
            Ok(allocation) => Ok(allocation),
            Err(error) => Err(self.mark_corrupt(refused_for(what, error)).await),
        }
    }

    pub(crate) async fn begin_allocation(&self) -> Result<()> {
        if self.lazy_refcounts.is_some() {
            self.begin_lazy_refcounts().await?;
        }
        self.emit(Event::ClusterAlloc).await;
        Ok(())
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

    /// Takes the guest range that covers whole clusters around `range`.
    pub(crate) async fn lock_clusters(&self, range: Range<u64>, mode: Mode) -> Result<RangeGuard> {
        let cluster = self.geometry.cluster_size_bytes();
        let start = self.geometry.cluster_start(range.start);
        let end = range.end.div_ceil(cluster).saturating_mul(cluster);
        let guard = self.guest_ranges.acquire(start..end, mode).await;
        self.check_still_inside(range)?;
        Ok(guard)
    }

    /// Begins a change of the mapping of guest clusters: takes them exclusive, calls the
    /// range dirty in the enabled bitmaps, and writes back what is buffered beside it.
    /// [`Image::end_mapping_change`] ends it, while the guard is still held.
    pub(crate) async fn begin_mapping_change(
        self: &Arc<Self>,
        range: Range<u64>,
    ) -> Result<RangeGuard> {
        let exclusive = self.lock_clusters(range.clone(), Mode::Exclusive).await?;
        if self.bitmaps.is_tracking() {
            self.mark_dirty(range.clone()).await?;
        }
        if !self.write_buffer.is_empty() {
            self.write_back_beside(range).await?;
        }
        Ok(exclusive)
    }

    /// Ends a change of the mapping of `range`, which leads to the newest bytes by now.
    pub(crate) async fn end_mapping_change(self: &Arc<Self>, range: &Range<u64>) -> Result<()> {
        if !self.write_buffer.is_empty() {
            self.discard_replaced(range);
        }
        self.relieve_l2_cache().await
    }

    /// Lets dirty tables be written in the background when they fill the cache.
    pub(crate) async fn relieve_l2_cache(self: &Arc<Self>) -> Result<()> {
        match self.l2.wants_writeback() {
            true => self.start_background_commit().await,
            false => Ok(()),
        }
    }

    /// Makes sure that the L2 table for `guest` exists and is this image state's own, so
    /// that its entries may be changed.
    pub(crate) async fn ensure_l2_table(self: &Arc<Self>, guest: GuestOffset) -> Result<()> {
        match self.mapper().owned_table(guest)? {
            Some(_) => Ok(()),
            None => self.make_l2_table(guest).await,
        }
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
        if self.preparation.is_over.load(Ordering::Acquire) {
            return Ok(());
        }
        let _one = self.preparation.turn.lock().await;
        if !self.preparation.is_over.load(Ordering::Acquire) {
            // Whoever came first may have failed.
            self.check_changeable(operation)?;
            // Durable with the sync, and so before anything is counted.
            self.tell_of_leaks().await;
            self.sync_what_was_read().await?;
            self.map_metadata().await?;
            self.begin_tracking().await?;
            self.preparation.is_over.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Rule 13: makes durable what was read until now, once. It may be what a killed process has left in the page cache.
    pub(crate) async fn sync_what_was_read(&self) -> Result<()> {
        if self.preparation.has_synced.load(Ordering::Acquire)
            || mutants::is(Mutant::ChangeUnsynced)
        {
            return Ok(());
        }
        let synced = async {
            if self.has_external_data() {
                self.data.flush().await?;
            }
            self.file.flush().await
        };
        if let Err(error) = synced.await {
            // Rule 11: another sync would not tell of what this one has lost.
            let error = error.of_failed_sync();
            self.stop_changes(error.clone());
            return Err(error);
        }
        self.preparation.has_synced.store(true, Ordering::Release);
        Ok(())
    }

    /// Refuses where changes are not allowed.
    pub(crate) fn check_changeable(&self, operation: &'static str) -> Result<()> {
        if !self.read_only {
            return self.fail_stop.check(operation, &self.name);
        }
        let message = "the image is open read-only";
        Err(Error::new(ErrorKind::ReadOnly, operation, message).target(self.name.clone()))
    }
}
