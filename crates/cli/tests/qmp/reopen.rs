//! `blockdev-reopen`: nodes get other options under those who use them.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::backup::{DISK, SERVER};
use crate::dirty;
use crate::place::Step::Ask;
use crate::place::{Daemon, Place, Step, add, qcow2, same, with};

fn reopen(nodes: &[Value]) -> Step {
    Ask("blockdev-reopen", json!({"options": nodes}))
}

#[test]
fn what_cannot_change_is_refused_alike() {
    let file = json!({"driver": "file", "node-name": "f", "filename": "o"});
    let over = json!({"driver": "qcow2", "node-name": "q", "file": "f"});
    let inline = qcow2("t", "t", json!(null));
    let null = json!({"driver": "null-co", "node-name": "nu", "size": 1048576});
    let debug = json!({"driver": "blkdebug", "node-name": "bd", "image": "nu"});
    let reading = json!({"driver": "copy-on-read", "node-name": "cor", "file": "nu"});
    let script = [
        Ask("blockdev-reopen", json!({})),
        Ask("blockdev-reopen", json!({"options": [1]})),
        reopen(&[json!({"driver": "qcow2"})]),
        reopen(&[json!({"driver": "qcow2", "file": "f"})]),
        reopen(&[with(over.clone(), json!({"node-name": "no"}))]),
        Ask("blockdev-add", file.clone()),
        Ask("blockdev-add", over.clone()),
        reopen(&[json!({"driver": "qcow2", "node-name": "q"})]),
        reopen(&[with(over.clone(), json!({"driver": "raw"}))]),
        reopen(&[with(over.clone(), json!({"file": "nosuch"}))]),
        reopen(&[with(over.clone(), json!({"file": null}))]),
        reopen(&[with(
            over.clone(),
            json!({"file": {"driver": "file", "filename": "o"}}),
        )]),
        reopen(&[with(over.clone(), json!({"file": "q"}))]),
        reopen(&[with(over.clone(), json!({"nosuch": 1}))]),
        reopen(&[with(over.clone(), json!({"force-share": true}))]),
        reopen(&[with(over.clone(), json!({"backing": "no"}))]),
        reopen(&[with(over.clone(), json!({"backing": ""}))]),
        reopen(&[with(over.clone(), json!({"backing": "q"}))]),
        reopen(&[with(over.clone(), json!({"detect-zeroes": "unmap"}))]),
        reopen(&[with(
            over.clone(),
            json!({"l2-cache-size": 100, "cache-size": 10}),
        )]),
        reopen(&[json!({"driver": "file", "node-name": "f"})]),
        reopen(&[with(file.clone(), json!({"filename": "b"}))]),
        reopen(&[with(file.clone(), json!({"locking": "off"}))]),
        reopen(&[with(file.clone(), json!({"aio": "io_uring"}))]),
        reopen(&[with(file, json!({"read-only": true}))]),
        Ask("blockdev-add", inline.clone()),
        reopen(&[qcow2("t", "t", json!(""))]),
        reopen(&[qcow2("t", "b", json!(null))]),
        reopen(&[qcow2("t", "t", json!({"driver": "qcow2", "file": "f"}))]),
        reopen(&[with(inline, json!({"file": "f"}))]),
        Ask("blockdev-add", null.clone()),
        reopen(&[json!({"driver": "null-co", "node-name": "nu"})]),
        reopen(&[with(null.clone(), json!({"read-zeroes": true}))]),
        reopen(&[with(null.clone(), json!({"read-only": true}))]),
        reopen(&[null]),
        Ask("blockdev-add", debug.clone()),
        reopen(std::slice::from_ref(&debug)),
        reopen(&[with(debug.clone(), json!({"align": 4096}))]),
        reopen(&[with(debug, json!({"image": "q"}))]),
        Ask("blockdev-add", reading.clone()),
        reopen(&[reading]),
    ];
    same(&[], &script);
}

#[test]
fn nodes_are_opened_anew_alike() {
    let top = |backing: Value| with(qcow2("top", "t", backing), json!({}));
    let base = |more: Value| with(qcow2("base", "b", json!(null)), more);
    let throttle = |group: &str, file: &str| json!({"driver": "throttle", "node-name": "th", "throttle-group": group, "file": file});
    let raw = |file: &str| json!({"driver": "raw", "node-name": "r", "file": file});
    let group = |id: &str| {
        Ask(
            "object-add",
            json!({"qom-type": "throttle-group", "id": id}),
        )
    };
    let script = [
        add("base", "b", json!(null)),
        add("mid", "m", json!("base")),
        add("top", "t", json!("mid")),
        reopen(&[top(json!("base"))]),
        Ask("blockdev-del", json!({"node-name": "mid"})),
        Ask("blockdev-del", json!({"node-name": "base"})),
        reopen(&[top(json!(null))]),
        reopen(&[top(json!(null)), base(json!({"read-only": true}))]),
        reopen(&[top(json!("base")), base(json!({"lazy-refcounts": true}))]),
        // One that fails takes the others with it.
        reopen(&[
            top(json!(null)),
            base(json!({"l2-cache-size": 100, "cache-size": 10})),
        ]),
        Ask("blockdev-del", json!({"node-name": "base"})),
        group("g1"),
        group("g2"),
        Ask("blockdev-add", throttle("g1", "top")),
        reopen(&[throttle("g2", "top")]),
        reopen(&[throttle("g3", "top")]),
        Ask("object-del", json!({"id": "g1"})),
        Ask("object-del", json!({"id": "g2"})),
        Ask("blockdev-add", with(raw("th"), json!({"offset": 4096}))),
        reopen(&[raw("th")]),
        reopen(&[raw("top")]),
        reopen(&[raw("r")]),
        reopen(&[throttle("g2", "r")]),
        Ask("blockdev-del", json!({"node-name": "th"})),
        Ask("blockdev-del", json!({"node-name": "r"})),
        Ask("blockdev-del", json!({"node-name": "top"})),
        Ask("blockdev-del", json!({"node-name": "base"})),
    ];
    same(&[], &script);
}

fn serve(place: &Place) -> Daemon {
    let mut daemon = place.ours(SERVER);
    let file = json!({"driver": "file", "node-name": "f", "filename": "b"});
    daemon.must("blockdev-add", file);
    let disk = json!({"driver": "qcow2", "node-name": "disk", "file": "f"});
    daemon.must("blockdev-add", disk);
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk",
        "writable": true});
    daemon.must("block-export-add", export);
    daemon
}

#[test]
fn a_client_writes_on_while_nodes_are_opened_anew() {
    let place = Place::new();
    let mut daemon = serve(&place);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut byte = 0;
            while byte == 0 || !is_over.load(Ordering::SeqCst) {
                byte = byte % 250 + 1;
                let write = format!("write -P {byte} 0 512k");
                let read = format!("read -P {byte} 0 512k");
                place.io(DISK, &[&write, "flush", &read]);
            }
            byte
        });
        let file = |more: Value| {
            let file = json!({"driver": "file", "node-name": "f", "filename": "b"});
            with(file, more)
        };
        let disk = |more: Value| {
            let disk = json!({"driver": "qcow2", "node-name": "disk", "file": "f"});
            with(disk, more)
        };
        for _ in 0..8 {
            for options in [
                json!([file(json!({"discard": "unmap"}))]),
                json!([disk(
                    json!({"lazy-refcounts": true, "l2-cache-size": 65536})
                )]),
                json!([disk(json!({})), file(json!({"cache": {"no-flush": false}}))]),
            ] {
                daemon.must("blockdev-reopen", json!({"options": options}));
            }
        }
        is_over.store(true, Ordering::SeqCst);
        let byte = writer.join().expect("it writes");
        let refused = daemon.ask(
            "blockdev-reopen",
            json!({"options": [disk(json!({"read-only": true}))]}),
        );
        let text = "Read-only block node 'disk' cannot support read-write users";
        assert_eq!(refused["error"]["desc"], text);
        // The power is cut: what was flushed is there.
        daemon.kill();
        place.io("b", &[&format!("read -P {byte} 0 512k")]);
    });
}

/// What the bitmap `b` calls dirty, as an export shows it: offsets and lengths.
fn dirty(place: &Place, export: &str) -> Vec<(u64, u64)> {
    let uri = format!("nbd+unix:///{export}?socket=sock");
    let words = ["--map=qemu:dirty-bitmap:b", "--json", &uri];
    dirty::extents(&place.must("nbdinfo", &words))
}

/// A backup that asks an export what has changed must hear of all of it, whatever was opened anew.
#[test]
fn an_export_shows_what_is_written_after_its_disk_was_opened_anew() {
    const KIB_64: u64 = 65536;
    let place = Place::new();
    let mut daemon = serve(&place);
    let named = json!({"node": "disk", "name": "b"});
    let new = with(named.clone(), json!({"persistent": true}));
    daemon.must("block-dirty-bitmap-add", new);
    let shown = json!({"type": "nbd", "id": "s", "node-name": "disk", "name": "shown",
        "writable": true, "bitmaps": ["b"]});
    daemon.must("block-export-add", shown);
    place.io(DISK, &["write 0 64k"]);
    let reopen = |more: Value| {
        let disk = json!({"driver": "qcow2", "node-name": "disk", "file": "f"});
        json!({"options": [with(disk, more)]})
    };
    daemon.must("blockdev-reopen", reopen(json!({"discard": "unmap"})));
    place.io(DISK, &["write 128k 64k"]);
    let written = [(0, KIB_64), (2 * KIB_64, KIB_64)];
    assert_eq!(dirty(&place, "shown"), written);
    // One that fails.
    let failing = reopen(json!({"l2-cache-size": 100, "cache-size": 10}));
    assert!(daemon.ask("blockdev-reopen", failing)["error"].is_object());
    place.io(DISK, &["write 256k 64k"]);
    let written = [&written[..], &[(4 * KIB_64, KIB_64)]].concat();
    assert_eq!(dirty(&place, "shown"), written);
    // Nobody else may change it, still.
    let refused = daemon.ask("block-dirty-bitmap-clear", named);
    assert!(refused["error"].is_object(), "{refused}");
    // What is written from here on is that of the overlay.
    daemon.must("blockdev-add", qcow2("over", "o", json!(null)));
    let over = json!({"node": "disk", "overlay": "over"});
    daemon.must("blockdev-snapshot", over);
    assert_eq!(dirty(&place, "shown"), written);
    daemon.end();
}

/// Such a node has another name each time.
#[test]
fn an_export_shows_a_bitmap_of_a_node_that_only_a_filter_knows() {
    let place = Place::new();
    place.img("bitmap --add b b");
    let mut daemon = place.ours(SERVER);
    let group = |id: &str| json!({"qom-type": "throttle-group", "id": id});
    daemon.must("object-add", group("g1"));
    daemon.must("object-add", group("g2"));
    let filter = |group: &str| {
        json!({"driver": "throttle", "node-name": "disk", "throttle-group": group,
            "file": {"driver": "qcow2", "file": {"driver": "file", "filename": "b"}}})
    };
    daemon.must("blockdev-add", filter("g1"));
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk",
        "writable": true, "bitmaps": ["b"]});
    daemon.must("block-export-add", export);
    place.io(DISK, &["write 0 64k"]);
    daemon.must("blockdev-reopen", json!({"options": [filter("g2")]}));
    place.io(DISK, &["write 128k 64k"]);
    assert_eq!(dirty(&place, "disk"), [(0, 65536), (131_072, 65536)]);
    let nodes = daemon.must("query-named-block-nodes", json!({}));
    let nodes = nodes.as_array().expect("nodes").iter();
    let bitmaps = nodes.filter_map(|node| node["dirty-bitmaps"].as_array());
    let busy: Vec<&Value> = bitmaps.flatten().map(|bitmap| &bitmap["busy"]).collect();
    assert_eq!(busy, [true]);
    daemon.end();
}

#[test]
fn a_file_is_locked_at_every_moment_of_a_reopen() {
    let place = Place::new();
    let mut daemon = serve(&place);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut attempts = 0;
            while attempts < 3 || !is_over.load(Ordering::SeqCst) {
                let output = std::process::Command::new("qemu-io")
                    .current_dir(place.root())
                    .args(["-f", "qcow2", "-c", "write 0 512", "b"])
                    .output()
                    .expect("qemu-io");
                assert!(!output.status.success(), "it got in between");
                attempts += 1;
            }
        });
        for round in 0..100 {
            let disk = json!({
                "driver": "qcow2", "node-name": "disk", "file": "f", "lazy-refcounts": round % 2 == 0,
            });
            let file = json!({"driver": "file", "node-name": "f", "filename": "b"});
            daemon.must("blockdev-reopen", json!({"options": [disk, file]}));
        }
        is_over.store(true, Ordering::SeqCst);
        other.join().expect("it is refused");
    });
    daemon.end();
    place.img("check -q b");
}
