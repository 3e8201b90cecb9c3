//! [`Tracker`]: notes what is written through it.

use std::sync::Arc;

use vellum::{BlockDevice, Buffer, Io, RequestFlags, ZeroRequest, delegate};
use vellum_storage::mutants::{self, Mutant};

use super::dirty::DirtyMap;

/// A device of which every change is noted in a [`DirtyMap`], once it is made and before
/// whoever asked for it hears of that; or copied by then, if whoever copies what is dirty
/// wants that.
#[derive(Debug)]
pub struct Tracker {
    device: Arc<dyn BlockDevice>,
    dirty: Arc<DirtyMap>,
}

impl Tracker {
    /// Notes in `dirty` what is written to `device`.
    pub fn new(device: Arc<dyn BlockDevice>, dirty: Arc<DirtyMap>) -> Arc<Self> {
        Arc::new(Tracker { device, dirty })
    }

    /// Makes a change, and notes it. Also of one that fails a part may have been made.
    fn change<T: 'static>(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        begin: impl FnOnce(&dyn BlockDevice) -> Io<T> + 'static,
    ) -> Io<T> {
        if let Some(mirror) = self.dirty.follower() {
            return mirror.change(offset_bytes, len_bytes, begin);
        }
        let change = begin(&*self.device);
        if change.is_ready() {
            self.dirty.mark(offset_bytes, len_bytes);
            return change;
        }
        let dirty = self.dirty.clone();
        Io::start(async move {
            let changed = change.await;
            dirty.mark(offset_bytes, len_bytes);
            changed
        })
    }
}

impl BlockDevice for Tracker {
    delegate!(
        device: info, size_bytes, read, copy_up, flush, block_status, truncate, resize, close, backing,
        identity, allocated_bytes,
    );
    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.change(offset_bytes, buffer.len() as u64, move |device| {
            device.write(offset_bytes, buffer, flags)
        })
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        self.change(offset_bytes, buffer.len() as u64, move |device| {
            device.write_compressed(offset_bytes, buffer, flags)
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        if mutants::is(Mutant::ForgetDirtyZeroes) {
            return self.device.write_zeroes(offset_bytes, len_bytes, request);
        }
        self.change(offset_bytes, len_bytes, move |device| {
            device.write_zeroes(offset_bytes, len_bytes, request)
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.change(offset_bytes, len_bytes, move |device| {
            device.discard(offset_bytes, len_bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::block_on;

    use super::*;
    use crate::live::blocked_device::BlockedDevice;

    #[test]
    fn what_is_written_is_dirty_once_it_is_there() {
        block_on(async {
            let gate = BlockedDevice::new(0, false);
            let dirty = DirtyMap::new(4096);
            let tracker = Tracker::new(gate.clone(), dirty.clone());
            let bytes = Buffer::copy_of(&[1; 512]);
            let write = tracker.write(0, bytes, RequestFlags::default());
            let zeroes = tracker.write_zeroes(512, 512, ZeroRequest::default());
            // Somebody who copies now copies what was there before.
            dirty.take();
            gate.open();
            write.await.expect("a write");
            assert!(!dirty.take().is_empty(), "the copy is out of date");
            zeroes.await.expect("zeroes");
            tracker.discard(0, 512).await.expect("a discard");
            assert!(!dirty.take().is_empty());
        });
    }
}
