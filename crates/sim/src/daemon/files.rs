//! The simulated files of a daemon, by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use vellum::qcow2::create::{CreateOptions, create};
use vellum_graph::files::Files;
use vellum_io::{Error, ErrorKind, Result};
use vellum_storage::Storage;

use crate::disk::{Disk, Mode};
use crate::failure::{Failure, FailureKind};
use crate::prepare::DEVICE_FILL;
use crate::runtime::Runtime;
use crate::sparse_bytes::SparseBytes;
use crate::storage::SimFileOptions;

/// Whether a file is a raw image: its name says so.
pub(super) fn is_raw(name: &str) -> bool {
    name.contains('r')
}

/// Stands in the name of a file of fixed length.
pub(super) const FIXED: &str = "x";

/// What a file of this name is like.
fn traits_of(name: &str, writable: bool) -> SimFileOptions {
    SimFileOptions {
        read_only: !writable,
        growable: !name.contains(FIXED),
        ..SimFileOptions::default()
    }
}

/// Files on one disk; each open of one is a descriptor of its own.
#[derive(Debug)]
pub(super) struct SimFiles {
    pub(super) disk: Arc<Disk>,
    names: Mutex<BTreeMap<String, usize>>,
}

impl SimFiles {
    pub(super) fn new(disk: Arc<Disk>) -> Arc<SimFiles> {
        Arc::new(SimFiles {
            disk,
            names: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.names.lock()
    }

    /// Adds a file that is there durably.
    pub(super) fn add(&self, name: &str, pages: SparseBytes) {
        let file = self.disk.files();
        drop(self.disk.add_file(name, pages, traits_of(name, true)));
        self.lock().insert(name.to_owned(), file);
    }

    /// All names, with the numbers of the files on the disk.
    pub(super) fn names(&self) -> BTreeMap<String, usize> {
        self.lock().clone()
    }
}

impl Files for SimFiles {
    fn open(&self, name: &str, writable: bool) -> Result<Arc<dyn Storage>> {
        let file = self.lock().get(name).copied();
        let Some(file) = file else {
            let message = format!("Could not open '{name}': No such file or directory");
            return Err(Error::new(ErrorKind::NotFound, "open", message));
        };
        let traits = traits_of(name, writable);
        Ok(Arc::new(self.disk.open_again(file, name, traits)))
    }
}

/// A new image of a name; `len_bytes`: how long a place of fixed length is.
pub(super) fn blank(
    name: &str,
    len_bytes: u64,
    options: CreateOptions,
) -> std::result::Result<SparseBytes, Failure> {
    let disk = Disk::new(Mode::Instant);
    let pages = match name.contains(FIXED) {
        true => SparseBytes::device(len_bytes, DEVICE_FILL),
        false => SparseBytes::new(),
    };
    let storage = disk.add_file(name, pages, traits_of(name, true));
    let target: Arc<dyn Storage> = storage.clone();
    let made = async move { create(target, None, &options).await };
    Runtime::new(disk, 0)
        .block_on(made)?
        .map_err(|error| Failure::error(FailureKind::Setup, "create", &error))?;
    Ok(storage.contents())
}
