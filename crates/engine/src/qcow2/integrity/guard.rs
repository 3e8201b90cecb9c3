//! [`GuardedData`]: the storage that guest data goes to, which refuses to write where
//! metadata lies.

use std::sync::Arc;

use vellum_format::geometry::Geometry;
use vellum_io::{Buffers, Io};
use vellum_storage::{Storage, WriteFlags, ZeroFlags, pass_on};

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
    pass_on!(
        file: capabilities, name, len_bytes, read, allocate, flush, truncate, block_status,
        allocated_bytes, may_clone_from, close, debugger, as_file,
    );

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
}
