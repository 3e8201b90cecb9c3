//! A disk that breaks its word, to show that the simulator notices.
//!
//! An engine keeps an ordering rule by a barrier between two writes. A disk that
//! keeps one kind of write back at that barrier does to a right engine what a
//! wrong engine does to a right disk: the second write may survive without the
//! first.

use std::fmt;
use std::sync::Arc;

use crate::layout::Layout;
use crate::pattern;
use crate::record::Record;
use crate::sparse_bytes::SparseBytes;

/// What a write on an image file is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskBugKind {
    /// The header cluster.
    Header,
    /// The refcount table or a block of it.
    Refcounts,
    /// The active L1 table.
    L1,
    /// An L2 table that the L1 table on disk points to.
    L2,
    /// An L2 table that nothing points to yet.
    NewL2,
    /// The bits, a table or the directory of bitmaps.
    Bitmaps,
    /// Guest data.
    Data,
    /// Anything else.
    Other,
}

/// The kind of a record, seen by what the file holds before it.
pub fn kind_of(before: &SparseBytes, record: &Record) -> DiskBugKind {
    let Ok(layout) = Layout::parse(before) else {
        return DiskBugKind::Other;
    };
    let at = record.offset_bytes;
    let cluster = at / layout.cluster_bytes() * layout.cluster_bytes();
    if at < layout.cluster_bytes() {
        return DiskBugKind::Header;
    }
    if layout.is_refcount_metadata(at) {
        return DiskBugKind::Refcounts;
    }
    if (layout.l1_offset..layout.l1_offset + layout.l1_entries * 8).contains(&at) {
        return DiskBugKind::L1;
    }
    if layout.l2_tables().any(|(_, table)| table == cluster) {
        return DiskBugKind::L2;
    }
    let holds = |(_, start, len): &(&str, u64, u64)| (*start..start + len).contains(&at);
    if layout.bitmaps.iter().any(holds) {
        return DiskBugKind::Bitmaps;
    }
    if pattern::is_guest_data(record.bytes()) {
        return DiskBugKind::Data;
    }
    let points = |word: &[u8]| matches!(word[0] & 0xfe, 0x80) || word == [0, 0, 0, 0, 0, 0, 0, 1];
    match record.bytes().chunks_exact(8).any(points) {
        true => DiskBugKind::NewL2,
        false => DiskBugKind::Other,
    }
}

type Delays = dyn Fn(&SparseBytes, &Record) -> bool + Send + Sync;
type Swallows = dyn Fn(u64) -> bool + Send + Sync;

/// A way to break the disk's word.
#[derive(Clone)]
pub struct DiskBug {
    delays: Option<Arc<Delays>>,
    swallows: Option<Arc<Swallows>>,
    hides: bool,
}

impl DiskBug {
    /// Writes of this kind become durable one flush too late.
    pub fn late(kind: DiskBugKind) -> DiskBug {
        DiskBug::late_if(move |before, record| kind_of(before, record) == kind)
    }

    /// The writes for which `delays` is true become durable one flush too late.
    pub fn late_if(
        delays: impl Fn(&SparseBytes, &Record) -> bool + Send + Sync + 'static,
    ) -> DiskBug {
        DiskBug {
            delays: Some(Arc::new(delays)),
            swallows: None,
            hides: false,
        }
    }

    /// The flushes for which `swallows` is true, counted from 1, do nothing.
    pub fn no_flush(swallows: impl Fn(u64) -> bool + Send + Sync + 'static) -> DiskBug {
        DiskBug {
            delays: None,
            swallows: Some(Arc::new(swallows)),
            hides: false,
        }
    }

    /// Flushes that fail, in scenarios in which some do, say that they have not.
    pub fn hidden_failures() -> DiskBug {
        DiskBug {
            delays: None,
            swallows: None,
            hides: true,
        }
    }

    pub(crate) fn hides_failures(&self) -> bool {
        self.hides
    }

    pub(crate) fn delays(&self, before: &SparseBytes, record: &Record) -> bool {
        self.delays
            .as_ref()
            .is_some_and(|delays| delays(before, record))
    }

    pub(crate) fn swallows(&self, flush: u64) -> bool {
        self.swallows
            .as_ref()
            .is_some_and(|swallows| swallows(flush))
    }
}

impl fmt::Debug for DiskBug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lie")
    }
}
