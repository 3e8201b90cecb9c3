//! Nodes under filters: jobs, snapshots and reopens there and above, beside each other.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use vellum_testing::nbd::Connection;

use crate::place::Step::{Ask, Wait};
use crate::place::{Daemon, NAME, Place, Step, Tolerance, add, alike, qcow2, same, with};

pub(super) const SERVER: &[&str] = &[
    "--nbd-server",
    "addr.type=unix,addr.path=sock",
    "--object",
    "throttle-group,id=g",
    "--object",
    "throttle-group,id=h",
];

pub(super) const EXPORT: &str = "nbd+unix:///e?socket=sock";

fn filter(driver: &str, name: &str, below: &str) -> Value {
    let filter = json!({"driver": driver, "node-name": name, "file": below});
    match driver {
        "throttle" => with(filter, json!({"throttle-group": "g"})),
        _ => filter,
    }
}

/// `top`, which stands on `base`, under a filter that is served, and an empty `to` beside.
fn served_under(driver: &str) -> Vec<Step> {
    let export = json!({"type": "nbd", "id": "e", "node-name": "flt", "name": "e",
        "writable": true});
    vec![
        add("base", "b", json!(null)),
        add("top", "m", json!("base")),
        Ask("blockdev-add", filter(driver, "flt", "top")),
        Ask("block-export-add", export),
        add("to", "o", json!(null)),
    ]
}

fn job(command: &'static str, id: &str, device: &str, more: Value) -> Step {
    let usual = json!({"job-id": id, "device": device, "speed": 65536});
    Ask(command, with(usual, more))
}

fn mirror(id: &str, device: &str) -> Step {
    let more = json!({"target": "to", "sync": "full"});
    job("blockdev-mirror", id, device, more)
}

fn backup(id: &str, device: &str) -> Step {
    // It ends only when it is cancelled.
    let more = json!({"target": "to", "sync": "none"});
    job("blockdev-backup", id, device, more)
}

fn commit(id: &str, device: &str) -> Step {
    let more = json!({"top-node": "top", "base-node": "base"});
    job("block-commit", id, device, more)
}

fn stream(id: &str, device: &str) -> Step {
    job("block-stream", id, device, json!({}))
}

const JOBS: [fn(&str, &str) -> Step; 4] = [mirror, backup, commit, stream];

fn cancel(id: &'static str) -> [Step; 2] {
    let arguments = json!({"device": id, "force": true});
    [Ask("block-job-cancel", arguments), Wait(id, "null")]
}

/// Has one daemon do what must succeed.
fn play(daemon: &mut Daemon, script: impl IntoIterator<Item = Step>) {
    for step in script {
        match step {
            Ask(command, arguments) => drop(daemon.must(command, arguments)),
            Wait(id, status) => daemon.wait(id, status),
            _ => unreachable!("no such step is played"),
        }
    }
}

fn told_alike(script: &[Step]) {
    let tolerance = Tolerance {
        left_out: &["offset", "len"],
        by_job: true,
        ..Tolerance::default()
    };
    alike(SERVER, script, &tolerance);
}

/// QEMU refuses some of the first, since a filter stands on their node, lets others work on the
/// source of a backup, and names filters of its own.
#[test]
fn one_job_works_on_a_node_whichever_way_it_gets_there() {
    for first in JOBS {
        let place = Place::new();
        let mut daemon = beside(first, &place);
        for second in [commit, stream] {
            let Ask(command, arguments) = second("k", "flt") else {
                unreachable!("it is asked for")
            };
            let refused = daemon.ask(command, arguments).to_string();
            assert!(refused.contains("Node 'top' is busy"), "{refused}");
        }
        play(&mut daemon, cancel("j"));
        play(&mut daemon, [commit("k", "flt")]);
        daemon.end();
    }
}

#[test]
fn nothing_is_put_between_an_image_and_its_backing_file() {
    let mut script = served_under("throttle");
    script.extend([
        Ask(
            "blockdev-snapshot",
            json!({"node": "base", "overlay": "to"}),
        ),
        Ask("blockdev-snapshot", json!({"node": "flt", "overlay": "to"})),
        add("other", "t", json!(null)),
        Ask(
            "blockdev-snapshot",
            json!({"node": "flt", "overlay": "other"}),
        ),
    ]);
    told_alike(&script);
}

#[test]
fn a_node_stays_writable_under_a_filter_that_is_written_to() {
    let reopened = |read_only: bool| {
        let top = qcow2("top", "m", json!("base"));
        let options = [with(top, json!({"read-only": read_only}))];
        Ask("blockdev-reopen", json!({"options": options}))
    };
    for driver in ["throttle", "copy-on-read", "raw"] {
        let mut script = served_under(driver);
        script.extend([reopened(true), reopened(false)]);
        if driver != "raw" {
            let unexport = json!({"id": "e", "mode": "hard"});
            script.extend([Ask("block-export-del", unexport), reopened(true)]);
        }
        told_alike(&script);
    }
}

/// `top` under a filter that is served, with a job that works on it.
fn beside(first: fn(&str, &str) -> Step, place: &Place) -> Daemon {
    // A stream has something to do for some seconds.
    place.io("b", &["write -P 3 0 1M"]);
    let apart = ["256k", "384k", "512k", "640k", "768k", "896k"];
    for at in apart {
        place.io("m", &[&format!("write -P 2 {at} 64k")]);
    }
    let mut daemon = place.ours(SERVER);
    play(&mut daemon, served_under("throttle"));
    place.io(EXPORT, &["write -P 7 0 64k"]);
    play(&mut daemon, [first("j", "top")]);
    daemon
}

fn group(group: &str) -> Value {
    json!({"options": [with(filter("throttle", "flt", "top"), json!({"throttle-group": group}))]})
}

/// QEMU does not open filters anew beside some of these, since jobs have filters there too.
#[test]
fn a_filter_is_opened_anew_beside_a_job_below_it() {
    for first in JOBS {
        let place = Place::new();
        let mut daemon = beside(first, &place);
        daemon.must("blockdev-reopen", group("h"));
        place.io(EXPORT, &["read -P 7 0 64k", "write -P 8 0 64k"]);
        play(&mut daemon, cancel("j"));
        daemon.must("blockdev-reopen", group("g"));
        place.io(EXPORT, &["read -P 8 0 64k"]);
        daemon.end();
    }
}

#[test]
fn a_reopen_that_is_refused_beside_a_job_leaves_the_filter_as_it_was() {
    for first in JOBS {
        let place = Place::new();
        let mut daemon = beside(first, &place);
        let refused = daemon.ask("blockdev-reopen", group("nowhere")).to_string();
        assert!(refused.contains("'nowhere'"), "{refused}");
        place.io(EXPORT, &["read -P 7 0 64k", "write -P 8 0 64k"]);
        play(&mut daemon, cancel("j"));
        daemon.must("blockdev-reopen", group("h"));
        place.io(EXPORT, &["read -P 8 0 64k"]);
        daemon.end();
    }
}

#[test]
fn a_snapshot_of_a_filter_is_made_beside_a_job_below_it() {
    for first in JOBS {
        let place = Place::new();
        let mut daemon = beside(first, &place);
        let snapshot = json!({"node": "flt", "overlay": "over"});
        place.img("create -q -f qcow2 s 1M");
        daemon.must("blockdev-add", qcow2("over", "s", json!(null)));
        daemon.must("blockdev-snapshot", snapshot);
        place.io(EXPORT, &["read -P 7 0 64k", "write -P 8 0 64k"]);
        play(&mut daemon, cancel("j"));
        place.io(EXPORT, &["read -P 8 0 64k"]);
        daemon.end();
    }
}

/// QEMU lets a job change what an overlay stands on that nobody uses, and opens that anew beside it.
#[test]
fn an_overlay_is_as_it_was_where_a_job_has_come_in_the_way_of_opening_it_anew() {
    let place = Place::new();
    place.img("create -q -f qcow2 -b b -F qcow2 x");
    let mut daemon = place.ours(SERVER);
    play(&mut daemon, served_under("throttle"));
    daemon.must("blockdev-add", qcow2("beside", "x", json!("base")));
    play(&mut daemon, [commit("j", "top")]);
    let options = json!({"options": [qcow2("beside", "x", json!("base"))]});
    let refused = daemon.ask("blockdev-reopen", options.clone()).to_string();
    assert!(refused.contains("Node 'base' is busy"), "{refused}");
    play(&mut daemon, cancel("j"));
    let export = json!({"type": "nbd", "id": "x", "node-name": "beside", "name": "x"});
    daemon.must("block-export-add", export);
    place.io("nbd+unix:///x?socket=sock", &["read -P 3 192k 64k"]);
    daemon.must("blockdev-reopen", options);
    daemon.end();
}

#[test]
fn a_node_and_the_upper_of_two_filters_are_opened_anew_together() {
    for between in ["throttle", "copy-on-read"] {
        let place = Place::new();
        let mut daemon = place.ours(SERVER);
        play(
            &mut daemon,
            [
                add("base", "b", json!(null)),
                add("top", "m", json!("base")),
            ],
        );
        daemon.must("blockdev-add", filter(between, "low", "top"));
        daemon.must("blockdev-add", filter("throttle", "flt", "low"));
        let export = json!({"type": "nbd", "id": "e", "node-name": "flt", "name": "e",
            "writable": true});
        daemon.must("block-export-add", export);
        place.io(EXPORT, &["write -P 7 0 64k"]);
        let (top, above) = (
            qcow2("top", "m", json!("base")),
            filter("throttle", "flt", "low"),
        );
        for options in [[&top, &above], [&above, &top]] {
            daemon.must("blockdev-reopen", json!({"options": options}));
            place.io(EXPORT, &["read -P 7 0 64k", "write -P 7 64k 64k"]);
        }
        daemon.end();
    }
}

/// A snapshot of the filter `flt`, and a new bitmap of `top` below it.
fn both(place: &Place, more: &[Value]) -> Value {
    let snapshot = json!({"type": "blockdev-snapshot-sync", "data": {"node-name": "flt",
        "snapshot-file": place.path("s"), "snapshot-node-name": "s"}});
    let bitmap = json!({"type": "block-dirty-bitmap-add", "data": {"node": "top", "name": "x"}});
    let actions = [&[snapshot, bitmap], more].concat();
    json!({"actions": actions})
}

/// The bytes that the bitmap of `top` calls dirty; `None` without one.
fn dirty_bytes(daemon: &mut Daemon) -> Option<u64> {
    let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
    let mut nodes = nodes.as_array().expect("a list").iter();
    let top = nodes.find(|node| node["node-name"] == "top");
    top.expect("the node")["dirty-bitmaps"][0]["count"].as_u64()
}

/// Both at one moment: what a client writes is in the image from before, or in the overlay, and never
/// in the bitmap.
#[test]
fn a_snapshot_of_a_filter_and_a_change_below_it_are_one_transaction() {
    for driver in ["throttle", "copy-on-read"] {
        let place = Place::new();
        let mut daemon = place.ours(SERVER);
        play(&mut daemon, served_under(driver));
        let export = json!({"type": "nbd", "id": "c", "node-name": "flt", "name": "",
            "writable": true});
        daemon.must("block-export-add", export);
        let socket = place.path("sock");
        let is_over = AtomicBool::new(false);
        let begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut client = Connection::open(&socket, false).expect("a server");
                let mut last = 0;
                while !is_over.load(Ordering::Relaxed) {
                    last = last % 250 + 1;
                    client.write(0, &[last; 65536]).expect("a write");
                    begun.store(true, Ordering::Relaxed);
                }
                last
            });
            while !begun.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let abort = json!({"type": "abort", "data": {}});
            let refused = daemon.ask("transaction", both(&place, &[abort]));
            assert_eq!(refused["error"]["class"], "GenericError", "{refused}");
            assert_eq!(dirty_bytes(&mut daemon), None);
            place.remove("s");
            daemon.must("transaction", both(&place, &[]));
            let at_once = dirty_bytes(&mut daemon);
            is_over.store(true, Ordering::Relaxed);
            let last = writer.join().expect("a client");
            assert_eq!(
                (at_once, dirty_bytes(&mut daemon)),
                (Some(0), Some(0)),
                "{driver}"
            );
            place.io(EXPORT, &[&format!("read -P {last} 0 64k")]);
        });
        daemon.end();
    }
}

#[test]
fn an_overlay_of_a_filter_is_given_what_all_layers_below_it_hold() {
    for driver in ["throttle", "copy-on-read", "blkdebug"] {
        let place = Place::new();
        place.img("create -q -f qcow2 s 1M");
        let mut daemon = place.ours(SERVER);
        let mut filter = filter(driver, "flt", "top");
        if driver == "blkdebug" {
            filter = json!({"driver": driver, "node-name": "flt", "image": "top"});
        }
        play(
            &mut daemon,
            [
                add("base", "b", json!(null)),
                add("top", "m", json!("base")),
            ],
        );
        daemon.must("blockdev-add", filter);
        daemon.must("blockdev-add", qcow2("over", "s", json!("flt")));
        let export = json!({"type": "nbd", "id": "e", "node-name": "over", "name": "e"});
        daemon.must("block-export-add", export);
        let read = |place: &Place| place.img(&["convert", "-O", "raw", EXPORT, "r"]);
        read(&place);
        let before = place.read("r");
        daemon.must("block-stream", json!({"job-id": "j", "device": "over"}));
        daemon.wait("j", "null");
        read(&place);
        let after = place.read("r");
        assert!(before.iter().any(|byte| *byte != 0));
        assert!(before == after, "{driver}: the disk reads differently");
        daemon.end();
    }
}

/// What the header of the image `s` says that it stands on, once a daemon has made it.
fn named_below(real: bool, filter: Value, command: &str, more: Value) -> [Value; 2] {
    let place = Place::new();
    let mut daemon = match real {
        true => place.start(Path::new(NAME), SERVER),
        false => place.ours(SERVER),
    };
    play(&mut daemon, [add("top", "t", json!(""))]);
    daemon.must("blockdev-add", filter);
    daemon.must(command, more);
    let words = ["info", "-U", "--output=json", "s"];
    let info: Value = serde_json::from_str(&place.img(&words)).expect("JSON");
    daemon.kill();
    ["backing-filename", "backing-filename-format"].map(|key| info[key].clone())
}

/// Not as in QEMU below a filter that copies on reads, which no backing file can be.
#[test]
fn the_header_of_an_overlay_says_what_opens_the_same() {
    let new = json!({"device": "flt", "target": "s", "sync": "none", "format": "qcow2",
        "job-id": "j"});
    let snapshot = json!({"node-name": "flt", "snapshot-file": "s", "snapshot-node-name": "s"});
    for (command, more) in [
        ("blockdev-snapshot-sync", snapshot),
        ("drive-mirror", new.clone()),
        ("drive-backup", new),
    ] {
        let raw = with(filter("raw", "flt", "top"), json!({"size": 65536}));
        for filter in [filter("throttle", "flt", "top"), raw] {
            let told = |real| named_below(real, filter.clone(), command, more.clone());
            let [file, format] = told(false);
            assert!(
                file.as_str().expect("a name").starts_with("json:"),
                "{file}"
            );
            assert_eq!([file, format], told(true), "{command}");
        }
        let copying = filter("copy-on-read", "flt", "top");
        let below = named_below(false, copying, command, more.clone());
        assert_eq!(below, ["t", "qcow2"]);
        // QEMU's names the image as if it were a file: what an overlay opens by that are its bytes.
        let debug = json!({"driver": "blkdebug", "node-name": "flt", "image": "top"});
        let below = named_below(false, debug, command, more.clone());
        assert_eq!(below, ["t", "qcow2"]);
    }
}

/// A chain in which a filter lies between two images: `over` on `flt` over `top` on `base`.
pub(super) fn over_a_filter(driver: &str) -> Vec<Step> {
    vec![
        add("base", "b", json!(null)),
        add("top", "m", json!("base")),
        Ask("blockdev-add", filter(driver, "flt", "top")),
        add("over", "t", json!("flt")),
    ]
}

#[test]
fn layers_below_a_filter_are_named_and_refused_alike() {
    let commit = |more: Value| {
        let arguments = with(json!({"device": "over", "job-id": "j"}), more);
        Ask("block-commit", arguments)
    };
    let stream = |more: Value| {
        let arguments = with(json!({"device": "over", "job-id": "s"}), more);
        Ask("block-stream", arguments)
    };
    for driver in ["throttle", "copy-on-read"] {
        let mut script = over_a_filter(driver);
        script.extend([
            commit(json!({"top-node": "flt", "base-node": "top"})),
            commit(json!({"top-node": "over", "base-node": "over"})),
            commit(json!({"top-node": "base", "base-node": "flt"})),
            stream(json!({"bottom": "flt"})),
            stream(json!({"base-node": "over"})),
            // The filter goes with what is committed.
            commit(json!({"top-node": "flt", "base-node": "base"})),
            Wait("j", "null"),
            Ask("query-jobs", json!({})),
            stream(json!({"base-node": "flt"})),
            stream(json!({"base-node": "base"})),
            Wait("s", "null"),
            Ask("blockdev-del", json!({"node-name": "base"})),
            Ask("blockdev-del", json!({"node-name": "flt"})),
            Ask("blockdev-del", json!({"node-name": "top"})),
        ]);
        same(SERVER, &script);
    }
}

/// What a disk reads as while jobs lead it from one layer to others below a filter, and who stands on
/// what afterwards.
#[test]
fn jobs_take_layers_below_a_filter_together() {
    let jobs = [
        (
            "block-commit",
            json!({"top-node": "flt", "base-node": "base"}),
            "base",
            true,
        ),
        // The filter stays, and stands on the base.
        (
            "block-commit",
            json!({"top-node": "top", "base-node": "base"}),
            "base",
            true,
        ),
        ("block-commit", json!({"base-node": "base"}), "", true),
        ("block-commit", json!({"base": "b"}), "", true),
        ("block-commit", json!({}), "", true),
        ("block-stream", json!({"base-node": "base"}), "base", false),
        ("block-stream", json!({"base-node": "top"}), "top", false),
        ("block-stream", json!({"base": "b"}), "base", false),
        ("block-stream", json!({"bottom": "top"}), "base", false),
        ("block-stream", json!({}), "", false),
    ];
    for driver in ["throttle", "copy-on-read"] {
        for (command, more, below, is_commit) in &jobs {
            let place = Place::new();
            let mut daemon = place.ours(SERVER);
            play(&mut daemon, over_a_filter(driver));
            let export = json!({"type": "nbd", "id": "e", "node-name": "over", "name": "e",
                "writable": true});
            daemon.must("block-export-add", export);
            let reads = [
                "read -P 1 0 128k",
                "read -P 2 128k 64k",
                "read -P 3 192k 192k",
            ];
            place.io(EXPORT, &reads);
            let job = with(json!({"job-id": "j", "device": "over"}), more.clone());
            daemon.must(command, job);
            if *is_commit && below.is_empty() {
                daemon.wait("j", "ready");
                place.io(EXPORT, &["write -P 4 512k 64k"]);
                daemon.must("job-complete", json!({"id": "j"}));
            }
            daemon.wait("j", "null");
            place.io(EXPORT, &reads);
            let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
            let mut nodes = nodes.as_array().expect("a list").iter();
            let over = nodes.find(|node| node["node-name"] == "over");
            let stands_on = over.expect("the node")["backing_file"].as_str();
            let expected = match *below {
                "top" => Some("m"),
                "base" => Some("b"),
                _ => None,
            };
            let is_active = *is_commit && below.is_empty();
            let has_filter = more["top-node"] == "top";
            assert!(
                is_active || has_filter || stands_on == expected,
                "{driver} {command} {more}: {stands_on:?}"
            );
            daemon.end();
            let image = if *is_commit && below.is_empty() {
                "b"
            } else {
                "t"
            };
            place.io(image, &reads);
            place.img(&format!("check -q {image}"));
        }
    }
}

/// QEMU's test 258: a commit below, and a stream down to its filter, in either order of their ends.
#[test]
fn a_stream_ends_at_the_filter_of_a_commit() {
    for stream_ends_first in [true, false] {
        let place = Place::new();
        place.img("create -q -f qcow2 -b t -F qcow2 u");
        place.img("create -q -f qcow2 -b u -F qcow2 v");
        place.io("u", &["write -P 5 512k 64k"]);
        place.io("v", &["write -P 6 576k 64k"]);
        let mut daemon = place.ours(SERVER);
        play(
            &mut daemon,
            [
                add("base", "b", json!(null)),
                add("one", "m", json!("base")),
                add("two", "t", json!("one")),
                add("three", "u", json!("two")),
                add("four", "v", json!("three")),
            ],
        );
        let export = json!({"type": "nbd", "id": "e", "node-name": "four", "name": "e"});
        daemon.must("block-export-add", export);
        let reads = [
            "read -P 1 0 128k",
            "read -P 2 128k 64k",
            "read -P 3 192k 192k",
            "read -P 5 512k 64k",
            "read -P 6 576k 64k",
        ];
        daemon.must(
            "block-commit",
            json!({"job-id": "c", "device": "four", "top-node": "one", "base-node": "base",
                "filter-node-name": "filter", "auto-finalize": false}),
        );
        daemon.must(
            "block-stream",
            json!({"job-id": "s", "device": "three", "base-node": "filter",
                "auto-finalize": false}),
        );
        daemon.wait("c", "pending");
        daemon.wait("s", "pending");
        for id in if stream_ends_first {
            ["s", "c"]
        } else {
            ["c", "s"]
        } {
            place.io(EXPORT, &reads);
            daemon.must("job-finalize", json!({"id": id}));
            daemon.wait(id, "null");
        }
        place.io(EXPORT, &reads);
        for node in ["one", "filter"] {
            let gone = daemon.ask("blockdev-del", json!({"node-name": node}));
            let free = node == "one" && gone.get("error").is_none();
            assert!(free || node == "filter", "{gone}");
        }
        daemon.end();
        for image in ["v", "t"] {
            place.img(&format!("check -q {image}"));
        }
        let info = place.img("info --output=json u");
        let info: Value = serde_json::from_str(&info).expect("JSON");
        assert_eq!(info["backing-filename"], "b");
        place.io("v", &reads);
    }
}
