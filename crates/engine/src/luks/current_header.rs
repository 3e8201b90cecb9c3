//! [`CurrentHeader`]: the LUKS header of a volume in use, whose key slots may change.

use std::sync::Arc;

use vellum_io::sync::Mutex;

use super::LuksHeader;

/// The header of a volume as it is now; clones share it.
#[derive(Debug, Clone)]
pub struct CurrentHeader(Arc<Mutex<Arc<LuksHeader>>>);

impl CurrentHeader {
    pub(crate) fn new(header: LuksHeader) -> Self {
        CurrentHeader(Arc::new(Mutex::new(Arc::new(header))))
    }

    /// What it says.
    pub fn get(&self) -> Arc<LuksHeader> {
        self.0.lock().clone()
    }

    /// Notes what was written.
    pub(crate) fn set(&self, header: &LuksHeader) {
        *self.0.lock() = Arc::new(header.clone());
    }
}
