//! `blockdev-mirror`, as whoever moves a disk uses it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::backup::{DISK, SERVER};
use crate::place::Step::{Ask, Wait};
use crate::place::{Daemon, NAME, Place, Step, add, qcow2, same, with};

fn mirror(more: Value) -> Step {
    let usual = json!({"device": "top", "target": "to", "sync": "full", "job-id": "j"});
    Ask("blockdev-mirror", with(usual, more))
}

fn job(command: &'static str) -> Step {
    job_of(command, "j")
}

fn job_of(command: &'static str, id: &str) -> Step {
    let key = if command.starts_with("block-job") {
        "device"
    } else {
        "id"
    };
    Ask(command, json!({key: id}))
}

fn change(id: &str, mode: &str) -> Step {
    let arguments = json!({"id": id, "type": "mirror", "copy-mode": mode});
    Ask("block-job-change", arguments)
}

/// The chain of a place and a target for it.
fn start() -> Vec<Step> {
    let mut to = qcow2("to", "o", json!(null));
    to["discard"] = json!("unmap");
    vec![
        add("base", "b", json!(null)),
        add("top", "m", json!("base")),
        Ask("blockdev-add", to),
    ]
}

#[test]
fn what_is_wrong_with_a_mirror_is_told_alike() {
    let small = json!({"driver": "null-co", "node-name": "small", "size": 65536});
    let mut read_only = qcow2("ro", "t", json!("base"));
    read_only["read-only"] = json!(true);
    let mut script = start();
    script.extend([
        Ask("blockdev-add", small),
        Ask("blockdev-mirror", json!({"device": "top", "target": "to"})),
        Ask("blockdev-mirror", json!({"device": "top", "sync": "full"})),
        Ask(
            "blockdev-mirror",
            json!({"device": "top", "target": "to", "sync": "full"}),
        ),
        mirror(json!({"device": "no"})),
        mirror(json!({"target": "no"})),
        mirror(json!({"target": "top"})),
        mirror(json!({"target": "base"})),
        mirror(json!({"device": "base"})),
        mirror(json!({"sync": "incremental"})),
        mirror(json!({"sync": "bitmap"})),
        mirror(json!({"sync": "bad"})),
        mirror(json!({"granularity": 100})),
        mirror(json!({"granularity": 3000})),
        mirror(json!({"granularity": 1 << 30})),
        mirror(json!({"buf-size": -1})),
        mirror(json!({"speed": -1})),
        mirror(json!({"on-source-error": "bad"})),
        mirror(json!({"on-target-error": "bad"})),
        mirror(json!({"copy-mode": "bad"})),
        mirror(json!({"replaces": "no"})),
        mirror(json!({"replaces": "base"})),
        mirror(json!({"replaces": "small"})),
        mirror(json!({"filter-node-name": "top"})),
        mirror(json!({"filter-node-name": "1"})),
        mirror(json!({"other": 1})),
        mirror(json!({"target": "small"})),
        Wait("j", "null"),
        Ask("blockdev-add", read_only),
        mirror(json!({"target": "ro"})),
        Ask("blockdev-del", json!({"node-name": "ro"})),
    ]);
    same(&[], &script);
}

#[test]
fn mirrors_are_made_alike() {
    let mut script = start();
    script.extend([
        mirror(json!({"filter-node-name": "filter"})),
        Wait("j", "ready"),
        Ask("query-block-jobs", json!({})),
        Ask("query-jobs", json!({})),
        mirror(json!({"job-id": "k"})),
        mirror(json!({"job-id": "k", "device": "to", "target": "base"})),
        Ask("blockdev-del", json!({"node-name": "to"})),
        Ask("blockdev-del", json!({"node-name": "top"})),
        Ask("block_resize", json!({"node-name": "top", "size": 2097152})),
        Ask("block_resize", json!({"node-name": "to", "size": 2097152})),
        change("no", "background"),
        change("j", "bad"),
        change("j", "background"),
        Ask("block-job-change", json!({"id": "j", "type": "mirror"})),
        job("job-cancel"),
        Wait("j", "null"),
        // Ended without going on with the target.
        mirror(json!({"job-id": "full"})),
        Wait("full", "ready"),
        job_of("block-job-cancel", "full"),
        Wait("full", "null"),
        mirror(json!({"job-id": "top", "sync": "top", "granularity": 4096})),
        Wait("top", "ready"),
        job_of("block-job-cancel", "top"),
        Wait("top", "null"),
        // Held up when it is ready.
        mirror(with(
            json!({"job-id": "none", "sync": "none"}),
            json!({"replaces": "top", "copy-mode": "write-blocking"}),
        )),
        Wait("none", "ready"),
        Ask("query-block-jobs", json!({})),
        change("none", "write-blocking"),
        change("none", "background"),
        job_of("job-pause", "none"),
        Wait("none", "standby"),
        change("none", "background"),
        job_of("block-job-cancel", "none"),
        job_of("job-complete", "none"),
        job_of("job-resume", "none"),
        Wait("none", "null"),
        Ask("query-jobs", json!({})),
        Ask("blockdev-del", json!({"node-name": "top"})),
    ]);
    same(&[], &script);
}

/// Of an image below a filter, too, only what it holds itself is copied.
#[test]
fn the_top_below_a_filter_is_mirrored_alike() {
    let maps = [None, Some(PathBuf::from(NAME))].map(|program| {
        let place = Place::new();
        let program = program.unwrap_or_else(|| place.path(NAME));
        let mut daemon = place.start(&program, "");
        for step in start() {
            let Ask(command, arguments) = step else {
                panic!("no question")
            };
            daemon.must(command, arguments);
        }
        let filter = json!({"driver": "copy-on-read", "node-name": "filter", "file": "top"});
        daemon.must("blockdev-add", filter);
        let arguments = json!({"device": "filter", "target": "to", "sync": "top", "job-id": "j"});
        daemon.must("blockdev-mirror", arguments);
        daemon.wait("j", "ready");
        daemon.must("job-complete", json!({"id": "j"}));
        daemon.wait("j", "null");
        daemon.end();
        let present = |name: &str| -> Vec<Value> {
            let map = place.img(&["map", "--output=json", name]);
            let map: Vec<Value> = serde_json::from_str(&map).expect("JSON");
            let runs = map
                .iter()
                .filter(|run| run["depth"] == 0 && run["data"] == true);
            runs.map(|run| json!([run["start"], run["length"]]))
                .collect()
        };
        [present("o"), present("m")]
    });
    assert_eq!(maps[0], maps[1]);
}

#[test]
fn a_mirror_waits_to_be_finalized_alike() {
    let mut script = start();
    script.extend([
        mirror(json!({"auto-finalize": false, "auto-dismiss": false, "sync": "top"})),
        Wait("j", "ready"),
        job("job-complete"),
        Wait("j", "pending"),
        Ask("query-block-jobs", json!({})),
        change("j", "background"),
        job("job-finalize"),
        Wait("j", "concluded"),
        job("job-dismiss"),
        Ask("blockdev-del", json!({"node-name": "top"})),
        Ask("blockdev-del", json!({"node-name": "to"})),
    ]);
    same(&[], &script);
}

/// However much was written while it was pending: that is copied while others go on.
#[test]
fn others_go_on_while_a_mirror_that_was_pending_comes_to_its_end() {
    let place = Place::new();
    for name in ["big", "copy"] {
        place.img(&format!("create -q -f qcow2 {name} 64M"));
    }
    let mut daemon = place.ours(SERVER);
    let limits = json!({"bps-write": 8 << 20});
    let group = json!({"qom-type": "throttle-group", "id": "g", "limits": limits});
    daemon.must("object-add", group);
    daemon.must("blockdev-add", qcow2("disk", "big", json!(null)));
    let slow = json!({"driver": "throttle", "node-name": "to", "throttle-group": "g",
        "file": qcow2("copy", "copy", json!(null))});
    daemon.must("blockdev-add", slow);
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk", "writable": true});
    daemon.must("block-export-add", export);
    let mirror = json!({"job-id": "j", "device": "disk", "target": "to", "sync": "full",
        "auto-finalize": false});
    daemon.must("blockdev-mirror", mirror);
    daemon.wait("j", "ready");
    daemon.must("job-complete", json!({"id": "j"}));
    daemon.wait("j", "pending");
    place.io(DISK, &["write -P 7 0 32M"]);
    daemon.must("job-finalize", json!({"id": "j"}));
    // By now it copies.
    std::thread::sleep(Duration::from_millis(300));
    let asked = Instant::now();
    let null = json!({"driver": "null-co", "node-name": "other"});
    daemon.must("blockdev-add", null);
    let took = asked.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    let jobs = daemon.must("query-jobs", json!({}));
    assert_eq!(
        jobs[0]["status"], "pending",
        "it has ended too soon to tell"
    );
    daemon.wait("j", "null");
    place.io(DISK, &["read -P 7 0 32M", "write -P 8 32M 64k"]);
    daemon.end();
    place.io("copy", &["read -P 7 0 32M", "read -P 8 32M 64k"]);
}

/// What a target shows where it holds nothing may come when all is copied: by a snapshot of what nobody uses.
#[test]
fn a_target_gets_its_backing_file_before_it_is_finalized_alike() {
    let null = |name: &str| {
        Ask(
            "blockdev-add",
            json!({"driver": "null-co", "node-name": name, "size": 1_048_576}),
        )
    };
    let over = |node: &str| Ask("blockdev-snapshot", json!({"node": node, "overlay": "to"}));
    let mut script = start();
    script.extend([
        mirror(json!({"auto-finalize": false})),
        Wait("j", "ready"),
        job("job-complete"),
        Wait("j", "pending"),
        null("below"),
        over("below"),
        null("other"),
        over("other"),
        job("job-finalize"),
        Wait("j", "null"),
        Ask("blockdev-del", json!({"node-name": "top"})),
        Ask("blockdev-del", json!({"node-name": "to"})),
        Ask("blockdev-del", json!({"node-name": "below"})),
    ]);
    same(&[], &script);
}

/// A target, once a write to which fails.
fn failing_target(errno: u64) -> Step {
    let node = json!({
        "driver": "raw",
        "node-name": "bad",
        "file": {
            "driver": "blkdebug",
            "inject-error": [{"event": "write_aio", "errno": errno, "once": true}],
            "image": {"driver": "file", "filename": "r"},
        },
    });
    Ask("blockdev-add", node)
}

#[test]
fn failures_of_a_mirror_are_met_alike() {
    for (errno, policy, is_held) in [
        (28, "enospc", true),
        (5, "stop", true),
        (5, "ignore", false),
        (5, "report", false),
        (5, "enospc", false),
    ] {
        let mut script = vec![
            Ask(
                "blockdev-create",
                json!({"job-id": "c", "options": {"driver": "file", "filename": "r", "size": 1 << 20}}),
            ),
            Wait("c", "concluded"),
            Ask("job-dismiss", json!({"id": "c"})),
            failing_target(errno),
        ];
        script.extend(start());
        // One request writes all that there is, so it is known how far others have come.
        let arguments = json!({"target": "bad", "on-target-error": policy, "sync": "top"});
        script.push(mirror(arguments));
        if is_held {
            script.extend([Wait("j", "paused"), job("job-resume")]);
        }
        if is_held || policy == "ignore" {
            script.extend([
                Wait("j", "ready"),
                Ask("query-block-jobs", json!({})),
                job("block-job-cancel"),
            ]);
        }
        script.extend([Wait("j", "null"), Ask("query-jobs", json!({}))]);
        same(&[], &script);
    }
}

const EXPORT: &[&str] = &[
    "--nbd-server",
    "addr.type=unix,addr.path=sock",
    "--blockdev",
    "driver=qcow2,node-name=top,file.driver=file,file.filename=t",
    "--export",
    "nbd,id=e,node-name=top,name=,writable=on",
];
const URI: &str = "nbd+unix:///?socket=sock";

fn begin(daemon: &mut Daemon, more: Value) {
    daemon.must("blockdev-add", qcow2("to", "o", json!(null)));
    let usual = json!({"device": "top", "target": "to", "sync": "full", "job-id": "j"});
    daemon.must("blockdev-mirror", with(usual, more));
}

/// What is written before, during and after a mirror.
const READS: [&str; 6] = [
    "read -P 5 0 64k",
    "read -P 1 64k 64k",
    "read -P 6 256k 64k",
    "read -P 0 320k 64k",
    "read -P 7 448k 64k",
    "read -P 8 512k 64k",
];

fn move_a_disk(more: Value) {
    let place = Place::new();
    let mut daemon = place.ours(EXPORT);
    place.io(URI, &["write -P 5 0 64k", "write -P 9 320k 64k"]);
    begin(&mut daemon, more);
    daemon.wait("j", "ready");
    place.io(
        URI,
        &[
            "write -P 6 256k 64k",
            "write -z 320k 64k",
            "write -P 7 448k 64k",
        ],
    );
    daemon.must("job-complete", json!({"id": "j"}));
    daemon.wait("j", "null");
    let exports = daemon.must("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], "to");
    daemon.must("blockdev-del", json!({"node-name": "top"}));
    place.io(URI, &["write -P 8 512k 64k"]);
    place.io(URI, &READS);
    daemon.end();
    place.img("check -q o");
    place.io("o", &READS);
}

#[test]
fn a_client_goes_on_with_the_target_of_a_mirror() {
    move_a_disk(json!({}));
    move_a_disk(json!({"copy-mode": "write-blocking", "granularity": 512}));
}

fn drive_mirror_of_nothing(target: &Place) -> Value {
    let target = target.path("n");
    json!({"device": "top", "target": target, "format": "qcow2", "sync": "none", "job-id": "j"})
}

#[test]
fn a_client_goes_on_with_an_overlay_that_a_mirror_has_made() {
    move_to_an_overlay(json!({"granularity": 512}));
    move_to_an_overlay(json!({"node-name": "new"}));
}

/// QEMU opens what the header names when the job ends, beside the source that has it locked: that
/// fails, and the job with it.
#[test]
fn a_client_goes_on_with_an_overlay_of_the_source_that_was_there() {
    move_to_an_overlay(json!({"mode": "existing"}));
}

fn move_to_an_overlay(more: Value) {
    let place = Place::new();
    if more["mode"] == "existing" {
        place.img("create -q -f qcow2 -b t -F qcow2 n");
    }
    let mut daemon = place.ours(EXPORT);
    place.io(URI, &["write -P 5 0 64k", "write -P 9 320k 64k"]);
    daemon.must("drive-mirror", with(drive_mirror_of_nothing(&place), more));
    daemon.wait("j", "ready");
    // Parts of clusters whose rest is the source's.
    place.io(
        URI,
        &[
            "write -P 6 20k 512",
            "write -z 384k 64k",
            "write -P 7 448k 64k",
        ],
    );
    daemon.must("job-complete", json!({"id": "j"}));
    daemon.wait("j", "null");
    let completed = daemon.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    place.io(URI, &["write -P 8 512k 512"]);
    let reads = [
        "read -P 5 0 20k",
        "read -P 6 20k 512",
        "read -P 5 41472 24064",
        "read -P 9 320k 64k",
        "read -P 0 384k 64k",
        "read -P 7 448k 64k",
        "read -P 8 512k 512",
    ];
    place.io(URI, &reads);
    daemon.end();
    place.img("check -q n");
    place.io("n", &reads);
}

#[test]
fn what_is_written_is_in_both_where_writes_are_blocking() {
    let place = Place::new();
    let mut daemon = place.ours(EXPORT);
    begin(&mut daemon, json!({"copy-mode": "write-blocking"}));
    daemon.wait("j", "ready");
    place.io(URI, &["write -P 6 256k 64k", "flush"]);
    let jobs = daemon.must("query-block-jobs", json!({}));
    assert_eq!(jobs[0]["actively-synced"], true, "{jobs}");
    daemon.must("job-cancel", json!({"id": "j"}));
    daemon.wait("j", "null");
    daemon.end();
    place.io("o", &["read -P 6 256k 64k"]);
}

#[test]
fn filters_of_jobs_are_nodes_while_these_run() {
    let names = |daemon: &mut Daemon| -> Vec<String> {
        let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
        let nodes = nodes.as_array().expect("nodes").iter();
        let filters = nodes.filter(|node| node["node-name"] == "filter");
        filters
            .map(|node| node["drv"].as_str().expect("a text").to_owned())
            .collect()
    };
    let place = Place::new();
    let mut daemon = place.ours(EXPORT);
    begin(&mut daemon, json!({"filter-node-name": "filter"}));
    daemon.wait("j", "ready");
    assert_eq!(names(&mut daemon), ["mirror_top"]);
    let export = json!({"type": "nbd", "id": "f", "node-name": "filter", "name": "f"});
    assert!(
        daemon
            .ask("block-export-add", export)
            .get("error")
            .is_some()
    );
    daemon.must("job-cancel", json!({"id": "j"}));
    daemon.wait("j", "null");
    assert!(names(&mut daemon).is_empty());
    let stream = json!({"device": "top", "job-id": "s", "speed": 1, "filter-node-name": "filter"});
    daemon.must("block-stream", stream);
    assert_eq!(names(&mut daemon), ["copy-on-read"]);
    daemon.must("job-cancel", json!({"id": "s"}));
    daemon.wait("s", "null");
    assert!(names(&mut daemon).is_empty());
    daemon.end();
}

/// QEMU's test 248: a target that was too short is opened anew, and the job goes on. It may as well be
/// the node below the target.
#[test]
fn a_target_is_opened_anew_while_its_mirror_waits_for_space() {
    for is_below in [false, true] {
        let place = Place::new();
        place.io("o", &["write 0 1M"]);
        let mut daemon = place.ours("");
        let below = |size: Option<u64>| {
            let file = json!({"driver": "file", "filename": "o"});
            let mut raw = json!({"driver": "raw", "file": file});
            if let Some(size) = size {
                raw["size"] = json!(size);
            }
            if is_below {
                raw["node-name"] = json!("below");
                raw["file"] = json!("o-file");
            }
            raw
        };
        let target = |file: Value| json!({"driver": "qcow2", "node-name": "to", "file": file, "backing": null});
        if is_below {
            let file = json!({"driver": "file", "node-name": "o-file", "filename": "o"});
            daemon.must("blockdev-add", file);
            daemon.must("blockdev-add", below(Some(320 << 10)));
            daemon.must("blockdev-add", target(json!("below")));
        } else {
            daemon.must("blockdev-add", target(below(Some(320 << 10))));
        }
        daemon.must("blockdev-add", qcow2("base", "b", json!(null)));
        daemon.must("blockdev-add", qcow2("top", "m", json!("base")));
        let mirror = json!({"device": "top", "target": "to", "sync": "full", "job-id": "j",
            "on-target-error": "enospc"});
        daemon.must("blockdev-mirror", mirror);
        daemon.wait("j", "paused");
        let other = match is_below {
            true => below(None),
            false => target(below(None)),
        };
        daemon.must("blockdev-reopen", json!({"options": [other]}));
        daemon.must("job-resume", json!({"id": "j"}));
        daemon.wait("j", "ready");
        daemon.must("job-complete", json!({"id": "j"}));
        daemon.wait("j", "null");
        daemon.end();
        place.io("o", &["read -P 2 64k 128k", "read -P 3 192k 192k"]);
        place.img("compare m o");
        place.img("check -q o");
    }
}
