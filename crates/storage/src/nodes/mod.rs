//! Storages that stand on other storages, or on nothing: the nodes from which
//! tests and users build graphs. One file a node; options and QEMU's words for
//! what is wrong with them are the business of `vellum-control`.

pub mod debug;
pub mod log_writes;
pub mod null;
pub mod preallocate;
pub mod throttle;
pub mod verify;

/// Passes on to `self.inner` what a filter does not change.
macro_rules! pass_on {
    ($($method:ident),*) => { $(crate::nodes::pass_on!(@ $method);)* };
    (@ capabilities) => {
        fn capabilities(&self) -> crate::Capabilities { self.inner.capabilities() }
    };
    (@ name) => {
        fn name(&self) -> &str { self.inner.name() }
    };
    (@ len_bytes) => {
        fn len_bytes(&self) -> crate::Result<u64> { self.inner.len_bytes() }
    };
    (@ block_status) => {
        fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> crate::Io<crate::StorageExtent> {
            self.inner.block_status(offset_bytes, len_bytes)
        }
    };
    (@ allocate) => {
        fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> crate::Io<()> {
            self.inner.allocate(offset_bytes, len_bytes)
        }
    };
    (@ discard) => {
        fn discard(&self, offset_bytes: u64, len_bytes: u64) -> crate::Io<()> {
            self.inner.discard(offset_bytes, len_bytes)
        }
    };
    (@ flush) => {
        fn flush(&self) -> crate::Io<()> { self.inner.flush() }
    };
    (@ truncate) => {
        fn truncate(&self, len_bytes: u64) -> crate::Io<()> { self.inner.truncate(len_bytes) }
    };
    (@ read) => {
        fn read(&self, offset_bytes: u64, buffers: crate::Buffers) -> crate::Io<crate::Buffers> {
            self.inner.read(offset_bytes, buffers)
        }
    };
    (@ allocated_bytes) => {
        fn allocated_bytes(&self) -> crate::Result<Option<u64>> { self.inner.allocated_bytes() }
    };
    (@ close) => {
        fn close(&self) -> crate::Io<()> { self.inner.close() }
    };
}
pub(crate) use pass_on;
