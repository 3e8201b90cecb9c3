//! Exports of the daemon that the daemon itself uses, by its nodes and its jobs: nothing waits for
//! itself (QEMU #3169, #2179).

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::backup::SERVER;
use crate::place::{Daemon, Place, qcow2};

fn export(daemon: &mut Daemon, node: &str) {
    let export = json!({"type": "nbd", "id": node, "node-name": node, "name": node,
        "writable": true});
    daemon.must("block-export-add", export);
}

/// The options of a node that is the daemon's own export of another one.
fn own_export(name: &str) -> Value {
    json!({"driver": "nbd", "server": {"type": "unix", "path": "sock"}, "export": name})
}

/// A client that reads and writes an export for some seconds, at most as often as `rounds`.
fn client(place: &Place, name: &str, rounds: usize) -> Child {
    let uri = format!("nbd+unix:///{name}?socket=sock");
    let commands = ["read 0 1M", "write 64k 64k", "flush"];
    let mut words = vec!["-f", "raw"];
    for _ in 0..rounds {
        words.extend(commands.iter().flat_map(|command| ["-c", command]));
    }
    words.push(&uri);
    Command::new("qemu-io")
        .current_dir(place.root())
        .args(words)
        .stdout(Stdio::null())
        .spawn()
        .expect("qemu-io")
}

fn end_all(clients: Vec<Child>) {
    for mut client in clients {
        let status = client.wait().expect("a child");
        assert!(status.success(), "{status}");
    }
}

/// An image `top` that stands on the daemon's own export of `base`, both used by clients.
fn on_own_export(place: &Place) -> Daemon {
    let mut daemon = place.ours(SERVER);
    daemon.must("blockdev-add", qcow2("base", "b", json!(null)));
    export(&mut daemon, "base");
    let backing = json!({"driver": "raw", "node-name": "far", "file": own_export("base")});
    daemon.must("blockdev-add", qcow2("top", "m", backing));
    export(&mut daemon, "top");
    daemon
}

#[test]
fn an_image_stands_on_an_export_of_the_same_daemon() {
    let place = Place::new();
    let mut daemon = on_own_export(&place);
    let clients = vec![client(&place, "top", 100), client(&place, "base", 100)];
    daemon.must("blockdev-add", qcow2("over", "o", json!(null)));
    let snapshot = json!({"node": "base", "overlay": "over"});
    daemon.must("blockdev-snapshot", snapshot);
    let stream = json!({"device": "top", "job-id": "s"});
    daemon.must("block-stream", stream);
    daemon.wait("s", "null");
    let commit = json!({"device": "over", "job-id": "c"});
    daemon.must("block-commit", commit);
    daemon.wait("c", "ready");
    daemon.must("job-complete", json!({"id": "c"}));
    daemon.wait("c", "null");
    end_all(clients);
    daemon.end();
    place.img("check -q m");
    place.img("check -q b");
}

#[test]
fn a_daemon_ends_well_that_is_its_own_client() {
    let place = Place::new();
    place.img("create -q -f raw far 8M");
    let mut daemon = place.ours(SERVER);
    let far = json!({"driver": "file", "node-name": "file", "filename": "far"});
    daemon.must("blockdev-add", far);
    export(&mut daemon, "file");
    place.img("create -q -f qcow2 nbd+unix:///file?socket=sock 1M");
    let mut image = qcow2("image", "", json!(null));
    image["file"] = own_export("file");
    daemon.must("blockdev-add", image);
    export(&mut daemon, "image");
    // What is not flushed yet: it is written, at the latest, when the image is closed.
    let uri = "nbd+unix:///image?socket=sock";
    place.io(uri, &["write -P 7 4k 4k"]);
    daemon.end();
    place.io("far", &["read -P 7 4k 4k"]);
    place.img("check -q -f qcow2 far");
}

#[test]
fn both_ends_of_an_own_export_are_held_at_one_moment() {
    let place = Place::new();
    let mut daemon = on_own_export(&place);
    let names = ["top", "top", "top", "base"];
    let clients = names.map(|name| client(&place, name, 150));
    for round in 0..40 {
        let bitmap = |node: &str| {
            let data = json!({"node": node, "name": format!("{node}{round}")});
            json!({"type": "block-dirty-bitmap-add", "data": data})
        };
        let actions = json!([bitmap("base"), bitmap("top")]);
        daemon.must("transaction", json!({"actions": actions}));
    }
    end_all(Vec::from(clients));
    daemon.end();
}

#[test]
fn jobs_write_to_an_export_of_the_same_daemon() {
    for command in ["blockdev-mirror", "blockdev-backup"] {
        let place = Place::new();
        let mut daemon = place.ours(SERVER);
        daemon.must("blockdev-add", qcow2("top", "b", json!(null)));
        daemon.must("blockdev-add", qcow2("to", "o", json!(null)));
        export(&mut daemon, "top");
        export(&mut daemon, "to");
        let mut far = own_export("to");
        far["node-name"] = json!("far");
        daemon.must("blockdev-add", far);
        let clients = vec![client(&place, "top", 30)];
        let job = json!({"device": "top", "target": "far", "sync": "full", "job-id": "j"});
        daemon.must(command, job);
        if command == "blockdev-mirror" {
            daemon.wait("j", "ready");
            daemon.must("job-complete", json!({"id": "j"}));
        }
        daemon.wait("j", "null");
        end_all(clients);
        // Whoever goes on with its own export ends before that does.
        daemon.must("block-export-del", json!({"id": "top", "mode": "hard"}));
        daemon.must("blockdev-del", json!({"node-name": "far"}));
        daemon.end();
        place.img("check -q o");
    }
}

/// Reads a file over and over.
struct Reader {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<u64>,
}

impl Reader {
    fn start(path: PathBuf) -> Reader {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut rounds = 0;
            while !stopped.load(Ordering::Relaxed) {
                assert_eq!(std::fs::read(&path).expect("it is mounted").len(), 1 << 20);
                rounds += 1;
            }
            rounds
        });
        Reader { stop, thread }
    }

    /// How often it was read.
    fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("a reader")
    }
}

#[test]
fn a_file_that_shows_a_disk_is_read_while_that_is_streamed() {
    let place = Place::new();
    let mut daemon = place.ours("");
    daemon.must("blockdev-add", qcow2("top", "t", json!("")));
    place.write("disk", b"");
    let export = json!({"type": "fuse", "id": "e", "node-name": "top", "mountpoint": "disk",
        "writable": true});
    daemon.must("block-export-add", export);
    let reader = Reader::start(place.path("disk"));
    let stream = json!({"device": "top", "job-id": "j", "speed": 1 << 20});
    daemon.must("block-stream", stream);
    daemon.must("block-job-set-speed", json!({"device": "j", "speed": 0}));
    daemon.wait("j", "null");
    // The daemon itself reads and writes the file, too.
    let own = json!({"driver": "file", "node-name": "own", "filename": "disk",
        "locking": "off"});
    daemon.must("blockdev-add", own);
    daemon.must("blockdev-add", qcow2("to", "o", json!(null)));
    let backup = json!({"device": "own", "target": "to", "sync": "full", "job-id": "k"});
    daemon.must("blockdev-backup", backup);
    daemon.wait("k", "null");
    daemon.must("blockdev-del", json!({"node-name": "own"}));
    assert!(reader.end() > 0);
    daemon.must("block-export-del", json!({"id": "e"}));
    daemon.end();
    let words = ["compare", "-q", "t", "o"];
    place.img(&words);
}
