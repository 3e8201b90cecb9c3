//! What a user has flushed stays, whatever happens to the graph meanwhile: a guest writes
//! and flushes beside each kind of change, and after each of its flushes the power fails, or
//! only the program ends.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use vellum::gate::DenyAll;
use vellum::nodes::CopyOnRead;
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{Raw, RawOptions, ZeroRequest};
use vellum_io::lane::yield_now;
use vellum_io::spawn;
use vellum_storage::{MemStorage, Storage};

use super::volatile::Volatile;
use super::*;
use crate::graph::OpenedNode;
use crate::wrap::WriteThrough;

pub(super) const SIZE_BYTES: u64 = 256 << 10;
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
pub(crate) struct World {
    pub(crate) nodes: Nodes,
    /// By the name of the node that stands on it.
    files: RefCell<BTreeMap<String, Volatile>>,
    moments: RefCell<Vec<Moment>>,
    model: RefCell<Model>,
    over: Cell<bool>,
}

pub(crate) async fn open(layers: &[[Vec<u8>; 2]], which: usize) -> Arc<dyn BlockDevice> {
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
    pub(crate) fn new() -> Rc<World> {
        Rc::new(World {
            nodes: Nodes::live(),
            files: RefCell::default(),
            moments: RefCell::default(),
            model: RefCell::new(vec![0; SECTORS as usize]),
            over: Cell::new(false),
        })
    }

    /// Adds a node of a driver over a file of its own.
    pub(crate) async fn add(&self, name: &str, driver: &str) -> Volatile {
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
    pub(crate) async fn add_suspendable(&self, name: &str) {
        self.add_over(name, Volatile::image().await, |below| {
            format!("driver=qcow2,file.driver=blkdebug,file.image={below}")
        })
        .await;
    }

    /// Adds a raw node over a file that holds an image.
    pub(crate) async fn add_image_as_raw(&self, name: &str) {
        self.add_over(name, Volatile::image().await, |below| {
            format!("driver=raw,file={below}")
        })
        .await;
    }

    /// Adds a node of an image that stands on another node.
    pub(crate) async fn add_overlay(&self, name: &str, backing: &str) {
        self.add_over(name, Volatile::image().await, |below| {
            format!("driver=qcow2,file={below},backing={backing}")
        })
        .await;
    }

    async fn add_over(&self, name: &str, file: Volatile, how: impl FnOnce(&str) -> String) {
        let below = format!("{name}-file");
        let node = OpenedNode {
            driver: "file",
            kind: NodeKind::Storage(Arc::new(file.clone())),
            filtered: None,
            files: Vec::new(),
            writable: true,
        };
        self.nodes
            .name(&Ancestry::default(), &below, node, None)
            .unwrap();
        self.nodes.lock().nodes.show(&below);
        let text = format!("{},node-name={name}", how(&below));
        add(&self.nodes, &text).await.unwrap();
        self.files.borrow_mut().insert(name.to_owned(), file);
    }

    /// What the disk, which is a chain of nodes, consists of now.
    pub(crate) fn layers(&self, chain: &[String]) -> Vec<[Vec<u8>; 2]> {
        let files = self.files.borrow();
        chain.iter().map(|name| files[name].left()).collect()
    }

    /// The file below the node `name`.
    pub(crate) fn file(&self, name: &str) -> Volatile {
        self.files.borrow()[name].clone()
    }

    pub(crate) fn join(&self, name: &str) -> NodeUse {
        let user = User::Export("guest".into());
        self.nodes
            .join(user, name, RequiredAccess::reading("root"))
            .unwrap()
    }

    /// Writes a sector, and notes what it holds then.
    pub(crate) async fn put(&self, joined: &NodeUse, sector: u64, byte: u8) {
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
    pub(crate) async fn check_left(&self, chain: &[String]) {
        let moment = Moment {
            model: self.model.borrow().clone(),
            layers: self.layers(chain),
        };
        moment.check(0).await;
    }

    /// Whether something stands in front of a node.
    pub(crate) fn is_watched(&self, name: &str) -> bool {
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
    pub(crate) async fn change(self: &Rc<World>, name: &str, change: impl Future<Output = ()>) {
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

#[test]
fn a_flush_holds_what_was_written_while_a_snapshot_was_made() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            world.add("base", driver).await;
            world.add("over", "qcow2").await;
            let snapshot = async { world.nodes.snapshot("base", "over").await.unwrap() };
            world.change("base", snapshot).await;
        });
    }
}

#[test]
fn a_snapshot_of_what_cannot_be_made_durable_leaves_all_as_it_was() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            let file = world.add("base", driver).await;
            world.add("over", "qcow2").await;
            let joined = world.join("base");
            let write = async |byte: u8| {
                let bytes = Buffer::copy_of(&[byte; 512]);
                joined.link.write(0, bytes, RequestFlags::default()).await
            };
            write(1).await.unwrap();
            // Only the flush that counts fails: what it is about is written by then.
            let snapshot = spawn({
                let nodes = world.nodes.clone();
                async move { nodes.snapshot("base", "over").await }
            });
            let over = &world.nodes;
            while over.backing_of("over").is_none() {
                yield_now().await;
            }
            write(2).await.unwrap();
            file.0.fails_flushes.store(true, Ordering::SeqCst);
            assert!(snapshot.await.is_err());
            assert_eq!(world.nodes.used_by(joined.id).as_deref(), Some("base"));
            assert_eq!(world.nodes.chain("over"), ["over"]);
            let read = joined.link.read(0, Buffer::for_read(512)).await.unwrap();
            assert_eq!(read[..], [2; 512]);
            world.nodes.remove("over").await.unwrap();
        });
    }
}

#[test]
fn a_flush_holds_while_the_node_is_opened_anew() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            world.add("disk", driver).await;
            let change = async {
                for writable in [false, true, false, true] {
                    let set = world.nodes.set_writable("disk", writable);
                    set.await.unwrap();
                    for _ in 0..20 {
                        yield_now().await;
                    }
                }
            };
            world.change("disk", change).await;
        });
    }
}

#[test]
fn a_flush_holds_while_what_lies_below_is_exchanged() {
    lane::block_on(async {
        let world = World::new();
        for name in ["base", "mid", "top"] {
            world.add(name, "qcow2").await;
        }
        for (node, overlay) in [("base", "mid"), ("mid", "top")] {
            world.nodes.snapshot(node, overlay).await.unwrap();
        }
        let change = async {
            world.nodes.set_writable("base", false).await.unwrap();
            let rebased = world.nodes.rebase("top", Some("base"), None).await;
            rebased.unwrap();
            assert_eq!(world.nodes.chain("top"), ["top", "base"]);
            world.nodes.set_writable("base", true).await.unwrap();
        };
        world.change("top", change).await;
    });
}

#[test]
fn a_flush_holds_while_something_is_put_in_front_and_taken_away() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            world.add("disk", driver).await;
            let change = async {
                for _ in 0..2 {
                    let front = CopyOnRead::fetching(world.nodes.device("disk").unwrap());
                    let put = world.nodes.insert_filter("disk", Some(front)).await;
                    put.unwrap();
                    for _ in 0..20 {
                        yield_now().await;
                    }
                    world.nodes.insert_filter("disk", None).await.unwrap();
                }
            };
            world.change("disk", change).await;
        });
    }
}

/// Graphs over a file: their name, whether the file is an image, and how they are asked for.
const GRAPHS: [(&str, bool, &str); 7] = [
    ("raw", false, "driver=raw,file="),
    ("qcow2", true, "driver=qcow2,file="),
    ("blkdebug", false, "driver=blkdebug,image="),
    (
        "preallocate",
        false,
        "driver=raw,file.driver=preallocate,file.file=",
    ),
    (
        "raw on qcow2",
        true,
        "driver=raw,file.driver=qcow2,file.file=",
    ),
    (
        "copy-on-read",
        true,
        "driver=copy-on-read,file.driver=qcow2,file.file=",
    ),
    (
        "qcow2 on blkdebug",
        true,
        "driver=qcow2,file.driver=blkdebug,file.image=",
    ),
];

#[test]
fn what_was_written_is_durable_once_its_node_is_removed_or_all_are_closed() {
    for (graph, is_image, how) in GRAPHS {
        for all in [false, true] {
            lane::block_on(async {
                let world = World::new();
                let file = match is_image {
                    true => Volatile::image().await,
                    false => Volatile::new(vec![0; SIZE_BYTES as usize]),
                };
                let with_file = |below: &str| format!("{how}{below}");
                world.add_over("disk", file, with_file).await;
                let joined = world.join("disk");
                let bytes = Buffer::copy_of(&[9; 512]);
                let write = joined.link.write(1024, bytes, RequestFlags::default());
                write.await.unwrap();
                world.nodes.leave(joined.id);
                match all {
                    false => world.nodes.remove("disk").await.unwrap(),
                    true => world.nodes.clone().close().await.unwrap(),
                }
                let left = open(&world.layers(&["disk".to_owned()]), 0).await;
                let read = left.read(1024, Buffer::for_read(512)).await.unwrap();
                assert_eq!(read[..], [9; 512], "{graph}, all: {all}");
            });
        }
    }
}

#[test]
fn a_close_that_fails_is_told() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            let file = world.add("disk", driver).await;
            world.add("sound", "qcow2").await;
            let joined = world.join("disk");
            let bytes = Buffer::copy_of(&[9; 512]);
            let write = joined.link.write(0, bytes, RequestFlags::default());
            write.await.unwrap();
            file.0.fails_flushes.store(true, Ordering::SeqCst);
            world.nodes.leave(joined.id);
            let closed = world.nodes.clone().close().await;
            assert_eq!(closed.unwrap_err().errno(), libc::EIO, "{driver}");
            assert!(world.nodes.is_empty());
        });
    }
}

#[test]
fn what_has_a_name_is_there_for_the_next_one_who_stands_on_it() {
    for how in ["file=", "file.driver=raw,file.node-name=between,file.file="] {
        lane::block_on(async {
            let world = World::new();
            let file = Volatile::image().await;
            let with_file = |below: &str| format!("driver=qcow2,{how}{below}");
            world.add_over("disk", file.clone(), with_file).await;
            // Opened anew it is referred to by its name, too.
            world.nodes.set_writable("disk", false).await.unwrap();
            world.nodes.remove("disk").await.unwrap();
            assert!(!world.nodes.contains("between"));
            let again = "driver=qcow2,node-name=again,file=disk-file";
            add(&world.nodes, again).await.unwrap();
            let disk = world.nodes.device("again").unwrap();
            disk.read(0, Buffer::for_read(512)).await.unwrap();
            world.nodes.clone().close().await.unwrap();
            assert!(file.flush().await.is_err(), "its own end closes it");
        });
    }
}

#[test]
fn what_is_written_through_is_durable_at_once_before_and_after_a_snapshot() {
    for driver in ["raw", "qcow2"] {
        lane::block_on(async {
            let world = World::new();
            world.add("disk", driver).await;
            world.add("over", "qcow2").await;
            let joined = world.join("disk");
            let device = WriteThrough::new(joined.link.clone());
            let check = async |chain: &[&str]| {
                let chain: Vec<String> = chain.iter().map(ToString::to_string).collect();
                for byte in [5, 6] {
                    let bytes = Buffer::copy_of(&[byte; 1024]);
                    let write = device.write(512, bytes, RequestFlags::default());
                    write.await.unwrap();
                    world.model.borrow_mut()[1..3].fill(byte);
                    world.check_left(&chain).await;
                    let zeroes = device.write_zeroes(512, 512, ZeroRequest::default());
                    zeroes.await.unwrap();
                    world.model.borrow_mut()[1] = 0;
                    world.check_left(&chain).await;
                }
            };
            check(&["disk"]).await;
            world.nodes.snapshot("disk", "over").await.unwrap();
            check(&["over", "disk"]).await;
        });
    }
}

#[test]
fn the_bottom_of_what_is_copied_is_found_below_a_node_with_a_name() {
    lane::block_on(async {
        let world = World::new();
        for name in ["base", "over"] {
            world.add(name, "qcow2").await;
        }
        world.nodes.snapshot("base", "over").await.unwrap();
        for bottom in ["base", "over"] {
            let copying =
                format!("driver=copy-on-read,file=over,bottom={bottom},node-name=copying");
            add(&world.nodes, &copying).await.unwrap();
            world.nodes.remove("copying").await.unwrap();
        }
        let device = world.nodes.device("over").unwrap();
        device.read(0, Buffer::for_read(512)).await.unwrap();
    });
}
