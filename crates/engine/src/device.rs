//! [`BlockDevice`]: what a guest, an export or a job sees of a node.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use vellum_io::shared_memory::SharedBuffer;
use vellum_io::{Buffer, Error, ErrorKind, Io, Result};
pub use vellum_storage::DiskIdentity;
use vellum_storage::{Storage, StorageIdentity};

use crate::Preallocation;

/// What a device is and what it wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The format driver's name: `"qcow2"`, `"raw"`.
    pub format: &'static str,
    /// The name for messages: a path or a node name.
    pub name: String,
    /// Writes are refused.
    pub read_only: bool,
    /// Cluster size in bytes where the format has one.
    pub cluster_size_bytes: Option<u64>,
    /// Requests aligned to this run without read-modify-write (1 where any do).
    pub request_alignment_bytes: u32,
    /// Zero and discard requests aligned to this can be done without writing.
    pub discard_alignment_bytes: u64,
    /// Data never written reads as zeroes (no backing file shows through).
    pub has_zero_init: bool,
    /// The device grows when written beyond its end (a raw file being made).
    pub growable: bool,
}

vellum_io::with_setters! {
    /// How a write is to be done.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct RequestFlags {
        /// Durable when the request completes.
        pub fua: bool,
    }
}

vellum_io::with_setters! {
    /// How zeroes are to be written.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct ZeroRequest {
        /// Space may be given back (`BDRV_REQ_MAY_UNMAP`).
        pub may_unmap: bool,
        /// Fail rather than write zeroes out (`BDRV_REQ_NO_FALLBACK`).
        pub no_fallback: bool,
        /// Durable when the request completes.
        pub fua: bool,
    }
}

/// Where an extent's bytes lie, when they can be read there as they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLocation {
    /// The storage's name (a path).
    pub storage: Arc<str>,
    /// Which storage it is: names do not tell two servers apart.
    pub identity: StorageIdentity,
    /// Offset in it in bytes.
    pub offset_bytes: u64,
}

impl HostLocation {
    /// The first byte of a storage.
    pub fn start_of(storage: &dyn Storage) -> HostLocation {
        HostLocation {
            storage: storage.name().into(),
            identity: StorageIdentity::of(storage),
            offset_bytes: 0,
        }
    }
}

/// What the bytes of an [`Extent`] are, and whether a layer holds them.
///
/// `qemu-img map` tells the same with four words, which the predicates here are named for:
///
/// | kind | present | data | zero | compressed |
/// | --- | --- | --- | --- | --- |
/// | [`Data`](ExtentKind::Data) | yes | yes | | |
/// | [`Compressed`](ExtentKind::Compressed) | yes | yes | | yes |
/// | [`ZeroData`](ExtentKind::ZeroData) | yes | yes | yes | |
/// | [`Zero`](ExtentKind::Zero) | yes | | yes | |
/// | [`AbsentZero`](ExtentKind::AbsentZero) | | | yes | |
/// | [`Absent`](ExtentKind::Absent) | | | | |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExtentKind {
    /// Bytes that were written, or must be taken to be; they may still all be zero.
    Data,
    /// The same, compressed on disk.
    Compressed,
    /// Allocated as data and known to read as zeroes: space made ahead of its use.
    ZeroData,
    /// The layer says that the bytes are zeroes (a zero cluster, a hole), whether it has
    /// space for them or not.
    Zero,
    /// No layer holds the bytes, so they read as zeroes. Where a layer ends before the
    /// one above, [`Extent::depth`] is of the one above.
    AbsentZero,
    /// None of the layers that were asked holds the bytes; what they read as is not told.
    Absent,
}

impl ExtentKind {
    /// Whether a layer holds the run: that of [`Extent::depth`].
    pub fn is_present(self) -> bool {
        !matches!(self, ExtentKind::AbsentZero | ExtentKind::Absent)
    }

    /// Whether the run is allocated as data, zeroes or not.
    pub fn is_data(self) -> bool {
        matches!(
            self,
            ExtentKind::Data | ExtentKind::Compressed | ExtentKind::ZeroData
        )
    }

    /// Whether the bytes are known to read as zeroes.
    pub fn is_zero(self) -> bool {
        matches!(
            self,
            ExtentKind::ZeroData | ExtentKind::Zero | ExtentKind::AbsentZero
        )
    }

    /// Whether the bytes are compressed on disk.
    pub fn is_compressed(self) -> bool {
        self == ExtentKind::Compressed
    }

    /// Whether a layer holds bytes that only reading them tells: data that is not known
    /// to be zeroes.
    pub fn needs_reading(self) -> bool {
        matches!(self, ExtentKind::Data | ExtentKind::Compressed)
    }
}

/// A run of guest bytes of one kind, as `qemu-img map` tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Length of the run in bytes; never 0 inside the device.
    pub len_bytes: u64,
    /// What the bytes are.
    pub kind: ExtentKind,
    /// Where the bytes lie, for uncompressed, unencrypted data (or preallocated zeroes).
    pub host: Option<HostLocation>,
    /// The layer that decides: 0 is this device, 1 its backing file, and so on.
    pub depth: u32,
}

impl Extent {
    /// A run that this device itself decides, whose bytes lie nowhere in particular.
    pub fn new(len_bytes: u64, kind: ExtentKind) -> Extent {
        Extent {
            len_bytes,
            kind,
            host: None,
            depth: 0,
        }
    }
}

/// A device of bytes. All offsets and lengths are in bytes of the guest's view.
///
/// Any alignment is accepted. A request beyond [`BlockDevice::size_bytes`] fails
/// with [`vellum_io::ErrorKind::OutOfRange`]. Requests run in parallel in any
/// order; of overlapping writes each sector ends up as one of them. Requests must
/// be made inside a lane (or an executor), and finish even if the returned [`Io`]
/// of a changing request is dropped. None waits for another one to be polled, but that
/// changes of a qcow2 image's snapshots wait until the reads before them have been polled
/// to their end, or dropped.
///
/// Embedders may implement this trait; [`delegate!`](crate::delegate!) helps where a device
/// stands around another one.
pub trait BlockDevice: Send + Sync + fmt::Debug {
    /// What the device is.
    fn info(&self) -> DeviceInfo;

    /// The virtual size in bytes.
    fn size_bytes(&self) -> u64;

    /// Reads `buffer.len()` bytes at `offset_bytes` and gives the buffer back filled.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] beyond the end, [`ErrorKind::Corrupt`] where the metadata
    /// contradicts itself, else what the storage says.
    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer>;

    /// Writes the buffer at `offset_bytes` and gives it back.
    ///
    /// # Errors
    /// As [`BlockDevice::read`]; [`ErrorKind::ReadOnly`] where nothing may be changed,
    /// [`ErrorKind::NoSpace`] where the storage is full. Any part of the range may have been
    /// written.
    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer>;

    /// As [`BlockDevice::read`], straight into memory that others change at any time (a guest's), in
    /// order. `None`, the default: not from this device, or not this range as it lies; then
    /// nothing was done, and whoever asks reads into a buffer of its own and copies. Whatever
    /// looks at bytes (decrypts, decompresses, compares, sums up) answers so.
    fn read_into(&self, offset_bytes: u64, into: &[SharedBuffer]) -> Option<Io<()>> {
        let _ = (offset_bytes, into);
        None
    }

    /// As [`BlockDevice::write`], straight from such memory: each byte is fetched some time before the
    /// end, and nothing else is done with it. `None`: as of [`BlockDevice::read_into`].
    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: RequestFlags,
    ) -> Option<Io<()>> {
        let _ = (offset_bytes, from, flags);
        None
    }

    /// Writes the buffer at `offset_bytes` so that it takes less room in the image,
    /// where it can, and gives it back. Clusters that compression makes no smaller are
    /// stored as they are. What is in the way, compressed or not, is replaced.
    ///
    /// Requests that run side by side are compressed on all cores, and lie in the file
    /// in the order in which they were made.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use vellum::gate::DenyAll;
    /// # use vellum::qcow2::create::{CreateOptions, create};
    /// # use vellum::qcow2::{OpenOptions, Qcow2};
    /// # use vellum_io::lane;
    /// # use vellum_storage::MemStorage;
    /// # use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
    /// # lane::block_on(async {
    /// let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    /// let options = CreateOptions::default().size_bytes(1 << 30);
    /// create(file.clone(), None, &options).await?;
    /// let image = Qcow2::open(file.clone(), Arc::new(DenyAll), OpenOptions::default()).await?;
    /// let text = Buffer::copy_of(&b"much of the same ".repeat(1 << 20)[..1 << 20]);
    /// image.write_compressed(0, text, RequestFlags::default()).await?;
    /// image.close().await?;
    /// assert!(file.len_bytes()? < 1 << 19);
    /// # Ok::<(), vellum::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the format, or this image, has no compressed
    /// clusters; [`ErrorKind::InvalidArgument`] unless the range is made of whole
    /// clusters ([`DeviceInfo::cluster_size_bytes`]; the last may end with the device);
    /// otherwise as [`BlockDevice::write`].
    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        let _ = (buffer, flags);
        let message = "the format has no compressed clusters";
        let error = Error::new(ErrorKind::Unsupported, "write compressed", message);
        Io::ready(Err(error.target(self.info().name).at(offset_bytes)))
    }

    /// As [`BlockDevice::write`], but the data gets its place behind that of all such
    /// requests that were made before, whichever is done first: a copy that writes in the
    /// order of its offsets is laid out in that order. By default the same as a write.
    ///
    /// # Errors
    /// As [`BlockDevice::write`].
    fn write_in_order(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        self.write(offset_bytes, buffer, RequestFlags::default())
    }

    /// As [`BlockDevice::write_zeroes`], in one order with [`BlockDevice::write_in_order`].
    ///
    /// # Errors
    /// As [`BlockDevice::write_zeroes`].
    fn write_zeroes_in_order(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        request: ZeroRequest,
    ) -> Io<()> {
        self.write_zeroes(offset_bytes, len_bytes, request)
    }

    /// Makes a range hold what `source` holds from `from_bytes` on, without moving a byte:
    /// the file system has both share the blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where that cannot be had, in general or for this range (it
    /// should be whole clusters); otherwise as [`BlockDevice::write`]. A part of the range may
    /// have been written.
    fn write_shared(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        source: Arc<dyn Storage>,
        from_bytes: u64,
    ) -> Io<()> {
        let _ = (len_bytes, source, from_bytes);
        let message = "the device shares no blocks";
        let error = Error::new(ErrorKind::Unsupported, "write shared", message);
        Io::ready(Err(error.target(self.info().name).at(offset_bytes)))
    }

    /// Has the device hold what of a range shows through from its backing file, in whole clusters
    /// (subclusters, if there are some) around it: as zeroes where that is known to be zeroes. What others write meanwhile is not
    /// undone, and no byte that can be read changes.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the format cannot do that, and nothing was done; otherwise
    /// as [`BlockDevice::write`].
    fn copy_up(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let _ = len_bytes;
        let message = "the format copies nothing up from a backing file";
        let error = Error::new(ErrorKind::Unsupported, "copy up", message);
        Io::ready(Err(error.target(self.info().name).at(offset_bytes)))
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As [`BlockDevice::write`].
    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()>;

    /// Gives a range's space back where that is possible; a hint, at cluster grain.
    ///
    /// # Errors
    /// As [`BlockDevice::write`]. That nothing can be given back is no error.
    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()>;

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// What the storage says. After a failure what was written before may be lost; but after
    /// [`ErrorKind::NoSpace`] nothing is, and a flush may be tried again when there is room.
    fn flush(&self) -> Io<()>;

    /// The first extent at `offset_bytes`, at most `len_bytes` long. With
    /// `max_depth` 0 only this layer is asked (what it does not hold is
    /// [`ExtentKind::Absent`], or [`ExtentKind::AbsentZero`] where nothing shows through);
    /// `u32::MAX` asks the whole chain.
    ///
    /// # Errors
    /// As [`BlockDevice::read`].
    fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent>;

    /// Sets the virtual size; bytes that come into being read as zeroes. Requests
    /// may run meanwhile; those beyond a new end fail or have their effect before. Of a device
    /// that shows the bytes of a storage as they lie there (raw, luks) whoever shrinks it waits for
    /// such changes first: it keeps no account of them, and one that comes late makes the file longer.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the size is fixed, or what an image holds keeps it from
    /// being changed; [`ErrorKind::InvalidArgument`] for a size that an image cannot have;
    /// [`ErrorKind::ReadOnly`] where nothing may be changed; else what the storage says.
    fn truncate(&self, size_bytes: u64) -> Io<()>;

    /// As [`BlockDevice::truncate`], with what comes into being made ahead of its
    /// use.
    ///
    /// # Errors
    /// As [`BlockDevice::truncate`], and [`ErrorKind::Unsupported`] for what cannot be made
    /// ahead.
    fn resize(&self, size_bytes: u64, preallocation: Preallocation) -> Io<()> {
        if preallocation == Preallocation::Off {
            return self.truncate(size_bytes);
        }
        let message = format!("Unsupported preallocation mode '{}'", preallocation.name());
        Io::ready(Err(Error::new(ErrorKind::Unsupported, "resize", message)))
    }

    /// Gives up everything that the device holds itself, so that its backing file shows
    /// through everywhere.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the format cannot do that, otherwise as
    /// [`BlockDevice::write`].
    fn clear(&self) -> Io<()> {
        let message = "Operation not supported";
        Io::ready(Err(Error::new(ErrorKind::Unsupported, "clear", message)))
    }

    /// Waits for the changes that have begun, writes back everything, releases reservations
    /// and marks the image clean. Changes after it are refused; reads may be too.
    ///
    /// # Errors
    /// What the storage says. What was not flushed before may be lost then; a close may be
    /// tried again.
    fn close(&self) -> Io<()>;

    /// The backing device, if there is one.
    fn backing(&self) -> Option<Arc<dyn BlockDevice>> {
        None
    }

    /// The device that this one stands for at the moment, where that can change
    /// ([`crate::nodes::Link`]).
    fn stands_for(&self) -> Option<Arc<dyn BlockDevice>> {
        None
    }

    /// The storage that holds the image's own file.
    fn storage(&self) -> Option<Arc<dyn Storage>> {
        None
    }

    /// The storage that holds the device's bytes one by one, and the offset of the
    /// first, where that is so whatever is written: a raw device's.
    fn bytes_in(&self) -> Option<(Arc<dyn Storage>, u64)> {
        None
    }

    /// The image or volume that this device is, or stands around, as its own type: for
    /// [`AsQcow2`](crate::qcow2::AsQcow2) and [`AsLuks`](crate::luks::AsLuks), and for
    /// formats of others. `None` where there is nothing more to know than this trait says.
    fn format_device(&self) -> Option<&dyn Any> {
        None
    }

    /// As [`BlockDevice::format_device`], where requests from above may also read past
    /// this device: nothing that it does beside that would be missed. A device around
    /// another one must not pass this on unless it changes nothing and watches no reads. What a
    /// [`crate::nodes::Link`] leads to can be exchanged, so it answers with itself.
    fn transparent_device(&self) -> Option<&dyn Any> {
        None
    }

    /// Which disk this is, through all that stands around it. Of two devices with other identities, a
    /// flush of one makes nothing durable of the other. `None`, the default: that is not
    /// known, and it may be any disk, or several.
    fn identity(&self) -> Option<DiskIdentity> {
        None
    }

    /// Bytes of storage that the image takes now, where known.
    ///
    /// # Errors
    /// As [`Storage::allocated_bytes`].
    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}

/// The device that one stands for in the end, where it stands for others
/// ([`BlockDevice::stands_for`]).
pub fn target_of(device: &dyn BlockDevice) -> Option<Arc<dyn BlockDevice>> {
    let mut target = device.stands_for()?;
    while let Some(next) = target.stands_for() {
        target = next;
    }
    Some(target)
}
