//! [`GuardedData`]: the storage that guest data goes to, which refuses to write where
//! metadata lies.

use std::sync::Arc;

use vellum_format::geometry::Geometry;
use vellum_storage::{
    Buffers, Capabilities, Io, Result, Storage, StorageExtent, WriteFlags, ZeroFlags,
};

use super::overlap::OverlapMap;

/// The image file as guest data sees it: every write is checked.
#[derive(Debug)]
pub(crate) struct GuardedData {
    file: Arc<dyn Storage>,
    map: Arc<OverlapMap>,
}

impl GuardedData {
    /// What guest data is written through. An external data file holds no metadata.
    pub(crate) fn around(
        data: Arc<dyn Storage>,
        geometry: &Geometry,
        map: &Arc<OverlapMap>,
    ) -> Arc<dyn Storage> {
        match geometry.external_data {
            true => data,
            false => Arc::new(GuardedData {
                file: data,
                map: map.clone(),
            }),
        }
    }

    /// Starts a request that changes a range, if it may.
    fn guard<T>(&self, offset_bytes: u64, len_bytes: u64, start: impl FnOnce() -> Io<T>) -> Io<T>
    where
        T: Send + 'static,
    {
        match self.map.check(offset_bytes, len_bytes, None) {
            Ok(()) => start(),
            Err(error) => Io::ready(Err(error)),
        }
    }
}

impl Storage for GuardedData {
    fn capabilities(&self) -> Capabilities {
        self.file.capabilities()
    }

    fn name(&self) -> &str {
        self.file.name()
    }

    fn len_bytes(&self) -> Result<u64> {
        self.file.len_bytes()
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        self.file.read(offset_bytes, buffers)
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let len_bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        self.guard(offset_bytes, len_bytes, || {
            self.file.write(offset_bytes, buffers, flags)
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.guard(offset_bytes, len_bytes, || {
            self.file.write_zeroes(offset_bytes, len_bytes, flags)
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.guard(offset_bytes, len_bytes, || {
            self.file.discard(offset_bytes, len_bytes)
        })
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.file.allocate(offset_bytes, len_bytes)
    }

    fn flush(&self) -> Io<()> {
        self.file.flush()
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.file.truncate(len_bytes)
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        self.file.block_status(offset_bytes, len_bytes)
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        self.file.allocated_bytes()
    }

    fn copy_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        self.guard(to_bytes, len_bytes, || {
            self.file
                .copy_range(source, from_bytes, to_bytes, len_bytes)
        })
    }

    fn may_clone_from(&self, source: &dyn Storage) -> bool {
        self.file.may_clone_from(source)
    }

    fn clone_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        self.guard(to_bytes, len_bytes, || {
            self.file
                .clone_range(source, from_bytes, to_bytes, len_bytes)
        })
    }

    fn close(&self) -> Io<()> {
        self.file.close()
    }

    fn debugger(&self) -> Option<Arc<vellum_storage::nodes::debug::Debugger>> {
        self.file.debugger()
    }

    fn as_file(&self) -> Option<&vellum_storage::FileStorage> {
        self.file.as_file()
    }
}
