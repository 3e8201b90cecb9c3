//! What a server offers, which may change while it serves.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::export::Export;

/// The exports of a server. Clones share them, so what is added or removed while a
/// server runs is there, or not, for the next client.
#[derive(Debug, Clone, Default)]
pub struct Exports(Arc<Mutex<Vec<Arc<Export>>>>);

impl Exports {
    /// A set of exports; of two with one name the first is found.
    pub fn new(exports: impl IntoIterator<Item = Export>) -> Self {
        let exports = exports.into_iter().map(Arc::new).collect();
        Exports(Arc::new(Mutex::new(exports)))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Export>>> {
        self.0.lock()
    }

    /// The export called `name`.
    pub fn find(&self, name: &str) -> Option<Arc<Export>> {
        let exports = self.lock();
        exports.iter().find(|export| export.name == name).cloned()
    }

    /// All exports, as they are now.
    pub fn list(&self) -> Vec<Arc<Export>> {
        self.lock().clone()
    }

    /// Offers one more.
    pub fn add(&self, export: Export) -> Arc<Export> {
        let export = Arc::new(export);
        self.lock().push(export.clone());
        export
    }

    /// Stops offering an export, and hangs up on the clients that use it. Everything that
    /// they have begun on its device is complete on return, and nothing more will come.
    /// Must run inside a lane.
    pub async fn remove(&self, export: &Arc<Export>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, export));
        export.sessions.end().await;
    }
}

#[cfg(test)]
mod tests {
    use vellum::{Raw, RawOptions, Storage};
    use vellum_io::lane;
    use vellum_storage::MemStorage;

    use super::*;

    #[test]
    fn what_is_removed_is_not_found_by_others_who_share_the_set() {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(vec![0; 512]));
        let device = Raw::open(file, RawOptions::default()).expect("a device");
        let exports = Exports::new([Export::new("a", device.clone())]);
        let shared = exports.clone();
        let added = exports.add(Export::new("b", device));
        assert_eq!(shared.list().len(), 2);
        lane::block_on(exports.remove(&added));
        assert!(shared.find("b").is_none() && shared.find("a").is_some());
    }
}
