//! A disk that breaks its word, to show that the simulator notices.
//!
//! An engine keeps an ordering rule by a barrier between two writes. A disk that
//! keeps one kind of write back at that barrier does to a right engine what a
//! wrong engine does to a right disk: the second write may survive without the
//! first.

use std::fmt;
use std::sync::Arc;

use crate::layout::Layout;
use crate::pages::Pages;
use crate::pattern;
use crate::record::Record;

/// What a write on an image file is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
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
pub fn kind_of(before: &Pages, record: &Record) -> Kind {
    let Ok(layout) = Layout::parse(before) else {
        return Kind::Other;
    };
    let at = record.offset_bytes;
    let cluster = at / layout.cluster_bytes() * layout.cluster_bytes();
    if at < layout.cluster_bytes() {
        return Kind::Header;
    }
    if layout.is_refcount_metadata(at) {
        return Kind::Refcounts;
    }
    if (layout.l1_offset..layout.l1_offset + layout.l1_entries * 8).contains(&at) {
        return Kind::L1;
    }
    if layout.l2_tables().any(|(_, table)| table == cluster) {
        return Kind::L2;
    }
    let holds = |(_, start, len): &(&str, u64, u64)| (*start..start + len).contains(&at);
    if layout.bitmaps.iter().any(holds) {
        return Kind::Bitmaps;
    }
    if pattern::is_guest_data(record.bytes()) {
        return Kind::Data;
    }
    let points = |word: &[u8]| matches!(word[0] & 0xfe, 0x80) || word == [0, 0, 0, 0, 0, 0, 0, 1];
    match record.bytes().chunks_exact(8).any(points) {
        true => Kind::NewL2,
        false => Kind::Other,
    }
}

type Delays = dyn Fn(&Pages, &Record) -> bool + Send + Sync;
type Swallows = dyn Fn(u64) -> bool + Send + Sync;

/// A way to break the disk's word.
#[derive(Clone)]
pub struct Lie {
    delays: Option<Arc<Delays>>,
    swallows: Option<Arc<Swallows>>,
    hides: bool,
}

impl Lie {
    /// Writes of this kind become durable one flush too late.
    pub fn late(kind: Kind) -> Lie {
        Lie::late_if(move |before, record| kind_of(before, record) == kind)
    }

    /// The writes for which `delays` is true become durable one flush too late.
    pub fn late_if(delays: impl Fn(&Pages, &Record) -> bool + Send + Sync + 'static) -> Lie {
        Lie {
            delays: Some(Arc::new(delays)),
            swallows: None,
            hides: false,
        }
    }

    /// The flushes for which `swallows` is true, counted from 1, do nothing.
    pub fn no_flush(swallows: impl Fn(u64) -> bool + Send + Sync + 'static) -> Lie {
        Lie {
            delays: None,
            swallows: Some(Arc::new(swallows)),
            hides: false,
        }
    }

    /// Flushes that fail, in stories in which some do, say that they have not.
    pub fn hidden_failures() -> Lie {
        Lie {
            delays: None,
            swallows: None,
            hides: true,
        }
    }

    pub(crate) fn hides_failures(&self) -> bool {
        self.hides
    }

    pub(crate) fn delays(&self, before: &Pages, record: &Record) -> bool {
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

impl fmt::Debug for Lie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lie")
    }
}
