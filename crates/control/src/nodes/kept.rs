//! What others stand on and do not own: a node with a name of its own outlives whoever uses
//! it, so these make it durable where they would close it.

use std::sync::Arc;

use vellum::{BlockDevice, Buffer, Io, RequestFlags};
use vellum_storage::Storage;

use crate::graph::{Body, Opened};

/// A storage that is closed by its node alone.
#[derive(Debug)]
struct KeptStorage(Arc<dyn Storage>);

impl Storage for KeptStorage {
    vellum_storage::pass_on!(
        0: capabilities, name, len_bytes, read, write, write_zeroes, discard, allocate, flush,
        truncate, block_status, allocated_bytes, may_clone_from, debugger, as_file,
    );

    fn copy_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        self.0.copy_range(source, from_bytes, to_bytes, len_bytes)
    }

    fn clone_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        self.0.clone_range(source, from_bytes, to_bytes, len_bytes)
    }

    fn close(&self) -> Io<()> {
        match self.0.capabilities().read_only {
            true => Io::ready(Ok(())),
            false => self.0.flush(),
        }
    }
}

/// A device that is closed by its node alone.
#[derive(Debug)]
struct KeptDevice(Arc<dyn BlockDevice>);

impl BlockDevice for KeptDevice {
    vellum::pass_on!(
        0: info, size_bytes, read, write, write_zeroes, discard, flush, block_status, truncate,
        resize, clear, backing, storage, as_qcow2, allocated_bytes,
    );

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        self.0.write_compressed(offset_bytes, buffer, flags)
    }

    fn stands_for(&self) -> Option<Arc<dyn BlockDevice>> {
        Some(self.0.clone())
    }

    fn close(&self) -> Io<()> {
        match self.0.info().read_only {
            true => Io::ready(Ok(())),
            false => self.0.flush(),
        }
    }
}

impl Opened {
    /// The node for one who stands on it and does not own it.
    pub(crate) fn kept(self) -> Opened {
        let body = match self.body {
            Body::Storage(storage) => Body::Storage(Arc::new(KeptStorage(storage))),
            Body::Device(device) => Body::Device(Arc::new(KeptDevice(device))),
        };
        Opened { body, ..self }
    }
}
