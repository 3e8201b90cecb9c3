//! [`NodeNotice`]: what happens to nodes, on whichever lane, and somebody may want to hear of.

use std::sync::{Arc, OnceLock};

use vellum::nodes::QuorumReport;

/// Something that has happened to a node.
#[derive(Debug, Clone)]
pub enum NodeNotice {
    /// A write reaches beyond the threshold, which is gone now.
    WriteThreshold {
        /// The node.
        node: String,
        /// The threshold in bytes.
        threshold_bytes: u64,
        /// How far beyond it the write ends, in bytes.
        exceeded_bytes: u64,
    },
    /// Children of a quorum do not agree, or fail.
    Quorum {
        /// The node.
        node: String,
        /// What was found.
        report: QuorumReport,
    },
    /// The metadata of an image contradicts itself.
    Corrupted {
        /// The node.
        node: String,
        /// What is wrong.
        message: String,
        /// Where, in bytes of the image's file, if that is known.
        offset_bytes: Option<u64>,
        /// Nothing can be changed any more.
        is_fatal: bool,
    },
}

/// Receives notices, on the lane where something happens, which waits for it.
pub type NoticeSink = dyn Fn(NodeNotice) + Send + Sync;

/// Where notices go, once somebody wants them; clones share it.
#[derive(Clone, Default)]
pub(crate) struct Notices(pub(crate) Arc<OnceLock<Box<NoticeSink>>>);

impl std::fmt::Debug for Notices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Notices({})", self.0.get().is_some())
    }
}

impl Notices {
    pub(crate) fn give(&self, notice: NodeNotice) {
        if let Some(sink) = self.0.get() {
            sink(notice);
        }
    }
}
