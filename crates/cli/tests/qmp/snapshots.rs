//! Snapshots of disks in use: overlays that the daemon makes, and those inside images.

use serde_json::{Value, json};

use crate::backup::{DISK, SERVER};
use crate::place::Step::Ask;
use crate::place::{Daemon, Place, Step, add, qcow2, same, with};

fn sync(more: Value) -> Step {
    Ask("blockdev-snapshot-sync", more)
}

fn all(actions: Value) -> Step {
    Ask("transaction", json!({"actions": actions}))
}

#[test]
fn what_cannot_be_put_over_a_node_is_told_alike() {
    let new = |more: Value| {
        let arguments = with(
            json!({"node-name": "top", "snapshot-file": "s", "snapshot-node-name": "s"}),
            more,
        );
        sync(arguments)
    };
    let script = [
        add("base", "b", json!(null)),
        add("top", "t", json!("base")),
        sync(json!({})),
        sync(json!({"node-name": "top"})),
        sync(json!({"node-name": "top", "snapshot-file": "s"})),
        sync(json!({"device": "top", "snapshot-file": "s", "snapshot-node-name": "s"})),
        new(json!({"node-name": "no"})),
        new(json!({"node-name": "base"})),
        new(json!({"snapshot-node-name": "top"})),
        new(json!({"format": "raw"})),
        new(json!({"format": "nosuch"})),
        new(json!({"mode": "nosuch"})),
        new(json!({"mode": "existing"})),
    ];
    same(&[], &script);
}

#[test]
fn snapshots_inside_images_are_led_alike() {
    let make = |device: &str, name: &str| {
        let arguments = json!({"device": device, "name": name});
        Ask("blockdev-snapshot-internal-sync", arguments)
    };
    let delete = |more: Value| Ask("blockdev-snapshot-delete-internal-sync", more);
    let raw = json!({
        "driver": "raw", "node-name": "r", "read-only": true,
        "file": {"driver": "file", "filename": "o"},
    });
    let writable = json!({"driver": "null-co", "node-name": "nu", "size": 1048576});
    let script = [
        add("base", "b", json!(null)),
        add("top", "t", json!("base")),
        Ask("blockdev-add", raw),
        Ask("blockdev-add", writable),
        make("r", "x"),
        make("nu", "x"),
        make("no", "x"),
        make("base", "x"),
        make("top", ""),
        make("top", "x"),
        make("top", "x"),
        make("top", "1"),
        Ask("blockdev-snapshot-internal-sync", json!({"device": "top"})),
        delete(json!({"device": "top"})),
        delete(json!({"device": "base", "name": "x"})),
        delete(json!({"device": "nu", "name": "x"})),
        delete(json!({"device": "top", "name": "no"})),
        delete(json!({"device": "top", "name": "x", "id": "2"})),
    ];
    same(&[], &script);
}

#[test]
fn names_of_backing_files_are_changed_alike() {
    let change = |device: &str, image: &str, file: &str| {
        let arguments = json!({"device": device, "image-node-name": image, "backing-file": file});
        Ask("change-backing-file", arguments)
    };
    let script = [
        add("base", "b", json!(null)),
        add("mid", "m", json!("base")),
        add("top", "t", json!("mid")),
        add("other", "o", json!(null)),
        Ask("change-backing-file", json!({})),
        change("no", "mid", "x"),
        change("top", "no", "x"),
        change("mid", "mid", "x"),
        change("top", "base", "x"),
        change("other", "mid", "x"),
        change("top", "mid", "x/y"),
        change("top", "top", ""),
        change("top", "top", "m"),
    ];
    same(&[], &script);
    let place = Place::new();
    let mut daemon = place.ours("");
    daemon.must("blockdev-add", qcow2("base", "b", json!(null)));
    daemon.must("blockdev-add", qcow2("top", "m", json!("base")));
    let arguments = json!({"device": "top", "image-node-name": "top", "backing-file": "x/y"});
    daemon.must("change-backing-file", arguments);
    daemon.end();
    let info = place.img("info --output=json m");
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["backing-filename"], "x/y");
    assert_eq!(info["backing-filename-format"], "qcow2");
}

#[test]
fn transactions_of_snapshots_are_carried_out_alike() {
    let overlay = |node: &str, overlay: &str| {
        let data = json!({"node": node, "overlay": overlay});
        json!({"type": "blockdev-snapshot", "data": data})
    };
    let inside = |device: &str, name: &str| {
        let data = json!({"device": device, "name": name});
        json!({"type": "blockdev-snapshot-internal-sync", "data": data})
    };
    let abort = json!({"type": "abort", "data": {}});
    let null = json!({"driver": "null-co", "node-name": "nu", "size": 1048576});
    let gone = json!({"device": "top", "name": "s"});
    let grouped = |actions: Value| {
        let properties = json!({"completion-mode": "grouped"});
        Ask(
            "transaction",
            json!({"actions": actions, "properties": properties}),
        )
    };
    let bitmap = json!({"type": "block-dirty-bitmap-add", "data": {"node": "top", "name": "b"}});
    let script = [
        add("top", "t", json!(null)),
        Ask("blockdev-add", null),
        add("over", "o", json!(null)),
        all(json!([overlay("nu", "over"), abort.clone()])),
        all(json!([overlay("nu", "over"), overlay("top", "no")])),
        all(json!([inside("top", "s"), overlay("top", "no")])),
        all(json!([inside("top", "s"), abort])),
        Ask("blockdev-snapshot-delete-internal-sync", gone),
        all(json!([{"type": "blockdev-snapshot", "data": {"node": "top"}}])),
        all(json!([{"type": "blockdev-snapshot-internal-sync", "data": {"device": "top"}}])),
        all(json!([{
            "type": "blockdev-snapshot-sync",
            "data": {"node-name": "top", "snapshot-file": "s"},
        }])),
        all(json!([overlay("top", "over"), inside("nu", "s")])),
        all(json!([overlay("top", "over")])),
        Ask("blockdev-del", json!({"node-name": "top"})),
        grouped(json!([])),
        grouped(json!([bitmap])),
        grouped(json!([overlay("top", "over")])),
    ];
    same(&[], &script);
}

fn serve(place: &Place) -> Daemon {
    let mut daemon = place.ours(SERVER);
    daemon.must("blockdev-add", qcow2("disk", "b", json!(null)));
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk",
        "writable": true});
    daemon.must("block-export-add", export);
    daemon
}

#[test]
fn a_client_goes_on_over_overlays_that_are_made_for_it() {
    let place = Place::new();
    let mut daemon = serve(&place);
    let mut node = "disk".to_owned();
    for round in 1..4 {
        place.io(DISK, &[&format!("write -P {round} 0 {round}00k")]);
        let name = format!("s{round}");
        let arguments =
            json!({"node-name": node, "snapshot-file": name, "snapshot-node-name": name});
        daemon.must("blockdev-snapshot-sync", arguments);
        node = name;
    }
    place.io(DISK, &["read -P 3 0 300k", "write -P 9 0 64k"]);
    let exports = daemon.must("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], "s3");
    daemon.end();
    place.io("s3", &["read -P 9 0 64k", "read -P 3 64k 236k"]);
    place.io("s2", &["read -P 3 0 300k"]);
    place.io("s1", &["read -P 2 0 200k"]);
    for image in ["b", "s1", "s2", "s3"] {
        place.img(&format!("check -q {image}"));
    }
}

#[test]
fn overlays_of_other_formats_are_made_under_a_client() {
    let place = Place::new();
    let mut daemon = serve(&place);
    place.io(DISK, &["write -P 1 0 300k"]);
    let mut node = "disk".to_owned();
    for (round, format) in [(2, "qed"), (3, "qcow"), (4, "qcow2")] {
        let arguments = json!({"node-name": node, "snapshot-file": format,
            "snapshot-node-name": format, "format": format});
        daemon.must("blockdev-snapshot-sync", arguments);
        place.io(
            DISK,
            &["read -P 1 128k 64k", &format!("write -P {round} 0 64k")],
        );
        node = format.to_owned();
    }
    place.io(DISK, &["read -P 4 0 64k"]);
    daemon.end();
    for (format, pattern) in [("qed", 2), ("qcow", 3), ("qcow2", 4)] {
        let image = format!("json:{{\"driver\":\"{format}\",\"file.filename\":\"{format}\"}}");
        place.io(
            &image,
            &[&format!("read -P {pattern} 0 64k"), "read -P 1 64k 236k"],
        );
    }
}

/// The image below is opened anew, to be read only, with all its files.
#[test]
fn disks_of_several_files_are_put_under_overlays() {
    for (driver, create) in [
        ("qcow2", "create -q -f qcow2 -o data_file=d.data d 4M"),
        (
            "qcow2",
            "create -q -f qcow2 -o data_file=d.data,data_file_raw=on d 4M",
        ),
        ("vmdk", "create -q -f vmdk -o subformat=monolithicFlat d 4M"),
        (
            "vmdk",
            "create -q -f vmdk -o subformat=twoGbMaxExtentSparse d 4M",
        ),
    ] {
        let place = Place::new();
        place.img(create);
        let mut daemon = place.ours(SERVER);
        let file = json!({"driver": "file", "filename": "d"});
        let disk = json!({"driver": driver, "node-name": "disk", "file": file});
        daemon.must("blockdev-add", disk);
        let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk",
            "writable": true});
        daemon.must("block-export-add", export);
        place.io(DISK, &["write -P 1 0 64k"]);
        let arguments =
            json!({"node-name": "disk", "snapshot-file": "s", "snapshot-node-name": "s"});
        daemon.must("blockdev-snapshot-sync", arguments);
        place.io(DISK, &["read -P 1 0 64k", "write -P 2 64k 64k"]);
        if driver == "qcow2" {
            daemon.must("block-commit", json!({"device": "s", "job-id": "c"}));
            daemon.wait("c", "ready");
            daemon.must("job-complete", json!({"id": "c"}));
            daemon.wait("c", "null");
        }
        place.io(DISK, &["read -P 1 0 64k", "read -P 2 64k 64k"]);
        daemon.end();
    }
}

#[test]
fn what_is_below_an_overlay_can_be_copied_by_others() {
    let place = Place::new();
    let mut daemon = serve(&place);
    let copied = std::process::Command::new("qemu-img")
        .current_dir(place.root())
        .args(["convert", "-O", "raw", "b", "copy"])
        .output()
        .expect("qemu-img");
    assert!(!copied.status.success(), "it is written to");
    daemon.must("blockdev-add", qcow2("over", "o", json!(null)));
    let snapshot = json!({"node": "disk", "overlay": "over"});
    let actions = json!([{"type": "blockdev-snapshot", "data": snapshot}]);
    daemon.must("transaction", json!({"actions": actions}));
    place.io(DISK, &["write -P 9 0 64k"]);
    place.img("convert -O raw b copy");
    place.io("copy", &["read -P 0 0 128k", "read -P 3 128k 256k"]);
    // Who commits to it may write again.
    let commit = json!({"device": "over", "job-id": "c"});
    daemon.must("block-commit", commit);
    daemon.wait("c", "ready");
    daemon.must("job-complete", json!({"id": "c"}));
    daemon.wait("c", "null");
    place.io(DISK, &["read -P 9 0 64k", "write -P 8 64k 64k"]);
    daemon.end();
    place.io("b", &["read -P 9 0 64k", "read -P 8 64k 64k"]);
}

#[test]
fn a_snapshot_inside_an_image_has_what_was_written() {
    let place = Place::new();
    let mut daemon = serve(&place);
    place.io(DISK, &["write -P 5 0 512k"]);
    let arguments = json!({"device": "disk", "name": "then"});
    daemon.must("blockdev-snapshot-internal-sync", arguments);
    place.io(DISK, &["write -P 6 0 256k", "flush"]);
    // It is a crash for the image.
    daemon.kill();
    place.io("b", &["read -P 6 0 256k", "read -P 5 256k 256k"]);
    place.img("snapshot -a then b");
    place.io("b", &["read -P 5 0 512k"]);
    place.img("check -q b");
}

#[test]
fn nodes_under_filters_and_raw_nodes_are_put_under_overlays() {
    let place = Place::new();
    let mut daemon = place.ours(SERVER);
    daemon.must("blockdev-add", qcow2("disk", "b", json!(null)));
    let group = json!({"qom-type": "throttle-group", "id": "g"});
    daemon.must("object-add", group);
    let throttle =
        json!({"driver": "throttle", "node-name": "th", "throttle-group": "g", "file": "disk"});
    daemon.must("blockdev-add", throttle);
    let raw = json!({"driver": "raw", "node-name": "raw", "file": "th"});
    daemon.must("blockdev-add", raw);
    let export = json!({"type": "nbd", "id": "e", "node-name": "raw", "name": "disk",
        "writable": true});
    daemon.must("block-export-add", export);
    place.io(DISK, &["write -P 5 0 128k"]);
    let arguments = json!({"node-name": "disk", "snapshot-file": "s", "snapshot-node-name": "s"});
    daemon.must("blockdev-snapshot-sync", arguments);
    place.io(DISK, &["read -P 5 0 128k", "write -P 6 0 64k"]);
    daemon.end();
    place.io("b", &["read -P 5 0 128k"]);
    place.io("s", &["read -P 6 0 64k", "read -P 5 64k 64k"]);
}
