//! Exports that end: nobody uses them any more, but what their clients have begun is still on its
//! way to the disk. They are listed until it has arrived, and their ids and nodes stay in use.
//!
//! Invariant: nobody holds the daemon's parts for an end but who takes the server, or all, away.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

use event_listener::Event;
use vellum_io::spawn;

/// An export that ends.
#[derive(Debug, Clone)]
pub(super) struct EndingExport {
    pub(super) id: String,
    /// The node that it was made for.
    pub(super) node: String,
    /// The number of its use of a live node.
    pub(super) joined: Option<u64>,
    /// QEMU's name of the type.
    pub(super) kind: &'static str,
    /// It may still write to the node.
    pub(super) needs_active: bool,
    /// The file that it is mounted over.
    pub(super) mountpoint: Option<PathBuf>,
}

/// Those that end; clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct EndingExports(Rc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    exports: RefCell<Vec<EndingExport>>,
    /// One has ended.
    ended: Event,
}

impl EndingExports {
    /// All of them.
    pub(super) fn list(&self) -> Vec<EndingExport> {
        self.0.exports.borrow().clone()
    }

    pub(super) fn contains(&self, id: &str) -> bool {
        let exports = self.0.exports.borrow();
        exports.iter().any(|one| one.id == id)
    }

    /// Ends one: `end` runs beside the caller, then `tell`.
    pub(super) fn begin(
        &self,
        export: EndingExport,
        end: impl Future<Output = ()> + 'static,
        tell: impl FnOnce() + 'static,
    ) {
        let id = export.id.clone();
        self.0.exports.borrow_mut().push(export);
        let shared = self.0.clone();
        drop(spawn(async move {
            end.await;
            shared.exports.borrow_mut().retain(|one| one.id != id);
            tell();
            shared.ended.notify(usize::MAX);
        }));
    }

    /// Waits until one has ended.
    pub(super) async fn ended(&self, id: &str) {
        while self.contains(id) {
            let ended = self.0.ended.listen();
            if self.contains(id) {
                ended.await;
            }
        }
    }
}
