//! What others stand on and do not own: a node with a name of its own outlives whoever uses
//! it, so these make it durable where they would close it.

use std::sync::Arc;

use vellum::{BlockDevice, Io, Storage};

use crate::node::opened::{NodeKind, OpenedNode};

/// A storage that is closed by its node alone.
#[derive(Debug)]
struct BorrowedStorage(Arc<dyn Storage>);

impl Storage for BorrowedStorage {
    vellum_storage::delegate!(
        0: capabilities, name, version, len_bytes, modified_at, read, read_into, write, write_from, write_zeroes, discard, allocate, flush,
        truncate, block_status, allocated_bytes, free_bytes, copy_range,
        may_clone_from, clone_range, event_listener, disk, transparent_storage,
    );

    fn close(&self) -> Io<()> {
        match self.0.capabilities().read_only {
            true => Io::ready(Ok(())),
            false => self.0.flush(),
        }
    }
}

/// A device that is closed by its node alone.
#[derive(Debug)]
struct BorrowedDevice(Arc<dyn BlockDevice>);

impl BlockDevice for BorrowedDevice {
    vellum::delegate!(
        0: info, size_bytes, read, read_into, write, write_from, write_zeroes, copy_up, discard, flush, block_status,
        truncate, resize, clear, backing, storage, format_device, identity, allocated_bytes,
        write_compressed,
    );

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

impl OpenedNode {
    /// The node for one who stands on it and does not own it.
    pub(crate) fn borrowed(self) -> OpenedNode {
        let kind = match self.kind {
            NodeKind::Storage(storage) => NodeKind::Storage(Arc::new(BorrowedStorage(storage))),
            NodeKind::Device(device) => NodeKind::Device(Arc::new(BorrowedDevice(device))),
        };
        OpenedNode { kind, ..self }
    }
}
