//! What the tasks of a guest share: the machine it runs on, and what it knows.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use vellum::{Error, ErrorKind};

use crate::image_engine::ImageEngine;
use crate::machine::MachineStorages;
use crate::model::Model;
use crate::scenario::{ImageOptions, Step};
use crate::space::Ledger;
use crate::sparse_bytes::SparseBytes;

/// Everything that the guest's tasks share.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) engine: Arc<dyn ImageEngine>,
    pub(crate) options: ImageOptions,
    pub(crate) plugged: MachineStorages,
    pub(crate) model: RefCell<Model>,
    /// What the files held, the backing file's last, after each clean close.
    pub(crate) closed: RefCell<Vec<Vec<SparseBytes>>>,
    /// Requests on the disk fail now and then.
    pub(crate) failing: Cell<bool>,
    /// What was there when the image was opened may not be durable.
    pub(crate) unsettled: Cell<bool>,
    /// Nobody knows what the device holds: an apply of a snapshot has failed.
    pub(crate) astray: Cell<bool>,
    /// Whether there is room for the image, where that is checked.
    pub(crate) ledger: Option<RefCell<Ledger>>,
    /// What the image's own files held as a flush ended with nothing in flight.
    pub(crate) flushed: RefCell<Vec<Vec<SparseBytes>>>,
}

impl Guest {
    /// A guest on a disk that does not fail.
    pub(crate) fn new(
        engine: &Arc<dyn ImageEngine>,
        options: &ImageOptions,
        plugged: &MachineStorages,
        model: Model,
    ) -> Rc<Guest> {
        Rc::new(Guest {
            engine: engine.clone(),
            options: options.clone(),
            plugged: plugged.clone(),
            model: RefCell::new(model),
            closed: RefCell::default(),
            failing: Cell::new(false),
            unsettled: Cell::new(false),
            astray: Cell::new(false),
            ledger: Ledger::of(options, &plugged.disk).map(RefCell::new),
            flushed: RefCell::default(),
        })
    }

    /// Lets an error pass that the disk is to blame for.
    pub(crate) fn excuses(&self, error: &Error) -> bool {
        // What failures have leaked may fill a device.
        let is_full = !self.options.traits.growable && error.kind() == ErrorKind::NoSpace;
        self.failing.get() && (is_full || self.plugged.disk.has_failed())
    }

    /// Whether a change that is no request has failed: it may have come about or not.
    pub(super) fn has_unknown_change(&self) -> bool {
        self.model.borrow().has_unknown_change()
    }

    /// Whether a change of this kind has failed: it may have come about or not, and until the
    /// image is opened anew there is no other.
    pub(super) fn has_failed_change(&self, step: &Step) -> bool {
        let model = self.model.borrow();
        self.failing.get()
            && match step {
                Step::Resize { .. } | Step::Snapshot(_) => {
                    model.is_resizing() || model.is_changing_snapshots()
                }
                Step::Bitmap(_) => model.is_changing_bitmaps(),
                _ => false,
            }
    }
}
