//! [`MappedDevice`]: the block device over any [`Layout`].
//!
//! ```text
//!   read     lookup -> one run: the storage's own request; several: side by side
//!   write    data in place, range held shared; else the blocks are held exclusive:
//!            allocate -> data (and what is around it) -> link, in memory
//!   flush    take what changed -> barrier -> write it -> barrier       (rule 1)
//! ```
//!
//! Invariants:
//! - An entry that was linked reaches the disk after a barrier that makes durable the bytes it
//!   leads to (rule 1). Host space that a mapping has left is not used again before the image is opened
//!   anew, so reads need no protection from those who free it (rule 5).
//! - What lies at a place of data is read and written by [`Core::request`] alone, which decrypts and encrypts it
//!   where the image is encrypted.
//! - Changes of one block take turns (rule 9); those of others run side by side.
//! - After a failed write of tables reads go on, and changes fail with the first reason (rule 11). For want of room
//!   alone they go on, too: the next commit writes what that one did not, as absolute bytes, once more.

mod commit;
mod image;
mod plan;
mod read;
mod status;
mod write;
mod zero;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use vellum::{
    BlockDevice, Buffer, DeviceInfo, DiskIdentity, Error, ErrorKind, Extent, Io, RequestFlags,
    Result, Storage, ZeroRequest,
};
use vellum_io::changes::Changes;
use vellum_io::range_lock::RangeLock;
use vellum_storage::{Event, EventListener};

use crate::facts::Facts;
use crate::inflations::Inflations;
use crate::layout::Layout;
use commit::Commits;
pub use image::ForeignImage;
use read::{Inflated, most_inflations};

/// A device whose blocks lie where a [`Layout`] says.
#[derive(Debug)]
pub struct MappedDevice<L: Layout>(Arc<Core<L>>, ForeignImage);

#[derive(Debug)]
struct Core<L: Layout> {
    layout: L,
    name: Arc<str>,
    facts: Mutex<Arc<Facts>>,
    /// Who wants to be told of events of the image's file.
    listener: Option<Arc<dyn EventListener>>,
    backing: Option<Arc<dyn BlockDevice>>,
    read_only: bool,
    /// In bytes of the guest.
    ranges: Arc<RangeLock>,
    changes: Changes,
    commits: Commits<L::Changes>,
    /// The size that a resize is about to set, which changes of its own may reach already.
    coming_bytes: AtomicU64,
    /// Why there are no more changes.
    failure: Mutex<Option<Error>>,
    closed: AtomicBool,
    inflated: Inflated,
    /// By the generation of `inflated` and the block.
    inflations: Inflations<(u64, u64)>,
}

impl<L: Layout> MappedDevice<L> {
    /// A device over a layout. What the image holds nothing of is read from `backing`, and reads as
    /// zeroes beyond its end.
    pub fn new(layout: L, backing: Option<Arc<dyn BlockDevice>>, read_only: bool) -> Arc<Self> {
        let file = layout.files().first();
        let inflations = Inflations::new(most_inflations(layout.block_bytes()));
        let core = Arc::new(Core {
            name: file.map_or("", |file| file.name()).into(),
            facts: Mutex::new(Arc::new(layout.facts())),
            listener: file.and_then(|file| file.event_listener()),
            layout,
            backing,
            read_only,
            ranges: Arc::default(),
            changes: Changes::default(),
            commits: Commits::default(),
            coming_bytes: AtomicU64::new(0),
            failure: Mutex::default(),
            closed: AtomicBool::new(false),
            inflated: Inflated::default(),
            inflations,
        });
        Arc::new(MappedDevice(core.clone(), ForeignImage::new(core)))
    }

    /// The format's own side.
    pub fn layout(&self) -> &L {
        &self.0.layout
    }

    /// A changing request, which runs to its end whoever waits for it.
    fn change<T: 'static, F>(&self, work: impl FnOnce(Arc<Core<L>>) -> F) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        let core = self.0.clone();
        let work = work(core.clone());
        Io::start(async move {
            core.changes.begin().await;
            let counted = Counted(&core.changes);
            let result = match core.check_changeable() {
                Ok(()) => work.await,
                Err(error) => Err(error),
            };
            drop(counted);
            result
        })
    }
}

/// A change that is counted out when it is dropped.
struct Counted<'a>(&'a Changes);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl<L: Layout> Core<L> {
    fn error(&self, kind: ErrorKind, operation: &'static str, message: &str) -> Error {
        Error::new(kind, operation, message).target(&*self.name)
    }

    fn check_range(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        let end = offset_bytes.checked_add(len_bytes);
        match end.is_some_and(|end| end <= self.layout.size_bytes()) {
            true => Ok(()),
            false => Err(self
                .error(
                    ErrorKind::OutOfRange,
                    operation,
                    "request beyond the end of the device",
                )
                .at(offset_bytes)),
        }
    }

    /// What can be said of a change before it begins.
    fn check_change(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        if self.read_only {
            return Err(self.error(ErrorKind::ReadOnly, operation, "the device is read-only"));
        }
        self.check_range(operation, offset_bytes, len_bytes)
    }

    fn check_changeable(&self) -> Result<()> {
        if let Some(failure) = &*self.failure.lock() {
            return Err(failure.clone());
        }
        if self.closed.load(Ordering::Acquire) {
            let message = "the device is closed";
            return Err(self.error(ErrorKind::InvalidArgument, "write", message));
        }
        Ok(())
    }

    /// Rule 11: nothing is changed any more.
    fn fail_stop(&self, error: &Error) {
        self.failure.lock().get_or_insert_with(|| error.clone());
    }

    /// Tells whoever watches the file.
    async fn tell(&self, event: Event) {
        if let Some(listener) = &self.listener {
            listener.emit(event).await;
        }
    }

    /// The block around an offset, as the device has it.
    fn block_at(&self, offset_bytes: u64) -> std::ops::Range<u64> {
        let block_bytes = self.layout.block_bytes();
        let start = offset_bytes - offset_bytes % block_bytes;
        let coming_bytes = self.coming_bytes.load(Ordering::Acquire);
        let size_bytes = self.layout.size_bytes().max(coming_bytes);
        start..start.saturating_add(block_bytes).min(size_bytes)
    }
}

impl<L: Layout> BlockDevice for MappedDevice<L> {
    fn info(&self) -> DeviceInfo {
        let core = &*self.0;
        let alignment_bytes = core
            .layout
            .files()
            .iter()
            .map(|file| file.capabilities().request_alignment_bytes)
            .max();
        DeviceInfo {
            format: core.layout.format(),
            name: (*core.name).to_owned(),
            read_only: core.read_only,
            cluster_size_bytes: core.layout.cluster_size_bytes(),
            request_alignment_bytes: alignment_bytes.unwrap_or(1),
            discard_alignment_bytes: core.layout.block_bytes(),
            has_zero_init: core.backing.is_none() && core.layout.has_zero_init(),
            growable: false,
        }
    }

    fn size_bytes(&self) -> u64 {
        self.0.layout.size_bytes()
    }

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        read::read(&self.0, offset_bytes, buffer)
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        let len_bytes = buffer.len() as u64;
        if let Err(error) = self.0.check_change("write", offset_bytes, len_bytes) {
            return Io::ready(Err(error));
        }
        self.change(|core| async move { core.write(offset_bytes, buffer, flags).await })
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        let len_bytes = buffer.len() as u64;
        if let Err(error) = self
            .0
            .check_change("write compressed", offset_bytes, len_bytes)
        {
            return Io::ready(Err(error));
        }
        if self.0.layout.never_compresses() {
            return self
                .change(|core| async move { core.write(offset_bytes, buffer, flags).await });
        }
        self.change(|core| async move { core.write_compressed(offset_bytes, buffer, flags).await })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        if let Err(error) = self.0.check_change("write zeroes", offset_bytes, len_bytes) {
            return Io::ready(Err(error));
        }
        self.change(|core| async move { core.write_zeroes(offset_bytes, len_bytes, request).await })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        if let Err(error) = self.0.check_change("discard", offset_bytes, len_bytes) {
            return Io::ready(Err(error));
        }
        self.change(|core| async move { core.discard(offset_bytes, len_bytes).await })
    }

    fn flush(&self) -> Io<()> {
        if self.0.read_only {
            return Io::ready(Ok(()));
        }
        let core = self.0.clone();
        Io::start(async move { core.commit().await })
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        if let Err(error) = self.0.check_range("block status", offset_bytes, len_bytes) {
            return Io::ready(Err(error));
        }
        let core = self.0.clone();
        Io::start(async move { core.block_status(offset_bytes, len_bytes, max_depth).await })
    }

    fn truncate(&self, size_bytes: u64) -> Io<()> {
        if self.0.read_only {
            let message = "the device is read-only";
            return Io::ready(Err(self.0.error(ErrorKind::ReadOnly, "truncate", message)));
        }
        let core = self.0.clone();
        Io::start(async move { core.resize(size_bytes).await })
    }

    fn clear(&self) -> Io<()> {
        if self.0.read_only {
            let message = "the device is read-only";
            return Io::ready(Err(self.0.error(ErrorKind::ReadOnly, "clear", message)));
        }
        let core = self.0.clone();
        Io::start(async move { core.clear().await })
    }

    fn close(&self) -> Io<()> {
        let core = self.0.clone();
        Io::start(async move { core.close().await })
    }

    fn backing(&self) -> Option<Arc<dyn BlockDevice>> {
        self.0.backing.clone()
    }

    fn storage(&self) -> Option<Arc<dyn Storage>> {
        self.0.layout.files().first().cloned()
    }

    fn identity(&self) -> Option<DiskIdentity> {
        Some(DiskIdentity::of(&*self.0))
    }

    fn format_device(&self) -> Option<&dyn std::any::Any> {
        Some(&self.1)
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        let mut all_bytes = 0;
        for file in self.0.layout.files() {
            match file.allocated_bytes()? {
                Some(bytes) => all_bytes += bytes,
                None => return Ok(None),
            }
        }
        Ok(Some(all_bytes))
    }
}
