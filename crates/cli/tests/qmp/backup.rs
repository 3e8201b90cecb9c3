//! `blockdev-backup`, as backup tools use it.

use serde_json::{Value, json};

use crate::place::Step::{Ask, Wait};
use crate::place::{Daemon, Place, Step, add, qcow2, same, with};

fn backup(more: Value) -> Step {
    let arguments = with(
        json!({"device": "top", "target": "to", "sync": "full", "job-id": "j"}),
        more,
    );
    Ask("blockdev-backup", arguments)
}

fn bitmap(name: &str) -> Step {
    let arguments = json!({"node": "top", "name": name, "persistent": true});
    Ask("block-dirty-bitmap-add", arguments)
}

#[test]
fn what_is_wrong_with_a_backup_is_told_alike() {
    let small = json!({"driver": "null-co", "node-name": "small", "size": 65536});
    let null = json!({"driver": "null-co", "node-name": "null", "size": 1048576});
    let with_bitmap =
        |sync: &str, mode: &str| backup(json!({"bitmap": "a", "sync": sync, "bitmap-mode": mode}));
    let mut read_only = qcow2("ro", "b", json!(null));
    read_only["read-only"] = json!(true);
    let script = [
        add("top", "t", json!("")),
        add("to", "o", json!(null)),
        Ask("blockdev-add", small),
        Ask("blockdev-add", null),
        Ask("blockdev-add", read_only),
        Ask("blockdev-backup", json!({"device": "top", "target": "to"})),
        Ask(
            "blockdev-backup",
            json!({"device": "top", "target": "to", "sync": "full"}),
        ),
        backup(json!({"sync": "bad"})),
        backup(json!({"device": "no"})),
        backup(json!({"target": "no"})),
        backup(json!({"target": "top"})),
        backup(json!({"target": "small"})),
        backup(json!({"target": "ro"})),
        backup(json!({"target": "null", "compress": true})),
        backup(json!({"sync": "incremental"})),
        backup(json!({"sync": "bitmap"})),
        backup(json!({"sync": "incremental", "bitmap": "a"})),
        backup(json!({"bitmap": "a"})),
        backup(json!({"bitmap-mode": "always"})),
        bitmap("a"),
        backup(json!({"bitmap": "a"})),
        backup(json!({"sync": "bitmap", "bitmap": "a"})),
        with_bitmap("incremental", "always"),
        with_bitmap("none", "always"),
        with_bitmap("top", "never"),
        with_bitmap("full", "bad"),
        backup(json!({"x-perf": {"max-workers": 0}})),
        backup(json!({"x-perf": {"other": 0}})),
        backup(json!({"on-source-error": "bad"})),
        backup(json!({"job-id": "x", "speed": -1})),
        backup(json!({"other": 1})),
    ];
    same(&[], &script);
}

#[test]
fn backups_are_made_alike() {
    let named = |name: &str| json!({"node": "top", "name": name});
    let job = |id: &str| json!({"id": id});
    let script = [
        add("top", "t", json!("")),
        add("to", "o", json!(null)),
        bitmap("a"),
        bitmap("b"),
        backup(json!({
            "bitmap": "a", "bitmap-mode": "on-success", "auto-dismiss": false,
            "auto-finalize": false, "filter-node-name": "filter",
        })),
        Wait("j", "pending"),
        Ask("block-dirty-bitmap-clear", named("a")),
        Ask("block-dirty-bitmap-remove", named("a")),
        Ask("block-dirty-bitmap-clear", named("b")),
        Ask("blockdev-del", json!({"node-name": "to"})),
        Ask("job-finalize", job("j")),
        Wait("j", "concluded"),
        Ask("query-jobs", json!({})),
        Ask("query-block-jobs", json!({})),
        Ask("block-dirty-bitmap-clear", named("a")),
        Ask("job-dismiss", job("j")),
        backup(json!({"job-id": "k", "sync": "incremental", "bitmap": "a"})),
        Wait("k", "null"),
        backup(json!({"job-id": "l", "sync": "top"})),
        Wait("l", "null"),
        backup(json!({
            "job-id": "m", "sync": "bitmap", "bitmap": "b", "bitmap-mode": "never",
            "x-perf": {"max-workers": 3},
        })),
        Wait("m", "null"),
        backup(json!({"job-id": "n", "sync": "none", "auto-dismiss": false})),
        backup(json!({"job-id": "o"})),
        Ask("job-complete", job("n")),
        Ask("job-cancel", job("n")),
        Wait("n", "concluded"),
        Ask("query-jobs", json!({})),
        Ask("job-dismiss", job("n")),
        Ask("blockdev-del", json!({"node-name": "to"})),
        Ask("blockdev-del", json!({"node-name": "top"})),
    ];
    same(&[], &script);
}

pub const SERVER: &[&str] = &["--nbd-server", "addr.type=unix,addr.path=sock"];
pub const DISK: &str = "nbd+unix:///disk?socket=sock";

/// A daemon with an export `disk` of the image `d` as the node `top`, which holds sevens in
/// its first 2 MiB, and a node `to`.
fn serve(place: &Place, to: Value) -> Daemon {
    let mut daemon = place.ours(SERVER);
    daemon.must("blockdev-add", qcow2("top", "d", json!(null)));
    daemon.must("blockdev-add", to);
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "top", "name": "disk", "writable": true});
    daemon.must("block-export-add", export);
    daemon
}

pub fn disk() -> Place {
    let place = Place::new();
    place.img("create -q -f qcow2 d 8M");
    place.img("create -q -f qcow2 full 8M");
    place.io("d", &["write -P 7 0 2M", "write -P 8 4M 64k"]);
    place
}

fn begin(daemon: &mut Daemon, more: Value) {
    let Ask(command, arguments) = backup(more) else {
        unreachable!("it asks")
    };
    daemon.must(command, arguments);
}

#[test]
fn clients_write_while_they_are_backed_up() {
    let place = disk();
    let mut daemon = serve(&place, qcow2("to", "full", json!(null)));
    // After the first piece it would take days.
    begin(&mut daemon, json!({"speed": 1}));
    place.io(
        DISK,
        &[
            "write -P 9 0 64k",
            "write -P 10 1500k 1M",
            "write -z 4M 128k",
        ],
    );
    let refused = daemon.ask(
        "block_resize",
        json!({"node-name": "top", "size": 16 << 20}),
    );
    let text = "Node 'top' is busy: block device is in use by block job: backup";
    assert_eq!(refused["error"]["desc"], text);
    // It would write past the job.
    let debugger = json!({"driver": "blkdebug", "node-name": "debugger", "image": "top"});
    let refused = daemon.ask("blockdev-add", debugger);
    assert_eq!(refused["error"]["desc"], text);
    place.io(DISK, &["read -P 10 1500k 1M", "read -P 0 4M 128k"]);
    daemon.must("block-job-set-speed", json!({"device": "j", "speed": 0}));
    daemon.wait("j", "null");
    place.io(DISK, &["write -P 11 3M 64k"]);
    daemon.end();
    place.img("check -q full");
    place.img("check -q d");
    place.io(
        "full",
        &[
            "read -P 7 0 2M",
            "read -P 0 2M 2M",
            "read -P 8 4M 64k",
            "read -P 0 4160k 3936k",
        ],
    );
    place.io(
        "d",
        &[
            "read -P 9 0 64k",
            "read -P 10 1500k 1M",
            "read -P 0 4M 4M",
            "read -P 11 3M 64k",
        ],
    );
}

#[test]
fn a_chain_of_incremental_backups_is_the_disk() {
    let place = disk();
    place.img("create -q -f qcow2 -b full -F qcow2 inc");
    let mut daemon = serve(&place, qcow2("to", "full", json!(null)));
    let new = json!({"node": "top", "name": "a", "persistent": true});
    daemon.must("block-dirty-bitmap-add", new);
    begin(
        &mut daemon,
        json!({"bitmap": "a", "bitmap-mode": "on-success", "compress": true}),
    );
    daemon.wait("j", "null");
    daemon.must("blockdev-del", json!({"node-name": "to"}));
    place.io(
        DISK,
        &[
            "write -P 9 100k 100k",
            "write -z 1M 64k",
            "discard 1536k 64k",
        ],
    );
    // One that fails for want of space, and one that is given up, change nothing.
    let full = json!({"driver": "raw", "node-name": "none", "file": {"driver": "blkdebug",
        "image": {"driver": "null-co", "size": 8 << 20},
        "inject-error": [{"event": "pwritev", "iotype": "write", "errno": 28}]}});
    daemon.must("blockdev-add", full);
    let incremental = |id: &str, target: &str, speed: u64| json!({"job-id": id, "target": target, "sync": "incremental", "bitmap": "a", "speed": speed});
    begin(&mut daemon, incremental("none", "none", 0));
    daemon.wait("none", "null");
    daemon.must("blockdev-add", qcow2("inc", "inc", json!("")));
    begin(&mut daemon, incremental("given-up", "inc", 1));
    place.io(DISK, &["write -P 12 6M 64k"]);
    daemon.must("job-cancel", json!({"id": "given-up"}));
    daemon.wait("given-up", "null");
    begin(&mut daemon, incremental("whole", "inc", 0));
    daemon.wait("whole", "null");
    place.img("compare -q -U d inc");
    place.io(DISK, &["write -P 13 7M 64k"]);
    let events = daemon.end();
    let failed = events
        .iter()
        .find(|event| event["event"] == "BLOCK_JOB_ERROR");
    let data = json!({"device": "none", "operation": "write", "action": "report"});
    assert_eq!(failed.expect("a failure")["data"], data);
    place.img("check -q inc");
    // What was written since is what the next one has to copy.
    let words = ["bitmap", "--add", "d", "b"];
    place.img(&words);
    let map = place.img("map --output=json inc");
    assert!(map.contains("\"depth\": 0"), "{map}");
    let mut daemon = serve(&place, qcow2("inc", "inc", json!("")));
    place.img("create -q -f qcow2 -b inc -F qcow2 last");
    daemon.must("blockdev-add", qcow2("last", "last", json!("inc")));
    begin(&mut daemon, incremental("last", "last", 0));
    daemon.wait("last", "null");
    daemon.end();
    let map = place.img("map --output=json last");
    let map: Value = serde_json::from_str(&map).expect("JSON");
    let own = map.as_array().expect("extents").iter();
    let own: Vec<&Value> = own.filter(|extent| extent["depth"] == 0).collect();
    assert_eq!(own.len(), 1, "{own:?}");
    assert_eq!(
        (&own[0]["start"], &own[0]["length"]),
        (&json!(7 << 20), &json!(65536))
    );
    place.img("compare -q d last");
}

/// What a target has got and may lose again is still to be copied.
#[test]
fn a_bitmap_forgets_nothing_of_which_the_target_may_not_be_durable() {
    let place = disk();
    let to = json!({"driver": "qcow2", "node-name": "to", "file": {"driver": "blkdebug",
        "image": {"driver": "file", "filename": "full"},
        "inject-error": [{"event": "flush_to_disk", "iotype": "flush", "errno": 5}]}});
    let mut daemon = serve(&place, to);
    let new = json!({"node": "top", "name": "a", "persistent": true});
    daemon.must("block-dirty-bitmap-add", new);
    place.io(DISK, &["write -P 9 0 1M", "flush"]);
    let dirty_bytes = |daemon: &mut Daemon| {
        let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
        let mut nodes = nodes.as_array().expect("nodes").iter();
        let top = nodes.find(|node| node["node-name"] == "top").expect("it");
        top["dirty-bitmaps"][0]["count"].clone()
    };
    assert_eq!(dirty_bytes(&mut daemon), 1 << 20);
    begin(
        &mut daemon,
        json!({"sync": "bitmap", "bitmap": "a", "bitmap-mode": "always"}),
    );
    let ended = daemon.event("BLOCK_JOB_COMPLETED");
    assert_eq!(ended["error"], "Input/output error");
    daemon.wait("j", "null");
    assert_eq!(dirty_bytes(&mut daemon), 1 << 20);
    // The target cannot be closed cleanly, of which the daemon would tell.
    daemon.kill();
}

#[test]
fn a_target_on_the_disk_itself_shows_it_as_it_was() {
    let place = disk();
    place.img("create -q -f qcow2 -b d -F qcow2 fleece");
    let mut daemon = serve(&place, qcow2("to", "fleece", json!("top")));
    begin(&mut daemon, json!({"sync": "none"}));
    let export = json!({"type": "nbd", "id": "f", "node-name": "to", "name": "was"});
    daemon.must("block-export-add", export);
    place.io(
        DISK,
        &["write -P 9 32k 64k", "write -z 1M 1M", "write -P 10 3M 64k"],
    );
    let was = "nbd+unix:///was?socket=sock";
    let reads = ["read -P 7 0 2M", "read -P 0 2M 2M", "read -P 8 4M 64k"];
    let mut words = vec!["-r", "-f", "raw"];
    words.extend(reads.iter().flat_map(|read| ["-c", read]));
    words.push(was);
    let said = place.must("qemu-io", &words);
    assert!(!said.contains("failed"), "{said}");
    place.img(&["convert", "-f", "raw", "-O", "qcow2", was, "pulled"]);
    daemon.must("block-export-del", json!({"id": "f", "mode": "hard"}));
    daemon.must("job-cancel", json!({"id": "j"}));
    daemon.wait("j", "null");
    daemon.must("blockdev-del", json!({"node-name": "to"}));
    place.io(
        DISK,
        &["read -P 9 32k 64k", "read -P 0 1M 1M", "write -P 11 0 64k"],
    );
    daemon.end();
    place.io("pulled", &reads);
    place.img("check -q d");
}
