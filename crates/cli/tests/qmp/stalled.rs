//! Jobs and exports of a server that does not answer any more.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vellum_testing::{Qmp, within};

use crate::place::{Daemon, Place, with};

/// Of which a job that is told to end must have ended.
pub const SOON: Duration = Duration::from_secs(2);
const GUEST: &str = "nbd+unix:///?socket=sock";

/// A server of the image `o`, raw, that can be stopped.
pub struct Target(pub Daemon);

impl Target {
    pub fn start(place: &Place) -> Target {
        place.img("create -q -f raw o 64M");
        Target(place.ours(
            "--blockdev file,node-name=o,filename=o \
             --nbd-server addr.type=unix,addr.path=theirs \
             --export nbd,id=e,node-name=o,name=,writable=on",
        ))
    }

    pub fn signal(&self, signal: &str) {
        self.0.running.signal(signal);
    }
}

/// A disk of 64 MiB with a guest, and the target as a node.
fn with_disk(place: &Place) -> Daemon {
    place.img("create -q -f qcow2 big 64M");
    place.io("big", &["write -P 1 0 64M"]);
    let mut daemon = place.ours(
        "--blockdev qcow2,node-name=disk,file.driver=file,file.filename=big \
             --nbd-server addr.type=unix,addr.path=sock \
             --export nbd,id=e,node-name=disk,name=,writable=on",
    );
    let server = json!({"type": "unix", "path": place.path("theirs")});
    let node = json!({"driver": "nbd", "node-name": "to", "server": server, "reconnect-delay": 30});
    daemon.must("blockdev-add", node);
    daemon
}

/// Has the job `j` wait for the server.
fn stall_in_the_middle(daemon: &mut Daemon, target: &Target) {
    until("the job copies", || {
        daemon.must("query-block-jobs", json!({}))[0]["offset"] != 0
    });
    target.signal("-STOP");
    daemon.must("block-job-set-speed", json!({"device": "j", "speed": 0}));
    std::thread::sleep(Duration::from_millis(300));
}

/// A server that is gone is waited for by guests, as long as `reconnect-delay` says, but not by
/// whoever ends the daemon.
#[test]
fn the_end_does_not_wait_for_a_server_that_is_gone() {
    let place = Place::new();
    let target = Target::start(&place);
    let mut daemon = with_disk(&place);
    let arguments =
        json!({"device": "disk", "target": "to", "sync": "full", "job-id": "j", "speed": 4 << 20});
    daemon.must("blockdev-mirror", arguments);
    until("the job copies", || {
        daemon.must("query-block-jobs", json!({}))[0]["offset"] != 0
    });
    target.0.kill();
    daemon.must("block-job-set-speed", json!({"device": "j", "speed": 0}));
    std::thread::sleep(Duration::from_millis(300));
    daemon.must("block-job-cancel", json!({"device": "j", "force": true}));
    assert!(daemon.wait_within("j", "null", SOON), "the job goes on");
    let asked = Instant::now();
    daemon.say("{\"execute\": \"quit\"}\n");
    // It fails, and says that the target was not closed cleanly.
    until("the daemon ends", || daemon.running.has_ended());
    let took = asked.elapsed();
    assert!(took < Duration::from_secs(8), "{took:?}");
    place.io("big", &["read -P 1 0 64M"]);
}

pub fn until(what: &str, is_so: impl FnMut() -> bool) {
    within(Duration::from_secs(20), what, is_so);
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
    stall_in_the_middle(&mut daemon, &target);
    // A guest's write, which may wait for what it overwrites.
    let mut guest = Command::new("qemu-io")
        .current_dir(place.root())
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
    target.signal("-CONT");
    until("the target is left", || {
        daemon.ask("blockdev-del", json!({"node-name": "to"}))["error"].is_null()
    });
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

/// A target that was opened for a job goes with it, also where it answers after the end of the job.
fn target_goes(command: &str) {
    let place = Place::new();
    let target = Target::start(&place);
    let mut daemon = with_disk(&place);
    daemon.must("blockdev-del", json!({"node-name": "to"}));
    let nodes = |daemon: &mut Daemon| {
        let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
        nodes.as_array().expect("a list").len()
    };
    let before = nodes(&mut daemon);
    let to = json!({"target": "nbd+unix:///?socket=theirs", "mode": "existing", "format": "raw"});
    let job = json!({"device": "disk", "sync": "full", "job-id": "j", "speed": 4 << 20});
    daemon.must(command, with(job, to));
    stall_in_the_middle(&mut daemon, &target);
    daemon.must("block-job-cancel", json!({"device": "j", "force": true}));
    assert!(
        daemon.wait_within("j", "null", SOON),
        "{command}: it goes on"
    );
    assert!(nodes(&mut daemon) > before, "{command}: the server has it");
    target.signal("-CONT");
    until("the target is closed", || nodes(&mut daemon) == before);
    daemon.end();
    target.0.end();
}

#[test]
fn what_was_opened_for_a_job_is_closed_when_it_answers() {
    target_goes("drive-backup");
    target_goes("drive-mirror");
}

#[test]
fn an_export_of_a_stalled_server_ends_behind_the_answer() {
    let place = Place::new();
    let target = Target::start(&place);
    let mut daemon = with_disk(&place);
    let export =
        json!({"type": "nbd", "id": "x", "node-name": "to", "name": "x", "writable": true});
    daemon.must("block-export-add", export.clone());
    target.signal("-STOP");
    let mut guest = Command::new("qemu-io")
        .current_dir(place.root())
        .args(["-f", "raw", "-c", "write -P 9 0 64k"])
        .arg("nbd+unix:///x?socket=sock")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("qemu-io");
    std::thread::sleep(Duration::from_millis(500));
    let asked = Instant::now();
    daemon.must("block-export-del", json!({"id": "x", "mode": "hard"}));
    let ending = daemon.must("query-block-exports", json!({}));
    assert!(asked.elapsed() < 2 * SOON, "monitors wait");
    let find = |exports: &Value| {
        let mut exports = exports.as_array().expect("a list").iter();
        exports.find(|one| one["id"] == "x").cloned()
    };
    let found = find(&ending).expect("it ends, and has not ended");
    assert_eq!(found["shutting-down"], true, "{found}");
    for (command, arguments) in [
        ("block-export-add", export),
        ("block-export-del", json!({"id": "x"})),
        ("blockdev-del", json!({"node-name": "to"})),
    ] {
        let refused = daemon.ask(command, arguments);
        assert!(refused["error"].is_object(), "{command}: {refused}");
    }
    target.signal("-CONT");
    assert_eq!(daemon.event("BLOCK_EXPORT_DELETED")["id"], "x");
    assert!(find(&daemon.must("query-block-exports", json!({}))).is_none());
    daemon.must("blockdev-del", json!({"node-name": "to"}));
    guest.kill().expect("a child");
    guest.wait().expect("a child");
    daemon.end();
    target.0.end();
}

/// Whoever has a node opened anew or closed that stands on a silent server waits for that, and nobody
/// else does.
#[test]
fn other_commands_are_answered_while_a_node_waits_for_its_server() {
    let place = Place::new();
    let target = Target::start(&place);
    place.img("create -q -f qcow2 big 64M");
    place.io("big", &["write -P 1 0 64M"]);
    let server = format!(
        "server.type=unix,server.path={}",
        place.path("theirs").display()
    );
    let node = format!("nbd,node-name=to,reconnect-delay=30,{server}");
    let mut daemon = place.ours(&[
        "--chardev",
        "socket,id=s,path=qmp,server=on,wait=off",
        "--monitor",
        "s",
        "--blockdev",
        "qcow2,node-name=disk,file.driver=file,file.filename=big",
        "--blockdev",
        &node,
        "--nbd-server",
        "addr.type=unix,addr.path=sock",
    ]);
    let mut other = Qmp::connect(place.path("qmp"));
    let mirror =
        json!({"device": "disk", "target": "to", "sync": "full", "job-id": "j", "speed": 4 << 20});
    daemon.must("blockdev-mirror", mirror);
    stall_in_the_middle(&mut daemon, &target);
    let path = json!({"type": "unix", "path": place.path("theirs")});
    let options =
        json!({"driver": "nbd", "node-name": "to", "server": path, "reconnect-delay": 30});
    other.send("blockdev-reopen", json!({"options": [options]}));
    std::thread::sleep(Duration::from_millis(300));
    daemon.must("query-block-jobs", json!({}));
    daemon.must("block-job-cancel", json!({"device": "j", "force": true}));
    target.signal("-CONT");
    let reopened = other.answer();
    assert!(reopened.get("return").is_some(), "{reopened}");

    let export =
        json!({"type": "nbd", "id": "x", "node-name": "to", "name": "x", "writable": true});
    until("the target is left", || {
        daemon.ask("block-export-add", export.clone())["error"].is_null()
    });
    place.io("nbd+unix:///x?socket=sock", &["write -P 9 0 64k"]);
    daemon.must("block-export-del", json!({"id": "x"}));
    daemon.event("BLOCK_EXPORT_DELETED");
    target.signal("-STOP");
    other.send("blockdev-del", json!({"node-name": "to"}));
    std::thread::sleep(Duration::from_millis(300));
    daemon.must("query-block-jobs", json!({}));
    target.signal("-CONT");
    let removed = other.answer();
    assert!(removed.get("return").is_some(), "{removed}");
    daemon.end();
    target.0.end();
}

/// Has another client ask for something while the server is silent, and a guest waits for that, if there is
/// an export: others are answered meanwhile.
fn ask_of_silent(
    (place, target): (&Place, &Target),
    (daemon, other): (&mut Daemon, &mut Qmp),
    (command, arguments): (&str, Value),
) {
    let exports = daemon.must("query-block-exports", json!({}));
    target.signal("-STOP");
    let guest = (exports != json!([])).then(|| {
        let mut program = Command::new("qemu-io");
        let program = program.current_dir(place.root());
        let program = program.args(["-f", "raw", "-c", "read -P 7 0 64k", GUEST]);
        let program = program.stdout(Stdio::null());
        program.spawn().expect("qemu-io")
    });
    std::thread::sleep(Duration::from_millis(300));
    other.send(command, arguments);
    std::thread::sleep(Duration::from_millis(300));
    daemon.must("query-block", json!({}));
    daemon.must(
        "blockdev-add",
        json!({"driver": "null-co", "node-name": "more"}),
    );
    daemon.must("query-named-block-nodes", json!({}));
    daemon.must("blockdev-del", json!({"node-name": "more"}));
    target.signal("-CONT");
    let done = other.answer();
    assert!(done.get("return").is_some(), "{command}: {done}");
    let ended = guest.map(|mut guest| guest.wait().expect("a child"));
    assert!(ended.is_none_or(|it| it.success()), "{command}");
}

/// A daemon with a new image on the server `theirs` as its node `to`, and a second monitor.
fn with_an_image_there(place: &Place) -> Daemon {
    place.img("create -q -f qcow2 nbd+unix:///?socket=theirs 1M");
    let server = place.name("theirs");
    let node = format!(
        "qcow2,node-name=to,file.driver=nbd,file.server.type=unix,file.server.path={server}"
    );
    place.ours(&[
        "--chardev",
        "socket,id=s,path=qmp,server=on,wait=off",
        "--monitor",
        "s",
        "--blockdev",
        &node,
        "--nbd-server",
        "addr.type=unix,addr.path=sock",
    ])
}

/// Whoever asks for a snapshot or another size of a disk waits as long as its server is silent, and nobody
/// else does.
#[test]
fn other_commands_are_answered_while_a_disk_is_changed_whose_server_is_silent() {
    let place = Place::new();
    let target = Target::start(&place);
    let mut daemon = with_an_image_there(&place);
    let mut other = Qmp::connect(place.path("qmp"));
    let internal = |name: &str| json!({"device": "to", "name": name});
    let resize = json!({"node-name": "to", "size": 2 << 20});
    let two = json!({"type": "blockdev-snapshot-internal-sync", "data": internal("two")});
    let over = json!({
        "node-name": "to", "snapshot-file": "over", "snapshot-node-name": "over", "format": "qcow2",
    });
    // An export forbids that.
    let both = (&place, &target);
    ask_of_silent(both, (&mut daemon, &mut other), ("block_resize", resize));
    let export = json!({"type": "nbd", "id": "e", "node-name": "to", "name": "", "writable": true});
    daemon.must("block-export-add", export);
    place.io(GUEST, &["write -P 7 0 64k"]);
    for asked in [
        ("blockdev-snapshot-internal-sync", internal("one")),
        ("transaction", json!({"actions": [two]})),
        ("blockdev-snapshot-delete-internal-sync", internal("one")),
        ("blockdev-snapshot-sync", over),
    ] {
        ask_of_silent(both, (&mut daemon, &mut other), asked);
    }
    place.io(GUEST, &["read -P 7 0 64k", "write -P 8 1M 64k"]);
    // The end of the daemon does not wait for such a command.
    target.signal("-STOP");
    other.send("blockdev-snapshot-delete-internal-sync", internal("two"));
    std::thread::sleep(Duration::from_millis(300));
    daemon.say("{\"execute\": \"quit\"}");
    let refused = other.answer();
    assert!(refused.get("error").is_some(), "{refused}");
    target.signal("-CONT");
    daemon.answer();
    daemon.wait_for_exit();
    target.0.end();
}

/// So does whoever changes bitmaps of a disk, or has it become inactive.
#[test]
fn other_commands_are_answered_while_bitmaps_are_changed_of_a_silent_server() {
    let place = Place::new();
    let target = Target::start(&place);
    let mut daemon = with_an_image_there(&place);
    place.img("create -q -f raw copy 1M");
    let copy = json!({"driver": "file", "node-name": "copy", "filename": "copy"});
    daemon.must("blockdev-add", copy);
    let mut other = Qmp::connect(place.path("qmp"));
    let named = json!({"node": "to", "name": "b"});
    let merge = json!({"node": "to", "target": "b", "bitmaps": ["c"]});
    let activity = |active: bool| json!({"node-name": "to", "active": active});
    let persistent = |name: &str| json!({"node": "to", "name": name, "persistent": true});
    let export = json!({"type": "nbd", "id": "e", "node-name": "to", "bitmaps": ["c"]});
    let export = with(export, json!({"writable": true}));
    let backup = json!({"job-id": "j", "device": "to", "target": "copy", "sync": "bitmap",
        "bitmap": "b", "bitmap-mode": "on-success", "auto-finalize": false});
    let stream = json!({"job-id": "s", "device": "to"});
    for (command, arguments) in [
        ("block-dirty-bitmap-add", persistent("b")),
        ("block-dirty-bitmap-add", persistent("c")),
        ("block-dirty-bitmap-clear", named.clone()),
        ("block-dirty-bitmap-merge", merge),
        ("block-dirty-bitmap-disable", named.clone()),
        ("x-debug-block-dirty-bitmap-sha256", named.clone()),
        ("query-named-block-nodes", json!({})),
        ("block-dirty-bitmap-enable", named.clone()),
        ("block-export-add", export),
        ("block-export-del", json!({"id": "e"})),
        ("blockdev-backup", backup),
        ("job-finalize", json!({"id": "j"})),
        ("block-stream", stream),
        ("block-dirty-bitmap-remove", named),
        ("blockdev-set-active", activity(false)),
        ("blockdev-set-active", activity(true)),
    ] {
        target.signal("-STOP");
        other.send(command, arguments);
        std::thread::sleep(Duration::from_millis(300));
        let null = json!({"driver": "null-co", "node-name": "more"});
        daemon.must("blockdev-add", null);
        daemon.must("blockdev-del", json!({"node-name": "more"}));
        target.signal("-CONT");
        let done = other.answer();
        assert!(done.get("return").is_some(), "{command}: {done}");
        match command {
            "blockdev-backup" => daemon.wait("j", "pending"),
            "job-finalize" => daemon.wait("j", "null"),
            "block-stream" => daemon.wait("s", "null"),
            _ => {}
        }
    }
    daemon.end();
    target.0.end();
}

/// A stream that is cancelled while the server of its backing file is silent leaves its nodes once that answers.
/// Until then commands about other disks are answered.
#[test]
fn other_commands_are_answered_while_a_cancelled_stream_waits_for_its_server() {
    let place = Place::new();
    let target = Target::start(&place);
    place.io("nbd+unix:///?socket=theirs", &["write -P 1 0 64M"]);
    place.img("create -q -f qcow2 -u -b base -F raw top 64M");
    place.img("create -q -f qcow2 other 64M");
    let server = place.name("theirs");
    let below = "qcow2,node-name=disk,file.driver=file,file.filename=top,backing.driver=raw,\
                 backing.file.driver=nbd,backing.file.server.type=unix,backing.file.server.path=";
    let mut daemon = place.ours(&[
        "--blockdev",
        &format!("{below}{server}"),
        "--blockdev",
        "qcow2,node-name=other,file.driver=file,file.filename=other",
        "--nbd-server",
        "addr.type=unix,addr.path=sock",
    ]);
    let stream = json!({"device": "disk", "job-id": "j", "speed": 4 << 20});
    daemon.must("block-stream", stream);
    stall_in_the_middle(&mut daemon, &target);
    daemon.must("block-job-cancel", json!({"device": "j"}));
    std::thread::sleep(Duration::from_millis(300));
    let asked = Instant::now();
    daemon.must("query-block-jobs", json!({}));
    daemon.must("query-named-block-nodes", json!({}));
    let null = json!({"driver": "null-co", "node-name": "more"});
    daemon.must("blockdev-add", null);
    daemon.must("blockdev-del", json!({"node-name": "more"}));
    let over = json!({
        "node-name": "other", "snapshot-file": "over", "snapshot-node-name": "over", "format": "qcow2",
    });
    daemon.must("blockdev-snapshot-sync", over);
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "over", "name": "over", "writable": true});
    daemon.must("block-export-add", export);
    place.io("nbd+unix:///over?socket=sock", &["write -P 2 0 64k"]);
    daemon.must("block-export-del", json!({"id": "e"}));
    assert!(asked.elapsed() < SOON, "{:?}", asked.elapsed());
    target.signal("-CONT");
    daemon.wait("j", "null");
    daemon.end();
    target.0.end();
}
