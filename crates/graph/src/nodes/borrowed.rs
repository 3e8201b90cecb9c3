//! What others stand on and do not own: a node with a name of its own outlives whoever uses
//! it, so these make it durable where they would close it.

use std::sync::Arc;

use vellum::nodes::Link;
use vellum::{BlockDevice, Io, Result};
use vellum_storage::Storage;

use super::Nodes;
use crate::graph::{NodeKind, OpenedNode};
use crate::open::Ancestry;

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

impl Nodes {
    /// Whether a node can be exchanged under whoever stands on it behind a link.
    pub(crate) fn is_linkable(&self, name: &str, node: &OpenedNode) -> bool {
        self.is_kept(name) && matches!(node.kind, NodeKind::Device(_))
    }

    /// What the node at `place` stands on as `role`: behind a link if it is of a format and others
    /// know it too, so that it can be exchanged.
    pub(crate) fn linked(
        &self,
        place: &Ancestry,
        role: &str,
        node: OpenedNode,
    ) -> Result<OpenedNode> {
        let above = place.parent.as_deref().filter(|_| self.live);
        let mut named = self.lock();
        let Some(used) = above.and_then(|above| named.uses.by_as(above, role)) else {
            return Ok(node);
        };
        let (id, name) = (used.id, used.node.clone());
        let is_linkable = self.is_linkable(&name, &node);
        let Some(below) = named
            .nodes
            .seen_from_mut(place, &name)
            .filter(|_| is_linkable)
        else {
            return Ok(node);
        };
        let device = below.device()?;
        let link = Link::new(below.front.clone().unwrap_or(device));
        named.uses.go_through(id, link.clone());
        let kind = NodeKind::Device(link);
        Ok(OpenedNode { kind, ..node }.borrowed())
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
