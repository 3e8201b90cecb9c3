//! The monitor of `qemu-storage-daemon` beside the real one: the same scripts, the same
//! answers and events.

mod amend;
mod backup;
mod bitmaps;
mod block_stats;
mod chardev;
mod compact;
mod create;
mod dirty;
mod drive_backup;
mod estimates;
mod filenames;
mod filters;
mod filters_committed;
mod fleecing;
mod full;
mod hostile;
mod image_info;
mod inactive;
mod latency;
mod libvirt;
mod link;
mod mirror;
mod objects;
mod opening;
mod own_exports;
mod permissions;
mod place;
mod promises;
mod quorum;
mod raw_over_images;
mod reopen;
mod schema;
mod scrub;
mod snapshots;
mod stalled;
mod throttle;
mod transaction;
mod users;

use std::io::{BufRead, BufReader, Write};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use place::Step::{Ask, Say, Wait};
use place::{Daemon, Place, Step, add, qcow2, same, with};

#[test]
fn what_is_no_request_is_answered_alike() {
    same(
        &[],
        &[
            Ask("qmp_capabilities", json!({})),
            Ask("nosuch", json!({})),
            Say("hello"),
            Say("[1]"),
            Say("3 "),
            Say("\"text\""),
            Say("{}"),
            Say(r#"{"execute": 1}"#),
            Say(r#"{"execute": "query-jobs", "arguments": 1}"#),
            Say(r#"{"execute": "query-jobs", "other": 1}"#),
            Say(r#"{"execute": "query-jobs", "arguments": {"a": 1}}"#),
            Say(r#"{"execute": "query-jobs", "id": {"b": [1], "a": null}}"#),
            Say("{'execute': 'query-jobs',\r\n 'id': 'it\\'s'}"),
            Say(r#"{"execute": "query-jobs", "id": [-0, 1e2, -0.0, 0.1, 1e21]}"#),
            Say("}"),
            Say("]"),
            Say("{]"),
            Say(r#"{"execute": "query-jobs", "execute": "quit"}"#),
            Say(r#"{"execute": "query-jobs", "arguments": {"a": {"b": 1, "b": 2}}}"#),
            Say(r#"{"execute": "blockdev-del"}"#),
            Say(r#"{"execute": "blockdev-del", "arguments": {"node-name": 1}}"#),
        ],
    );
}

#[test]
fn nodes_and_exports_come_and_go_alike() {
    let null = json!({"driver": "null-co", "node-name": "n", "size": 1048576});
    let export = json!({"type": "nbd", "id": "e", "node-name": "n"});
    let address = json!({"addr": {"type": "unix", "data": {"path": "sock"}}});
    same(
        &["--object", "iothread,id=i0"],
        &[
            add("top", "t", json!("")),
            add("top", "t", json!("")),
            add("other", "nosuch", json!(null)),
            add("other", "o", json!("nosuch")),
            add("0", "o", json!(null)),
            Ask("blockdev-add", json!({"driver": "bad", "node-name": "x"})),
            Ask("blockdev-add", json!({"node-name": "x"})),
            Ask("blockdev-add", json!({"driver": "null-co"})),
            Ask("blockdev-add", null),
            Ask("block-export-add", export.clone()),
            Ask("nbd-server-stop", json!({})),
            Ask("nbd-server-start", json!({"addr": {"type": "unix"}})),
            Ask(
                "nbd-server-start",
                json!({"addr": {"type": "unix", "data": {"path": "p"}, "x": 1}}),
            ),
            Ask("nbd-server-start", address.clone()),
            Ask("nbd-server-start", address),
            Ask("block-export-add", export.clone()),
            Ask("block-export-add", export),
            Ask(
                "block-export-add",
                json!({"type": "nbd", "id": "x", "node-name": "no"}),
            ),
            Ask("query-block-exports", json!({})),
            Ask("blockdev-del", json!({"node-name": "n"})),
            Ask("blockdev-del", json!({"node-name": "nosuch"})),
            Ask("block-export-del", json!({"id": "nosuch"})),
            Ask("block-export-del", json!({"id": "e"})),
            Ask("query-block-exports", json!({})),
            Ask(
                "nbd-server-add",
                json!({"device": "n", "name": "x", "writable": true}),
            ),
            Ask("nbd-server-remove", json!({"name": "y"})),
            Ask("nbd-server-remove", json!({"name": "x"})),
            Ask("nbd-server-add", json!({"device": "n"})),
            Ask("nbd-server-stop", json!({})),
            Ask("blockdev-del", json!({"node-name": "n"})),
            Ask("block_resize", json!({"node-name": "top", "size": 2097152})),
            Ask("block_resize", json!({"node-name": "no", "size": 2097152})),
            Ask("block_resize", json!({"node-name": "top", "size": -1})),
            Ask("object-add", json!({"qom-type": "iothread", "id": "i0"})),
            Ask(
                "object-add",
                json!({"qom-type": "secret", "id": "s", "data": "x"}),
            ),
            Ask("object-del", json!({"id": "i0"})),
            Ask("object-del", json!({"id": "i0"})),
            Ask("object-del", json!({"id": "s"})),
            Ask("blockdev-del", json!({"node-name": "top"})),
        ],
    );
}

#[test]
fn bitmaps_are_led_alike() {
    let named = |name: &str| json!({"node": "top", "name": name});
    let new = |name: &str| json!({"node": "top", "name": name, "persistent": true});
    let merge = |bitmaps: Value| json!({"node": "top", "target": "a", "bitmaps": bitmaps});
    same(
        &[],
        &[
            add("top", "t", json!("")),
            Ask("block-dirty-bitmap-add", new("a")),
            Ask("block-dirty-bitmap-add", new("a")),
            Ask("block-dirty-bitmap-add", new("b")),
            Ask("block-dirty-bitmap-add", json!({"node": "no", "name": "a"})),
            Ask("block-dirty-bitmap-disable", named("a")),
            Ask("block-dirty-bitmap-enable", named("a")),
            Ask("block-dirty-bitmap-merge", merge(json!(["b"]))),
            Ask(
                "block-dirty-bitmap-merge",
                merge(json!([{"node": "top", "name": "b"}])),
            ),
            Ask("block-dirty-bitmap-merge", merge(json!(["c"]))),
            Ask("block-dirty-bitmap-clear", named("a")),
            Ask("block-dirty-bitmap-remove", named("c")),
            Ask(
                "block-dirty-bitmap-clear",
                json!({"node": "no", "name": "a"}),
            ),
            Ask("block-dirty-bitmap-remove", named("b")),
        ],
    );
}

#[test]
fn who_gets_in_the_way_of_whom_is_told_alike() {
    let file = json!({"driver": "file", "node-name": "f", "filename": "o"});
    let format = |name: &str| json!({"driver": "qcow2", "node-name": name, "file": "f"});
    let raw = json!({"driver": "raw", "node-name": "r", "file": "f"});
    let address = json!({"addr": {"type": "unix", "data": {"path": "sock"}}});
    let export = |writable: bool| {
        let id = if writable { "w" } else { "r" };
        let export =
            json!({"type": "nbd", "id": id, "node-name": "f", "name": id, "writable": writable});
        Ask("block-export-add", export)
    };
    same(
        &[],
        &[
            Ask("blockdev-add", file),
            Ask("nbd-server-start", address),
            Ask("blockdev-add", format("one")),
            Ask("blockdev-del", json!({"node-name": "f"})),
            export(true),
            export(false),
            Ask("blockdev-add", raw.clone()),
            Ask("blockdev-add", format("two")),
            Ask("blockdev-del", json!({"node-name": "one"})),
            export(true),
            Ask("blockdev-add", format("two")),
        ],
    );
}

/// The chain of a place as nodes that are called `base`, `mid` and `top`.
fn chain() -> Vec<Step> {
    vec![
        add("base", "b", json!(null)),
        add("mid", "m", json!("base")),
        add("top", "t", json!("mid")),
    ]
}

#[test]
fn snapshots_and_commits_are_made_alike() {
    let job = |id: &str| json!({"id": id});
    let commit = |more: Value| {
        let arguments = with(json!({"device": "over", "job-id": "j"}), more);
        Ask("block-commit", arguments)
    };
    let snapshot = |node: &str, overlay: &str| {
        Ask(
            "blockdev-snapshot",
            json!({"node": node, "overlay": overlay}),
        )
    };
    let mut script = chain();
    script.extend([
        Ask("blockdev-del", json!({"node-name": "mid"})),
        add("over", "o", json!(null)),
        snapshot("no", "over"),
        snapshot("top", "no"),
        snapshot("top", "mid"),
        snapshot("top", "over"),
        Ask("blockdev-del", json!({"node-name": "top"})),
        Ask("block-commit", json!({"device": "over"})),
        Ask("block-commit", json!({"device": "no", "job-id": "j"})),
        Ask("block-commit", json!({"device": "base", "job-id": "j"})),
        commit(json!({"top-node": "no"})),
        commit(json!({"base-node": "no"})),
        commit(json!({"job-id": "x", "top-node": "mid", "speed": -1})),
        Ask("job-complete", job("no")),
        Ask("block-job-complete", json!({"device": "no"})),
        // In the middle.
        commit(json!({"top-node": "mid"})),
        Wait("j", "null"),
        Ask("query-jobs", json!({})),
        // From the top, given up.
        commit(json!({"job-id": "given-up", "auto-dismiss": false})),
        Wait("given-up", "ready"),
        commit(json!({"job-id": "k"})),
        Ask("blockdev-del", json!({"node-name": "over"})),
        Ask("job-dismiss", job("given-up")),
        Ask("job-finalize", job("given-up")),
        Ask("job-resume", job("given-up")),
        Ask("job-pause", job("given-up")),
        Ask("job-pause", job("given-up")),
        Ask("job-resume", job("given-up")),
        Ask("job-cancel", job("given-up")),
        Wait("given-up", "concluded"),
        Ask("query-jobs", json!({})),
        Ask("job-cancel", job("given-up")),
        Ask("job-dismiss", job("given-up")),
        // From the top, to its end.
        commit(json!({"job-id": "whole"})),
        Wait("whole", "ready"),
        Ask("query-block-jobs", json!({})),
        Ask("job-complete", job("whole")),
        Wait("whole", "null"),
        Ask("blockdev-del", json!({"node-name": "over"})),
    ]);
    same(&[], &script);
}

#[test]
fn streams_are_made_alike() {
    let mut script = chain();
    script.extend([
        Ask("block-stream", json!({"device": "no", "job-id": "s"})),
        Ask("block-stream", json!({"device": "top"})),
        Ask(
            "block-stream",
            json!({"device": "top", "job-id": "s", "base-node": "base"}),
        ),
        Wait("s", "null"),
        Ask("block-stream", json!({"device": "top", "job-id": "whole"})),
        Wait("whole", "null"),
        Ask("query-jobs", json!({})),
        Ask(
            "block-stream",
            json!({"device": "top", "job-id": "nothing"}),
        ),
        Wait("nothing", "null"),
        Ask("blockdev-del", json!({"node-name": "top"})),
        Ask("blockdev-del", json!({"node-name": "base"})),
    ]);
    same(&[], &script);
}

#[test]
fn the_speed_of_a_job_is_set_alike() {
    let set = |device: &str, speed: i64| {
        let arguments = json!({"device": device, "speed": speed});
        Ask("block-job-set-speed", arguments)
    };
    let stream = json!({"device": "top", "job-id": "j", "speed": 1, "auto-dismiss": false});
    let mut script = chain();
    script.extend([
        set("no", 1),
        Ask("block-job-set-speed", json!({"device": "no"})),
        Ask("block-job-set-speed", json!({"speed": 1})),
        Ask(
            "block-job-set-speed",
            json!({"device": "no", "speed": 1, "x": 1}),
        ),
        // At this speed it would take days.
        Ask("block-stream", stream),
        set("j", -1),
        set("j", 2),
        set("j", 0),
        Wait("j", "concluded"),
        set("j", 1),
        Ask("query-block-jobs", json!({})),
        Ask("job-dismiss", json!({"id": "j"})),
    ]);
    same(&[], &script);
}

const EXPORT: &[&str] = &[
    "--nbd-server",
    "addr.type=unix,addr.path=sock",
    "--blockdev",
    "driver=qcow2,node-name=base,file.driver=file,file.filename=b",
    "--export",
    "nbd,id=e,node-name=base,name=,writable=on",
];
const URI: &str = "nbd+unix:///?socket=sock";

/// Puts the image `o` over the exported one, as the node `over`.
fn put_over(daemon: &mut Daemon) {
    daemon.must("blockdev-add", qcow2("over", "o", json!(null)));
    daemon.must(
        "blockdev-snapshot",
        json!({"node": "base", "overlay": "over"}),
    );
}

#[test]
fn a_client_goes_on_over_a_snapshot_and_its_commit() {
    let place = Place::new();
    let mut daemon = place.ours(EXPORT);
    place.io(URI, &["write -P 5 0 64k"]);
    put_over(&mut daemon);
    place.io(URI, &["read -P 5 0 64k", "write -P 6 32k 64k"]);
    daemon.must("block-commit", json!({"device": "over", "job-id": "j"}));
    daemon.wait("j", "ready");
    place.io(URI, &["write -P 7 64k 64k", "write -P 8 512k 64k"]);
    daemon.must("job-complete", json!({"id": "j"}));
    daemon.wait("j", "null");
    let exports = daemon.must("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], "base");
    daemon.must("blockdev-del", json!({"node-name": "over"}));
    place.io(URI, &["write -P 9 768k 64k"]);
    let events = daemon.end();
    let last = events.last().expect("an event");
    assert_eq!(
        *last,
        json!({"event": "BLOCK_EXPORT_DELETED", "data": {"id": "e"}})
    );
    place.img("check -q b");
    place.io(
        "b",
        &[
            "read -P 5 0 32k",
            "read -P 6 32k 32k",
            "read -P 7 64k 64k",
            "read -P 8 512k 64k",
            "read -P 9 768k 64k",
        ],
    );
}

#[test]
fn a_commit_that_is_killed_costs_nothing() {
    let place = Place::new();
    let mut daemon = place.ours(EXPORT);
    put_over(&mut daemon);
    place.io(URI, &["write -P 6 0 1M", "flush"]);
    // Slow enough to be in the middle of it.
    let commit = json!({"device": "over", "job-id": "j", "speed": 65536});
    daemon.must("block-commit", commit);
    let refused = daemon.ask("blockdev-add", qcow2("late", "t", json!("base")));
    let text = "Could not open backing file: Node 'base' is busy: block device is in use by block \
                job: commit";
    assert_eq!(refused["error"]["desc"], text);
    place.io(URI, &["write -P 7 64k 64k", "write -P 8 512k 64k", "flush"]);
    let jobs = daemon.must("query-jobs", json!({}));
    assert_eq!(jobs[0]["status"], "running", "{jobs}");
    daemon.kill();
    for image in ["b", "o"] {
        let words = ["check", "-q", image];
        let status = Command::new("qemu-img")
            .current_dir(place.root())
            .args(words)
            .status();
        // Leaks at worst.
        let code = status.expect("qemu-img").code();
        assert!(matches!(code, Some(0 | 3)), "{image}: {code:?}");
    }
    let options = "driver=qcow2,file.filename=o,backing.driver=qcow2,backing.file.filename=b";
    let reads = [
        "read -P 6 0 64k",
        "read -P 7 64k 64k",
        "read -P 6 128k 384k",
        "read -P 8 512k 64k",
        "read -P 6 576k 448k",
    ];
    let mut words = vec!["--image-opts"];
    words.extend(reads.iter().flat_map(|read| ["-c", read]));
    words.push(options);
    let said = place.must("qemu-io", &words);
    assert!(!said.contains("failed"), "{said}");
}

/// A chain of which only the top may be written to, as tools describe it that know their
/// layers, with an export of the top.
fn with_read_only_layers(place: &Place) -> Daemon {
    let node = |name: &str, file: &str, rest: &str| {
        format!(
            "driver=qcow2,node-name={name},file.driver=file,file.filename={file},\
             file.auto-read-only=on{rest}"
        )
    };
    place.ours(&[
        "--nbd-server",
        "addr.type=unix,addr.path=sock",
        "--blockdev",
        &node("base", "b", ",read-only=on"),
        "--blockdev",
        &node("mid", "m", ",read-only=on,backing=base"),
        "--blockdev",
        &node("top", "t", ",backing=mid"),
        "--export",
        "nbd,id=e,node-name=top,name=,writable=on",
    ])
}

#[test]
fn layers_that_a_job_made_writable_can_be_read_after_it() {
    let reads = [
        "read -P 1 0 128k",
        "read -P 2 128k 64k",
        "read -P 3 192k 192k",
    ];
    let read_only = |daemon: &mut Daemon, name: &str| {
        let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
        let nodes = nodes.as_array().expect("nodes").clone();
        let mut named = nodes.iter().filter(|node| node["node-name"] == name);
        named.next().expect("a node")["ro"].clone()
    };
    let place = Place::new();
    let mut daemon = with_read_only_layers(&place);
    let active = json!({"device": "top", "base-node": "base", "job-id": "a"});
    daemon.must("block-commit", active);
    daemon.wait("a", "ready");
    daemon.must("job-cancel", json!({"id": "a"}));
    daemon.wait("a", "null");
    assert_eq!(read_only(&mut daemon, "base"), json!(true));
    place.io(URI, &reads);
    let below = json!({"device": "top", "top-node": "mid", "base-node": "base", "job-id": "b"});
    daemon.must("block-commit", below);
    daemon.wait("b", "null");
    assert_eq!(read_only(&mut daemon, "base"), json!(true));
    place.io(URI, &reads);
    daemon.end();

    let place = Place::new();
    let mut daemon = with_read_only_layers(&place);
    daemon.must("block-stream", json!({"device": "mid", "job-id": "s"}));
    daemon.wait("s", "null");
    assert_eq!(read_only(&mut daemon, "mid"), json!(true));
    place.io(URI, &reads);
    daemon.end();
}

#[test]
fn headers_name_what_images_stand_on_after_commits_and_streams() {
    let place = Place::new();
    let mut daemon =
        place.ours("--blockdev driver=qcow2,node-name=top,file.driver=file,file.filename=t");
    let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
    let named = |file: &str, format: &str| {
        let nodes = nodes.as_array().expect("nodes");
        let mut found = nodes
            .iter()
            .filter(|node| node["file"] == file && node["drv"] == format);
        found.next().expect("a node")["node-name"].clone()
    };
    let (mid, base) = (named("m", "qcow2"), named("b", "qcow2"));
    let commit = json!({"device": "top", "job-id": "j", "top-node": mid, "base-node": base});
    daemon.must("block-commit", commit);
    daemon.wait("j", "null");
    daemon.end();
    let info = place.img("info t");
    assert!(info.contains("backing file: b\n"), "{info}");
    place.io(
        "t",
        &[
            "read -P 1 0 128k",
            "read -P 2 128k 64k",
            "read -P 3 192k 192k",
        ],
    );
    let mut daemon =
        place.ours("--blockdev driver=qcow2,node-name=top,file.driver=file,file.filename=t");
    daemon.must("block-stream", json!({"device": "top", "job-id": "s"}));
    daemon.wait("s", "null");
    daemon.end();
    let info = place.img("info t");
    assert!(!info.contains("backing file"), "{info}");
    place.img("check -q t");
    place.io(
        "t",
        &[
            "read -P 1 0 128k",
            "read -P 2 128k 64k",
            "read -P 3 192k 192k",
        ],
    );
}

#[test]
fn what_a_client_sends_and_leaves_behind_harms_nobody() {
    let place = Place::new();
    let mut daemon =
        place.ours("--chardev socket,id=s,path=qmp,server=on,wait=off --monitor s,pretty=on");
    for _ in 0..2 {
        let stream = std::os::unix::net::UnixStream::connect(place.path("qmp")).expect("a socket");
        let mut input = stream.try_clone().expect("a clone");
        let mut lines = BufReader::new(stream).lines();
        assert_eq!(lines.next().expect("a line").expect("a line"), "{");
        input
            .write_all(b"}}}}\x00\xff{\"execute\": \"qmp_cap")
            .expect("it listens");
    }
    daemon.must("query-version", json!({}));
    // The end of input is not the end of the program.
    daemon.input = None;
    std::thread::sleep(Duration::from_millis(50));
    assert!(!daemon.running.has_ended());
    daemon.running.signal("-TERM");
    daemon.wait_for_exit();
    assert!(!place.has("qmp"));
}
