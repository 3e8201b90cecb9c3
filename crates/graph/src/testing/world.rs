//! [`World`]: a guest that writes and flushes beside a change of the graph. After each of its flushes the power fails, or only
//! the program ends, and what was flushed must be there.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Raw, RawOptions, RequestFlags};
use vellum_io::lane::yield_now;
use vellum_io::spawn;
use vellum_options::Options;
use vellum_storage::MemStorage;

use crate::Nodes;
use crate::live::joining::NodeUse;
use crate::live::uses::{RequiredAccess, User};
use crate::node::driver::DriverFacts;
use crate::node::opened::{NodeKind, OpenedNode};
use crate::node::place::NodePlace;

use super::volatile::Volatile;

/// The size of every disk.
pub const SIZE_BYTES: u64 = 256 << 10;
const SECTOR_BYTES: u64 = 512;
const SECTORS: u64 = SIZE_BYTES / SECTOR_BYTES;

/// What every sector of the guest's disk holds.
type Model = Vec<u8>;

/// When a guest has heard that all it has written is durable.
struct Moment {
    model: Model,
    /// What the disk consists of, from the top down: what is left of each file.
    layers: Vec<[Vec<u8>; 2]>,
}

/// Nodes on files that are kept in memory, and a guest.
pub struct World {
    /// The graph under test.
    pub nodes: Nodes,
    /// By the name of the node that stands on it.
    files: RefCell<BTreeMap<String, Volatile>>,
    moments: RefCell<Vec<Moment>>,
    /// What every sector must hold.
    pub model: RefCell<Model>,
    over: Cell<bool>,
}

/// Opens a chain of files, from the top down, for what is left of them: after a power cut if `which` is 0, after the
/// end of the program if it is 1.
///
/// # Panics
///
/// If what is left cannot be opened.
pub async fn open(layers: &[[Vec<u8>; 2]], which: usize) -> Arc<dyn BlockDevice> {
    let mut below: Option<Arc<dyn BlockDevice>> = None;
    for layer in layers.iter().rev() {
        let bytes = layer[which].clone();
        let is_qcow2 = bytes.starts_with(b"QFI\xfb");
        let file = Arc::new(MemStorage::with_bytes(bytes));
        let device: Arc<dyn BlockDevice> = match is_qcow2 {
            false => Raw::open(file, RawOptions::default()).unwrap(),
            true => {
                let options = OpenOptions::default()
                    .backing(below.take().map_or(Backing::None, Backing::Given));
                let opened = Qcow2::open(file, Arc::new(DenyAll), options).await;
                opened.unwrap()
            }
        };
        below = Some(device);
    }
    below.unwrap()
}

impl Moment {
    async fn check(&self, at: usize) {
        for (which, what) in ["the power fails", "the program ends"].iter().enumerate() {
            let disk = open(&self.layers, which).await;
            let read = disk.read(0, Buffer::for_read(SIZE_BYTES as usize));
            let bytes = read.await.unwrap();
            for (sector, expected) in self.model.iter().enumerate() {
                let found = &bytes[sector * 512..][..512];
                let is_right = found.iter().all(|byte| byte == expected);
                let found = found[0];
                assert!(
                    is_right,
                    "flush {at}, {what}: sector {sector} holds {found} and not {expected}"
                );
            }
        }
    }
}

impl World {
    /// No nodes yet, and a disk of zeroes.
    pub fn new() -> Rc<World> {
        Rc::new(World {
            nodes: Nodes::live(),
            files: RefCell::default(),
            moments: RefCell::default(),
            model: RefCell::new(vec![0; SECTORS as usize]),
            over: Cell::new(false),
        })
    }

    /// Adds a node of a driver over a file of its own.
    pub async fn add(&self, name: &str, driver: &str) -> Volatile {
        let file = match driver {
            "raw" => Volatile::new(vec![0; SIZE_BYTES as usize]),
            _ => Volatile::image().await,
        };
        self.add_over(name, file.clone(), |below| {
            format!("driver={driver},file={below}")
        })
        .await;
        file
    }

    /// Adds a node of an image whose requests can be suspended.
    pub async fn add_suspendable(&self, name: &str) {
        self.add_over(name, Volatile::image().await, |below| {
            format!("driver=qcow2,file.driver=blkdebug,file.image={below}")
        })
        .await;
    }

    /// Adds a raw node over a file that holds an image.
    pub async fn add_image_as_raw(&self, name: &str) {
        self.add_over(name, Volatile::image().await, |below| {
            format!("driver=raw,file={below}")
        })
        .await;
    }

    /// Adds a node of an image that stands on another node.
    pub async fn add_overlay(&self, name: &str, backing: &str) {
        self.add_over(name, Volatile::image().await, |below| {
            format!("driver=qcow2,file={below},backing={backing}")
        })
        .await;
    }

    /// Adds the node `file` as `{name}-file`, and a node `name` with the options that `how` makes of the name below.
    ///
    /// # Panics
    ///
    /// If a node cannot be opened.
    pub async fn add_over(&self, name: &str, file: Volatile, how: impl FnOnce(&str) -> String) {
        let below = format!("{name}-file");
        let node = OpenedNode {
            driver: DriverFacts::named("file"),
            kind: NodeKind::Storage(Arc::new(file.clone())),
            filtered: None,
            files: Vec::new(),
            writable: true,
        };
        self.nodes
            .name(&NodePlace::default(), &below, node, None)
            .unwrap();
        self.nodes.lock().nodes.show(&below);
        let text = format!("{},node-name={name}", how(&below));
        let options = Options::parse(&text).unwrap();
        self.nodes.add(options).await.unwrap();
        self.files.borrow_mut().insert(name.to_owned(), file);
    }

    /// What the disk, which is a chain of nodes, consists of now.
    pub fn layers(&self, chain: &[String]) -> Vec<[Vec<u8>; 2]> {
        let files = self.files.borrow();
        chain.iter().map(|name| files[name].left()).collect()
    }

    /// The file below the node `name`.
    pub fn file(&self, name: &str) -> Volatile {
        self.files.borrow()[name].clone()
    }

    /// A use of the node `name` by an export.
    ///
    /// # Panics
    ///
    /// If the node is not there or forbids it.
    pub fn join(&self, name: &str) -> NodeUse {
        let user = User::Export("guest".into());
        self.nodes
            .join(user, name, RequiredAccess::reading("root"))
            .unwrap()
    }

    /// Writes a sector, and notes what it holds then.
    pub async fn put(&self, joined: &NodeUse, sector: u64, byte: u8) {
        let bytes = Buffer::copy_of(&[byte; SECTOR_BYTES as usize]);
        let at = sector * SECTOR_BYTES;
        let write = joined.link.write(at, bytes, RequestFlags::default());
        // What is refused as the node is read-only is not there.
        if write.await.is_ok() {
            self.model.borrow_mut()[sector as usize] = byte;
        }
    }

    /// What is left of a disk, a chain of nodes, when the power fails now holds all that was
    /// written.
    pub async fn check_left(&self, chain: &[String]) {
        let moment = Moment {
            model: self.model.borrow().clone(),
            layers: self.layers(chain),
        };
        moment.check(0).await;
    }

    /// Whether something stands in front of a node.
    pub fn is_watched(&self, name: &str) -> bool {
        self.nodes.lock().nodes[name].front.is_some()
    }

    /// Writes and flushes; a flush that succeeds is a moment to look at.
    async fn guest(self: Rc<World>, joined: NodeUse) {
        let (mut sector, mut byte) = (0, 0u8);
        while !self.over.get() {
            for _ in 0..2 {
                sector = (sector + 67) % SECTORS;
                byte = byte.wrapping_add(1).max(1);
                self.put(&joined, sector, byte).await;
            }
            if joined.link.flush().await.is_ok() {
                let node = self.nodes.used_by(joined.id).unwrap();
                self.moments.borrow_mut().push(Moment {
                    model: self.model.borrow().clone(),
                    layers: self.layers(&self.nodes.chain(&node)),
                });
            }
            yield_now().await;
        }
        self.nodes.leave(joined.id);
    }

    /// Makes a change of the graph beside a guest of the node `name`, and checks what the
    /// guest was told before, meanwhile and afterwards.
    pub async fn change(self: &Rc<World>, name: &str, change: impl Future<Output = ()>) {
        let guest = spawn(self.clone().guest(self.join(name)));
        let pass = async || {
            let until = self.moments.borrow().len() + 3;
            while self.moments.borrow().len() < until {
                yield_now().await;
            }
        };
        pass().await;
        change.await;
        pass().await;
        self.over.set(true);
        guest.await;
        for (at, moment) in self.moments.take().iter().enumerate() {
            moment.check(at).await;
        }
    }
}
