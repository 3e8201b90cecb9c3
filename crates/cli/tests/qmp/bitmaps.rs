//! Dirty bitmaps in memory, of any node, beside those of images.

use serde_json::{Value, json};

use crate::place::Step::{Ask, Io, Wait};
use crate::place::{Place, Step, add, qcow2, same, with};

const SERVER: &[&str] = &["--nbd-server", "addr.type=unix,addr.path=sock"];

fn new(node: &str, name: &str, more: Value) -> Step {
    let arguments = with(json!({"node": node, "name": name}), more);
    Ask("block-dirty-bitmap-add", arguments)
}

fn named(command: &'static str, node: &str, name: &str) -> Step {
    Ask(command, json!({"node": node, "name": name}))
}

fn sha256(node: &str, name: &str) -> Step {
    named("x-debug-block-dirty-bitmap-sha256", node, name)
}

fn merge(node: &str, target: &str, sources: Value) -> Step {
    let arguments = json!({"node": node, "target": target, "bitmaps": sources});
    Ask("block-dirty-bitmap-merge", arguments)
}

fn export(node: &str, more: Value) -> Step {
    let arguments = with(
        json!({"type": "nbd", "id": node, "node-name": node, "writable": true}),
        more,
    );
    Ask("block-export-add", arguments)
}

/// A raw node `r` on the file node `rf`, over the image `o`'s bytes, and an export of it.
fn raw() -> Vec<Step> {
    let file = json!({"driver": "file", "filename": "o", "node-name": "rf"});
    let raw = json!({"driver": "raw", "node-name": "r", "file": file});
    vec![Ask("blockdev-add", raw), export("r", json!({}))]
}

#[test]
fn bitmaps_of_any_node_are_led_alike() {
    let mut script = raw();
    script.extend([
        add("top", "t", json!("")),
        new("r", "a", json!({})),
        new("r", "a", json!({})),
        new("r", "", json!({})),
        new("r", "p", json!({"persistent": true})),
        new("no", "p", json!({})),
        new("r", "fine", json!({"granularity": 512})),
        new(
            "r",
            "off",
            json!({"granularity": 1_048_576, "disabled": true}),
        ),
        new("r", "huge", json!({"granularity": 2_147_483_648_u64})),
        new("r", "bad", json!({"granularity": 1000})),
        new("r", "bad", json!({"granularity": 256})),
        new("r", "bad", json!({"granularity": 4_294_967_296_u64})),
        new("rf", "f", json!({})),
        new("top", "m", json!({})),
        new("top", "p", json!({"persistent": true})),
        Io(
            "r",
            &["write 0 1k", "write 70000 20k", "write -z 65536 512"],
        ),
        sha256("r", "a"),
        sha256("r", "fine"),
        sha256("r", "off"),
        sha256("r", "huge"),
        sha256("rf", "f"),
        sha256("top", "p"),
        sha256("r", "no"),
        sha256("no", "no"),
        merge("r", "off", json!(["a", "fine"])),
        sha256("r", "off"),
        merge("r", "fine", json!([{"node": "rf", "name": "f"}])),
        sha256("r", "fine"),
        merge("top", "p", json!([{"node": "rf", "name": "f"}])),
        merge("rf", "f", json!([{"node": "top", "name": "m"}])),
        merge("rf", "f", json!(["no"])),
        merge("top", "p", json!(["m"])),
        named("block-dirty-bitmap-disable", "r", "a"),
        named("block-dirty-bitmap-clear", "r", "fine"),
        Io("r", &["write 150000 1k"]),
        sha256("r", "a"),
        sha256("r", "fine"),
        named("block-dirty-bitmap-enable", "r", "a"),
        Io("r", &["write 150000 1k"]),
        sha256("r", "a"),
        named("block-dirty-bitmap-remove", "r", "a"),
        named("block-dirty-bitmap-remove", "r", "a"),
    ]);
    same(SERVER, &script);
}

#[test]
fn a_bitmap_that_an_export_shows_is_left_alone_alike() {
    let mut script = raw();
    let more = json!({"id": "e", "name": "e", "bitmaps": ["a"]});
    let mut read_only = more.clone();
    read_only["writable"] = json!(false);
    let mut unknown = more.clone();
    unknown["bitmaps"] = json!(["no"]);
    let mut below = more.clone();
    below["bitmaps"] = json!([{"node": "rf", "name": "f"}]);
    below["id"] = json!("below");
    below["name"] = json!("below");
    script.extend([
        new("r", "a", json!({})),
        new("rf", "f", json!({})),
        export("r", read_only),
        export("r", unknown),
        export("r", more),
        export("r", below),
        named("block-dirty-bitmap-clear", "r", "a"),
        named("block-dirty-bitmap-remove", "rf", "f"),
        merge("r", "a", json!(["a"])),
        Ask("block-export-del", json!({"id": "e"})),
        named("block-dirty-bitmap-clear", "r", "a"),
        Ask("block-export-del", json!({"id": "below"})),
        named("block-dirty-bitmap-remove", "rf", "f"),
    ]);
    same(SERVER, &script);
}

#[test]
fn bitmaps_follow_the_size_of_their_node_alike() {
    let resize = |size: u64| Ask("block_resize", json!({"node-name": "over", "size": size}));
    let script = [
        add("over", "o", json!(null)),
        new("over", "a", json!({})),
        export("over", json!({})),
        Io("over", &["write 0 1M"]),
        Ask("block-export-del", json!({"id": "over", "mode": "hard"})),
        sha256("over", "a"),
        resize(524_288),
        sha256("over", "a"),
        resize(8_388_608),
        sha256("over", "a"),
    ];
    same(SERVER, &script);
}

#[test]
fn backups_by_bitmaps_in_memory_are_made_alike() {
    let backup = |id: &str, more: Value| {
        let arguments = with(
            json!({"device": "r", "target": "to", "job-id": id, "bitmap": "a"}),
            more,
        );
        Ask("blockdev-backup", arguments)
    };
    let size = 65536 * 64;
    let to = json!({"driver": "null-co", "node-name": "to", "size": size});
    let null = json!({"driver": "null-co", "node-name": "r", "size": size});
    let script = [
        Ask("blockdev-add", null),
        Ask("blockdev-add", to),
        export("r", json!({})),
        new("r", "a", json!({})),
        Io("r", &["write 0 1k", "write 3M 128k"]),
        backup("j", json!({"sync": "incremental", "auto-finalize": false})),
        Wait("j", "pending"),
        named("block-dirty-bitmap-clear", "r", "a"),
        Io("r", &["write 2M 1k"]),
        Ask("job-finalize", json!({"id": "j"})),
        Wait("j", "null"),
        sha256("r", "a"),
        backup("k", json!({"sync": "bitmap", "bitmap-mode": "never"})),
        Wait("k", "null"),
        sha256("r", "a"),
        backup("l", json!({"sync": "full", "bitmap-mode": "always"})),
        Wait("l", "null"),
        sha256("r", "a"),
    ];
    same(SERVER, &script);
}

#[test]
fn bitmaps_are_listed_with_the_newest_first_and_are_gone_with_their_node() {
    let place = Place::new();
    let mut daemon = place.ours(SERVER);
    daemon.must("blockdev-add", qcow2("top", "t", json!("")));
    for (name, persistent) in [("one", false), ("two", true), ("three", false)] {
        let new = json!({"node": "top", "name": name, "persistent": persistent});
        daemon.must("block-dirty-bitmap-add", new);
    }
    let listed = |nodes: Value| -> Vec<(String, bool)> {
        let nodes = nodes.as_array().expect("a list").clone();
        let top = nodes.into_iter().find(|node| node["node-name"] == "top");
        let bitmaps = top.expect("a node")["dirty-bitmaps"].clone();
        let bitmaps = bitmaps.as_array().cloned().unwrap_or_default();
        let one = |bitmap: &Value| {
            let name = bitmap["name"].as_str().expect("a name").to_owned();
            (name, bitmap["persistent"] == true)
        };
        bitmaps.iter().map(one).collect()
    };
    let all = [("three", false), ("two", true), ("one", false)];
    let nodes = daemon.must("query-named-block-nodes", json!({}));
    assert_eq!(
        listed(nodes),
        all.map(|(name, kept)| (name.to_owned(), kept))
    );
    daemon.must("blockdev-del", json!({"node-name": "top"}));
    daemon.must("blockdev-add", qcow2("top", "t", json!("")));
    let nodes = daemon.must("query-named-block-nodes", json!({}));
    assert_eq!(listed(nodes), [("two".to_owned(), true)]);
    daemon.end();
}
