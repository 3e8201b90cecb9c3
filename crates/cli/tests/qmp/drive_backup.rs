//! `drive-backup`, and what backups and streams do about requests that fail.

use serde_json::{Value, json};

use crate::backup::{DISK, SERVER, disk};
use crate::place::Step::{Ask, Event, Wait};
use crate::place::{Daemon, Place, Step, Tolerance, add, alike, qcow2, same, with};

fn backup(more: Value) -> Step {
    let usual = json!({"device": "top", "target": "new", "sync": "full", "job-id": "j"});
    Ask("drive-backup", with(usual, more))
}

fn job(command: &'static str) -> Step {
    Ask(command, json!({"id": "j"}))
}

fn start() -> Vec<Step> {
    vec![
        add("base", "b", json!(null)),
        add("top", "m", json!("base")),
    ]
}

#[test]
fn what_is_wrong_with_a_drive_backup_is_told_alike() {
    let mut script = start();
    let other_file = json!({"target": "o", "mode": "existing"});
    script.extend([
        Ask("drive-backup", json!({"device": "top", "target": "new"})),
        Ask("drive-backup", json!({"device": "top", "sync": "full"})),
        Ask(
            "drive-backup",
            json!({"device": "top", "target": "new", "sync": "full"}),
        ),
        backup(json!({"device": "no"})),
        backup(json!({"mode": "bad"})),
        backup(json!({"sync": "bad"})),
        backup(json!({"format": "bad"})),
        backup(json!({"format": "raw", "sync": "top"})),
        backup(json!({"sync": "bitmap"})),
        backup(json!({"sync": "incremental", "bitmap": "a"})),
        backup(json!({"bitmap": "a"})),
        backup(json!({"speed": -1})),
        backup(json!({"on-target-error": "bad"})),
        backup(json!({"other": 1})),
        backup(json!({"filter-node-name": "top"})),
        backup(json!({"filter-node-name": "1"})),
        backup(json!({"x-perf": {"max-workers": 0}})),
        backup(json!({"node-name": "x"})),
        backup(with(other_file.clone(), json!({"format": "raw"}))),
        backup(with(other_file, json!({"format": "qcow2", "job-id": "k"}))),
        Wait("k", "null"),
        Ask("query-jobs", json!({})),
        Ask("blockdev-del", json!({"node-name": "top"})),
    ]);
    same(&[], &script);
}

#[test]
fn drive_backups_are_made_alike() {
    let id = |id: &str| json!({"job-id": id, "target": id});
    let mut base = qcow2("base", "b", json!(null));
    base["read-only"] = json!(true);
    let mut script = vec![Ask("blockdev-add", base), add("top", "m", json!("base"))];
    script.extend([
        backup(json!({"auto-dismiss": false, "auto-finalize": false, "filter-node-name": "f"})),
        Wait("j", "pending"),
        Ask("query-block-jobs", json!({})),
        job("job-finalize"),
        Wait("j", "concluded"),
        job("job-dismiss"),
        backup(with(id("top"), json!({"sync": "top", "compress": true}))),
        Wait("top", "null"),
        backup(with(id("raw"), json!({"format": "raw"}))),
        Wait("raw", "null"),
        backup(with(
            id("again"),
            json!({"target": "top", "sync": "top", "mode": "existing"}),
        )),
        Wait("again", "null"),
        backup(with(id("none"), json!({"sync": "none"}))),
        Ask("job-cancel", json!({"id": "none"})),
        Wait("none", "null"),
        backup(with(
            id("base"),
            json!({"device": "base", "sync": "top", "speed": 1 << 30}),
        )),
        Wait("base", "null"),
        Ask("query-jobs", json!({})),
        Ask("blockdev-del", json!({"node-name": "top"})),
        Ask("blockdev-del", json!({"node-name": "base"})),
    ]);
    same(&[], &script);
}

#[test]
fn drive_backups_of_a_transaction_are_made_alike() {
    let action = |id: &str, more: Value| {
        let usual = json!({"device": "top", "job-id": id, "target": id, "sync": "full"});
        json!({"type": "drive-backup", "data": with(usual, more)})
    };
    let all = |actions: Value| Ask("transaction", json!({"actions": actions}));
    let grouped = |actions: Value| {
        let properties = json!({"completion-mode": "grouped"});
        Ask(
            "transaction",
            json!({"actions": actions, "properties": properties}),
        )
    };
    let base = json!({"device": "base"});
    let word = json!({"auto-finalize": false});
    alike(
        &[],
        &[
            add("base", "b", json!(null)),
            add("top", "o", json!(null)),
            all(json!([action("a", json!({})), {"type": "abort", "data": {}}])),
            all(json!([action("a", json!({"sync": "bitmap"}))])),
            all(json!([action("a", json!({"device": "no"}))])),
            all(json!([action("c", json!({}))])),
            Wait("c", "null"),
            grouped(json!([
                action("one", json!({})),
                action("two", with(base.clone(), json!({"auto-finalize": true})))
            ])),
            Wait("one", "null"),
            Wait("two", "null"),
            // A word to one of them is one to all, and those that need none wait for it, too.
            grouped(json!([
                action("three", word.clone()),
                action("four", with(base.clone(), word.clone()))
            ])),
            Wait("three", "pending"),
            Wait("four", "pending"),
            Ask("job-finalize", json!({"id": "three"})),
            Wait("three", "null"),
            Wait("four", "null"),
            grouped(json!([action("five", word), action("six", base)])),
            Wait("five", "pending"),
            Wait("six", "pending"),
            Ask("job-finalize", json!({"id": "five"})),
            Wait("five", "null"),
            Wait("six", "null"),
            Ask("query-jobs", json!({})),
            Ask("blockdev-del", json!({"node-name": "top"})),
            Ask("blockdev-del", json!({"node-name": "base"})),
        ],
        &Tolerance {
            by_job: true,
            ..Tolerance::default()
        },
    );
}

/// A backup of a disk with a client, which goes on writing.
#[test]
fn clients_write_while_a_file_is_made_of_their_disk() {
    let place = disk();
    place.img("create -q -f qcow2 -b d -F qcow2 over");
    place.io("over", &["write -P 1 0 64k", "write -P 1 6M 64k"]);
    let mut daemon = place.ours(SERVER);
    daemon.must("blockdev-add", qcow2("top", "over", json!("")));
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "top", "name": "disk", "writable": true});
    daemon.must("block-export-add", export);
    let nodes = |daemon: &mut Daemon| {
        let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
        nodes.as_array().expect("nodes").clone()
    };
    for (id, sync) in [("full", "full"), ("top", "top"), ("none", "none")] {
        // After the first piece it would take days.
        let arguments = json!({"device": "top", "target": id, "job-id": id, "sync": sync,
            "speed": 1, "filter-node-name": "filter"});
        daemon.must("drive-backup", arguments);
        let all = nodes(&mut daemon).into_iter();
        let filters = all.filter(|node| node["node-name"] == "filter");
        let drivers: Vec<_> = filters.map(|node| node["drv"].clone()).collect();
        assert_eq!(drivers, ["copy-before-write"]);
        place.io(DISK, &["write -P 9 0 64k", "write -z 6M 64k"]);
        match sync {
            "none" => daemon.must("job-cancel", json!({"id": id})),
            _ => daemon.must("block-job-set-speed", json!({"device": id, "speed": 0})),
        };
        daemon.wait(id, "null");
        let mut all = nodes(&mut daemon).into_iter();
        assert!(!all.any(|node| node["file"] == id || node["node-name"] == "filter"));
        place.io(DISK, &["write -P 1 0 64k", "write -P 1 6M 64k"]);
    }
    daemon.end();
    place.img("compare -q over full");
    place.img("compare -q over top");
    place.img("compare -q over none");
    for (image, backing) in [("full", None), ("top", Some("d")), ("none", Some("over"))] {
        place.img(&format!("check -q {image}"));
        let info = place.img(&["info", "--output=json", image]);
        let info: Value = serde_json::from_str(&info).expect("JSON");
        assert_eq!(info["backing-filename"].as_str(), backing, "{info}");
    }
}

/// A node of the file `r` that fails once.
fn failing(name: &str, event: &str, errno: u64) -> Step {
    let node = json!({
        "driver": "raw",
        "node-name": name,
        "file": {
            "driver": "blkdebug",
            "inject-error": [{"event": event, "errno": errno, "once": true}],
            "image": {"driver": "file", "filename": "r"},
        },
    });
    Ask("blockdev-add", node)
}

fn make_file(megabytes: u64) -> [Step; 3] {
    let options = json!({"driver": "file", "filename": "r", "size": megabytes << 20});
    [
        Ask(
            "blockdev-create",
            json!({"job-id": "c", "options": options}),
        ),
        Wait("c", "concluded"),
        Ask("job-dismiss", json!({"id": "c"})),
    ]
}

/// How jobs meet failures: the error, the policy, and whether somebody has to resume it.
const FAILURES: [(u64, &str, bool); 6] = [
    (28, "enospc", true),
    (28, "auto", true),
    (5, "stop", true),
    (5, "ignore", false),
    (5, "report", false),
    (5, "enospc", false),
];

#[test]
fn failures_of_a_backups_target_are_met_alike() {
    for (errno, policy, is_held) in FAILURES {
        let mut script = Vec::from(make_file(1));
        script.push(failing("bad", "write_aio", errno));
        script.extend(start());
        // One request writes all that there is, so it is known how far others have come.
        let arguments = json!({"device": "top", "target": "bad", "job-id": "j", "sync": "top",
            "on-target-error": policy, "auto-dismiss": false});
        script.push(Ask("blockdev-backup", arguments));
        meet_failure(&mut script, is_held);
        same(&[], &script);
    }
}

/// A node of the image `b`, the first read of whose data fails.
fn unreadable(errno: u64) -> Step {
    let node = json!({
        "driver": "qcow2",
        "node-name": "bad",
        "file": {
            "driver": "blkdebug",
            "inject-error": [{"event": "read_aio", "errno": errno, "once": true}],
            "image": {"driver": "file", "filename": "b"},
        },
    });
    Ask("blockdev-add", node)
}

/// How far a job came that failed depends on the size of its pieces.
const WITHOUT_OFFSETS: Tolerance = Tolerance {
    left_out: &["offset"],
    by_job: false,
    events: false,
};

/// The rest of a script with a job that meets a failure.
fn meet_failure(script: &mut Vec<Step>, is_held: bool) {
    if is_held {
        script.extend([
            Event("BLOCK_JOB_ERROR"),
            Ask("query-block-jobs", json!({})),
            Ask("block-job-resume", json!({"device": "j"})),
        ]);
    }
    script.extend([
        Wait("j", "concluded"),
        Ask("query-block-jobs", json!({})),
        job("job-dismiss"),
    ]);
}

#[test]
fn failures_of_a_backups_source_are_met_alike() {
    for (errno, policy, is_held) in FAILURES {
        let arguments = json!({"device": "bad", "target": "to", "job-id": "j", "sync": "full",
            "on-source-error": policy, "auto-dismiss": false});
        let mut script = vec![
            unreadable(errno),
            add("to", "o", json!(null)),
            Ask("blockdev-backup", arguments),
        ];
        meet_failure(&mut script, is_held);
        alike(&[], &script, &WITHOUT_OFFSETS);
    }
}

#[test]
fn failures_of_a_stream_are_met_alike() {
    for (errno, policy, is_held) in FAILURES {
        let arguments =
            json!({"device": "top", "job-id": "j", "on-error": policy, "auto-dismiss": false});
        let mut script = vec![
            unreadable(errno),
            add("top", "m", json!("bad")),
            Ask("block-stream", arguments),
        ];
        meet_failure(&mut script, is_held);
        alike(&[], &script, &WITHOUT_OFFSETS);
    }
}

/// An image of which something was left out stands on what it stood on.
#[test]
fn a_stream_that_ignores_a_failure_changes_nothing_of_what_is_shown() {
    let place = Place::new();
    let mut daemon = place.ours("");
    let Ask(command, arguments) = unreadable(5) else {
        unreachable!("it asks")
    };
    daemon.must(command, arguments);
    daemon.must("blockdev-add", qcow2("top", "m", json!("bad")));
    let stream = json!({"device": "top", "job-id": "j", "on-error": "ignore"});
    daemon.must("block-stream", stream);
    daemon.wait("j", "null");
    daemon.end();
    let info = place.img("info m");
    assert!(info.contains("backing file: b"), "{info}");
    place.io("m", &["read -P 2 64k 128k", "read -P 3 192k 192k"]);
    place.img("check -q m");
}

/// What a fleece has no room for is lost, whatever is to be done about failures.
#[test]
fn a_backup_whose_old_bytes_are_lost_fails_under_every_policy() {
    let place = Place::new();
    let mut daemon = place.ours(SERVER);
    daemon.must("blockdev-add", qcow2("top", "t", json!("")));
    daemon.must("blockdev-add", qcow2("to", "o", json!(null)));
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "top", "name": "disk", "writable": true});
    daemon.must("block-export-add", export);
    let arguments = json!({"device": "top", "target": "to", "job-id": "j", "sync": "none",
        "on-target-error": "ignore", "on-source-error": "ignore", "auto-dismiss": false,
        "x-vellum-fleecing": {"max-size": 0, "when-full": "fail"}});
    daemon.must("blockdev-backup", arguments);
    place.io(DISK, &["write -P 9 0 64k"]);
    daemon.wait("j", "concluded");
    let jobs = daemon.must("query-jobs", json!({}));
    assert_eq!(jobs[0]["error"], "No space left in the fleece", "{jobs}");
    daemon.end();
}
