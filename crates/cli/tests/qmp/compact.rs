//! `x-vellum-compact`: the file of a disk becomes short while its guest goes on.

use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use serde_json::{Value, json};

use super::place::{Daemon, Place};

const URI: &str = "nbd+unix:///d?socket=sock";
const MIB: u64 = 1 << 20;

/// An image `d` of which every second 64 KiB was given up, with a snapshot of some of it.
fn full_of_gaps() -> Place {
    let place = Place::new();
    place.img("create -q -f qcow2 d 64M");
    place.io("d", &["write -P 1 0 8M"]);
    place.img("snapshot -c first d");
    let writes: Vec<String> = (0..24)
        .map(|piece| format!("write -P {} {}M 1M", piece + 2, piece + 8))
        .collect();
    let discards: Vec<String> = (0..192)
        .map(|piece| format!("discard {}k 64k", 8192 + 128 * piece))
        .collect();
    let all: Vec<&str> = writes.iter().chain(&discards).map(String::as_str).collect();
    place.io("d", &all);
    place
}

fn start(place: &Place) -> Daemon {
    place.ours(
        "--nbd-server addr.type=unix,addr.path=sock \
             --blockdev driver=qcow2,node-name=d,discard=unmap,file.driver=file,file.filename=d \
             --export nbd,id=e,node-name=d,name=d,writable=on",
    )
}

/// The file is no longer than 1.05 of what it takes.
fn check_short(place: &Place) {
    let known = place.path("d").metadata().expect("the image");
    let (len_bytes, allocated_bytes) = (known.len(), known.blocks() * 512);
    assert!(
        len_bytes * 100 <= allocated_bytes * 105,
        "{len_bytes} bytes, of which {allocated_bytes} are taken"
    );
}

fn len_bytes(place: &Place) -> u64 {
    place.path("d").metadata().expect("the image").len()
}

/// A client that writes to the last part of the disk until it is ended.
struct Writer {
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Writer {
    fn start(place: &Place) -> Writer {
        let over = Arc::new(AtomicBool::new(false));
        let (is_over, folder) = (over.clone(), place.root().to_owned());
        // One that wrote more at once would go on at the begin of the disk.
        let words = "bench -f raw -w -n -t none -c 2000 -d 4 -s 4k -S 4k --pattern 77 -o 56M";
        let thread = std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let mut command = Command::new("qemu-img");
                command.args(words.split(' ')).arg(URI);
                let ended = command.current_dir(&folder).stdout(Stdio::null()).status();
                assert!(ended.expect("the program of `cargo xtask setup`").success());
            }
        });
        Writer { over, thread }
    }

    fn end(self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().expect("it is served");
    }
}

fn check_content(place: &Place, name: &str) {
    let mut reads = vec!["read -P 1 0 8M".to_owned()];
    for piece in 0..384 {
        let pattern = if piece % 2 == 0 { 0 } else { piece / 16 + 2 };
        reads.push(format!("read -P {pattern} {}k 64k", 8192 + 64 * piece));
    }
    let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
    place.io(name, &reads);
}

#[test]
fn the_file_gets_short_while_a_client_writes() {
    let place = full_of_gaps();
    let before = len_bytes(&place);
    assert!(before > 32 * MIB, "{before}");
    let mut daemon = start(&place);
    let client = Writer::start(&place);
    daemon.must(
        "x-vellum-compact",
        json!({"job-id": "c", "device": "d", "auto-dismiss": false}),
    );
    daemon.wait("c", "concluded");
    let jobs = daemon.must("query-jobs", json!({}));
    assert_eq!(jobs[0]["type"], "x-vellum-compact");
    assert_eq!(jobs[0].get("error"), None, "{jobs}");
    daemon.must("job-dismiss", json!({"id": "c"}));
    client.end();
    check_content(&place, URI);
    daemon.end();
    place.img("check d");
    check_short(&place);
    // 8 MiB of the snapshot, 12 MiB of data, what the client has written, and metadata.
    assert!(
        len_bytes(&place) < 30 * MIB,
        "{} of {before}",
        len_bytes(&place)
    );
    check_content(&place, "d");
    place.img("snapshot -a first d");
    place.io("d", &["read -P 1 0 8M", "read -P 0 8M 56M"]);
}

#[test]
fn a_kill_in_the_middle_costs_nothing() {
    for steps in [1, 3, 6] {
        let place = full_of_gaps();
        let mut daemon = start(&place);
        // Slow enough to be met in the middle.
        let arguments = json!({"job-id": "c", "device": "d", "speed": 4 * MIB});
        daemon.must("x-vellum-compact", arguments);
        let done = |daemon: &mut Daemon| -> u64 {
            let jobs: Value = daemon.must("query-jobs", json!({}));
            jobs[0]["current-progress"].as_u64().unwrap_or(u64::MAX)
        };
        while done(&mut daemon) < steps * MIB {}
        daemon.kill();
        check_content(&place, "d");
        // Clusters may be leaked, no more.
        place.img("check -q -r leaks d");
        check_content(&place, "d");
        let mut daemon = start(&place);
        daemon.must("x-vellum-compact", json!({"job-id": "c", "device": "d"}));
        daemon.wait("c", "null");
        daemon.end();
        place.img("check d");
        check_content(&place, "d");
        check_short(&place);
        assert!(len_bytes(&place) < 22 * MIB, "{}", len_bytes(&place));
    }
}

/// Discards that no flush has followed are gaps as well.
#[test]
fn what_a_client_has_just_discarded_is_cut_off() {
    let place = Place::new();
    place.img("create -q -f qcow2 d 64M");
    place.io("d", &["write -P 1 0 16M", "write -P 2 16M 16M"]);
    let mut daemon = start(&place);
    let client = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .current_dir(place.root())
        .args(["io", "-f", "raw", "-c", "discard 0 16M", URI])
        .stdout(Stdio::null())
        .status();
    assert!(client.expect("a client").success());
    daemon.must("x-vellum-compact", json!({"job-id": "c", "device": "d"}));
    daemon.wait("c", "null");
    let bytes = len_bytes(&place);
    assert!(bytes < 17 * MIB, "{bytes}");
    place.io(URI, &["read -P 0 0 16M", "read -P 2 16M 16M"]);
    daemon.end();
    place.img("check d");
}

/// What a kill has leaked keeps the file long, and the job says so.
#[test]
fn leaked_clusters_that_keep_the_file_long_are_told() {
    let place = Place::new();
    // An image of version 3 would tell the next open of them, which frees them.
    place.img("create -q -f qcow2 -o compat=0.10 d 64M");
    for kill in 0..4 {
        let daemon = start(&place);
        let writes = (8 * kill..8 * kill + 8).map(|n| format!("write -q {n}M 1M"));
        let writes: Vec<String> = writes.chain(["flush".to_owned()]).collect();
        let commands: Vec<&str> = writes.iter().map(String::as_str).collect();
        place.io(URI, &commands);
        daemon.kill();
    }
    let mut daemon = start(&place);
    let arguments = json!({"job-id": "c", "device": "d", "auto-dismiss": false});
    daemon.must("x-vellum-compact", arguments);
    daemon.wait("c", "concluded");
    let jobs = daemon.must("query-jobs", json!({}));
    let why = jobs[0]["error"].as_str().expect("a reason");
    assert!(why.contains("leaked clusters"), "{why}");
    assert!(why.contains("vellum check -r leaks"), "{why}");
    daemon.end();
    let vellum = env!("CARGO_BIN_EXE_vellum");
    let said = place.must(vellum, "compact d");
    assert!(said.contains("leaked clusters"), "{said}");
    place.must(vellum, "check -q -r leaks d");
    let said = place.must(vellum, "compact d");
    assert!(!said.contains("leaked clusters"), "{said}");
    place.img("check d");
    let bytes = len_bytes(&place);
    assert!(bytes < 33 * MIB, "{bytes}");
}

#[test]
fn a_job_that_is_cancelled_leaves_a_whole_image() {
    let place = full_of_gaps();
    let mut daemon = start(&place);
    let arguments = json!({"job-id": "c", "device": "d", "speed": 2 * MIB});
    daemon.must("x-vellum-compact", arguments);
    daemon.must("job-cancel", json!({"id": "c"}));
    daemon.wait("c", "null");
    check_content(&place, URI);
    daemon.end();
    place.img("check d");
    check_content(&place, "d");
}

#[test]
fn what_cannot_be_compacted_is_refused_at_once() {
    let place = Place::new();
    let mut daemon = place.ours(
        "--blockdev driver=qcow2,node-name=ro,read-only=on,file.driver=file,file.filename=b \
             --blockdev driver=raw,node-name=raw,file.driver=file,file.filename=o",
    );
    for (device, why) in [
        ("ro", "Node 'ro' is read-only"),
        (
            "raw",
            "Node 'raw' is no qcow2 image: only these are compacted",
        ),
    ] {
        let arguments = json!({"job-id": "c", "device": device});
        let refused = daemon.ask("x-vellum-compact", arguments);
        assert_eq!(refused["error"]["desc"], why, "{refused}");
    }
    let arguments = json!({"job-id": "c", "device": "nowhere"});
    let refused = daemon.ask("x-vellum-compact", arguments);
    assert!(refused.to_string().contains("nowhere"), "{refused}");
}

/// Limits have no file; a compaction is named to who wants to do something else with the disk.
#[test]
fn the_image_below_limits_is_compacted_and_others_are_told() {
    let place = full_of_gaps();
    place.img("create -q -f qcow2 copy 64M");
    let mut daemon = place.ours(
        "--object throttle-group,id=g \
             --blockdev driver=qcow2,node-name=d,discard=unmap,file.driver=file,file.filename=d \
             --blockdev driver=throttle,node-name=limits,throttle-group=g,file=d \
             --blockdev driver=qcow2,node-name=copy,file.driver=file,file.filename=copy",
    );
    let before = len_bytes(&place);
    let arguments = json!({"job-id": "c", "device": "limits", "speed": 1});
    daemon.must("x-vellum-compact", arguments);
    let mirror =
        |device: &str| json!({"job-id": "m", "device": device, "target": "copy", "sync": "full"});
    for (command, arguments) in [
        ("blockdev-mirror", mirror("d")),
        ("blockdev-mirror", mirror("limits")),
        ("block-commit", json!({"job-id": "m", "device": "d"})),
    ] {
        let refused = daemon.ask(command, arguments);
        let why = refused["error"]["desc"].as_str().unwrap_or_default();
        assert!(
            why.contains("compaction runs on node 'd'"),
            "{command}: {refused}"
        );
    }
    daemon.must("block-job-set-speed", json!({"device": "c", "speed": 0}));
    daemon.wait("c", "null");
    assert!(len_bytes(&place) < before, "{before}");
    daemon.end();
    place.img("check d");
    check_content(&place, "d");
}
