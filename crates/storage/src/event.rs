//! [`Event`]: moments in the work of a format driver that tests may hook onto.
//!
//! The names are QEMU's (`BlkdebugEvent`). A storage may say who listens
//! ([`crate::Storage::event_listener`]); whoever uses the storage tells that one.

use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Who is told of the [`Event`]s in the use of a storage: a [`crate::nodes::debug::Debugger`],
/// or a type of the embedder's.
pub trait EventListener: Any + Send + Sync + fmt::Debug {
    /// Hears of an event. What is returned holds the one who told, and must be awaited;
    /// `None` lets it go on at once.
    fn event(&self, event: Event) -> Option<Suspension>;
}

impl dyn EventListener {
    /// Tells of an event, and waits as long as the listener holds the caller.
    pub async fn emit(&self, event: Event) {
        if let Some(suspension) = self.event(event) {
            suspension.await;
        }
    }
}

/// The hold of an [`EventListener`] on the one who told it of an event: a future that ends
/// when that one may go on.
#[must_use = "the request is held only if this is awaited"]
pub struct Suspension(Pin<Box<dyn Future<Output = ()> + Send>>);

impl Suspension {
    /// Holds until `resumed` is done.
    pub fn until(resumed: impl Future<Output = ()> + Send + 'static) -> Suspension {
        Suspension(Box::pin(resumed))
    }
}

impl Future for Suspension {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(context)
    }
}

impl fmt::Debug for Suspension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Suspension").finish_non_exhaustive()
    }
}

/// Makes the enum and the table of its names from one list.
macro_rules! events {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A moment in the work of a format driver, or of a request.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Event {
            $($(#[$doc])* $variant,)*
        }

        impl Event {
            /// Every event, with the name that users write.
            pub const ALL: &'static [(Event, &'static str)] = &[$((Event::$variant, $name),)*];
        }
    };
}

events! {
    /// An entry of the L1 table is about to be written.
    L1Update = "l1_update",
    /// A larger L1 table gets its place.
    L1GrowAllocTable = "l1_grow_alloc_table",
    /// A larger L1 table is about to be written.
    L1GrowWriteTable = "l1_grow_write_table",
    /// The header is about to point at a larger L1 table.
    L1GrowActivateTable = "l1_grow_activate_table",
    /// An L2 table is about to be read.
    L2Load = "l2_load",
    /// A changed L2 table is about to be written.
    L2Update = "l2_update",
    /// The entry of a compressed cluster is about to change.
    L2UpdateCompressed = "l2_update_compressed",
    /// A shared L2 table is about to be copied.
    L2AllocCowRead = "l2_alloc_cow_read",
    /// A new L2 table is about to be written for the first time.
    L2AllocWrite = "l2_alloc_write",
    /// Data is about to be read.
    ReadAio = "read_aio",
    /// Data is about to be read from the backing file.
    ReadBackingAio = "read_backing_aio",
    /// Compressed data is about to be read.
    ReadCompressed = "read_compressed",
    /// Data is about to be written.
    WriteAio = "write_aio",
    /// Compressed data is about to be written.
    WriteCompressed = "write_compressed",
    /// The state of a virtual machine is about to be read.
    VmstateLoad = "vmstate_load",
    /// The state of a virtual machine is about to be written.
    VmstateSave = "vmstate_save",
    /// The rest of a cluster is about to be read for a copy.
    CowRead = "cow_read",
    /// The rest of a cluster is about to be written.
    CowWrite = "cow_write",
    /// The refcount table is about to be read.
    ReftableLoad = "reftable_load",
    /// A larger refcount table is about to be made.
    ReftableGrow = "reftable_grow",
    /// An entry of the refcount table is about to be written.
    ReftableUpdate = "reftable_update",
    /// A refcount block is about to be read.
    RefblockLoad = "refblock_load",
    /// A refcount block is about to be written.
    RefblockUpdate = "refblock_update",
    /// A part of a refcount block is about to be written.
    RefblockUpdatePart = "refblock_update_part",
    /// A new refcount block is needed.
    RefblockAlloc = "refblock_alloc",
    /// The refcount table is about to point at a new refcount block.
    RefblockAllocHookup = "refblock_alloc_hookup",
    /// A new refcount block is about to be written.
    RefblockAllocWrite = "refblock_alloc_write",
    /// The blocks for a larger refcount table are about to be written.
    RefblockAllocWriteBlocks = "refblock_alloc_write_blocks",
    /// A larger refcount table is about to be written.
    RefblockAllocWriteTable = "refblock_alloc_write_table",
    /// The header is about to point at a larger refcount table.
    RefblockAllocSwitchTable = "refblock_alloc_switch_table",
    /// Clusters are about to be allocated.
    ClusterAlloc = "cluster_alloc",
    /// Space for compressed data is about to be allocated.
    ClusterAllocBytes = "cluster_alloc_bytes",
    /// Clusters are about to be freed.
    ClusterFree = "cluster_free",
    /// A flush is about to write back what is in memory.
    FlushToOs = "flush_to_os",
    /// A flush is about to make things durable.
    FlushToDisk = "flush_to_disk",
    /// The block that an unaligned write begins in is about to be read.
    PwritevRmwHead = "pwritev_rmw_head",
    /// It has been read.
    PwritevRmwAfterHead = "pwritev_rmw_after_head",
    /// The block that an unaligned write ends in is about to be read.
    PwritevRmwTail = "pwritev_rmw_tail",
    /// It has been read.
    PwritevRmwAfterTail = "pwritev_rmw_after_tail",
    /// A write is about to start.
    Pwritev = "pwritev",
    /// A write of zeroes is about to start.
    PwritevZero = "pwritev_zero",
    /// A write has ended.
    PwritevDone = "pwritev_done",
    /// An image is about to be emptied.
    EmptyImagePrepare = "empty_image_prepare",
    /// A shorter L1 table is about to be written.
    L1ShrinkWriteTable = "l1_shrink_write_table",
    /// The L2 tables beyond a shorter L1 table are about to be freed.
    L1ShrinkFreeL2Clusters = "l1_shrink_free_l2_clusters",
    /// Data that was read from below is about to be written.
    CorWrite = "cor_write",
    /// New clusters are about to be filled with zeroes.
    ClusterAllocSpace = "cluster_alloc_space",
    /// The node is opened.
    None = "none",
}

impl Event {
    /// The event of a name.
    pub fn parse(name: &str) -> Option<Event> {
        let found = Self::ALL.iter().find(|(_, known)| *known == name);
        found.map(|(event, _)| *event)
    }

    /// The name that users write.
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        for &(event, name) in Event::ALL {
            assert_eq!(Event::parse(name), Some(event));
            assert_eq!(event.name(), name);
        }
        assert_eq!(Event::parse("L1_UPDATE"), Option::None);
    }
}
