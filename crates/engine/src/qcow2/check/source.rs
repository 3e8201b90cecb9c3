//! The image that is checked, as its header describes it.

use std::cell::Cell;
use std::sync::Arc;

use vellum_format::header::Purpose;
use vellum_format::{Geometry, Header, HostOffset};
use vellum_storage::WriteFlags;

use super::report::ProgressSink;
use crate::qcow2::header::load;
use crate::{Buffer, Buffers, Error, ErrorKind, Result, Storage};

/// Most clusters of a file that can be checked, as in QEMU.
const MAX_CLUSTERS: u64 = i32::MAX as u64;
const EFBIG: i32 = 27;

/// See [`Image::longest_bytes`].
const MAX_GROWTH_BYTES: u64 = 64 << 20;

/// How many bytes of tables are read for each byte of the file, and in any case.
/// The tables of a sound image share no bytes and are read twice at most; a hostile
/// one can lay millions of them over each other, and a check would take for ever.
const TABLE_BYTES_PER_FILE_BYTE: u64 = 4;
const MIN_TABLE_BYTES: u64 = 16 << 20;

/// The image as its header describes it.
pub(in crate::qcow2) struct Image {
    pub(in crate::qcow2) storage: Arc<dyn Storage>,
    pub(in crate::qcow2) header: Header,
    pub(in crate::qcow2) geometry: Geometry,
    len_bytes: u64,
    /// Bytes of tables that may still be read.
    table_bytes_left: Cell<u64>,
    on_progress: Option<ProgressSink>,
    /// Bytes of tables that have been read, and that are known to be read.
    progress: Cell<(u64, u64)>,
}

impl Image {
    pub(in crate::qcow2) async fn open(
        storage: Arc<dyn Storage>,
        on_progress: Option<ProgressSink>,
    ) -> Result<Image> {
        let header = load::header(&storage, Purpose::Check).await?;
        let geometry = header.geometry();
        let mut image = Image {
            storage,
            header,
            geometry,
            len_bytes: 0,
            table_bytes_left: Cell::new(0),
            on_progress,
            progress: Cell::new((0, 0)),
        };
        image.measure()?;
        Ok(image)
    }

    /// Reads the header again, and takes notice of the file's length.
    pub(super) async fn reload(&mut self) -> Result<()> {
        self.header = load::header(&self.storage, Purpose::Check).await?;
        self.measure()
    }

    fn measure(&mut self) -> Result<()> {
        self.len_bytes = self.storage.len_bytes()?;
        if self.geometry.clusters_for(self.len_bytes) > MAX_CLUSTERS {
            let message = "the file has more clusters than can be checked";
            return Err(Error::new(ErrorKind::Unsupported, "check", message)
                .target(self.storage.name())
                .with_errno(EFBIG));
        }
        let table_bytes = self
            .len_bytes
            .saturating_mul(TABLE_BYTES_PER_FILE_BYTE)
            .max(MIN_TABLE_BYTES);
        self.table_bytes_left.set(table_bytes);
        Ok(())
    }

    /// Reads an L1 table as far as the file goes: what lies beyond would read as zeroes.
    pub(in crate::qcow2) async fn read_l1_table(
        &self,
        offset: HostOffset,
        entries: u32,
    ) -> Result<Buffer> {
        let in_file = self.len_bytes.saturating_sub(offset.0);
        let len_bytes = (u64::from(entries) * 8).min(in_file);
        self.spend(len_bytes)?;
        load::read_bytes(&self.storage, offset.0, len_bytes.next_multiple_of(8)).await
    }

    /// Makes the file so long; a length that is refused changes nothing.
    pub(super) async fn extend(&mut self, len_bytes: u64) -> Result<()> {
        let fits = self.storage.capabilities().growable
            && self.geometry.clusters_for(len_bytes) <= MAX_CLUSTERS;
        if !fits {
            return Err(Error::from_errno("check", EFBIG).target(self.storage.name()));
        }
        self.storage.truncate(len_bytes).await?;
        self.measure()
    }

    /// How long a repair makes the file at most for what points behind its end: only while
    /// that does not make much more of it than there was.
    pub(super) fn longest_bytes(&self) -> u64 {
        match self.storage.capabilities().growable {
            true => self.len_bytes.max(MAX_GROWTH_BYTES) * 2,
            false => self.len_bytes,
        }
    }

    /// Takes tables of `size_bytes` off what may still be read.
    pub(in crate::qcow2) fn spend(&self, size_bytes: u64) -> Result<()> {
        let left = self.table_bytes_left.get().checked_sub(size_bytes);
        self.table_bytes_left.set(left.ok_or_else(|| {
            let message = "the tables of the image overlap too much to be checked";
            Error::new(ErrorKind::Corrupt, "check", message).target(self.storage.name())
        })?);
        let (done, total) = self.progress.get();
        self.progress.set((done, total + size_bytes));
        Ok(())
    }

    /// Tells that tables of `size_bytes` have been dealt with.
    pub(super) fn note_read(&self, size_bytes: u64) {
        let (done, total) = self.progress.get();
        let done = done + size_bytes;
        self.progress.set((done, total.max(done)));
        if let Some(on_progress) = &self.on_progress {
            on_progress(done, total.max(done));
        }
    }

    pub(in crate::qcow2) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Clusters of the file, the last perhaps in part.
    pub(in crate::qcow2) fn file_clusters(&self) -> u64 {
        self.geometry.clusters_for(self.len_bytes)
    }

    pub(in crate::qcow2) fn cluster_of(&self, offset_bytes: u64) -> u64 {
        offset_bytes >> self.geometry.cluster_bits
    }

    pub(super) fn offset_of(&self, cluster: u64) -> u64 {
        cluster << self.geometry.cluster_bits
    }

    /// Writes `bytes` at `offset_bytes`; no barrier.
    pub(super) async fn write(&self, offset_bytes: u64, bytes: Buffer) -> Result<()> {
        let buffers = Buffers::from_buf([bytes]);
        self.storage
            .write(offset_bytes, buffers, WriteFlags::default())
            .await
            .map(drop)
    }

    pub(super) async fn flush(&self) -> Result<()> {
        self.storage.flush().await
    }
}
