//! Jobs whose target is at a server that does not answer any more.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::place::{Daemon, Place, with};

/// Of which a job that is told to end must have ended.
const SOON: Duration = Duration::from_secs(2);
const GUEST: &str = "nbd+unix:///?socket=sock";

/// A server of the image `o`, raw, that can be stopped.
struct Target(Daemon);

impl Target {
    fn start(place: &Place) -> Target {
        place.img("create -q -f raw o 64M");
        Target(place.ours(&[
            "--blockdev",
            "file,node-name=o,filename=o",
            "--nbd-server",
            "addr.type=unix,addr.path=theirs",
            "--export",
            "nbd,id=e,node-name=o,name=,writable=on",
        ]))
    }

    fn signal(&self, place: &Place, signal: &str) {
        place.must("kill", &[signal, &self.0.child.id().to_string()]);
    }
}

/// A disk of 64 MiB with a guest, and the target as a node.
fn with_disk(place: &Place) -> Daemon {
    place.img("create -q -f qcow2 big 64M");
    place.io("big", &["write -P 1 0 64M"]);
    let mut daemon = place.ours(&[
        "--blockdev",
        "qcow2,node-name=disk,file.driver=file,file.filename=big",
        "--nbd-server",
        "addr.type=unix,addr.path=sock",
        "--export",
        "nbd,id=e,node-name=disk,name=,writable=on",
    ]);
    let server = json!({"type": "unix", "path": place.path("theirs")});
    let node = json!({"driver": "nbd", "node-name": "to", "server": server, "reconnect-delay": 30});
    daemon.must("blockdev-add", node);
    daemon
}

/// A job to a server that stops answering in the middle is cancelled: it ends soon, whoever
/// waits for it goes on, and the target may be written to until it answers.
fn cancel_in_the_middle(command: &str, more: Value) {
    let place = Place::new();
    let target = Target::start(&place);
    let mut daemon = with_disk(&place);
    let arguments = with(
        json!({"device": "disk", "target": "to", "sync": "full", "job-id": "j", "speed": 4 << 20}),
        more,
    );
    daemon.must(command, arguments);
    let begun = Instant::now();
    while daemon.must("query-block-jobs", json!({}))[0]["offset"] == 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{command}: no progress"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    target.signal(&place, "-STOP");
    daemon.must("block-job-set-speed", json!({"device": "j", "speed": 0}));
    std::thread::sleep(Duration::from_millis(300));
    // A guest's write, which may wait for what it overwrites.
    let mut guest = Command::new("qemu-io")
        .current_dir(place.folder.path())
        .args(["-f", "raw", "-c", "write -P 9 60M 64k", GUEST])
        .stdout(Stdio::null())
        .spawn()
        .expect("qemu-io");
    std::thread::sleep(Duration::from_millis(200));
    let asked = Instant::now();
    daemon.must("block-job-cancel", json!({"device": "j", "force": true}));
    assert!(
        daemon.wait_within("j", "null", SOON),
        "{command}: it goes on"
    );
    while guest.try_wait().expect("a child").is_none() {
        assert!(asked.elapsed() < SOON, "{command}: the guest waits");
        std::thread::sleep(Duration::from_millis(5));
    }
    // What is on its way may land at any time, so it is nobody else's yet.
    let busy = daemon.ask("blockdev-del", json!({"node-name": "to"}));
    assert!(busy["error"].is_object(), "{busy}");
    target.signal(&place, "-CONT");
    while daemon.ask("blockdev-del", json!({"node-name": "to"}))["error"].is_object() {
        assert!(
            asked.elapsed() < Duration::from_secs(20),
            "{command}: the target is kept"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    place.io(GUEST, &["read -P 9 60M 64k", "read -P 1 0 60M"]);
    daemon.end();
    target.0.end();
}

#[test]
fn a_backup_to_a_stalled_server_is_cancelled_soon() {
    cancel_in_the_middle("blockdev-backup", json!({}));
}

#[test]
fn so_is_one_for_which_the_guest_waits() {
    let direct = json!({"x-vellum-fleecing": {"enabled": false}});
    cancel_in_the_middle("blockdev-backup", direct);
}

#[test]
fn a_mirror_to_a_stalled_server_is_cancelled_soon() {
    cancel_in_the_middle("blockdev-mirror", json!({}));
    cancel_in_the_middle("blockdev-mirror", json!({"copy-mode": "write-blocking"}));
}
