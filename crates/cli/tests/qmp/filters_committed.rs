//! Commits of layers right below a filter: it stands on the base afterwards.

use serde_json::{Value, json};

use crate::filters::{EXPORT, SERVER, over_a_filter};
use crate::place::Step::{Ask, Wait};
use crate::place::{Place, same, with};

/// QEMU's copy-on-read filter over the top has its commit refused.
#[test]
fn a_filter_over_what_is_committed_stands_on_the_base_afterwards() {
    let mut script = over_a_filter("throttle");
    let commit = json!({"job-id": "j", "device": "over", "top-node": "top", "base-node": "base"});
    script.extend([
        Ask("block-commit", commit.clone()),
        Wait("j", "null"),
        Ask("blockdev-del", json!({"node-name": "base"})),
        Ask("blockdev-del", json!({"node-name": "flt"})),
        Ask("blockdev-del", json!({"node-name": "top"})),
        Ask("block-commit", with(commit, json!({"top-node": "flt"}))),
        Ask("blockdev-del", json!({"node-name": "over"})),
        Ask("blockdev-del", json!({"node-name": "flt"})),
        Ask("blockdev-del", json!({"node-name": "base"})),
    ]);
    same(SERVER, &script);
}

/// The layers below the filter were described with it, and go with their places.
#[test]
fn a_filter_is_led_to_the_base_of_layers_without_names() {
    let place = Place::new();
    let mut daemon = place.ours(SERVER);
    let file = |name: &str| json!({"driver": "file", "filename": name});
    let over = json!({"driver": "qcow2", "node-name": "over", "file": file("t"), "backing": {
        "driver": "throttle", "throttle-group": "g", "node-name": "flt", "file": {
            "driver": "qcow2", "file": file("m")}}});
    daemon.must("blockdev-add", over);
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "over", "name": "e", "writable": true});
    daemon.must("block-export-add", export);
    daemon.must(
        "block-commit",
        json!({"job-id": "j", "device": "over", "top": "m", "base": "b"}),
    );
    daemon.wait("j", "null");
    let reads = [
        "read -P 1 0 128k",
        "read -P 2 128k 64k",
        "read -P 3 192k 192k",
    ];
    place.io(EXPORT, &reads);
    daemon.end();
    place.io("t", &reads);
    place.img("check -q t");
    let info = place.img("info --output=json t");
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["backing-filename"], "b");
}
