//! What a disk showed at one moment, by `copy-before-write` and `snapshot-access`, and backups
//! to slow targets.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::place::Step::{Ask, Io};
use crate::place::{Place, Step, add, qcow2, same, with};

const SERVER: &[&str] = &["--nbd-server", "addr.type=unix,addr.path=sock"];

fn filter(more: Value) -> Step {
    let arguments = with(
        json!({"driver": "copy-before-write", "node-name": "cbw", "file": "top", "target": "tmp"}),
        more,
    );
    Ask("blockdev-add", arguments)
}

fn snapshot(more: Value) -> Step {
    let arguments = with(
        json!({"driver": "snapshot-access", "node-name": "snap", "file": "cbw"}),
        more,
    );
    Ask("blockdev-add", arguments)
}

fn export(node: &str, writable: bool) -> Step {
    let arguments = json!({"type": "nbd", "id": node, "node-name": node, "writable": writable});
    Ask("block-export-add", arguments)
}

fn del(node: &str) -> Step {
    Ask("blockdev-del", json!({"node-name": node}))
}

#[test]
fn snapshots_are_fleeced_alike() {
    let script = [
        add("top", "t", json!("")),
        add("tmp", "o", json!(null)),
        filter(json!({"file": "no"})),
        filter(json!({"target": "no"})),
        filter(json!({"on-cbw-error": "x"})),
        filter(json!({"bitmap": {"node": "top", "name": "no"}})),
        filter(json!({"bitmap": {"node": "top"}})),
        filter(json!({"min-cluster-size": 1000})),
        filter(json!({"cbw-timeout": -1})),
        Ask(
            "blockdev-add",
            json!({"driver": "copy-before-write", "node-name": "cbw", "file": "top"}),
        ),
        filter(json!({
            "on-cbw-error": "break-snapshot", "cbw-timeout": 45, "min-cluster-size": 131_072,
        })),
        Ask(
            "blockdev-add",
            json!({"driver": "snapshot-access", "node-name": "snap"}),
        ),
        snapshot(json!({"discard": "unmap"})),
        export("cbw", true),
        export("snap", true),
        export("top", true),
        Io(
            "snap",
            &[
                "read -P 1 0 128k",
                "read -P 2 128k 64k",
                "read -P 3 192k 192k",
            ],
        ),
        Io(
            "cbw",
            &[
                "write -P 7 0 100k",
                "write -z 200k 100k",
                "discard 150k 10k",
            ],
        ),
        Io(
            "snap",
            &[
                "read -P 1 0 128k",
                "read -P 2 128k 64k",
                "read -P 3 192k 192k",
            ],
        ),
        Io("cbw", &["read -P 7 0 100k", "read -P 0 200k 100k"]),
        del("tmp"),
        del("cbw"),
        Ask("block-export-del", json!({"id": "snap", "mode": "hard"})),
        Ask("block-export-del", json!({"id": "cbw", "mode": "hard"})),
        del("cbw"),
        del("snap"),
        del("cbw"),
        del("tmp"),
    ];
    same(SERVER, &script);
}

/// Has `qemu-io` read from the export `snap`; whether that failed.
fn fails(place: &Place, command: &str) -> bool {
    let uri = "nbd+unix:///snap?socket=sock";
    let words = ["-f", "raw", "-c", command, uri];
    let output = std::process::Command::new("qemu-io")
        .current_dir(place.root())
        .args(words)
        .output()
        .expect("qemu-io");
    !output.status.success()
}

#[test]
fn a_snapshot_shows_only_what_its_bitmap_calls_dirty_and_nobody_gave_up() {
    let place = Place::new();
    let mut daemon = place.ours(SERVER);
    let mut tell = |step: Step| match step {
        Ask(command, arguments) => drop(daemon.must(command, arguments)),
        _ => unreachable!(),
    };
    tell(add("top", "t", json!("")));
    tell(add("tmp", "o", json!(null)));
    let bitmap = json!({"node": "top", "name": "b"});
    tell(Ask("block-dirty-bitmap-add", bitmap.clone()));
    tell(export("top", true));
    place.io("nbd+unix:///top?socket=sock", &["write -P 5 0 256k"]);
    tell(Ask(
        "block-export-del",
        json!({"id": "top", "mode": "hard"}),
    ));
    tell(filter(json!({"bitmap": bitmap})));
    tell(snapshot(json!({"discard": "unmap"})));
    tell(export("cbw", true));
    tell(export("snap", true));
    assert!(!fails(&place, "read -P 5 0 256k"));
    assert!(fails(&place, "read 256k 64k"));
    place.io("nbd+unix:///cbw?socket=sock", &["write -P 6 0 1M"]);
    assert!(!fails(&place, "read -P 5 0 256k"));
    place.io("nbd+unix:///snap?socket=sock", &["discard 0 64k"]);
    assert!(fails(&place, "read 0 64k"));
    assert!(!fails(&place, "read -P 5 64k 64k"));
    daemon.end();
}

/// A disk, and a target that takes 64 KiB a second.
fn with_slow_target(place: &Place) -> crate::place::Daemon {
    place.img("create -q -f raw slow 1M");
    let mut daemon = place.ours(
        "--nbd-server addr.type=unix,addr.path=sock \
             --object throttle-group,id=g,limits.bps-total=65536 \
             --blockdev driver=throttle,node-name=to,throttle-group=g,file.driver=file,file.filename=slow \
             --blockdev driver=qcow2,node-name=top,file.driver=file,file.filename=t \
             --export nbd,id=e,node-name=top,name=,writable=on",
    );
    daemon.must("query-jobs", json!({}));
    daemon
}

const URI: &str = "nbd+unix:///?socket=sock";

#[test]
fn a_slow_target_holds_no_guest_up_and_gets_what_there_was() {
    let place = Place::new();
    let mut daemon = with_slow_target(&place);
    let backup = json!({"device": "top", "target": "to", "sync": "full", "job-id": "j"});
    daemon.must("blockdev-backup", backup);
    let begun = Instant::now();
    place.io(URI, &["write -P 9 0 1M", "flush"]);
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "the target takes 16 s"
    );
    let jobs = daemon.must("query-jobs", json!({}));
    assert_eq!(jobs[0]["status"], "running", "{jobs}");
    daemon.wait("j", "null");
    daemon.end();
    place.io(
        "slow",
        &[
            "read -P 1 0 128k",
            "read -P 2 128k 64k",
            "read -P 3 192k 192k",
            "read -P 0 384k 640k",
        ],
    );
    place.io("t", &["read -P 9 0 1M"]);
}

#[test]
fn a_backup_that_may_not_hold_guests_up_fails_where_there_is_no_room() {
    let place = Place::new();
    // More than is in flight at once.
    let mut daemon = place.ours(
        "--nbd-server addr.type=unix,addr.path=sock \
             --object throttle-group,id=g,limits.bps-total=4194304 \
             --blockdev driver=throttle,node-name=to,throttle-group=g,file.driver=null-co,file.size=64M \
             --blockdev driver=null-co,node-name=top,size=64M \
             --export nbd,id=e,node-name=top,name=,writable=on",
    );
    let fleecing = json!({"max-size": 65536, "when-full": "fail", "directory": "."});
    let backup = json!({
        "device": "top", "target": "to", "sync": "full", "job-id": "j", "auto-dismiss": false,
        "x-vellum-fleecing": fleecing,
    });
    daemon.must("blockdev-backup", backup.clone());
    let begun = Instant::now();
    place.io(URI, &["write -P 9 32M 16M", "flush"]);
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "the target takes 16 s"
    );
    daemon.wait("j", "concluded");
    let jobs = daemon.must("query-jobs", json!({}));
    assert_eq!(jobs[0]["error"], "No space left in the fleece", "{jobs}");
    daemon.must("job-dismiss", json!({"id": "j"}));
    let mut elsewhere = backup;
    elsewhere["x-vellum-fleecing"] = json!({"directory": "/no/such/directory"});
    let refused = daemon.ask("blockdev-backup", elsewhere);
    let text = refused["error"]["desc"].as_str().expect("a refusal");
    assert!(text.contains("No such file or directory"), "{text}");
    daemon.end();
}

#[test]
fn what_was_copied_may_be_discarded_only_if_nobody_else_writes() {
    let place = Place::new();
    let mut daemon = place.ours(SERVER);
    daemon.must("blockdev-add", qcow2("top", "t", json!("")));
    let mut to = qcow2("to", "o", json!(null));
    to["discard"] = json!("unmap");
    daemon.must("blockdev-add", to);
    let export = json!({"type": "nbd", "id": "e", "node-name": "top", "writable": true});
    daemon.must("block-export-add", export);
    let backup = json!({
        "device": "top", "target": "to", "sync": "full", "job-id": "j", "discard-source": true,
    });
    let refused = daemon.ask("blockdev-backup", backup.clone());
    let text = refused["error"]["desc"].as_str().expect("a refusal");
    assert!(text.contains("Permission conflict on node 'top'"), "{text}");
    daemon.must("block-export-del", json!({"id": "e", "mode": "hard"}));
    daemon.must("blockdev-backup", backup);
    daemon.wait("j", "null");
    daemon.end();
    place.io(
        "o",
        &[
            "read -P 1 0 128k",
            "read -P 2 128k 64k",
            "read -P 3 192k 192k",
        ],
    );
}
