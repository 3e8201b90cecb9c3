//! What is served: a device under a name.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum::qcow2::BitmapView;

use vellum_nbd::proto;

use super::sessions::Sessions;
use crate::accounting::Accounting;
use crate::room::WhenFull;

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
    /// Dirty bitmaps that clients may ask for, by their names.
    pub bitmaps: Vec<(String, BitmapView)>,
    /// What becomes of requests for which the device has no room.
    pub when_full: WhenFull,
    /// Counts what clients ask for; clones of the export share it.
    pub accounting: Arc<Accounting>,
    /// Who uses it now; clones of the export share that.
    pub(super) sessions: Sessions,
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
            bitmaps: Vec::new(),
            when_full: WhenFull::Fail,
            accounting: Arc::default(),
            sessions: Sessions::default(),
        }
    }

    /// How many clients use the export now.
    pub fn connections(&self) -> usize {
        self.sessions.count()
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
        let bitmaps = (0..self.bitmaps.len()).map(MetaContext::Bitmap);
        std::iter::once(MetaContext::Allocation)
            .chain(depth)
            .chain(bitmaps)
    }

    /// A context's name on the wire.
    pub fn context_name(&self, context: MetaContext) -> Cow<'static, str> {
        match context {
            MetaContext::Allocation => proto::CONTEXT_ALLOCATION.into(),
            MetaContext::Depth => proto::CONTEXT_DEPTH.into(),
            MetaContext::Bitmap(index) => {
                let name = self.bitmaps.get(index).map_or("", |(name, _)| name);
                format!("{}{name}", proto::CONTEXT_BITMAP_PREFIX).into()
            }
        }
    }

    /// Whether a query of `OPT_SET_META_CONTEXT` names a context.
    pub fn is_named(&self, context: MetaContext, query: &str) -> bool {
        query == self.context_name(context)
    }

    /// Whether a query of `OPT_LIST_META_CONTEXT` names a context, its namespace, or all
    /// bitmaps.
    pub fn is_listed(&self, context: MetaContext, query: &str) -> bool {
        let name = self.context_name(context);
        let is_bitmap = matches!(context, MetaContext::Bitmap(_));
        query == name
            || query.ends_with(':') && name.split_inclusive(':').next() == Some(query)
            || is_bitmap && query == proto::CONTEXT_BITMAP_PREFIX
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
    /// What a bitmap of [`Export::bitmaps`] calls dirty.
    Bitmap(usize),
}

impl MetaContext {
    /// The number by which replies refer to the context.
    pub fn id(self) -> u32 {
        match self {
            MetaContext::Allocation => 0,
            MetaContext::Depth => 1,
            MetaContext::Bitmap(index) => 2 + index as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum::raw::RawOptions;
    use vellum::{Raw, Storage};
    use vellum_storage::MemStorage;

    use super::*;

    #[test]
    fn namespaces_list_their_contexts() {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(vec![0; 512]));
        let device = Raw::open(file, RawOptions::default()).expect("a device");
        let export = Export::new("", device);
        assert!(export.is_listed(MetaContext::Allocation, "base:"));
        assert!(export.is_listed(MetaContext::Depth, "qemu:allocation-depth"));
        assert!(!export.is_listed(MetaContext::Depth, "base:"));
        assert!(!export.is_listed(MetaContext::Depth, "qemu"));
        assert!(!export.is_named(MetaContext::Depth, "qemu:"));
        assert!(export.is_listed(MetaContext::Bitmap(0), "qemu:"));
        assert!(export.is_listed(MetaContext::Bitmap(0), "qemu:dirty-bitmap:"));
        assert!(!export.is_listed(MetaContext::Depth, "qemu:dirty-bitmap:"));
        assert!(!export.is_named(MetaContext::Bitmap(0), "qemu:dirty-bitmap:x"));
    }
}
