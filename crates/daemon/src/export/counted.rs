//! [`CountedExports`]: what is counted of exports, for those who look at it now and then. They do not
//! wait for a command that holds the exports because a disk does not answer.
//!
//! Invariant: an export is listed from when it is made until it begins to end.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use vellum_export::accounting::Accounting;
use vellum_graph::Nodes;

/// An export, and what its clients have asked for.
#[derive(Debug, Clone)]
pub(crate) struct CountedExport {
    pub(crate) id: String,
    /// The node that it was made for; in [`CountedExports::list`] the one that it shows.
    pub(crate) node: String,
    /// QEMU's name of the type.
    pub(crate) kind: &'static str,
    /// The name by which NBD clients ask for it.
    pub(crate) name: Option<String>,
    /// The number of its use of a live node.
    pub(super) joined: Option<u64>,
    pub(crate) accounting: Arc<Accounting>,
}

/// Exports, in the order in which they were made; clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct CountedExports(Rc<RefCell<Vec<CountedExport>>>);

impl CountedExports {
    pub(super) fn add(&self, export: CountedExport) {
        self.0.borrow_mut().push(export);
    }

    pub(super) fn remove(&self, id: &str) {
        self.0.borrow_mut().retain(|export| export.id != id);
    }

    /// All of them, with the nodes that they show now.
    pub(crate) fn list(&self, nodes: &Nodes) -> Vec<CountedExport> {
        let exports = self.0.borrow();
        let now = |export: &CountedExport| CountedExport {
            node: shown(&export.node, export.joined, nodes),
            ..export.clone()
        };
        exports.iter().map(now).collect()
    }
}

/// The node that an export shows now, which was made for `node`.
pub(super) fn shown(node: &str, joined: Option<u64>, nodes: &Nodes) -> String {
    let used = joined.and_then(|joined| nodes.used_by(joined));
    used.unwrap_or_else(|| node.to_owned())
}
