//! [`MappedDevice`]: a device whose requests are those of its [`Core`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use parking_lot::Mutex;
use vellum::{
    BlockDevice, Buffer, DeviceInfo, DiskIdentity, ErrorKind, Extent, Io, RequestFlags, Result,
    Storage, ZeroRequest,
};
use vellum_io::changes::Changes;

use super::commits::Commits;
use super::core::Core;
use super::image::ForeignImage;
use super::inflated::{Inflated, most_inflations};
use super::read::read;
use crate::inflations::Inflations;
use crate::layout::Layout;

/// A device whose blocks lie where a [`Layout`] says.
#[derive(Debug)]
pub struct MappedDevice<L: Layout>(Arc<Core<L>>, ForeignImage);

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
        read(&self.0, offset_bytes, buffer)
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
