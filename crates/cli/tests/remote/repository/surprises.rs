//! What happens between pushes, and to a repository, that nobody would expect.

use std::fs;
use std::process::{Command, Stdio};

use vellum_testing::{Running, until};

use serde_json::Value;

use super::super::place::Place;
use super::Ours;

#[test]
fn what_a_bitmap_cannot_know_is_noticed() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    // Cut off, and longer again: what was there is zeroes now.
    let disk = "www/disk.qcow2";
    ours.good(&["push", "--track", disk, "r:vm"]);
    for size in ["21M", "64M"] {
        place.img(&["resize", "-q", "--shrink", disk, size]);
    }
    let pushed = ours.json(&["push", "--track", disk, "r:vm"]);
    assert_eq!(pushed["read"], 0);
    ours.expect_equal("r:vm", disk, None);
    // The backing file changes, or is another one.
    for (name, pattern) in [("base1", 1), ("base2", 2)] {
        place.img(&["create", "-q", "-f", "qcow2", name, "8M"]);
        place.must(
            "qemu-io",
            &["-c", &format!("write -P {pattern} 0 2M"), name],
        );
    }
    place.img("create -q -f qcow2 -b base1 -F qcow2 top");
    ours.good(&["push", "--track", "top", "r:top"]);
    let pushed = ours.json(&["push", "--track", "top", "r:top"]);
    assert_eq!(
        (&pushed["incremental"], &pushed["read"]),
        (&true.into(), &0.into())
    );
    let changes: [(&str, &[&str]); 3] = [
        ("qemu-io", &["-c", "write -P 3 1M 1M", "base1"]),
        (
            "qemu-img",
            &["rebase", "-u", "-b", "base2", "-F", "qcow2", "top"],
        ),
        ("qemu-img", &["rebase", "-u", "-b", "", "top"]),
    ];
    for (program, words) in changes {
        place.must(program, words);
        ours.good(&["push", "--track", "top", "r:top"]);
        ours.expect_equal("r:top", "top", None);
    }
    // Nothing can change in a disk without length.
    place.img("create -q -f qcow2 nothing 0");
    ours.good(&["push", "--track", "nothing", "r:nothing"]);
    ours.refused(
        &["bitmap", "--add", "nothing", "b"],
        "The disk has no length",
    );
    place.img("check nothing");
}

/// Nothing tells whether such a layer has changed, so all is read each time, and no bitmap is left.
#[test]
fn a_backing_file_without_a_version_counts_as_changed() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    let backing =
        r#"json:{"driver":"raw","file":{"driver":"null-co","size":1048576,"read-zeroes":true}}"#;
    let words = [
        "create", "-q", "-f", "qcow2", "-b", backing, "-F", "raw", "top",
    ];
    place.img(&words);
    for number in 1..3 {
        let pushed = ours.json(&["push", "--track", "top", "r:top"]);
        assert_eq!(
            (&pushed["number"], &pushed["incremental"]),
            (&number.into(), &false.into())
        );
        let info = place.img("info top");
        assert!(!info.contains("bitmaps"), "{info}");
    }
    ours.refused(
        &["push", "--since", "top", "top", "r:top"],
        "does not know what has changed",
    );
}

#[test]
fn a_bitmap_in_a_copy_is_not_believed() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    let disk = "www/disk.qcow2";
    place.img(&["snapshot", "-c", "before", disk]);
    place.must("qemu-io", &["-c", "write -P 8 2M 1M", disk]);
    ours.good(&["push", "--track", disk, "r:vm"]);
    // The copy has the bitmap of now, and what the snapshot holds.
    let words = [
        "convert",
        "-l",
        "before",
        "-O",
        "qcow2",
        "--bitmaps",
        disk,
        "copy.qcow2",
    ];
    place.img(&words);
    ours.good(&["push", "--track", "copy.qcow2", "r:vm"]);
    ours.expect_equal("r:vm", "copy.qcow2", None);
    // One that is switched off knows nothing of what comes after.
    place.img("bitmap --add --disable copy.qcow2 b");
    ours.refused(&["push", "--bitmap", "b", "copy.qcow2", "r:vm"], "disabled");
    // Whoever writes to such a file by itself tells no bitmap.
    let options = "data_file=data.raw,data_file_raw=on";
    place.img(&["create", "-q", "-f", "qcow2", "-o", options, "x", "1M"]);
    ours.refused(&["push", "--track", "x", "r:x"], "without a raw data file");
}

#[test]
fn an_overlay_stands_on_the_disk_that_it_was_made_on() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    ours.good(&["push", "www/disk.raw", "r:vm"]);
    ours.good(&["open", "r:vm", "top.qcow2"]);
    ours.good(&[
        "compare",
        "top.qcow2",
        "www/disk.raw",
        "-f",
        "qcow2",
        "-F",
        "raw",
    ]);
    fs::rename(place.path("r"), place.path("old")).expect("a name");
    ours.good(&["push", "www/disk.qcow2", "r:vm"]);
    ours.refused(
        &["info", "--backing-chain", "top.qcow2"],
        "another disk now",
    );
}

#[test]
fn pull_leaves_alone_what_is_in_use() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    ours.good(&["push", "www/disk.raw", "r:vm"]);
    place.img("create -q -f qcow2 used.qcow2 1M");
    place.good_command(
        Command::new("chmod")
            .arg("600")
            .arg(place.path("used.qcow2")),
    );
    fs::create_dir(place.path("links")).expect("a folder");
    let socket = place.name("used.sock");
    let mut server = ours.command(&["nbd", "-t", "-f", "qcow2", "-k", &socket, "used.qcow2"]);
    let server = server.stdout(Stdio::null()).spawn().expect("our program");
    let server = Running { child: server };
    until("a socket", || place.has("used.sock"));
    ours.refused(&["pull", "r:vm", "used.qcow2"], "lock");
    drop(server);
    ours.good(&["pull", "r:vm", "used.qcow2"]);
    ours.good(&[
        "compare",
        "used.qcow2",
        "www/disk.raw",
        "-f",
        "qcow2",
        "-F",
        "raw",
    ]);
    use std::os::unix::fs::{PermissionsExt, symlink};
    let mode = fs::metadata(place.path("used.qcow2"))
        .expect("it is there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    symlink("../new.qcow2", place.path("links/link.qcow2")).expect("a link");
    ours.good(&["pull", "r:vm", "links/link.qcow2"]);
    assert!(place.path("new.qcow2").is_file() && place.path("links/link.qcow2").is_symlink());
}

#[test]
fn what_does_not_belong_there_is_named_and_left_alone() {
    use std::os::unix::fs::symlink;
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    ours.good(&["push", "www/disk.raw", "r:vm"]);
    // A manifest that was damaged: everything else goes on, but for what removes.
    let damaged = place.path("r/tags/vm/0000000002");
    fs::write(&damaged, "x").expect("a file");
    let said = ours.run(&["repo", "list", "r"]);
    assert_eq!(said.code, Some(2));
    assert!(
        said.out.contains("vm@1") && said.err.contains("tags/vm/0000000002"),
        "{}",
        said.err
    );
    ours.good(&["push", "www/disk.raw", "r:other"]);
    ours.refused(&["repo", "gc", "r"], "tags/vm/0000000002");
    ours.good(&["repo", "remove", "r:vm"]);
    ours.good(&["repo", "gc", "r"]);
    fs::create_dir_all(place.path("r/sessions")).expect("a folder");
    place.write("r/sessions/large", vec![b'x'; 80 << 10]);
    fs::create_dir_all(place.path("r/garbage")).expect("a folder");
    place.write("r/garbage/letter", "x");
    ours.good(&["push", "www/disk.raw", "r:other"]);
    ours.good(&["repo", "gc", "r"]);
    assert!(place.has("r/garbage/letter"));
    // Links lead to what is somebody else's.
    fs::create_dir(place.path("else")).expect("a folder");
    place.write("else/letter", "x");
    place.remove("r/garbage/letter");
    fs::remove_dir(place.path("r/garbage")).expect("a folder");
    symlink("../else", place.path("r/garbage")).expect("a link");
    ours.refused(&["repo", "gc", "r"], "is a link");
    assert!(place.has("else/letter"));
    place.remove("r/garbage");
    symlink("../../else", place.path("r/tags/linked")).expect("a link");
    ours.refused(&["push", "www/disk.raw", "r:linked"], "is a link");
    ours.refused(&["repo", "gc", "r"], "is a link");
    place.remove("r/tags/linked");
    assert_eq!(ours.verify("r")["problems"], Value::Array(Vec::new()));
}

/// The others would be written over before the new disk is whole.
#[test]
fn images_of_several_files_are_not_pulled() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    ours.good(&["push", "www/disk.qcow2", "r:vm"]);
    fs::write(place.path("data"), "mine").unwrap();
    fs::write(place.path("x-flat.vmdk"), "mine").unwrap();
    let one = "What is pulled is one file";
    ours.refused(&["pull", "-o", "data_file=data", "r:vm", "x"], one);
    for subformat in ["monolithicFlat", "twoGbMaxExtentSparse"] {
        let options = format!("subformat={subformat}");
        ours.refused(
            &["pull", "-O", "vmdk", "-o", &options, "r:vm", "x.vmdk"],
            one,
        );
    }
    assert_eq!(fs::read(place.path("data")).unwrap(), b"mine");
    assert_eq!(fs::read(place.path("x-flat.vmdk")).unwrap(), b"mine");
    ours.good(&["pull", "-O", "vmdk", "r:vm", "x.vmdk"]);
}

/// The bitmap takes a connection beside the disk's, which such a server accepts and never greets.
#[test]
fn a_bitmap_of_a_server_with_one_slot_is_not_waited_for() {
    let place = Place::with_disk();
    let ours = Ours {
        place: &place,
        gateway: None,
    };
    let disk = "www/disk.qcow2";
    ours.good(&["push", disk, "r:vm"]);
    place.img(&["bitmap", "--add", disk, "b"]);
    place.must("qemu-io", &["-c", "write -P 5 10M 64k", disk]);
    for slots in ["1", "2"] {
        let socket = place.path(&format!("sock{slots}"));
        let mut server = Command::new("qemu-nbd");
        server.args(["-r", "-t", "-f", "qcow2", "-B", "b", "-e", slots, "-k"]);
        server.arg(&socket).arg(place.path(disk));
        let _server = Running {
            child: server.spawn().expect("qemu-nbd"),
        };
        until("a server", || socket.exists());
        let disk = format!("nbd+unix:///?socket={}", socket.display());
        let words = ["push", "-f", "raw", "--bitmap", "b", &disk, "r:vm"];
        match slots {
            "1" => ours.refused(&words, "--shared=2"),
            _ => assert_eq!(ours.json(&words)["read"], 65536),
        }
    }
}
