//! Internal snapshots: create, apply, delete, list.
//!
//! A snapshot is an L1 table of its own over the same L2 tables and clusters, each of
//! which is counted once more for it. The first write to any of them then finds the
//! COPIED flag missing and copies.
//!
//! What a snapshot refers to never changes: tables whose flags have to change are
//! copied, not edited. All of a change comes into force with one write of the header
//! (see [`exchange`]), so a crash leaves the image as it was before or as it is
//! afterwards.
//!
//! | file | what it does |
//! | --- | --- |
//! | `requests` | what create, apply and delete make of the image: its tables and counts afterwards |
//! | `references` | what an L2 table refers to, and how many more or fewer references clusters get |
//! | `places` | new places for metadata, given back if the change fails |
//! | `relocate` | metadata in new places further down in the file (`compact`) |
//! | `counts` | every refcount block and their table in new places |
//! | [`exchange`] | writes all of it and puts it into force with one write of the header (rule 3) |
//! | `select` | which snapshot is meant, by identifier or name |
//! | [`views`] | which snapshots are open as devices of their own |
//! | `vm_state` | the state of a virtual machine behind the end of the disk |
//!
//! Invariants:
//! - While snapshots change no request changes anything, no commit runs and
//!   no cluster is counted or freed. Reads go on; a read beside an apply sees, sector by
//!   sector, the old content or the snapshot's.
//! - While snapshots change, no compressed data is between its place and its mapping: they hold
//!   `placing`, which is taken before any guest range.

mod counts;
mod exchange;
mod places;
mod references;
mod relocate;
mod requests;
pub(crate) mod select;
pub(crate) mod views;
mod vm_state;

use std::sync::Arc;

use vellum_format::snapshot::SnapshotEntry;
use vellum_io::{Error, ErrorKind, Io, Result};

use crate::qcow2::device::Qcow2;
use crate::qcow2::header::load::SnapshotTable;
use crate::qcow2::image::Image;
use crate::qcow2::info::{SnapshotInfo, snapshot_info};
use crate::qcow2::open;
pub use select::SnapshotSelector;

const ENOENT: i32 = 2;

/// A snapshot to be made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewSnapshot {
    /// Its name; several may have the same.
    pub name: String,
    /// Its identifier, which no other may have; without one it gets the next number.
    pub id: Option<String>,
    /// When it is taken: seconds since the epoch.
    pub date_seconds: u32,
    /// When it is taken: nanoseconds of the second.
    pub date_nanoseconds: u32,
    /// How long the guest has run, in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// Instructions that the guest has executed, where that is recorded.
    pub icount: Option<u64>,
    /// Length of the VM state that was saved ([`Qcow2::save_vm_state`]); with one the
    /// snapshot takes it, and the disk has it no more.
    pub vm_state_size_bytes: u64,
}

impl Qcow2 {
    /// The image's internal snapshots, in the order of its table (spec: "Snapshots").
    pub fn snapshots(&self) -> Vec<SnapshotInfo> {
        let size_bytes = self.image.size.visible_bytes();
        let table = self.image.snapshot_table();
        let entries = table.entries.iter();
        entries
            .map(|entry| snapshot_info(entry, size_bytes))
            .collect()
    }

    /// Takes a snapshot of the disk: what completed requests have written, and of
    /// requests that run some or nothing, sector by sector. Everything that is in it is
    /// durable at the end.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with an external data file,
    /// [`ErrorKind::InvalidArgument`] if the identifier is taken (`EEXIST`), the image
    /// has 65,536 snapshots (`EFBIG`), or a refcount does not fit its width (`EINVAL`).
    /// Nothing has changed then.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use vellum::{BlockDevice, gate::DenyAll, storage::MemStorage};
    /// # use vellum::qcow2::{NewSnapshot, OpenOptions, Qcow2, SnapshotSelector};
    /// # use vellum::qcow2::create::{CreateOptions, create};
    /// # vellum_io::lane::block_on(async {
    /// # let file: Arc<dyn vellum::Storage> = Arc::new(MemStorage::new());
    /// # let options = CreateOptions::default().size_bytes(1 << 20);
    /// # create(file.clone(), None, &options).await?;
    /// let image = Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default()).await?;
    /// let new = NewSnapshot { name: "before".into(), ..NewSnapshot::default() };
    /// let made = image.create_snapshot(new).await?;
    /// assert_eq!((made.id.as_str(), image.snapshots().len()), ("1", 1));
    /// // ... writes that turn out to be a mistake ...
    /// let before = SnapshotSelector::Name("before".into());
    /// image.apply_snapshot(before.clone()).await?;
    /// image.delete_snapshot(before).await?;
    /// image.close().await?;
    /// # Ok::<(), vellum::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn create_snapshot(&self, new: NewSnapshot) -> Io<SnapshotInfo> {
        self.change(move |image| async move { image.create_snapshot(new).await })
    }

    /// Opens the disk as it was when a snapshot was taken, its size included, beside
    /// this image, over the same files. What is read stays the same whatever becomes of
    /// this image, as long as it does not delete the snapshot.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no such snapshot, or if its tables cannot be
    /// read.
    pub async fn open_snapshot(&self, snapshot: SnapshotSelector) -> Result<Arc<Qcow2>> {
        let image = open::snapshot_of(&self.image, snapshot).await?;
        Ok(Arc::new(Qcow2 { image }))
    }

    /// Makes the disk what it was when the snapshot was taken, its size included. The
    /// snapshot stays. Durable at the end.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no such snapshot; if its tables cannot be
    /// read, or the image has bitmaps. Nothing has changed then.
    pub fn apply_snapshot(&self, snapshot: SnapshotSelector) -> Io<()> {
        self.change(move |image| async move { image.apply_snapshot(&snapshot).await })
    }

    /// Deletes a snapshot and gives back what nobody else uses, also to the storage
    /// unless [`OpenOptions::pass_discard_snapshot`](crate::qcow2::OpenOptions) forbids it.
    /// Durable at the end.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no such snapshot, or if its tables cannot be
    /// read. Nothing has changed then.
    pub fn delete_snapshot(&self, snapshot: SnapshotSelector) -> Io<()> {
        self.change(move |image| async move { image.delete_snapshot(&snapshot).await })
    }
}

impl Image {
    /// The snapshots as they are now.
    pub(crate) fn snapshot_table(&self) -> Arc<SnapshotTable> {
        self.snapshots.lock().clone()
    }

    fn set_snapshot_table(&self, table: SnapshotTable) {
        *self.snapshots.lock() = Arc::new(table);
    }

    /// Changes the size that everybody sees; the header has it.
    fn set_size(&self, size_bytes: u64) {
        self.size.set(size_bytes);
        let options = *self.cache_options.lock();
        // The caches stay as they are if the options do not fit the new size.
        drop(self.set_cache_sizes(&options));
    }
}

/// The entry of a snapshot.
pub(crate) fn find<'a>(
    entries: &'a [SnapshotEntry],
    selector: &SnapshotSelector,
) -> Result<(usize, &'a SnapshotEntry)> {
    let found = selector.find(entries).map(|index| (index, &entries[index]));
    found.ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "snapshot", "Can't find snapshot").with_errno(ENOENT)
    })
}
