//! What is served: a device under a name.

use std::fmt;
use std::sync::Arc;

use vellum::BlockDevice;

use super::proto;

/// A device under the name by which clients ask for it.
#[derive(Clone)]
pub struct Export {
    /// The name; often empty.
    pub name: String,
    /// A description for people.
    pub description: Option<String>,
    /// The device.
    pub device: Arc<dyn BlockDevice>,
    /// Writes are refused.
    pub read_only: bool,
    /// Several connections may be open at once.
    pub multi_conn: bool,
    /// Clients may ask which layer of the backing chain holds a range.
    pub allocation_depth: bool,
}

impl Export {
    /// The export of `device` under `name` that one client at a time may write to.
    pub fn new(name: impl Into<String>, device: Arc<dyn BlockDevice>) -> Self {
        let read_only = device.info().read_only;
        Export {
            name: name.into(),
            description: None,
            device,
            read_only,
            multi_conn: false,
            allocation_depth: false,
        }
    }

    /// The transmission flags, without those that depend on the session.
    pub fn flags(&self) -> u16 {
        let mut flags = proto::FLAG_HAS_FLAGS
            | proto::FLAG_SEND_FLUSH
            | proto::FLAG_SEND_FUA
            | proto::FLAG_SEND_CACHE;
        if self.multi_conn {
            flags |= proto::FLAG_CAN_MULTI_CONN;
        }
        flags
            | if self.read_only {
                proto::FLAG_READ_ONLY
            } else {
                proto::FLAG_SEND_TRIM | proto::FLAG_SEND_WRITE_ZEROES | proto::FLAG_SEND_FAST_ZERO
            }
    }

    /// Minimum, preferred and maximum block size in bytes. A client that did not
    /// ask for them (`obeyed` is false) is promised that any alignment works,
    /// which is always true here; one that did gets the size that costs least.
    pub fn block_sizes(&self, obeyed: bool) -> [u32; 3] {
        let alignment = self.device.info().request_alignment_bytes.max(1);
        let aligned_size = self
            .device
            .size_bytes()
            .is_multiple_of(u64::from(alignment));
        let minimum = if obeyed && aligned_size { alignment } else { 1 };
        [
            minimum,
            alignment.max(4096),
            proto::MAX_PAYLOAD_BYTES as u32,
        ]
    }

    /// The metadata contexts that this export has.
    pub fn contexts(&self) -> impl Iterator<Item = MetaContext> + use<> {
        let depth = self.allocation_depth.then_some(MetaContext::Depth);
        std::iter::once(MetaContext::Allocation).chain(depth)
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("name", &self.name)
            .field("device", &self.device.info().name)
            .field("read_only", &self.read_only)
            .finish_non_exhaustive()
    }
}

/// A kind of information that block status can give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetaContext {
    /// Holes and zeroes.
    Allocation,
    /// The layer of the backing chain.
    Depth,
}

impl MetaContext {
    /// The context's name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            MetaContext::Allocation => proto::CONTEXT_ALLOCATION,
            MetaContext::Depth => proto::CONTEXT_DEPTH,
        }
    }

    /// The number by which replies refer to the context.
    pub fn id(self) -> u32 {
        match self {
            MetaContext::Allocation => 0,
            MetaContext::Depth => 1,
        }
    }

    /// Whether a query of `OPT_SET_META_CONTEXT` names this context.
    pub fn is_named(self, query: &str) -> bool {
        query == self.name()
    }

    /// Whether a query of `OPT_LIST_META_CONTEXT` names this context or its namespace.
    pub fn is_listed(self, query: &str) -> bool {
        self.is_named(query)
            || query.ends_with(':') && self.name().split_inclusive(':').next() == Some(query)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_list_their_contexts() {
        assert!(MetaContext::Allocation.is_listed("base:"));
        assert!(MetaContext::Depth.is_listed("qemu:allocation-depth"));
        assert!(!MetaContext::Depth.is_listed("base:"));
        assert!(!MetaContext::Depth.is_listed("qemu"));
        assert!(!MetaContext::Depth.is_named("qemu:"));
    }
}
