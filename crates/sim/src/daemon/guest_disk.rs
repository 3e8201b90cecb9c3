//! A disk that clients use, and what is known of it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use event_listener::Event;
use vellum::BlockDevice;

use super::files::FIXED;
use crate::model::{LogicalTime, Model};

/// A file that must hold what a disk showed at some moment since `begun`.
#[derive(Debug, Clone)]
pub(super) struct ExpectedFile {
    pub(super) file: String,
    /// The images below it: it shows what they hold.
    pub(super) stands_on: Vec<String>,
    /// As it was when the moment was over.
    pub(super) model: Rc<Model>,
    pub(super) begun: LogicalTime,
    pub(super) what: &'static str,
}

/// A disk that clients use through an export.
pub(super) struct GuestDisk {
    pub(super) name: String,
    pub(super) cluster_size_bytes: u64,
    /// All its images lie in places of their full size.
    pub(super) fixed_images: bool,
    pub(super) model: RefCell<Model>,
    pub(super) kept: RefCell<Vec<ExpectedFile>>,
    pub(super) series: RefCell<Option<BackupSeries>>,
    /// What the model knows of bitmaps is about these.
    pub(super) bitmaps: RefCell<Option<BitmapPair>>,
    /// Numbers nodes and jobs.
    next: Cell<u64>,
    /// What clients are connected to; `None` while there is no export.
    pub(super) device: RefCell<Option<Arc<dyn BlockDevice>>>,
    /// Requests that run.
    pub(super) running: Cell<usize>,
    /// Clients that are not done.
    pub(super) clients: Cell<usize>,
    pub(super) changed: Event,
    /// The server hangs up on its clients.
    pub(super) hung_up_on: Cell<bool>,
    /// There will be no export any more: what its clients would wait for has failed.
    is_gone: Cell<bool>,
    /// What clients used before their export went.
    pub(super) last_top: RefCell<Option<String>>,
    /// The filter between the export and the image.
    pub(super) served_through: RefCell<Option<ServedFilter>>,
}

impl GuestDisk {
    pub(super) fn new(
        name: &str,
        size_bytes: u64,
        cluster_size_bytes: u64,
        fixed_images: bool,
    ) -> GuestDisk {
        GuestDisk {
            name: name.to_owned(),
            cluster_size_bytes,
            fixed_images,
            model: RefCell::new(Model::new(size_bytes)),
            kept: RefCell::default(),
            series: RefCell::default(),
            bitmaps: RefCell::default(),
            next: Cell::new(0),
            device: RefCell::default(),
            running: Cell::new(0),
            clients: Cell::new(0),
            changed: Event::new(),
            hung_up_on: Cell::new(false),
            is_gone: Cell::new(false),
            last_top: RefCell::default(),
            served_through: RefCell::default(),
        }
    }

    /// Whether clients wait in vain for an export.
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.get()
    }

    /// Has clients wait no longer for an export.
    pub(super) fn give_up(&self) {
        self.is_gone.set(true);
        self.changed.notify(usize::MAX);
    }

    /// A new name for a node, its file, or a job.
    pub(super) fn new_name(&self, kind: &str) -> String {
        self.next.set(self.next.get() + 1);
        let is_image = matches!(kind, "n" | "b" | "c" | "f");
        let mark = if self.fixed_images && is_image {
            FIXED
        } else {
            ""
        };
        format!("{}{kind}{mark}{}", self.name, self.next.get())
    }

    /// Waits until something is so.
    pub(super) async fn until(&self, is_so: impl Fn(&GuestDisk) -> bool) {
        loop {
            let changed = self.changed.listen();
            if is_so(self) {
                return;
            }
            changed.await;
        }
    }

    /// Notes that the first image of a chain must show what the disk has shown at some moment
    /// since `begun`.
    pub(super) fn keep(&self, chain: &[String], begun: LogicalTime, what: &'static str) {
        let kept = ExpectedFile {
            file: chain[0].clone(),
            stands_on: chain[1..].to_vec(),
            model: Rc::new(self.model.borrow().clone()),
            begun,
            what,
        };
        self.kept.borrow_mut().push(kept);
    }

    /// Notes that a file may hold anything from now on.
    pub(super) fn forget(&self, file: &str) {
        let shows = |kept: &ExpectedFile| {
            kept.file == file || kept.stands_on.iter().any(|below| below == file)
        };
        self.kept.borrow_mut().retain(|kept| !shows(kept));
    }
}

/// Two bitmaps of a node: the first is there.
#[derive(Debug, Clone)]
pub(super) struct BitmapPair {
    pub(super) node: String,
    pub(super) first: String,
    pub(super) second: String,
}

/// A series that the next backup can go on with.
#[derive(Debug, Clone)]
pub(super) struct BackupSeries {
    /// The node that has the bitmap.
    pub(super) node: String,
    pub(super) bitmap: String,
    /// The file of the last backup. The bitmap calls dirty all that differs from it.
    pub(super) last: String,
    pub(super) backups: u32,
}

/// A filter between an image and the export that serves it.
pub(super) struct ServedFilter {
    pub(super) name: String,
    /// Where `copy-before-write` keeps what is overwritten.
    pub(super) target: Option<String>,
    pub(super) keeps_its_child: bool,
}

impl ServedFilter {
    /// Whether a command may be refused since this stands on the image: snapshots inside an image are for root nodes, as
    /// in QEMU, and no job leads `quorum` and `copy-before-write` to another child.
    pub(super) fn may_refuse(&self, refusal: &str) -> bool {
        let of_child = ["cannot be exchanged as", "as 'backing' child"];
        refusal.contains("Need a root block node")
            || self.keeps_its_child && of_child.iter().any(|words| refusal.contains(words))
    }
}
