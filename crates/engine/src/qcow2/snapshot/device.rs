//! What [`Qcow2`] offers of snapshots.

use std::sync::Arc;

use vellum_io::{Io, Result};

use super::new_snapshot::NewSnapshot;
use super::select::SnapshotSelector;
use crate::qcow2::device::Qcow2;
use crate::qcow2::info::{SnapshotInfo, snapshot_info};
use crate::qcow2::open;

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
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) with an external data file,
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the identifier is taken
    /// (`EEXIST`), the image has 65,536 snapshots (`EFBIG`), or a refcount does not fit its width
    /// (`EINVAL`).
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
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if there is no such snapshot, or if its tables cannot be
    /// read.
    pub async fn open_snapshot(&self, snapshot: SnapshotSelector) -> Result<Arc<Qcow2>> {
        let image = open::snapshot_of(&self.image, snapshot).await?;
        Ok(Arc::new(Qcow2 { image }))
    }

    /// Makes the disk what it was when the snapshot was taken, its size included. The
    /// snapshot stays. Durable at the end.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if there is no such snapshot; if its tables cannot be
    /// read, or the image has bitmaps. Nothing has changed then.
    pub fn apply_snapshot(&self, snapshot: SnapshotSelector) -> Io<()> {
        self.change(move |image| async move { image.apply_snapshot(&snapshot).await })
    }

    /// Deletes a snapshot and gives back what nobody else uses, also to the storage
    /// unless [`OpenOptions::pass_discard_snapshot`](crate::qcow2::OpenOptions) forbids it.
    /// Durable at the end.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if there is no such snapshot, or if its tables cannot be
    /// read. Nothing has changed then.
    pub fn delete_snapshot(&self, snapshot: SnapshotSelector) -> Io<()> {
        self.change(move |image| async move { image.delete_snapshot(&snapshot).await })
    }
}
