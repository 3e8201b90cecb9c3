//! What a device showed when its filter was made, for readers.

use std::ops::Range;
use std::sync::Arc;

use vellum::{
    BlockDevice, Buffer, DeviceInfo, Error, ErrorKind, Extent, Io, RequestFlags, ZeroRequest,
    delegate,
};
use vellum_io::bits::Bits;
use vellum_io::spawn;

use super::core::{Core, inaccessible};

/// How far a question about old bytes reaches, in bytes: writes wait for it, so no more is
/// asked than is answered soon.
const MAX_ASKED_BYTES: u64 = 16 << 20;

const ENOTSUP: i32 = 95;

/// The target, as one sees the source's old bytes through it where it stands on the source.
#[derive(Debug)]
pub(super) struct SnapshotView(pub(super) Arc<Core>);

impl BlockDevice for SnapshotView {
    delegate!(
        0.target: info, size_bytes, write, write_zeroes, discard, flush, truncate, close, backing,
        allocated_bytes,
    );

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        let core = self.0.clone();
        let grains = core.grains(offset_bytes, buffer.len() as u64);
        if !core.has_todo(&grains) {
            return match core.check_shown(offset_bytes) {
                Ok(()) => core.target.read(offset_bytes, buffer),
                Err(error) => Io::ready(Err(error)),
            };
        }
        Io::task(spawn(async move {
            let _read = core.clone().read(grains).await;
            let buffer = core.target.read(offset_bytes, buffer).await?;
            core.check_shown(offset_bytes).map(|()| buffer)
        }))
    }

    /// What the target does not hold is asked of the source: what lies there must not be
    /// overwritten, and so not copied, in between.
    fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        let core = self.0.clone();
        if !core.has_todo(&core.grains(offset_bytes, len_bytes)) {
            return match core.check_shown(offset_bytes) {
                Ok(()) => core.target.block_status(offset_bytes, len_bytes, max_depth),
                Err(error) => Io::ready(Err(error)),
            };
        }
        let len_bytes = len_bytes.min(MAX_ASKED_BYTES);
        let grains = core.grains(offset_bytes, len_bytes);
        Io::task(spawn(async move {
            let _read = core.clone().read(grains).await;
            let asked = core.target.block_status(offset_bytes, len_bytes, max_depth);
            let extent = asked.await?;
            core.check_shown(offset_bytes).map(|()| extent)
        }))
    }
}

/// The old bytes, wherever they are: in the source, or in the target.
#[derive(Debug)]
pub(super) struct SnapshotAccess(pub(super) Arc<Core>);

impl Core {
    /// Refuses what nobody can see any more. After a read it tells whether that saw old bytes: a
    /// change for whose sake they are given up begins only afterwards.
    fn check_shown(&self, at: u64) -> vellum::Result<()> {
        match self.lock().broken {
            None => Ok(()),
            Some(_) => Err(inaccessible(at)),
        }
    }

    /// Where a run of old bytes lies, and where it ends; whoever asks keeps it from changing.
    fn place(&self, at: u64, end: u64) -> vellum::Result<(&dyn BlockDevice, u64)> {
        let grains = self.grains(at, end - at);
        let state = self.lock();
        if state.broken.is_some() {
            return Err(inaccessible(at));
        }
        let is_todo = state.todo.contains(grains.start);
        let mut run = grains.start..state.todo.run_end(grains.start, grains.end);
        if let Some(hidden) = &state.hidden {
            match hidden.find(run.clone(), true) {
                Some(start) if start == run.start => return Err(inaccessible(at)),
                Some(start) => run.end = start,
                None => {}
            }
        }
        drop(state);
        let device: &dyn BlockDevice = match is_todo {
            true => &*self.source,
            false => &*self.target,
        };
        Ok((device, self.bytes(&run).end.min(end)))
    }

    fn check_end(&self, offset_bytes: u64, len_bytes: u64) -> vellum::Result<()> {
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.size_bytes => Ok(()),
            _ => {
                let message = "the request reaches beyond the end of the device";
                Err(Error::new(ErrorKind::OutOfRange, "read", message).at(offset_bytes))
            }
        }
    }

    async fn read_old(
        self: Arc<Self>,
        offset_bytes: u64,
        mut buffer: Buffer,
    ) -> vellum::Result<Buffer> {
        let len_bytes = buffer.len() as u64;
        self.check_end(offset_bytes, len_bytes)?;
        let _read = self
            .clone()
            .read(self.grains(offset_bytes, len_bytes))
            .await;
        let end = offset_bytes + len_bytes;
        let mut at = offset_bytes;
        while at < end {
            let (device, run_end) = self.place(at, end)?;
            if at == offset_bytes && run_end == end {
                let buffer = device.read(at, buffer).await?;
                return self.check_shown(at).map(|()| buffer);
            }
            let part = Buffer::for_read((run_end - at) as usize);
            let part = device.read(at, part).await?;
            self.check_shown(at)?;
            let place = (at - offset_bytes) as usize..(run_end - offset_bytes) as usize;
            buffer[place].copy_from_slice(&part);
            at = run_end;
        }
        Ok(buffer)
    }

    async fn status_of_old(
        self: Arc<Self>,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> vellum::Result<Extent> {
        let len_bytes = len_bytes.min(MAX_ASKED_BYTES);
        self.check_end(offset_bytes, len_bytes)?;
        let _read = self
            .clone()
            .read(self.grains(offset_bytes, len_bytes))
            .await;
        let (device, end) = self.place(offset_bytes, offset_bytes + len_bytes)?;
        let asked = device.block_status(offset_bytes, end - offset_bytes, u32::MAX);
        let extent = asked.await?;
        self.check_shown(offset_bytes)?;
        // As a snapshot it is one layer, and its bytes lie nowhere for long.
        Ok(Extent::new(extent.len_bytes, extent.kind))
    }

    /// Hides whole grains, which need not be copied then.
    pub(super) fn hide(&self, grains: &Range<u64>) {
        let count = self.grain_count();
        let mut state = self.lock();
        let hidden = state.hidden.get_or_insert_with(|| Bits::none(count));
        grains.clone().for_each(|grain| hidden.insert(grain));
        grains.clone().for_each(|grain| state.todo.remove(grain));
    }

    /// Nobody wants to see a range any more: the target gives up what it holds of it.
    async fn discard_old(self: Arc<Self>, offset_bytes: u64, len_bytes: u64) -> vellum::Result<()> {
        self.check_end(offset_bytes, len_bytes)?;
        let end = offset_bytes + len_bytes;
        let last = match end == self.size_bytes {
            true => self.grain_count(),
            false => end / self.grain_bytes,
        };
        let grains = offset_bytes.div_ceil(self.grain_bytes)..last;
        if grains.is_empty() {
            return Ok(());
        }
        // Nothing of it is being copied then, nor is before this has ended.
        let _read = self.clone().read(grains.clone()).await;
        self.hide(&grains);
        let range = self.bytes(&grains);
        self.target
            .discard(range.start, range.end - range.start)
            .await
    }
}

fn refused<T>(core: &Core) -> Io<T> {
    let error = Error::from_errno("write", ENOTSUP);
    Io::ready(Err(error.target(core.source.info().name)))
}

impl BlockDevice for SnapshotAccess {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            format: "snapshot-access",
            // What is discarded is given up.
            read_only: false,
            cluster_size_bytes: Some(self.0.grain_bytes),
            has_zero_init: false,
            growable: false,
            ..self.0.source.info()
        }
    }

    fn size_bytes(&self) -> u64 {
        self.0.size_bytes
    }

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        Io::task(spawn(self.0.clone().read_old(offset_bytes, buffer)))
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64, _: u32) -> Io<Extent> {
        Io::task(spawn(self.0.clone().status_of_old(offset_bytes, len_bytes)))
    }

    fn write(&self, _: u64, _: Buffer, _: RequestFlags) -> Io<Buffer> {
        refused(&self.0)
    }

    fn write_zeroes(&self, _: u64, _: u64, _: ZeroRequest) -> Io<()> {
        refused(&self.0)
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        Io::task(spawn(self.0.clone().discard_old(offset_bytes, len_bytes)))
    }

    fn flush(&self) -> Io<()> {
        Io::ready(Ok(()))
    }

    fn truncate(&self, _: u64) -> Io<()> {
        refused(&self.0)
    }

    fn close(&self) -> Io<()> {
        // What it shows belongs to others.
        Io::ready(Ok(()))
    }
}
