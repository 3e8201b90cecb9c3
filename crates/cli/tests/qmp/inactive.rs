//! `blockdev-set-active`: nodes whose files somebody else may write to.

use serde_json::{Value, json};

use crate::place::Step::{Ask, Io};
use crate::place::{Daemon, Place, Step, Tolerance, alike, with};

fn set(node: &str, active: bool) -> Step {
    let arguments = json!({"node-name": node, "active": active});
    Ask("blockdev-set-active", arguments)
}

fn file(name: &str, filename: &str) -> Step {
    let options = json!({"driver": "file", "node-name": name, "filename": filename});
    Ask("blockdev-add", options)
}

fn format(name: &str, file: &str, backing: Value, more: Value) -> Step {
    let options = with(
        json!({"driver": "qcow2", "node-name": name, "file": file, "backing": backing}),
        more,
    );
    Ask("blockdev-add", options)
}

fn export(more: Value) -> Step {
    let options = with(
        json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "e", "writable": true}),
        more,
    );
    Ask("block-export-add", options)
}

fn unexport() -> Step {
    Ask("block-export-del", json!({"id": "e", "mode": "hard"}))
}

/// Files with names, on them an inactive disk and an active target, and a server.
fn start() -> Vec<Step> {
    let address = json!({"addr": {"type": "unix", "data": {"path": "sock"}}});
    vec![
        file("disk-file", "b"),
        format("disk", "disk-file", json!(null), json!({"active": false})),
        file("to-file", "o"),
        format("to", "to-file", json!(null), json!({})),
        file("snap-file", "m"),
        file("snap2-file", "t"),
        Ask("nbd-server-start", address),
    ]
}

/// Our daemon tells of requests that fail, and of fewer jobs that are refused.
const WITHOUT_EVENTS: Tolerance = Tolerance {
    left_out: &[],
    by_job: false,
    events: true,
};

#[test]
fn nodes_become_inactive_and_active_alike() {
    let raw = |more: Value| {
        let mut options = json!({"driver": "raw", "node-name": "filter", "file": "disk"});
        if let Some(active) = more.as_bool() {
            options["active"] = json!(active);
        }
        Ask("blockdev-add", options)
    };
    let mut script = start();
    script.extend([
        // Exports need active nodes, unless they say that they do not.
        export(json!({})),
        unexport(),
        set("disk", false),
        export(json!({"allow-inactive": false})),
        set("disk", false),
        unexport(),
        set("disk", false),
        export(json!({"allow-inactive": true})),
        Io("e", &["read 0 64k"]),
        set("disk", true),
        set("disk", false),
        unexport(),
        export(json!({"writable": false})),
        set("disk", false),
        unexport(),
        export(json!({"allow-inactive": true, "type": "fuse", "mountpoint": "o"})),
        // Whoever stands on an inactive node is inactive.
        set("disk", true),
        set("disk-file", false),
        set("disk", false),
        set("disk-file", false),
        raw(json!(null)),
        raw(json!(true)),
        raw(json!(false)),
        Ask("blockdev-del", json!({"node-name": "filter"})),
        format("disk2", "disk-file", json!(null), json!({})),
        format("snap", "snap-file", json!("disk"), json!({})),
        Ask(
            "block_resize",
            json!({"node-name": "disk", "size": 1 << 24}),
        ),
        set("no", true),
        Ask("blockdev-set-active", json!({"node-name": "disk"})),
        Ask("blockdev-set-active", json!({"active": true})),
        Ask("blockdev-set-active", json!({"active": false})),
        Ask("blockdev-set-active", json!({"active": true})),
    ]);
    alike(&[], &script, &WITHOUT_EVENTS);
}

#[test]
fn jobs_on_inactive_nodes_are_refused_alike() {
    let none = json!({"active": false});
    let commit = json!({"job-id": "j", "device": "snap2", "top-node": "snap",
        "filter-node-name": "filter"});
    let job = |device: &str| {
        json!({"job-id": "j", "device": device, "target": "to", "sync": "full",
            "filter-node-name": "filter"})
    };
    let mut stream = json!({"job-id": "j", "device": "snap", "filter-node-name": "filter"});
    let mut script = start();
    script.extend([
        format("snap", "snap-file", json!(null), none.clone()),
        Ask(
            "blockdev-snapshot",
            json!({"node": "disk", "overlay": "snap"}),
        ),
        Ask("block-stream", stream.clone()),
        Ask("block-commit", stream.take()),
        format("snap2", "snap2-file", json!("snap"), none),
        Ask("block-commit", commit.clone()),
        set("disk", true),
        Ask("block-commit", commit),
        Ask("blockdev-mirror", job("snap2")),
        set("snap2", true),
        set("to", false),
        Ask("blockdev-mirror", job("snap2")),
        Ask("blockdev-backup", job("snap2")),
        set("snap2", false),
        set("to", true),
        Ask("blockdev-backup", job("snap2")),
        Ask("query-jobs", json!({})),
    ]);
    alike(&[], &script, &WITHOUT_EVENTS);
}

fn play(daemon: &mut Daemon, script: Vec<Step>) {
    for step in script {
        let Ask(command, arguments) = step else {
            unreachable!("it asks")
        };
        daemon.must(command, arguments);
    }
}

fn inactive(daemon: &mut Daemon) -> Vec<String> {
    let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
    let nodes = nodes.as_array().expect("nodes").iter();
    let names = nodes.filter(|node| node["active"] == false);
    let mut names: Vec<String> = names
        .map(|node| node["node-name"].as_str().expect("a name").to_owned())
        .filter(|name| !name.starts_with('#'))
        .collect();
    names.sort();
    names
}

#[test]
fn all_that_stands_below_alone_is_inactive_too() {
    let place = Place::new();
    let mut daemon = place.ours("");
    play(&mut daemon, start());
    assert_eq!(inactive(&mut daemon), ["disk"]);
    play(
        &mut daemon,
        vec![
            set("disk", true),
            set("disk", false),
            format("snap", "snap-file", json!(null), json!({})),
        ],
    );
    assert_eq!(inactive(&mut daemon), ["disk", "disk-file"]);
    // An overlay over an inactive node becomes inactive with what it stands on.
    let snapshot = json!({"node": "disk", "overlay": "snap"});
    daemon.must("blockdev-snapshot", snapshot);
    assert_eq!(
        inactive(&mut daemon),
        ["disk", "disk-file", "snap", "snap-file"]
    );
    play(&mut daemon, vec![set("disk", true)]);
    assert_eq!(inactive(&mut daemon), ["snap", "snap-file"]);
    play(&mut daemon, vec![set("snap", true)]);
    assert!(inactive(&mut daemon).is_empty());
    daemon.end();
}

const URI: &str = "nbd+unix:///e?socket=sock";

#[test]
fn a_disk_goes_to_another_program_and_comes_back() {
    let place = Place::new();
    let mut daemon = place.ours("");
    play(&mut daemon, start());
    play(
        &mut daemon,
        vec![set("disk", true), export(json!({"allow-inactive": true}))],
    );
    place.io(URI, &["write -P 7 0 64k", "write -P 7 500k 1k"]);
    play(&mut daemon, vec![set("disk", false)]);
    // All that was acknowledged is there, and the image is closed well.
    place.io(
        "b",
        &["read -P 7 0 64k", "read -P 7 500k 1k", "write -P 8 32k 64k"],
    );
    place.img("check -q b");
    let words = ["-f", "raw", "-c", "write 0 64k", "-c", "discard 0 64k", URI];
    let output = std::process::Command::new("qemu-io")
        .current_dir(place.root())
        .args(words)
        .output()
        .expect("qemu-io");
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("write failed: Operation not permitted"),
        "{said}"
    );
    assert!(
        said.contains("discard failed: Operation not permitted"),
        "{said}"
    );
    place.io(URI, &["flush"]);
    // Somebody else has it: then it cannot be active here, and stays what it is.
    let mut other = place.ours("");
    play(
        &mut other,
        vec![
            file("disk-file", "b"),
            format("disk", "disk-file", json!(null), json!({})),
        ],
    );
    let Ask(command, arguments) = set("disk", true) else {
        unreachable!("it asks")
    };
    let refused = daemon.ask(command, arguments);
    let text = refused["error"]["desc"].as_str().expect("a text");
    assert!(text.contains("lock"), "{text}");
    assert_eq!(inactive(&mut daemon), ["disk", "disk-file"]);
    other.end();
    play(&mut daemon, vec![set("disk", true)]);
    place.io(
        URI,
        &[
            "read -P 7 0 32k",
            "read -P 8 32k 64k",
            "write -P 9 128k 64k",
        ],
    );
    daemon.end();
    place.img("check -q b");
    place.io("b", &["read -P 9 128k 64k"]);
}

#[test]
fn a_node_that_a_job_works_on_stays_active() {
    let place = Place::new();
    let mut daemon = place.ours("");
    play(&mut daemon, start());
    play(&mut daemon, vec![set("disk", true)]);
    let mirror = json!({"job-id": "j", "device": "disk", "target": "to", "sync": "full"});
    daemon.must("blockdev-mirror", mirror);
    daemon.wait("j", "ready");
    for node in ["disk", "to"] {
        let Ask(command, arguments) = set(node, false) else {
            unreachable!("it asks")
        };
        let refused = daemon.ask(command, arguments);
        let text = format!("Node '{node}' is busy: block device is in use by block job: mirror");
        assert_eq!(refused["error"]["desc"], text);
    }
    daemon.must("job-cancel", json!({"id": "j"}));
    daemon.wait("j", "null");
    play(&mut daemon, vec![set("disk", false), set("to", false)]);
    daemon.end();
}
