//! Opening an image: nothing in it is trusted, and no other file is opened
//! except through the gate.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum_format::features::{Autoclear, Compatible, Incompatible};
use vellum_format::geometry::Geometry;
use vellum_format::header::{Header, Purpose};
use vellum_format::snapshot::SnapshotEntry;
use vellum_io::{Buffer, Error, ErrorKind, Result};
use vellum_storage::{Event, Storage};

use crate::debug_events::emit;
use crate::gate::{FileRequest, Gate};
use crate::luks::GuestEncryption;
use crate::qcow2::alloc::allocator::Allocator;
use crate::qcow2::alloc::host_room::{HostRoom, room_of_copy};
use crate::qcow2::alloc::lazy::LazyRefcounts;
use crate::qcow2::alloc::leaks;
use crate::qcow2::alloc::prealloc::PreallocateAhead;
use crate::qcow2::alloc::refcounts::{RefcountTable, Refcounts};
use crate::qcow2::bitmap::state::BitmapState;
use crate::qcow2::cache_budget::CacheShare;
use crate::qcow2::check;
use crate::qcow2::checksums;
use crate::qcow2::checksums::options::ChecksumOptions;
use crate::qcow2::checksums::pages::Checksums;
use crate::qcow2::commit::barrier::{BarrierFailure, Barriers};
use crate::qcow2::compressed::compress::{Codec, CompressionOptions};
use crate::qcow2::compressed::read_state::CompressedReads;
use crate::qcow2::compressed::write_state::CompressedWrites;
use crate::qcow2::encryption;
use crate::qcow2::header::autoclear::write_autoclear;
use crate::qcow2::header::load::{self, SnapshotTable, read_bytes};
use crate::qcow2::header::state::HeaderState;
use crate::qcow2::image::{Image, Size};
use crate::qcow2::integrity::errors::bad_format;
use crate::qcow2::integrity::overlap::{GuardedData, OverlapMap};
use crate::qcow2::mapping::l1::L1Table;
use crate::qcow2::mapping::lookup::L2Cache;
use crate::qcow2::mapping::packed::L2Codec;
use crate::qcow2::options::{
    Backing, CacheOptions, CacheSizes, L2_SLICE_BYTES, OpenOptions, OpenPurpose,
};
use crate::qcow2::read::layers::BackingChain;
use crate::qcow2::seal::area::refuse_sealed;
use crate::qcow2::seal::state::SealedReads;
use crate::qcow2::seal::unseal::{take_seal_off, unseal};
use crate::qcow2::snapshot::views::SnapshotViews;
use crate::qcow2::snapshot::{SnapshotSelector, select};
use crate::qcow2::table_cache::readahead::Readahead;
use crate::qcow2::write_buffer::buffer::WriteBuffer;
use crate::qcow2::write_log;
use crate::{BlockDevice, HostLocation};

fn refuse(kind: ErrorKind, file: &Arc<dyn Storage>, message: impl Into<String>) -> Error {
    Error::new(kind, "open", message).target(file.name())
}

/// Reads and decodes the header of the image in `file`.
///
/// # Errors
/// When the file is not a qcow2 image, or one that cannot be supported.
pub async fn read_header(file: &Arc<dyn Storage>) -> Result<Header> {
    load::header(file, Purpose::Use).await
}

/// Reads the snapshot table of an image whose header is `header`, without opening it.
///
/// # Errors
/// If the table breaks the limits or cannot be read. The L1 tables of the snapshots
/// ([`SnapshotEntry::check_l1_table`]) are not looked at.
pub async fn read_snapshots(
    file: &Arc<dyn Storage>,
    header: &Header,
) -> Result<Vec<SnapshotEntry>> {
    Ok(load::snapshots(file, header).await?.entries)
}

/// Opens the image in `file`.
pub(crate) async fn open(
    file: Arc<dyn Storage>,
    gate: &dyn Gate,
    options: OpenOptions,
) -> Result<Arc<Image>> {
    let purpose = match options.purpose {
        OpenPurpose::Check => Purpose::Check,
        _ => Purpose::Use,
    };
    let mut header = load::header(&file, purpose).await?;
    if options.accepts_changes() && !options.unseal {
        refuse_sealed(&file, &header)?;
    }
    let attached = checksums::attach::open(&file, gate, &mut header, &options).await?;
    let (file, checksums) = match &attached {
        Some(attached) => (attached.file(), Some(attached.checksums.clone())),
        None => (file, None),
    };
    let opened = open_in(file, checksums, gate, header, options).await;
    if let (Err(error), Some(attached)) = (&opened, attached) {
        attached.undo(error).await;
    }
    opened
}

/// Opens the image in `file`, by which its checksums are kept.
async fn open_in(
    file: Arc<dyn Storage>,
    checksums: Option<Arc<Checksums>>,
    gate: &dyn Gate,
    mut header: Header,
    options: OpenOptions,
) -> Result<Arc<Image>> {
    let snapshots = open_snapshots(&file, &mut header, &options).await?;
    check_supported(&file, &header, &options)?;
    let data = open_data_file(&file, gate, &header, &options).await?;
    let data = encryption::open(&file, data, &header, &options).await?;
    let backing = open_backing(&file, gate, &header, &options).await?;
    if options.accepts_changes() {
        header = make_writable(&file, header, &options).await?;
    }
    let seal = SealedReads::open(&file, &header, &data.1, &options).await?;
    let (file, barrier_failure) = Barriers::around(file);
    let beside = Beside {
        barrier_failure,
        backing,
        seal,
        checksums,
    };
    let image = assemble(file, data, beside, header, snapshots, &options).await?;
    if let Err(error) = write_log::attach::open(&image, gate, &options).await {
        image.abandon().await;
        return Err(error);
    }
    Ok(image)
}

/// Reads the snapshot table; where one of the snapshots is to be shown, the header
/// that comes back leads to that.
async fn open_snapshots(
    file: &Arc<dyn Storage>,
    header: &mut Header,
    options: &OpenOptions,
) -> Result<SnapshotTable> {
    // A check reads the table itself, and may repair it.
    match options.purpose {
        OpenPurpose::Check => return Ok(SnapshotTable::default()),
        OpenPurpose::Metadata if options.snapshot.is_none() => {
            return Ok(SnapshotTable::default());
        }
        _ => {}
    }
    let table = load::snapshots(file, header).await?;
    let Some(selector) = &options.snapshot else {
        return Ok(table);
    };
    if !options.read_only {
        let message = "Device is not readonly";
        return Err(refuse(ErrorKind::InvalidArgument, file, message));
    }
    let (_, entry) = select::find(&table.entries, selector)?;
    entry
        .check_l1_table(&header.geometry())
        .map_err(|error| bad_format("open", &error).target(file.name()))?;
    header.l1_table_offset = entry.l1_table_offset;
    header.l1_entries = entry.l1_entries;
    header.size_bytes = entry.disk_size_bytes.unwrap_or(header.size_bytes);
    Ok(table)
}

fn check_supported(file: &Arc<dyn Storage>, header: &Header, options: &OpenOptions) -> Result<()> {
    let changes = options.accepts_changes();
    if header.incompatible.contains(Incompatible::CORRUPT) && changes {
        return Err(refuse(
            ErrorKind::Corrupt,
            file,
            "qcow2: Image is corrupt; cannot be opened read/write",
        ));
    }
    let geometry = header.geometry();
    if options.discard_no_unref && geometry.version < 3 {
        return Err(refuse(
            ErrorKind::InvalidArgument,
            file,
            "discard-no-unref is only supported since qcow2 version 3",
        ));
    }
    if u64::from(header.l1_entries) < geometry.l1_entries_for(header.guest_size_bytes()) {
        return Err(refuse(
            ErrorKind::InvalidImage,
            file,
            "L1 table is too small",
        ));
    }
    if !options.read_only && file.capabilities().read_only {
        return Err(refuse(
            ErrorKind::ReadOnly,
            file,
            "the file is open read-only",
        ));
    }
    Ok(())
}

/// Brings the image into a state in which it may be changed: its refcounts are
/// right, and the header claims nothing that this program does not maintain.
async fn make_writable(
    file: &Arc<dyn Storage>,
    mut header: Header,
    options: &OpenOptions,
) -> Result<Header> {
    // Rule C3, durably and before anything else.
    let gives_up = matches!(options.checksums, Some(ChecksumOptions::GiveUp));
    if gives_up && (unseal(file).await? || checksums::forget(file).await?) {
        header = read_header(file).await?;
    }
    // Durably before anything else: a seal vouches for what nobody has changed since.
    if take_seal_off(file).await? {
        header = read_header(file).await?;
    }
    // Before a repair makes the file longer.
    check::cut_short::note_if_cut_short(file, &mut header).await?;
    if header.incompatible.contains(Incompatible::DIRTY) {
        check::repair_dirty(file.clone(), &options.messages).await?;
        header = read_header(file).await?;
    } else if header.compatible.contains(Compatible::MAY_HAVE_LEAKS) {
        leaks::free_leaks(file, &mut header).await?;
    }
    let known = Autoclear(header.autoclear.bits() & Autoclear::KNOWN.bits());
    if known != header.autoclear {
        header.autoclear = known;
        write_autoclear(&**file, known).await?;
    }
    Ok(header)
}

async fn open_data_file(
    file: &Arc<dyn Storage>,
    gate: &dyn Gate,
    header: &Header,
    options: &OpenOptions,
) -> Result<Arc<dyn Storage>> {
    if !header.geometry().external_data {
        if options.data_file.is_some() {
            return Err(refuse(
                ErrorKind::InvalidArgument,
                file,
                "'data-file' can only be set for images with an external data file",
            ));
        }
        return Ok(file.clone());
    }
    if let Some(data) = &options.data_file {
        return Ok(data.clone());
    }
    if options.purpose == OpenPurpose::Metadata {
        return Ok(file.clone());
    }
    let Some(name) = header.external_data_file() else {
        return Err(refuse(
            ErrorKind::InvalidArgument,
            file,
            "'data-file' is required for this image",
        ));
    };
    let request = FileRequest::for_part(file.name(), name, !options.read_only);
    gate.open_data_file(request).await
}

async fn open_backing(
    file: &Arc<dyn Storage>,
    gate: &dyn Gate,
    header: &Header,
    options: &OpenOptions,
) -> Result<Option<Arc<dyn BlockDevice>>> {
    match &options.backing {
        Backing::None => return Ok(None),
        Backing::Given(device) => return Ok(Some(device.clone())),
        Backing::FromImage if options.purpose == OpenPurpose::Metadata => return Ok(None),
        Backing::FromImage => {}
    }
    let Some(name) = header.backing_file_text() else {
        return Ok(None);
    };
    let request = FileRequest {
        image: file.name().to_owned(),
        name: name.into_owned(),
        format: header.backing_format().map(|format| format.into_owned()),
        writable: false,
    };
    gate.open_backing(request).await.map(Some)
}

/// Opens a closed image anew over the same files, for work on its metadata: nothing
/// is done ahead, and it is not marked dirty.
pub(crate) async fn reopen(closed: &Image) -> Result<Arc<Image>> {
    let header = read_header(&closed.file).await?;
    let options = OpenOptions {
        cache: cache_options(closed),
        discard: closed.discards.enabled,
        discard_no_unref: closed.discards.keep_references && header.version >= 3,
        pass_discard_request: Some(closed.discards.pass_request),
        pass_discard_other: closed.discards.pass_other,
        lazy_refcounts: Some(false),
        ahead: PreallocateAhead::NONE,
        ..OpenOptions::default()
    };
    let (file, data) = (closed.file.clone(), closed.unguarded_data.clone());
    let snapshots = load::snapshots(&file, &header).await?;
    let backing = closed.backing.clone();
    let data = (data, closed.encryption.clone());
    assemble(
        file,
        data,
        Beside::backing(backing),
        header,
        snapshots,
        &options,
    )
    .await
}

/// Opens an image, closed or only read, anew over the same files, to read what it holds itself:
/// no backing file shows through, and nothing is verified.
pub(crate) async fn reopen_to_read(image: &Image) -> Result<Arc<Image>> {
    let header = read_header(&image.file).await?;
    let options = OpenOptions {
        cache: cache_options(image),
        read_only: true,
        ..OpenOptions::default()
    };
    let (file, data) = (image.file.clone(), image.unguarded_data.clone());
    let data = (data, image.encryption.clone());
    let snapshots = SnapshotTable::default();
    assemble(
        file,
        data,
        Beside::backing(None),
        header,
        snapshots,
        &options,
    )
    .await
}

/// Opens what a snapshot of an image shows, read-only, over the same files.
pub(crate) async fn snapshot_of(image: &Image, snapshot: SnapshotSelector) -> Result<Arc<Image>> {
    let options = OpenOptions {
        cache: cache_options(image),
        read_only: true,
        snapshot: Some(snapshot),
        ..OpenOptions::default()
    };
    // Nobody moves what it is about to look up.
    let _one = image.resizing.lock().await;
    let (file, data) = (image.file.clone(), image.unguarded_data.clone());
    let mut header = read_header(&file).await?;
    let snapshots = open_snapshots(&file, &mut header, &options).await?;
    check_supported(&file, &header, &options)?;
    let data = (data, image.encryption.clone());
    let beside = Beside::backing(image.backing.clone());
    let view = assemble(file, data, beside, header, snapshots, &options).await?;
    image.views.note(&view.views);
    Ok(view)
}

fn cache_options(image: &Image) -> CacheOptions {
    let options = image.cache_options.lock();
    *options
}

/// Reads the refcount table where the header says it lies.
pub(crate) async fn read_refcount_table(
    file: &Arc<dyn Storage>,
    header: &Header,
    geometry: &Geometry,
) -> Result<RefcountTable> {
    emit(file, Event::ReftableLoad).await;
    Ok(RefcountTable::new(
        header.refcount_table_offset,
        header.refcount_table_clusters.into(),
        load::refcount_table(file, header, geometry).await?,
    ))
}

/// How clusters are compressed.
fn codec(file: &Arc<dyn Storage>, header: &Header, options: &OpenOptions) -> Result<Codec> {
    // Levels are for the image that is written, and no business of those below it.
    let compression = match options.read_only {
        true => CompressionOptions::default(),
        false => options.compression,
    };
    compression
        .codec(header.compression_type)
        .map_err(|error| error.target(file.name()))
}

/// The bytes of the L1 table; none where the mapping is not going to be looked at.
async fn read_l1(
    file: &Arc<dyn Storage>,
    header: &Header,
    options: &OpenOptions,
) -> Result<Buffer> {
    let len_bytes = match options.purpose {
        OpenPurpose::Metadata | OpenPurpose::Check => 0,
        OpenPurpose::GuestData | OpenPurpose::Locked => u64::from(header.l1_entries) * 8,
    };
    read_bytes(file, header.l1_table_offset.bytes(), len_bytes).await
}

/// Whether the header tells of leaks while the image is changed: lazy counts have a bit of their own.
fn tells_of_leaks(
    header: &Header,
    lazy: &Option<LazyRefcounts>,
    is_watched: bool,
    options: &OpenOptions,
) -> bool {
    let counts = lazy.is_none() && ahead(is_watched, options) != PreallocateAhead::NONE;
    header.version >= 3 && options.accepts_changes() && counts
}

/// What is done ahead: nothing where a listener wants to hear what each request leads to, or
/// where time must not count.
fn ahead(is_watched: bool, options: &OpenOptions) -> PreallocateAhead {
    match is_watched || options.reproducible {
        true => PreallocateAhead::NONE,
        false => options.ahead,
    }
}

/// What an image is opened with beside its own files.
struct Beside {
    barrier_failure: BarrierFailure,
    backing: Option<Arc<dyn BlockDevice>>,
    seal: Option<SealedReads>,
    checksums: Option<Arc<Checksums>>,
}

impl Beside {
    fn backing(backing: Option<Arc<dyn BlockDevice>>) -> Beside {
        Beside {
            barrier_failure: BarrierFailure::default(),
            backing,
            seal: None,
            checksums: None,
        }
    }
}

/// The refcounts of the image; of one that is only read they are not looked at.
async fn refcounts(
    file: &Arc<dyn Storage>,
    header: &Header,
    options: &OpenOptions,
    sizes: CacheSizes,
    overlap: &Arc<OverlapMap>,
    share: &Arc<CacheShare>,
) -> Result<Refcounts> {
    let geometry = header.geometry();
    let table = match options.accepts_changes() {
        false => RefcountTable::new(header.refcount_table_offset, 0, Vec::new()),
        true => read_refcount_table(file, header, &geometry).await?,
    };
    let (file, overlap) = (file.clone(), overlap.clone());
    let budget_bytes = sizes.refcount_bytes;
    let mut refcounts = Refcounts::new(geometry, file, budget_bytes, table, overlap);
    refcounts.cache.share_with(share);
    Ok(refcounts)
}

fn write_buffer(
    options: &OpenOptions,
    is_watched: bool,
    share: &Arc<CacheShare>,
    geometry: &Geometry,
) -> WriteBuffer {
    WriteBuffer::new(options.write_buffer_bytes(is_watched))
        .sharing(share)
        .owing(room_of_copy(geometry))
}

async fn assemble(
    file: Arc<dyn Storage>,
    (unguarded_data, encryption): (Arc<dyn Storage>, GuestEncryption),
    beside: Beside,
    header: Header,
    snapshots: SnapshotTable,
    options: &OpenOptions,
) -> Result<Arc<Image>> {
    let geometry = header.geometry();
    let size_bytes = header.guest_size_bytes();
    let sizes = options.cache.resolve(&geometry, size_bytes)?;
    let l1 = read_l1(&file, &header, options).await?;
    let slice_bytes = geometry.cluster_size_bytes().min(L2_SLICE_BYTES) as usize;
    let lazy = LazyRefcounts::new(&header, options.lazy_refcounts);
    let lazy = lazy.map_err(|error| error.target(file.name()))?;
    let codec = codec(&file, &header, options)?;
    let is_watched = file.event_listener().is_some();
    let overlap = OverlapMap::new(options.overlap_checks, &header);
    let data = GuardedData::around(unguarded_data.clone(), &geometry, &overlap);
    let share = CacheShare::new(options.cache_budget.clone());
    let refcounts = refcounts(&file, &header, options, sizes, &overlap, &share).await?;
    let mut l2 = L2Cache::with_codec(L2Codec::new(geometry), slice_bytes, sizes.l2);
    l2.share_with(&share);
    let chain_index_bytes = options.chain_index_bytes();
    let decompressed_bytes = options.decompressed_cache_bytes(&geometry);
    let image = Arc::new(Image {
        name: file.name().to_owned(),
        write_buffer: write_buffer(options, is_watched, &share, &geometry),
        write_log: std::sync::OnceLock::new(),
        listener: file.event_listener(),
        geometry,
        size: Size::new(size_bytes),
        resizing: async_lock::Mutex::new(()),
        read_only: !options.accepts_changes(),
        discards: options.discards(),
        l1: L1Table::new(header.l1_table_offset, &l1),
        l2,
        mapping_room: HostRoom::new(&geometry),
        cache_options: Mutex::new(options.cache),
        readahead: Readahead::default(),
        tells_of_leaks: tells_of_leaks(&header, &lazy, is_watched, options),
        lazy_refcounts: lazy,
        allocator: Allocator::new(refcounts, ahead(is_watched, options))?,
        compressed_reads: CompressedReads::new(&geometry, size_bytes, decompressed_bytes, &share),
        compressed_writes: CompressedWrites::new(&geometry, &data, codec),
        messages: options.messages.clone(),
        overlap,
        header: HeaderState::new(header),
        snapshots: Mutex::new(Arc::new(snapshots)),
        views: SnapshotViews::default(),
        file,
        data_start: HostLocation::start_of(&*data),
        data,
        unguarded_data,
        encryption,
        seal: beside.seal,
        checksums: beside.checksums,
        backing_chain: BackingChain::new(beside.backing.as_ref(), chain_index_bytes, &share),
        backing: beside.backing,
        guest_ranges: Arc::default(),
        l1_entries: Arc::default(),
        read_epochs: Arc::default(),
        unwritten: Default::default(),
        bitmaps: BitmapState::new(options.bitmap_step_bytes),
        commits: Default::default(),
        fail_stop: Default::default(),
        barrier_failure: beside.barrier_failure,
        changes: Default::default(),
        preparation: Default::default(),
        preallocated: std::sync::OnceLock::new(),
        reproducible: options.reproducible,
        cache_share: share,
    });
    image.cache_share.join(Arc::downgrade(&image) as _);
    Ok(image)
}
