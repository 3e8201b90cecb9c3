//! A `raw` node over an image that is exchanged below it: by a mirror, a stream, a commit or a snapshot.

use serde_json::{Value, json};

use crate::filters::{EXPORT, SERVER};
use crate::place::Step::{Ask, Wait};
use crate::place::{Place, Step, add, same, with};

/// `top` on `base`, under a `raw` node that is exported, and an empty `to` beside.
fn under_raw(window: Value) -> Vec<Step> {
    let raw = with(
        json!({"driver": "raw", "node-name": "raw", "file": "top"}),
        window,
    );
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "raw", "name": "e", "writable": true});
    vec![
        add("base", "b", json!(null)),
        add("top", "m", json!("base")),
        Ask("blockdev-add", raw),
        Ask("block-export-add", export),
        add("to", "o", json!(null)),
    ]
}

fn windows() -> [Value; 2] {
    [json!({}), json!({"offset": 65536, "size": 131_072})]
}

#[test]
fn a_stream_and_a_snapshot_end_as_with_qemu() {
    for window in windows() {
        let mut script = under_raw(window);
        script.extend([
            Ask("block-stream", json!({"job-id": "s", "device": "top"})),
            Wait("s", "null"),
            Ask("blockdev-snapshot", json!({"node": "top", "overlay": "to"})),
            Ask("block-stream", json!({"job-id": "t", "device": "to"})),
            Wait("t", "null"),
            Ask("blockdev-del", json!({"node-name": "top"})),
            Ask("blockdev-del", json!({"node-name": "to"})),
        ]);
        same(SERVER, &script);
    }
}

/// Writes through the `raw` node go to what stands below it now.
#[test]
fn writes_go_to_the_image_that_took_the_place() {
    for window in windows() {
        let place = Place::new();
        let mut daemon = place.ours(SERVER);
        let offset = window["offset"].as_u64().unwrap_or(0);
        for step in under_raw(window) {
            if let Ask(command, arguments) = step {
                daemon.must(command, arguments);
            }
        }
        place.io(EXPORT, &["write -P 21 0 64k"]);
        let mirror = json!({"job-id": "j", "device": "top", "target": "to", "sync": "full"});
        daemon.must("blockdev-mirror", mirror);
        daemon.event("BLOCK_JOB_READY");
        daemon.must("job-complete", json!({"id": "j"}));
        daemon.wait("j", "null");
        daemon.must("blockdev-del", json!({"node-name": "top"}));
        place.io(EXPORT, &["read -P 21 0 64k", "write -P 22 0 32k"]);
        let snapshot = json!({"node-name": "to", "snapshot-file": "over",
            "snapshot-node-name": "over", "format": "qcow2"});
        daemon.must("blockdev-snapshot-sync", snapshot);
        place.io(EXPORT, &["read -P 22 0 32k", "write -P 23 16k 16k"]);
        daemon.end();
        let at = |from: u64, len: u64| format!("{} {len}", offset + from);
        place.io("o", &[&format!("read -P 22 {}", at(0, 32 << 10))]);
        let reads = [
            format!("read -P 22 {}", at(0, 16 << 10)),
            format!("read -P 23 {}", at(16 << 10, 16 << 10)),
            format!("read -P 21 {}", at(32 << 10, 32 << 10)),
        ];
        place.io("over", &reads.each_ref().map(String::as_str));
        place.img("check -q over");
    }
}
