//! [`DeviceStorage`]: what a guest would see of a device, as the storage of another
//! format (qcow2 inside qcow2).
//!
//! Invariant: a write beyond the end is made only after the device has become
//! long enough, so whoever reads the device later sees it.

use crate::qcow2::AsQcow2;
use std::sync::Arc;

use vellum_io::buffer::total_len;
use vellum_io::{Buffers, spawn};
use vellum_storage::{BlockStatus, Capabilities, StorageExtent, WriteFlags, ZeroFlags};

use crate::{
    BlockDevice, Buffer, DiskIdentity, Error, Io, RequestFlags, Result, Storage, ZeroRequest,
};

/// Sizes of devices are whole sectors.
const SECTOR_SIZE_BYTES: u64 = 512;

/// A device used as a storage.
#[derive(Debug)]
pub struct DeviceStorage {
    name: String,
    core: Arc<Core>,
}

#[derive(Debug)]
struct Core {
    device: Arc<dyn BlockDevice>,
    growable: bool,
    /// Held by the one who changes the size.
    resizing: async_lock::Mutex<()>,
}

impl DeviceStorage {
    /// Uses `device` as a storage. It grows where the device can.
    pub fn new(device: Arc<dyn BlockDevice>) -> Arc<Self> {
        let info = device.info();
        let growable = !info.read_only && (info.growable || device.as_qcow2().is_some());
        Arc::new(DeviceStorage {
            name: info.name,
            core: Arc::new(Core {
                device,
                growable,
                resizing: async_lock::Mutex::new(()),
            }),
        })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.core.device
    }

    fn start<T: 'static, F>(&self, work: impl FnOnce(Arc<Core>) -> F) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        Io::task(spawn(work(self.core.clone())))
    }
}

impl Core {
    /// Makes the device at least `end_bytes` long.
    async fn grow_to(&self, end_bytes: u64) -> Result<()> {
        if end_bytes <= self.device.size_bytes() || !self.growable {
            return Ok(());
        }
        let _one = self.resizing.lock().await;
        let size_bytes = end_bytes.next_multiple_of(SECTOR_SIZE_BYTES);
        if size_bytes > self.device.size_bytes() {
            self.device.truncate(size_bytes).await?;
        }
        Ok(())
    }

    async fn read_one(&self, offset_bytes: u64, mut buffer: Buffer) -> Result<Buffer> {
        let inside = self.device.size_bytes().saturating_sub(offset_bytes);
        let inside = inside.min(buffer.len() as u64) as usize;
        if inside == buffer.len() {
            return self.device.read(offset_bytes, buffer).await;
        }
        buffer.fill(0);
        if inside > 0 {
            let part = Buffer::for_read(inside);
            let part = self.device.read(offset_bytes, part).await?;
            buffer[..inside].copy_from_slice(&part);
        }
        Ok(buffer)
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<StorageExtent> {
        let inside = self.device.size_bytes().saturating_sub(offset_bytes);
        if inside == 0 || len_bytes == 0 {
            let status = BlockStatus::Hole;
            return Ok(StorageExtent { status, len_bytes });
        }
        let asked = len_bytes.min(inside);
        let extent = self.device.block_status(offset_bytes, asked, u32::MAX);
        let extent = extent.await?;
        Ok(StorageExtent {
            status: match extent.kind.is_zero() {
                true => BlockStatus::Hole,
                false => BlockStatus::Data,
            },
            len_bytes: extent.len_bytes,
        })
    }
}

impl Storage for DeviceStorage {
    fn capabilities(&self) -> Capabilities {
        let info = self.core.device.info();
        Capabilities {
            request_alignment_bytes: info.request_alignment_bytes,
            memory_alignment_bytes: 1,
            // A device gives space back, and zeroes, by its own clusters.
            can_punch: false,
            can_zero: true,
            has_zero_init: info.has_zero_init,
            read_only: info.read_only,
            growable: self.core.growable,
        }
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.core.device.size_bytes())
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        self.start(|core| async move {
            let mut at = offset_bytes;
            let mut filled = Buffers::new();
            for buffer in buffers {
                let len_bytes = buffer.len() as u64;
                filled.push(core.read_one(at, buffer).await?);
                at += len_bytes;
            }
            Ok(filled)
        })
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        self.start(|core| async move {
            core.grow_to(offset_bytes + total_len(&buffers)).await?;
            let flags = RequestFlags { fua: flags.fua };
            let mut at = offset_bytes;
            let mut written = Buffers::new();
            for buffer in buffers {
                let len_bytes = buffer.len() as u64;
                written.push(core.device.write(at, buffer, flags).await?);
                at += len_bytes;
            }
            Ok(written)
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.start(|core| async move {
            core.grow_to(offset_bytes + len_bytes).await?;
            let request = ZeroRequest {
                may_unmap: flags.may_unmap,
                no_fallback: flags.no_fallback,
                fua: flags.fua,
            };
            core.device
                .write_zeroes(offset_bytes, len_bytes, request)
                .await
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let inside = self.core.device.size_bytes().saturating_sub(offset_bytes);
        match inside.min(len_bytes) {
            0 => Io::ready(Ok(())),
            len_bytes => self.core.device.discard(offset_bytes, len_bytes),
        }
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.start(|core| async move { core.grow_to(offset_bytes + len_bytes).await })
    }

    fn flush(&self) -> Io<()> {
        let flushed = self.core.device.flush();
        // A device says itself which of its flushes must not be tried again.
        Io::start(async move { flushed.await.map_err(Error::of_kept_flush) })
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.start(|core| async move {
            let _one = core.resizing.lock().await;
            let size_bytes = len_bytes.next_multiple_of(SECTOR_SIZE_BYTES);
            if size_bytes == core.device.size_bytes() {
                return Ok(());
            }
            core.device.truncate(size_bytes).await
        })
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        self.start(|core| async move { core.status(offset_bytes, len_bytes).await })
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        self.core.device.allocated_bytes()
    }

    fn free_bytes(&self) -> Io<Option<u64>> {
        match self.core.device.storage() {
            Some(storage) => storage.free_bytes(),
            None => Io::ready(Ok(None)),
        }
    }

    fn disk(&self) -> Option<DiskIdentity> {
        self.core.device.identity()
    }

    fn close(&self) -> Io<()> {
        self.core.device.close()
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::block_on;
    use vellum_storage::MemStorage;

    use super::*;
    use crate::gate::DenyAll;
    use crate::qcow2::OpenOptions;
    use crate::qcow2::Qcow2;
    use crate::qcow2::create::{CreateOptions, create};

    async fn image(storage: Arc<dyn Storage>, size_bytes: u64) -> Arc<Qcow2> {
        let options = CreateOptions {
            size_bytes,
            ..CreateOptions::default()
        };
        create(storage.clone(), None, &options).await.unwrap();
        let gate = Arc::new(DenyAll);
        Qcow2::open(storage, gate, OpenOptions::default())
            .await
            .unwrap()
    }

    #[test]
    fn an_image_inside_an_image_grows_it_and_keeps_its_data() {
        let memory = Arc::new(MemStorage::new());
        block_on(async {
            let outer = image(memory.clone(), 512).await;
            let inner = image(DeviceStorage::new(outer.clone()), 1 << 20).await;
            assert!(outer.size_bytes() > 512);
            let ones = Buffer::copy_of(&vec![1; 100_000]);
            inner
                .write(5000, ones, RequestFlags::default())
                .await
                .unwrap();
            // Closes the outer one too.
            inner.close().await.unwrap();
            let open = |storage| Qcow2::open(storage, Arc::new(DenyAll), OpenOptions::default());
            let outer = open(memory).await.unwrap();
            let storage = DeviceStorage::new(outer);
            let beyond = storage.len_bytes().unwrap();
            let read = storage.read(beyond, Buffers::from_iter([Buffer::copy_of(&[1; 9])]));
            assert!(read.await.unwrap()[0].is_zero());
            let inner = open(storage).await.unwrap();
            let read = inner.read(4999, Buffer::zeroed(100_002)).await.unwrap();
            assert_eq!(
                (read[0], read[1], read[100_000], read[100_001]),
                (0, 1, 1, 0)
            );
        });
    }
}
