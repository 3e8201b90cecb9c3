//! Repairs whose result others look at: images that QEMU left dirty, and images whose
//! entries point beyond the end of the file, where a repair must put nothing.

use std::sync::{Arc, Mutex};

use crate::common::{open, qemu, qemu_ok, qemu_verdict};
use vellum::gate::DenyAll;
use vellum::qcow2::Messages;
use vellum::qcow2::check::{CheckOptions, Fix, repair};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::{BlockDevice, Storage};
use vellum_io::lane;
use vellum_storage::MemStorage;
use vellum_storage::file::Create;

const CLUSTER: u64 = 65536;
const COPIED: u64 = 1 << 63;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

struct Broken {
    dir: tempfile::TempDir,
    bytes: Vec<u8>,
}

impl Broken {
    /// An image of QEMU's with 64 KiB clusters, some data and a snapshot, whose
    /// file ends with a cluster.
    fn new() -> Broken {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let steps = [
            ("qemu-img", "create -q -f qcow2 image 64M"),
            ("qemu-io", "-c\twrite -P 7 1M 500k\timage"),
            ("qemu-img", "snapshot -c one image"),
            ("qemu-io", "-c\twrite -P 8 2M 700k\timage"),
        ];
        for (tool, line) in steps {
            let by = if line.contains('\t') { '\t' } else { ' ' };
            let words: Vec<&str> = line.split(by).collect();
            qemu_ok(tool, dir.path(), &words);
        }
        let mut bytes = std::fs::read(dir.path().join("image")).expect("just made");
        bytes.resize(bytes.len().next_multiple_of(CLUSTER as usize), 0);
        Broken { dir, bytes }
    }

    fn be64(&self, at: u64) -> u64 {
        let at = at as usize;
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().expect("eight bytes"))
    }

    fn put64(&mut self, at: u64, value: u64) {
        let at = at as usize;
        self.bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }

    /// Where the entry of a guest cluster is.
    fn l2_entry(&self, guest: u64) -> u64 {
        (self.be64(self.be64(40)) & OFFSET) + guest * 8
    }

    /// Cluster `number` behind the end of the file.
    fn beyond(&self, number: u64) -> u64 {
        self.bytes.len() as u64 + number * CLUSTER
    }

    /// Makes the refcounts such that a repair has to make all of them anew.
    fn lose_refcounts(&mut self) {
        self.put64(self.be64(48), 0x200);
    }

    /// What QEMU reads.
    fn content(&self) -> Vec<u8> {
        let words = ["convert", "-f", "qcow2", "-O", "raw", "image", "raw"];
        qemu_ok("qemu-img", self.dir.path(), &words);
        std::fs::read(self.dir.path().join("raw")).expect("converted")
    }

    /// Repairs the image: what could be read stays as it was, and QEMU finds nothing
    /// wrong afterwards.
    fn expect_repair(&self, what: &str) {
        let path = self.dir.path().join("image");
        std::fs::write(&path, &self.bytes).expect("written");
        let before = self.content();
        let options = CheckOptions::default();
        let repaired = lane::block_on(repair(open(&path, Create::No), Fix::All, &options));
        repaired.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(self.content() == before, "{what}: the repair changed data");
        let verdict = qemu_verdict(&path);
        assert_eq!(verdict.exit_code, 0, "{what}: {verdict:?}");
        let write = [
            "-c",
            "write -P 9 16M 8M",
            "-c",
            "read -P 8 2M 700k",
            "image",
        ];
        let text = qemu_ok("qemu-io", self.dir.path(), &write);
        assert!(!text.contains("verification failed"), "{what}: {text}");
        assert_eq!(qemu_verdict(&path).exit_code, 0, "{what}: after a write");
    }
}

#[test]
fn new_refcounts_do_not_go_where_entries_point_beyond_the_end() {
    // A few clusters, with gaps in which one new cluster has room, or none.
    for places in [
        &[0][..],
        &[0, 1],
        &[0, 2],
        &[1, 3],
        &[0, 1, 2, 3, 4, 5, 6, 7],
    ] {
        let mut image = Broken::new();
        for (number, &place) in places.iter().enumerate() {
            let at = image.l2_entry(200 + number as u64);
            image.put64(at, image.beyond(place) | COPIED);
        }
        image.lose_refcounts();
        image.expect_repair(&format!("entries at {places:?}"));
    }
}

#[test]
fn new_refcounts_do_not_go_where_other_structures_lie_beyond_the_end() {
    // Entries without data, shared entries, compressed data, and an L2 table.
    let mut image = Broken::new();
    image.put64(image.l2_entry(200), image.beyond(0) | COPIED | 1);
    image.lose_refcounts();
    image.expect_repair("a zero cluster");
    let mut image = Broken::new();
    for guest in 200..203 {
        image.put64(image.l2_entry(guest), image.beyond(1));
    }
    image.lose_refcounts();
    image.expect_repair("a cluster with three users");
    let mut image = Broken::new();
    let l1 = image.be64(image.be64(64));
    image.put64(l1, image.beyond(0));
    image.lose_refcounts();
    image.expect_repair("an L2 table of a snapshot");
}

/// A refcount block beyond the end gets a place there only if nothing else points at it.
#[test]
fn a_refcount_block_beyond_the_end_does_not_take_the_place_of_data() {
    let mut image = Broken::new();
    let at = image.l2_entry(200);
    image.put64(at, image.beyond(3) | COPIED);
    image.put64(image.be64(48), image.beyond(3));
    image.expect_repair("data and a refcount block");
    let mut image = Broken::new();
    image.put64(image.be64(48), image.beyond(3));
    image.put64(image.be64(48) + 8, image.beyond(3));
    image.expect_repair("two refcount blocks");
}

/// A snapshot table that has to be written anew goes elsewhere as well.
#[test]
fn a_new_snapshot_table_does_not_go_where_entries_point_beyond_the_end() {
    let mut image = Broken::new();
    let at = image.l2_entry(200);
    image.put64(at, image.beyond(0) | COPIED);
    // The extra data of the snapshot is cut: it must be completed.
    let table = image.be64(64) as usize;
    let extra = u32::from_be_bytes(image.bytes[table + 36..table + 40].try_into().unwrap());
    let end = table + 40 + extra as usize;
    image.bytes[table + 36..table + 40].copy_from_slice(&8u32.to_be_bytes());
    image.bytes.copy_within(end..end + 64, table + 48);
    image.expect_repair("a snapshot table");
}

/// Opening an image for writing repairs it: QEMU then finds nothing wrong with it,
/// and the data is there.
#[test]
fn an_image_left_dirty_is_repaired_when_it_is_opened() {
    let kinds = [
        "cluster_size=64k",
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=1",
        "cluster_size=16k,extended_l2=on",
    ];
    for kind in kinds {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let options = format!("lazy_refcounts=on,{kind}");
        let create = ["create", "-q", "-f", "qcow2", "-o", &options, "image", "8M"];
        qemu_ok("qemu-img", dir.path(), &create);
        let steps = [
            "-f",
            "qcow2",
            "-c",
            "write -P 7 1M 500k",
            "-c",
            "flush",
            "-c",
            "abort",
        ];
        qemu("qemu-io", dir.path(), &[&steps[..], &["image"]].concat());
        let path = dir.path().join("image");
        let before = qemu_verdict(&path);
        assert_ne!(before.exit_code, 0, "{kind}: the crash left counts behind");

        lane::block_on(async {
            let storage = open(&path, Create::No);
            let image = Qcow2::open(storage, Arc::new(DenyAll), OpenOptions::default()).await;
            image.expect("repaired").close().await.expect("closed");
        });

        let after = qemu_verdict(&path);
        assert_eq!((after.exit_code, after.messages), (0, vec![]), "{kind}");
        let read = ["-r", "-f", "qcow2", "-c", "read -P 7 1M 500k", "image"];
        let text = qemu_ok("qemu-io", dir.path(), &read);
        assert!(!text.contains("verification failed"), "{kind}: {text}");
    }
}

/// An image that is marked dirty, and has thousands of leaked clusters.
fn dirty_with_leaks(leaks: u64) -> Vec<u8> {
    let mut image = Broken::new();
    let first = image.bytes.len() as u64 / CLUSTER;
    let block = image.be64(image.be64(48));
    for cluster in first..first + leaks {
        let at = (block + cluster * 2) as usize;
        image.bytes[at..at + 2].copy_from_slice(&1u16.to_be_bytes());
    }
    let end = image.beyond(leaks) as usize;
    image.bytes.resize(end, 0);
    image.put64(72, image.be64(72) | 1);
    image.bytes
}

/// What opening an image says.
fn said(
    bytes: Vec<u8>,
    messages: impl FnOnce(Box<dyn Fn(&str) + Send + Sync>) -> Messages,
) -> Vec<String> {
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    let sink = lines.clone();
    let say = move |line: &str| sink.lock().unwrap().push(line.to_owned());
    let options = OpenOptions::default().messages(messages(Box::new(say)));
    let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes));
    lane::block_on(async move {
        let image = Qcow2::open(file, Arc::new(DenyAll), options).await;
        image.expect("opened").close().await.expect("closed");
    });
    let lines = lines.lock().unwrap();
    lines.clone()
}

#[test]
fn a_repair_as_an_image_is_opened_says_a_few_lines_and_a_sum() {
    let few = said(dirty_with_leaks(3), |say| Messages::to(say));
    assert_eq!(few.len(), 6, "{few:?}");
    let lines = said(dirty_with_leaks(5000), |say| Messages::to(say));
    assert!(lines.len() < 20, "{} lines", lines.len());
    let last = lines.last().expect("a sum");
    assert!(last.contains("5000 leaked clusters"), "{last}");
}
