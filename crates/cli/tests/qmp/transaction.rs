//! `transaction`: all of its actions are carried out at one moment, or none.

use serde_json::{Value, json};

use crate::backup::{DISK, SERVER};
use crate::dirty;
use crate::place::Step::{Ask, Event, Io, Wait};
use crate::place::{Place, Step, add, qcow2, same, with};

fn action(kind: &str, data: Value) -> Value {
    json!({"type": kind, "data": data})
}

fn bitmap(what: &str, name: &str) -> Value {
    let mut data = json!({"node": "top", "name": name});
    if what == "add" {
        data["persistent"] = json!(true);
    }
    action(&format!("block-dirty-bitmap-{what}"), data)
}

fn backup(id: &str, device: &str, target: &str, sync: &str) -> Value {
    let data = json!({"job-id": id, "device": device, "target": target, "sync": sync});
    action("blockdev-backup", data)
}

fn all(actions: &[Value]) -> Step {
    Ask("transaction", json!({"actions": actions}))
}

#[test]
fn what_is_no_transaction_is_told_alike() {
    let script = [
        Ask("transaction", json!({})),
        Ask("transaction", json!({"actions": [1]})),
        all(&[]),
        all(&[action("bad", json!({}))]),
        all(&[json!({"type": "abort"})]),
        all(&[json!({"data": {}})]),
        all(&[action("block-dirty-bitmap-add", json!({"node": "top"}))]),
        all(&[action(
            "block-dirty-bitmap-clear",
            json!({"node": "no", "name": "a"}),
        )]),
    ];
    same(&[], &script);
}

#[test]
fn transactions_are_carried_out_alike() {
    let abort = action("abort", json!({}));
    // It tells whether there is one.
    let has = |name: &str| {
        let arguments = json!({"node": "top", "name": name});
        Ask("block-dirty-bitmap-disable", arguments)
    };
    let small = json!({"driver": "null-co", "node-name": "small", "size": 65536});
    let merge = action(
        "block-dirty-bitmap-merge",
        json!({"node": "top", "target": "a", "bitmaps": ["b"]}),
    );
    let script = [
        add("top", "t", json!("")),
        add("to", "o", json!(null)),
        Ask("blockdev-add", small),
        Ask(
            "blockdev-add",
            json!({"driver": "null-co", "node-name": "null", "size": 1048576}),
        ),
        Ask(
            "blockdev-add",
            json!({"driver": "null-co", "node-name": "hole", "size": 1048576}),
        ),
        all(std::slice::from_ref(&abort)),
        all(&[bitmap("add", "a"), abort.clone()]),
        has("a"),
        all(&[bitmap("add", "a"), bitmap("add", "a")]),
        has("a"),
        all(&[
            bitmap("add", "a"),
            bitmap("add", "b"),
            bitmap("disable", "a"),
            merge,
        ]),
        all(&[bitmap("remove", "a"), bitmap("clear", "c")]),
        has("a"),
        all(&[
            bitmap("clear", "a"),
            bitmap("enable", "a"),
            bitmap("remove", "b"),
        ]),
        has("b"),
        // The second one fails, so the first one never was.
        all(&[
            backup("never", "top", "to", "full"),
            backup("k", "hole", "small", "full"),
        ]),
        Ask("query-jobs", json!({})),
        has("a"),
        all(&[bitmap("clear", "a"), backup("j", "top", "to", "full")]),
        Wait("j", "null"),
        all(&[
            backup("one", "top", "to", "none"),
            backup("two", "hole", "null", "none"),
        ]),
        Ask("query-jobs", json!({})),
        Ask("job-cancel", json!({"id": "one"})),
        Wait("one", "null"),
        Ask("job-cancel", json!({"id": "two"})),
        Wait("two", "null"),
        Ask("blockdev-del", json!({"node-name": "top"})),
    ];
    same(&[], &script);
}

#[test]
fn bitmaps_are_as_they_were_when_a_transaction_fails() {
    let place = Place::new();
    let mut daemon = place.ours(SERVER);
    daemon.must("blockdev-add", qcow2("top", "o", json!(null)));
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "top", "name": "disk", "writable": true});
    daemon.must("block-export-add", export);
    let add = |name: &str| json!({"node": "top", "name": name, "persistent": true});
    daemon.must("block-dirty-bitmap-add", add("a"));
    daemon.must("block-dirty-bitmap-add", add("off"));
    place.io(DISK, &["write -P 1 64k 128k"]);
    daemon.must(
        "block-dirty-bitmap-disable",
        json!({"node": "top", "name": "off"}),
    );
    let refused = daemon.ask(
        "transaction",
        json!({"actions": [
            bitmap("clear", "a"), bitmap("disable", "a"), bitmap("enable", "off"),
            bitmap("clear", "off"), bitmap("remove", "a"), bitmap("add", "new"),
            action("abort", json!({})),
        ]}),
    );
    assert!(refused.get("error").is_some(), "{refused}");
    place.io(DISK, &["write -P 2 512k 64k"]);
    let export = json!({
        "type": "nbd", "id": "f", "node-name": "top", "name": "bitmaps", "writable": true,
        "bitmaps": ["a", "off"],
    });
    daemon.must("block-export-add", export);
    let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
    let nodes = nodes.as_array().expect("nodes").iter();
    let mut top = nodes.filter(|node| node["node-name"] == "top");
    let one = |name: &str, recording: bool, count: u64| {
        json!({
            "name": name, "recording": recording, "persistent": true, "busy": true,
            "granularity": 65536, "count": count,
        })
    };
    let told = json!([one("off", false, 131_072), one("a", true, 196_608)]);
    assert_eq!(top.next().expect("a node")["dirty-bitmaps"], told);
    // What was written before; and what was written since, which only one records.
    let (before, since) = ((65536, 131_072), (524_288, 65536));
    assert_eq!(dirty(&place, "a"), [before, since]);
    assert_eq!(dirty(&place, "off"), [before]);
    daemon.must("block-dirty-bitmap-add", add("new"));
    daemon.end();
}

/// The overlay is opened anew when it is put over the disk, and once more when that is taken back.
#[test]
fn bitmaps_of_an_overlay_are_as_they_were_when_a_transaction_fails_alike() {
    let of = |name: &str, more: Value| with(json!({"node": "over", "name": name}), more);
    let new = |name: &str, more: Value| Ask("block-dirty-bitmap-add", of(name, more));
    let sha256 = |name: &str| Ask("x-debug-block-dirty-bitmap-sha256", of(name, json!({})));
    let over = json!({"node": "top", "overlay": "over"});
    let aborted = |what: &str, data: Value| {
        all(&[
            action(&format!("block-dirty-bitmap-{what}"), data),
            action("blockdev-snapshot", over.clone()),
            action("abort", json!({})),
        ])
    };
    let export = |id: &str| {
        let data =
            json!({"type": "nbd", "id": id, "node-name": "over", "name": "disk", "writable": true});
        Ask("block-export-add", data)
    };
    let merge = json!({"node": "over", "target": "off", "bitmaps": ["a"]});
    let script = [
        add("top", "t", json!("")),
        add("over", "o", json!(null)),
        new("a", json!({"persistent": true})),
        new("off", json!({"persistent": true, "disabled": true})),
        new("memory", json!({})),
        export("e"),
        Io("disk", &["write -P 1 0 64k"]),
        Ask("block-export-del", json!({"id": "e", "mode": "hard"})),
        Event("BLOCK_EXPORT_DELETED"),
        aborted("clear", of("a", json!({}))),
        aborted("clear", of("memory", json!({}))),
        aborted("merge", merge),
        aborted("disable", of("a", json!({}))),
        aborted("enable", of("off", json!({}))),
        aborted("add", of("new", json!({"persistent": true}))),
        new("new", json!({"persistent": true})),
        export("f"),
        Io("disk", &["write -P 2 512k 64k"]),
        sha256("a"),
        sha256("off"),
        sha256("memory"),
        sha256("new"),
    ];
    same(SERVER, &script);
}

#[test]
fn a_bitmap_that_is_removed_is_not_used_again_alike() {
    let remove = || bitmap("remove", "a");
    let memory = || bitmap("remove", "m");
    let new = |name: &str, persistent: bool| {
        let data = json!({"node": "top", "name": name, "persistent": persistent});
        Ask("block-dirty-bitmap-add", data)
    };
    let merge = |target: &str, source: &str| {
        let data = json!({"node": "top", "target": target, "bitmaps": [source]});
        action("block-dirty-bitmap-merge", data)
    };
    let script = [
        add("top", "t", json!("")),
        new("a", true),
        new("m", false),
        all(&[remove(), remove()]),
        all(&[memory(), memory()]),
        all(&[remove(), bitmap("clear", "a")]),
        all(&[remove(), bitmap("disable", "a")]),
        all(&[remove(), merge("m", "a")]),
        all(&[remove(), merge("a", "m")]),
        all(&[remove(), bitmap("add", "a")]),
        new("a", true),
        new("m", false),
        all(&[remove(), memory()]),
        new("a", true),
        new("m", false),
    ];
    same(&[], &script);
}

/// Of several bitmaps that are to be removed none is, if one of them cannot be.
#[test]
fn a_removal_that_fails_brings_those_before_it_back() {
    let place = Place::new();
    place.img("bitmap --add b kept");
    let mut daemon = place.ours(SERVER);
    daemon.must("blockdev-add", qcow2("top", "o", json!(null)));
    let mut base = qcow2("base", "b", json!(null));
    base["read-only"] = json!(true);
    daemon.must("blockdev-add", base);
    for (name, persistent) in [("a", true), ("off", true), ("m", false)] {
        let new = json!({"node": "top", "name": name, "persistent": persistent});
        daemon.must("block-dirty-bitmap-add", new);
    }
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "top", "name": "disk", "writable": true});
    daemon.must("block-export-add", export);
    place.io(DISK, &["write -P 1 64k 128k"]);
    daemon.must(
        "block-dirty-bitmap-disable",
        json!({"node": "top", "name": "off"}),
    );
    let names = [("top", "a"), ("top", "m"), ("top", "off"), ("base", "kept")];
    let remove = names.map(|(node, name)| {
        action(
            "block-dirty-bitmap-remove",
            json!({"node": node, "name": name}),
        )
    });
    let refused = daemon.ask("transaction", json!({"actions": remove}));
    let text = refused["error"]["desc"].as_str().expect("an error");
    assert!(!text.contains("had back"), "{text}");
    place.io(DISK, &["write -P 2 512k 64k"]);
    let mut sha256 = |name: &str| {
        let data = json!({"node": "top", "name": name});
        daemon.must("x-debug-block-dirty-bitmap-sha256", data)["sha256"].take()
    };
    let (a, m, off) = (sha256("a"), sha256("m"), sha256("off"));
    assert!(a == m && a != off, "{a} {m} {off}");
    let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
    let nodes = nodes.as_array().expect("nodes").iter();
    let mut bitmaps: Vec<Value> = nodes
        .filter_map(|node| node["dirty-bitmaps"].as_array())
        .flatten()
        .map(|one| {
            json!([
                one["name"],
                one["count"],
                one["recording"],
                one["persistent"]
            ])
        })
        .collect();
    bitmaps.sort_by_key(Value::to_string);
    let told = json!([
        ["a", 196_608, true, true],
        ["kept", 0, true, true],
        ["m", 196_608, true, false],
        ["off", 131_072, false, true],
    ]);
    assert_eq!(json!(bitmaps), told);
    daemon.end();
    place.img("check -q o");
}

/// What a bitmap of the export `bitmaps` calls dirty: offsets and lengths.
fn dirty(place: &Place, name: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let uri = "nbd+unix:///bitmaps?socket=sock";
    dirty::extents(&place.must("nbdinfo", &[&map, "--json", uri]))
}

#[test]
fn disks_are_backed_up_as_of_one_moment() {
    let place = Place::new();
    place.img("create -q -f qcow2 one 4M");
    for image in ["two", "first", "second"] {
        place.img(&format!("create -q -f qcow2 {image} 4M"));
    }
    let mut daemon = place.ours(SERVER);
    let disks = [
        ("top", "first", "to1", "one", "disk"),
        ("other", "second", "to2", "two", "second"),
    ];
    for (node, file, target, target_file, name) in disks {
        daemon.must("blockdev-add", qcow2(node, file, json!(null)));
        daemon.must("blockdev-add", qcow2(target, target_file, json!(null)));
        let export =
            json!({"type": "nbd", "id": name, "node-name": node, "name": name, "writable": true});
        daemon.must("block-export-add", export);
    }
    let second = "nbd+unix:///second?socket=sock";
    place.io(DISK, &["write -P 5 2M 64k"]);
    place.io(second, &["write -P 5 2M 64k"]);
    // After the first piece it would take days.
    let mut slow = backup("first", "top", "to1", "full");
    slow["data"]["speed"] = json!(1);
    let actions = json!({"actions": [
        bitmap("add", "a"), slow, backup("last", "other", "to2", "full"),
    ]});
    daemon.must("transaction", actions);
    place.io(DISK, &["write -P 6 2M 64k"]);
    place.io(second, &["write -P 6 2M 64k"]);
    daemon.must(
        "block-job-set-speed",
        json!({"device": "first", "speed": 0}),
    );
    daemon.wait("first", "null");
    daemon.wait("last", "null");
    daemon.must("blockdev-del", json!({"node-name": "to1"}));
    // Of a chain all are held, and none of them waits for another one.
    let over = qcow2("over", "t", json!("top"));
    daemon.must("blockdev-add", over);
    daemon.must(
        "transaction",
        json!({"actions": [
            bitmap("clear", "a"),
            action("block-dirty-bitmap-add", json!({"node": "over", "name": "a", "persistent": true})),
        ]}),
    );
    daemon.end();
    for image in ["one", "two"] {
        place.io(image, &["read -P 5 2M 64k"]);
    }
    place.io("second", &["read -P 6 2M 64k"]);
}
