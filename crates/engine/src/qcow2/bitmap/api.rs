//! Bitmaps of an open image as the library shows them.

use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use vellum_format::bitmap::BitmapFlags;
use vellum_io::{Io, Result, spawn_to_completion};

use super::crash_consistent::{are_lost, is_consistent};
use super::dirty::Dirty;
use super::view::BitmapView;
use crate::qcow2::Qcow2;
use crate::qcow2::image::{Image, RunningChange};
use crate::qcow2::info::BitmapInfo;

vellum_io::with_setters! {
    /// How a bitmap is made.
    #[derive(Debug, Clone, Default)]
    pub struct BitmapOptions {
        /// Guest bytes that a bit stands for: a power of two from 512 bytes to 2 GiB.
        /// Default: the cluster size, but at least 4 KiB and at most 64 KiB.
        pub granularity_bytes: Option<u64>,
        /// It does not record writes until it is enabled.
        pub disabled: bool,
        /// What messages call the image; its name if `None`.
        pub node_name: Option<String>,
    }
}

/// A bitmap that is added with what it calls dirty: see [`Bitmaps::add_all`].
#[derive(Debug, Clone)]
pub struct NewBitmap {
    pub(super) name: String,
    pub(super) options: BitmapOptions,
    pub(super) content: Option<DirtyBitmap>,
}

impl NewBitmap {
    /// A bitmap that calls nothing dirty.
    pub fn new(name: impl Into<String>, options: BitmapOptions) -> Self {
        NewBitmap {
            name: name.into(),
            options,
            content: None,
        }
    }

    /// It calls dirty what `content` does, which is of a device of the same size.
    #[must_use]
    pub fn content(mut self, content: DirtyBitmap) -> Self {
        self.content = Some(content);
        self
    }
}

/// The ranges that a bitmap called dirty at one moment.
///
/// ```
/// # use vellum::qcow2::DirtyBitmap;
/// fn bytes_to_copy(bitmap: &DirtyBitmap) -> u64 {
///     bitmap.ranges().map(|range| range.end - range.start).sum()
/// }
/// # let bitmap = DirtyBitmap::all_dirty(1 << 20, 65536);
/// assert_eq!(bytes_to_copy(&bitmap), bitmap.dirty_bytes());
/// ```
#[derive(Debug, Clone)]
pub struct DirtyBitmap {
    pub(super) dirty: Dirty,
}

impl DirtyBitmap {
    /// A bitmap that calls all of a device dirty: what a first, full backup copies.
    /// `granularity_bytes` is rounded up to a power of two.
    pub fn all_dirty(size_bytes: u64, granularity_bytes: u64) -> Self {
        let bits = granularity_bytes
            .max(1)
            .next_power_of_two()
            .trailing_zeros();
        let mut dirty = Dirty::new(bits as u8, size_bytes);
        dirty.mark(&(0..size_bytes));
        DirtyBitmap { dirty }
    }

    /// Bytes that a bit stands for.
    pub fn granularity_bytes(&self) -> u64 {
        1 << self.dirty.granularity_bits()
    }

    /// Size of the device in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.dirty.size_bytes()
    }

    /// The dirty ranges in bytes, in order, none touching the next. Each begins at a
    /// multiple of the granularity, and ends there or with the device.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let run = self.dirty.next_run(from)?;
            from = run.end;
            Some(run)
        })
    }

    /// How many bytes are dirty.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty.dirty_bytes()
    }

    /// The SHA-256 of the bits in words of eight bytes, the first bit in the lowest place of the
    /// first byte: what QEMU's `x-debug-block-dirty-bitmap-sha256` tells.
    pub fn sha256(&self) -> [u8; 32] {
        const PIECE_BYTES: u64 = 64 << 10;
        let bits = self.dirty.bits();
        let len_bytes = bits.len().div_ceil(64).max(1) * 8;
        let mut digest = Sha256::new();
        let mut piece = Vec::new();
        let mut at = 0;
        while at < len_bytes {
            piece.resize((len_bytes - at).min(PIECE_BYTES) as usize, 0);
            bits.copy_to(at, &mut piece);
            digest.update(&piece);
            at += piece.len() as u64;
        }
        digest.finalize().into()
    }
}

/// The persistent dirty bitmaps of an open image (`qemu-img bitmap`).
///
/// An enabled bitmap tells which ranges of the guest's disk may have changed since it
/// was added or cleared: every write, zeroing, discard and change of the size is in it,
/// durably before the guest's bytes change. It is kept when the program or the machine
/// crashes, and calls more dirty than has changed afterwards, never less. To QEMU it is
/// then inconsistent, until Vellum has opened the image for writing and closed it.
///
/// Changes wait for the requests that run, make everything durable that was written
/// before, and take effect at one moment, also in a crash.
///
/// ```
/// use std::sync::Arc;
/// use vellum::gate::DenyAll;
/// use vellum::qcow2::create::{CreateOptions, create};
/// use vellum::qcow2::{BitmapOptions, OpenOptions, Qcow2};
/// use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
/// use vellum_io::lane;
/// use vellum_storage::MemStorage;
///
/// # fn main() -> vellum::Result<()> {
/// lane::block_on(async {
///     let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
///     let options = CreateOptions::default().size_bytes(1 << 30);
///     create(file.clone(), None, &options).await?;
///     let disk = Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default()).await?;
///
///     // Together with a full backup:
///     disk.bitmaps().add("monday", BitmapOptions::default()).await?;
///     disk.write(5 << 20, Buffer::zeroed(512), RequestFlags::default()).await?;
///
///     // The next backup copies what has changed since:
///     let changed = disk.bitmaps().read("monday").await?;
///     let ranges: Vec<_> = changed.ranges().collect();
///     assert_eq!(ranges, [5 << 20..(5 << 20) + 65536]);
///     disk.close().await
/// })
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Bitmaps {
    image: Arc<Image>,
}

impl Qcow2 {
    /// The persistent dirty bitmaps of this image.
    pub fn bitmaps(&self) -> Bitmaps {
        Bitmaps {
            image: self.image.clone(),
        }
    }
}

impl Bitmaps {
    fn change<F>(&self, work: impl FnOnce(Arc<Image>) -> F + 'static) -> Io<()>
    where
        F: Future<Output = Result<()>> + 'static,
    {
        let image = self.image.clone();
        Io::task(spawn_to_completion(async move {
            let _running = RunningChange::begin(image.clone()).await;
            let done = work(image.clone()).await;
            done.map_err(|error| image.name_error(error))
        }))
    }

    /// Whether the image had bitmaps, and a program that does not know bitmaps has
    /// changed it since. There are none then; the first change forgets them, and their
    /// clusters are leaked.
    pub fn are_lost(&self) -> bool {
        are_lost(&self.image.header())
    }

    /// Whether the image names no directory of bitmaps, so that [`Bitmaps::list`] finds none and reads nothing.
    pub fn are_none(&self) -> bool {
        self.image.header().bitmaps().is_none()
    }

    /// All bitmaps in the order of the directory, the inconsistent ones too.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn list(&self) -> Io<Vec<BitmapInfo>> {
        let image = self.image.clone();
        Io::start(async move {
            let _layout = image.bitmaps.layout.lock().await;
            let entries = image.bitmap_entries().await?;
            let header = image.header();
            let info = |entry| BitmapInfo::new(entry, is_consistent(&header, entry));
            Ok(entries.iter().map(info).collect())
        })
    }

    /// Tells of the bitmap `name`, whose content is not lost.
    ///
    /// # Errors
    /// As [`Bitmaps::read`].
    pub fn find(&self, name: &str) -> Io<BitmapInfo> {
        let (image, name) = (self.image.clone(), name.to_owned());
        Io::start(async move {
            let _layout = image.bitmaps.layout.lock().await;
            let found = image.consistent_bitmap(&name).await;
            let (entries, index) = found.map_err(|error| image.name_error(error))?;
            Ok(BitmapInfo::new(&entries[index], true))
        })
    }

    /// What the bitmap `name` calls dirty now. Requests that run may or may not be in
    /// it. Also of an image that is open read-only.
    ///
    /// # Errors
    /// [`vellum_io::ErrorKind::InvalidArgument`] if there is none of that name, or
    /// its content is lost; what reading meets.
    pub fn read(&self, name: &str) -> Io<DirtyBitmap> {
        let (image, name) = (self.image.clone(), name.to_owned());
        Io::start(async move {
            let _layout = image.bitmaps.layout.lock().await;
            let read = image.read_bitmap(&name).await;
            let dirty = read.map_err(|error| image.name_error(error))?;
            Ok(DirtyBitmap { dirty })
        })
    }

    /// The bitmap `name` for questions about single ranges, while the image changes.
    ///
    /// # Errors
    /// As [`Bitmaps::read`].
    pub fn view(&self, name: &str) -> Io<BitmapView> {
        let (image, name) = (self.image.clone(), name.to_owned());
        Io::start(async move {
            let view = BitmapView::new(image.clone(), &name).await;
            view.map_err(|error| image.name_error(error))
        })
    }

    /// Adds a bitmap that calls nothing dirty.
    ///
    /// # Errors
    /// [`vellum_io::ErrorKind::InvalidArgument`] if there is one of that name, the
    /// image is of version 2, or a limit of the format is met.
    pub fn add(&self, name: &str, options: BitmapOptions) -> Io<()> {
        self.add_all(vec![NewBitmap::new(name, options)])
    }

    /// Adds bitmaps, all or none. No more clusters are allocated than they need: adding and
    /// filling them one at a time also takes room for the tables and directories between.
    ///
    /// # Errors
    /// As [`Bitmaps::add`], and if the content is of a device of another size.
    pub fn add_all(&self, bitmaps: Vec<NewBitmap>) -> Io<()> {
        self.change(move |image| async move { image.add_bitmaps(bitmaps).await })
    }

    /// Removes a bitmap; also one whose content is lost.
    ///
    /// # Errors
    /// As [`Bitmaps::read`].
    pub fn remove(&self, name: &str) -> Io<()> {
        let name = name.to_owned();
        self.change(move |image| async move { image.remove_bitmap(&name).await })
    }

    /// Makes a bitmap call nothing dirty.
    ///
    /// # Errors
    /// As [`Bitmaps::read`].
    pub fn clear(&self, name: &str) -> Io<()> {
        let name = name.to_owned();
        self.change(move |image| async move { image.set_bitmap(&name, &[]).await })
    }

    /// Makes a bitmap call some ranges of bytes dirty, and nothing else.
    ///
    /// # Errors
    /// As [`Bitmaps::read`].
    pub fn set(&self, name: &str, ranges: Vec<Range<u64>>) -> Io<()> {
        let name = name.to_owned();
        self.change(move |image| async move { image.set_bitmap(&name, &ranges).await })
    }

    /// As [`Bitmaps::set`], with what has changed since a backup began, once that is complete.
    ///
    /// If the program dies before the image is closed, or this fails, a bitmap that records
    /// writes calls dirty what it did before, too: nobody may have heard of the backup.
    ///
    /// # Errors
    /// As [`Bitmaps::read`].
    pub fn set_after_backup(&self, name: &str, ranges: Vec<Range<u64>>) -> Io<()> {
        let name = name.to_owned();
        self.change(move |image| async move { image.set_bitmap_after_backup(&name, &ranges).await })
    }

    /// Has a bitmap record writes from now on.
    ///
    /// # Errors
    /// As [`Bitmaps::read`].
    pub fn enable(&self, name: &str) -> Io<()> {
        let name = name.to_owned();
        self.change(move |image| async move { image.enable_bitmap(&name).await })
    }

    /// Has a bitmap record no more writes.
    ///
    /// # Errors
    /// As [`Bitmaps::read`].
    pub fn disable(&self, name: &str) -> Io<()> {
        let name = name.to_owned();
        self.change(move |image| async move { image.disable_bitmap(&name).await })
    }

    /// Adds what `sources` call dirty, of this image or of another of the same size, to
    /// a bitmap.
    ///
    /// # Errors
    /// As [`Bitmaps::read`], and if the sizes differ.
    pub fn merge(&self, name: &str, sources: Vec<DirtyBitmap>) -> Io<()> {
        let name = name.to_owned();
        self.change(move |image| async move {
            let sources: Vec<Dirty> = sources.into_iter().map(|source| source.dirty).collect();
            image.merge_bitmaps(&name, &sources).await
        })
    }
}

impl BitmapInfo {
    pub(in crate::qcow2) fn new(
        entry: &vellum_format::bitmap::BitmapDirectoryEntry,
        consistent: bool,
    ) -> Self {
        BitmapInfo {
            name: entry.name_text().into_owned(),
            granularity_bytes: 1 << entry.granularity_bits,
            in_use: entry.flags.contains(BitmapFlags::IN_USE),
            auto: entry.flags.contains(BitmapFlags::AUTO),
            consistent,
        }
    }
}
