//! [`LogGate`]: opens the log that an image asks for, and nothing else.

use std::sync::Arc;

use vellum::gate::{DenyAll, FileRequest, Gate};
use vellum::{BlockDevice, Io, Storage};

/// Opens a log by the name that an image has for it.
#[derive(Debug)]
pub struct LogGate {
    pub name: &'static str,
    pub log: Arc<dyn Storage>,
}

impl Gate for LogGate {
    fn open_backing(&self, request: FileRequest) -> Io<Arc<dyn BlockDevice>> {
        DenyAll.open_backing(request)
    }

    fn open_data_file(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        DenyAll.open_data_file(request)
    }

    fn open_write_log(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        assert_eq!(request.name, self.name);
        Io::ready(Ok(self.log.clone()))
    }
}
