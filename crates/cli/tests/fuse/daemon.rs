//! The daemon's exports.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::{Value, json};
use vellum_testing::Qmp;

use crate::disk::overwrite;
use crate::place::{Place, is_mounted};
use vellum_testing::until;

fn export(id: &str, mountpoint: &str) -> Value {
    json!({"type": "fuse", "id": id, "node-name": "node", "mountpoint": mountpoint})
}

fn with(mut value: Value, key: &str, member: Value) -> Value {
    value[key] = member;
    value
}

/// As Proxmox VE does it.
#[test]
fn exports_come_and_go_by_the_monitor() {
    let place = Place::new("8M");
    place.touch("second");
    let vellum = env!("CARGO_BIN_EXE_vellum");
    let chardev = "socket,id=qmp,path=qmp,server=on,wait=off";
    let words = [
        "daemon",
        "--daemonize",
        "--pidfile",
        "pid",
        "--chardev",
        chardev,
    ];
    place.must(
        vellum,
        &[&words[..], &["--monitor", "chardev=qmp"]].concat(),
    );
    let pid = fs::read_to_string(place.path("pid")).expect("a pid");
    let mut monitor = Qmp::connect(place.path("qmp"));
    let image = json!({"driver": "file", "filename": place.name("image")});
    let node = json!({"driver": "qcow2", "node-name": "node", "file": image});
    monitor.must("blockdev-add", node);
    let (disk, second) = (place.name("disk"), place.name("second"));
    let writable = with(export("one", &disk), "writable", json!(true));
    monitor.must("block-export-add", writable);
    monitor.must("block-export-add", export("two", &second));
    let exports = monitor.must("query-block-exports", json!({}));
    let expected =
        |id: &str| json!({"id": id, "node-name": "node", "type": "fuse", "shutting-down": false});
    assert_eq!(exports, json!([expected("one"), expected("two")]));

    let file = File::options().write(true).open(&disk).expect("the disk");
    file.write_all_at(&[3; 70_000], 1000).expect("a write");
    let other = fs::read(&second).expect("the other file");
    assert!(other[1000..71_000] == [3; 70_000] && other[..1000] == [0; 1000]);
    let again = monitor.refused("block-export-add", export("three", &disk));
    assert_eq!(again, format!("There already is a FUSE export on '{disk}'"));
    let again = monitor.refused("block-export-add", export("one", &disk));
    assert_eq!(again, "Block export id 'one' is already in use");
    let odd = with(export("odd", &second), "allow-other", json!("maybe"));
    let odd = monitor.refused("block-export-add", odd);
    assert_eq!(odd, "Parameter 'allow-other' does not accept value 'maybe'");
    let missing = monitor.refused("block-export-add", export("odd", &place.name("missing")));
    assert!(missing.starts_with("Failed to stat '"), "{missing}");

    monitor.must("block-export-del", json!({"id": "one"}));
    assert!(!is_mounted(Path::new(&disk)) && is_mounted(Path::new(&second)));
    assert!(file.write_at(b"x", 0).is_err());
    monitor.must("quit", json!({}));
    until("the end", || !Path::new("/proc").join(pid.trim()).exists());
    assert!(!is_mounted(Path::new(&second)));
    let mut model = vec![0; 8 << 20];
    model[1000..71_000].fill(3);
    place.check_image(&model);
}

/// QEMU keeps the size of an export that is not growable.
#[test]
fn programs_that_truncate_what_they_write_cut_no_export() {
    for format in ["qcow2", "raw"] {
        let place = Place::of_format(format, "8M");
        let write = ["-f", format, "-c", "write -q -P 5 0 8M", "image"];
        place.must("qemu-io", &write);
        let node = format!(
            "{format},node-name=node,file.driver=file,file.filename={}",
            place.name("image")
        );
        let fuse = format!(
            "fuse,id=one,node-name=node,mountpoint={},writable=on",
            place.name("disk")
        );
        let server = place.start(&["daemon", "--blockdev", &node, "--export", &fuse]);
        overwrite(&place, true);
        server.end();
    }
}

/// A node may be made longer or shorter while nobody relies on its size; its own file may take
/// the place of the image.
#[test]
fn a_size_may_be_set_while_nobody_relies_on_it() {
    let place = Place::new("8M");
    let file = format!("file,node-name=file,filename={}", place.name("image"));
    let fuse = format!(
        "fuse,id=one,node-name=node,mountpoint={},writable=on",
        place.name("disk")
    );
    let server = place.start(&[
        "daemon",
        "--blockdev",
        &file,
        "--blockdev",
        "qcow2,node-name=node,file=file",
        "--nbd-server",
        "addr.type=unix,addr.path=nbd",
        "--chardev",
        "socket,id=qmp,path=qmp,server=on,wait=off",
        "--monitor",
        "qmp",
        "--export",
        &fuse,
    ]);
    let mut monitor = Qmp::connect(place.path("qmp"));
    let disk = File::options()
        .write(true)
        .open(place.path("disk"))
        .expect("the disk");
    disk.set_len(16 << 20).expect("nobody minds");
    let nbd = json!({"type": "nbd", "id": "two", "node-name": "node"});
    monitor.must("block-export-add", nbd);
    disk.set_len(8 << 20)
        .expect_err("clients of the other export know the size");
    monitor.must("block-export-del", json!({"id": "two"}));
    disk.set_len(8 << 20).expect("nobody minds any more");
    drop(disk);
    server.end();
    place.check_image(&vec![0; 8 << 20]);
}

/// The image's own path may show the disk in it.
#[test]
fn a_disk_may_take_the_place_of_its_image() {
    let place = Place::new("8M");
    place.io("image", &["write -P 6 0 1M"]);
    fs::rename(place.path("image"), place.path("disk")).expect("another name");
    let node = format!(
        "qcow2,node-name=node,file.driver=file,file.filename={}",
        place.name("disk")
    );
    let fuse = format!(
        "fuse,id=one,node-name=node,mountpoint={}",
        place.name("disk")
    );
    let server = place.start(&["daemon", "--blockdev", &node, "--export", &fuse]);
    let disk = fs::read(place.path("disk")).expect("the disk");
    assert!(disk.len() == 8 << 20 && disk[..1 << 20] == [6; 1 << 20]);
    server.end();
    let image = fs::read(place.path("disk")).expect("the image");
    assert_eq!(image[..4], *b"QFI\xfb");
}

/// An image in the file of an export: what its node has not written yet goes there at the end.
#[test]
fn a_disk_that_stands_on_an_export_is_whole_after_a_clean_shutdown() {
    let place = Place::of_format("raw", "32M");
    let vellum = env!("CARGO_BIN_EXE_vellum");
    let file = format!(
        "raw,node-name=below,file.driver=file,file.filename={}",
        place.name("image")
    );
    let fuse = format!(
        "fuse,id=file,node-name=below,mountpoint={},writable=on,growable=on",
        place.name("disk")
    );
    let chardev = "socket,id=qmp,path=qmp,server=on,wait=off";
    let server = place.start(&[
        "daemon",
        "--blockdev",
        &file,
        "--export",
        &fuse,
        "--chardev",
        chardev,
        "--monitor",
        "qmp",
    ]);
    place.must(vellum, "create -q -f qcow2 disk 16M");
    // By another name, as a configuration may have it.
    std::os::unix::fs::symlink(place.path("disk"), place.path("link")).expect("a link");
    let mut monitor = Qmp::connect(place.path("qmp"));
    let image = json!({"driver": "file", "filename": place.name("link")});
    let above = json!({"driver": "qcow2", "node-name": "above", "file": image});
    monitor.must("blockdev-add", above);
    let socket = json!({"type": "unix", "data": {"path": place.name("nbd")}});
    monitor.must("nbd-server-start", json!({"addr": socket}));
    let nbd = json!({"type": "nbd", "id": "above", "node-name": "above", "name": "above", "writable": true});
    monitor.must("block-export-add", nbd);
    let url = format!("nbd+unix:///above?socket={}", place.name("nbd"));
    // A client that never flushes.
    place.must(
        "qemu-io",
        &[
            "-t",
            "unsafe",
            "-f",
            "raw",
            "-c",
            "write -q -P 5 0 8M",
            &url,
        ],
    );
    drop(monitor);
    server.end();
    let mut model = vec![0; 16 << 20];
    model[..8 << 20].fill(5);
    place.check_image(&model);
}
