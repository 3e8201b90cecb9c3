//! `--config`: what it says is served, and its changes come into force under clients.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use serde_json::json;

use crate::place::{Place, VELLUM};
use vellum_testing::Qmp;

const DAEMON: &str = "[daemon]\nmonitors = ['qmp.sock']\nnbd = { path = 'nbd.sock' }\n";

/// A disk of an image of the same name, with an export.
fn disk(name: &str, more: &str) -> String {
    format!(
        "[[disk]]\nname = '{name}'\nimage = '{name}'\nformat = 'qcow2'\n{more}\n\
         [[disk.export]]\ntype = 'nbd'\nname = '{name}'\nwritable = true\n"
    )
}

/// A client that writes and reads a disk without an end, through one connection.
struct Busy {
    child: Child,
    over: Arc<AtomicBool>,
    working: JoinHandle<usize>,
}

impl Busy {
    fn begin(place: &Place, export: &str) -> Busy {
        let uri = format!("nbd+unix:///{export}?socket=nbd.sock");
        let mut child = Command::new("qemu-io")
            .current_dir(place.root())
            .args(["-f", "raw", &uri])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io; run `cargo xtask setup`");
        let mut input = child.stdin.take().expect("a pipe");
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let over = Arc::new(AtomicBool::new(false));
        let until = over.clone();
        let working = std::thread::spawn(move || {
            let mut rounds = 0;
            while !until.load(Ordering::SeqCst) {
                let byte = rounds % 250 + 1;
                for (command, done) in [("write", "wrote"), ("read", "read")] {
                    writeln!(input, "{command} -P {byte} 64k 4k").expect("it listens");
                    let mut line = String::new();
                    output.read_line(&mut line).expect("an answer");
                    assert!(
                        line.contains(&format!("{done} 4096/4096")),
                        "round {rounds}: {line}"
                    );
                    output.read_line(&mut line).expect("an answer");
                }
                rounds += 1;
            }
            rounds
        });
        Busy {
            child,
            over,
            working,
        }
    }

    /// How many rounds it has gone.
    fn end(mut self) -> usize {
        self.over.store(true, Ordering::SeqCst);
        let rounds = self.working.join().expect("every request has succeeded");
        self.child.wait().expect("a child");
        rounds
    }
}

#[test]
fn what_would_be_done_is_told_and_nothing_is_opened() {
    let place = Place::new();
    place.write("disks.toml", &(DAEMON.to_owned() + &disk("nowhere", "")));
    let told = place.must(VELLUM, "daemon --config disks.toml --check");
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines.len(), 4, "{told}");
    assert_eq!(lines[0], "disks.toml:2: a monitor at qmp.sock");
    assert!(lines[1].starts_with("disks.toml:3: {\"execute\":\"nbd-server-start\""));
    assert!(lines[2].starts_with("disks.toml:5: {\"execute\":\"blockdev-add\""));
    assert!(lines[3].starts_with("disks.toml:9: {\"execute\":\"block-export-add\""));
    assert!(!place.has("qmp.sock") && !place.has("nbd.sock"));

    place.write(
        "wrong.toml",
        "[[disk]]\nname = 'a'\nimag = 'a'\nformat = 'raw'\n",
    );
    for words in [&["--check"][..], &[]] {
        let words = [&["daemon", "--config", "wrong.toml"][..], words].concat();
        let output = place.run(VELLUM, &words);
        let said = output.err;
        assert_eq!(output.code, Some(1), "{said}");
        let expected = "vellum daemon: wrong.toml:1:1: 'image' is missing in disk 'a'";
        assert!(said.starts_with(expected), "{said}");
    }
}

#[test]
fn a_start_that_fails_names_the_line() {
    let place = Place::new();
    let text = DAEMON.to_owned() + &disk("a", "") + &disk("nowhere", "");
    place.write("disks.toml", &text);
    let output = place.run(VELLUM, "daemon --config disks.toml");
    let said = output.err;
    assert_eq!(output.code, Some(1), "{said}");
    let expected = "disks.toml:14:8: disk 'nowhere': Could not open 'nowhere': No such file";
    assert!(said.contains(expected), "{said}");

    // The others are served if the file says so, and what failed is tried again.
    let text = text.replace("[daemon]\n", "[daemon]\non-error = 'report'\n");
    place.write("disks.toml", &text);
    let service = place.start(&["--config", "disks.toml"]);
    let told = service.wait_told("READY=1");
    let expected = "STATUS=1 disks, 1 exports; 1 not as wanted: disks.toml:15:8: disk 'nowhere'";
    assert!(told.contains(expected), "{told}");
    assert!(
        service.log().contains("disks.toml:15:8: disk 'nowhere'"),
        "{}",
        service.log()
    );
    place.io("a", &["write 0 4k"]);
    assert_eq!(service.log().lines().count(), 1, "{}", service.log());
    std::fs::rename(place.path("d"), place.path("nowhere")).expect("an image");
    let told = service.reload();
    assert!(told.contains("STATUS=2 disks, 2 exports"), "{told}");
    place.io("nowhere", &["write 0 4k"]);
    service.end();
}

#[test]
fn changes_come_into_force_under_a_client() {
    let place = Place::new();
    let limits = |iops: u32| format!("[throttle.t]\niops-total = {iops}\n");
    let write =
        |parts: &[String]| place.write("disks.toml", &(DAEMON.to_owned() + &parts.concat()));
    let limited = disk("a", "throttle = 't'");
    write(&[limits(100_000), limited.clone(), disk("b", "")]);
    let service = place.serve("--config disks.toml");
    let mut monitor = place.monitor();
    assert_eq!(monitor.exports(), ["a-nbd", "b-nbd"]);
    let busy = Busy::begin(&place, "a");

    // Nothing is different.
    let told = service.reload();
    assert!(told.contains("STATUS=2 disks, 2 exports"), "{told}");

    // Limits, an option of the node in use, and disks that come and go.
    write(&[
        limits(90_000),
        disk("c", ""),
        disk("a", "throttle = 't'\ndiscard = 'unmap'"),
    ]);
    service.reload();
    assert_eq!(monitor.exports(), ["a-nbd", "c-nbd"]);
    let limit = json!({"path": "/objects/t", "property": "limits"});
    assert_eq!(monitor.must("qom-get", limit)["iops-total"], 90_000);
    place.io("c", &["write -P 7 0 4k", "read -P 7 0 4k"]);

    // One that cannot be: what it concerns stays, and the rest comes.
    write(&[
        limits(80_000),
        limited.replace("'t'", "'t'\noptions = { lazy-refcounts = true }"),
        disk("c", "").replace("image = 'c'", "image = 'nowhere'"),
        disk("d", ""),
    ]);
    let told = service.reload();
    assert!(told.contains("1 not as wanted"), "{told}");
    assert!(
        service.log().contains("disk 'c': Could not open 'nowhere'"),
        "{}",
        service.log()
    );
    assert_eq!(monitor.exports(), ["a-nbd", "c-nbd", "d-nbd"]);
    place.io("c", &["read -P 7 0 4k"]);

    // A file that cannot be understood changes nothing.
    place.write("disks.toml", "[[disk]\n");
    let told = service.reload();
    assert!(
        told.contains("STATUS=not reloaded: disks.toml:1:"),
        "{told}"
    );
    assert_eq!(monitor.exports(), ["a-nbd", "c-nbd", "d-nbd"]);

    assert!(busy.end() > 0);
    service.end();
}

#[test]
fn what_clients_did_is_met_as_they_left_it() {
    let place = Place::new();
    place.write(
        "disks.toml",
        &(DAEMON.to_owned() + &disk("a", "") + &disk("b", "")),
    );
    let service = place.serve("--config disks.toml");
    let mut monitor = place.monitor();
    // An overlay that a client has put over a disk is what the disk's export shows.
    let snapshot = json!({
        "node-name": "a", "snapshot-file": "over", "snapshot-node-name": "over", "format": "qcow2",
    });
    monitor.must("blockdev-snapshot-sync", snapshot);
    place.io("a", &["write -P 9 0 4k"]);
    // An export that a client has removed comes back.
    monitor.must("block-export-del", json!({"id": "b-nbd"}));
    let text =
        DAEMON.to_owned() + &disk("a", "").replace("writable", "description = 'x'\nwritable");
    place.write("disks.toml", &(text + &disk("b", "")));
    let told = service.reload();
    assert!(
        told.contains("STATUS=2 disks, 2 exports\n") || told.ends_with("exports"),
        "{told}"
    );
    place.io("a", &["read -P 9 0 4k"]);
    place.io("b", &["read 0 4k"]);
    let exports = monitor.must("query-block-exports", json!({}));
    let shown = exports
        .as_array()
        .expect("a list")
        .iter()
        .find(|one| one["id"] == "a-nbd");
    assert_eq!(shown.expect("it is there")["node-name"], "over");

    // Its image cannot be another one under that overlay: all stays.
    place.write(
        "disks.toml",
        &(DAEMON.to_owned() + &disk("a", "").replace("image = 'a'", "image = 'c'")),
    );
    let told = service.reload();
    assert!(told.contains("1 not as wanted"), "{told}");
    place.io("a", &["read -P 9 0 4k"]);
    assert_eq!(monitor.exports(), ["a-nbd"]);
    service.end();
}

#[test]
fn monitors_come_with_a_new_file() {
    let place = Place::new();
    place.write("disks.toml", DAEMON);
    let service = place.serve("--config disks.toml");
    place.monitor();
    let more = DAEMON.replace("['qmp.sock']", "['qmp.sock', 'second.sock']");
    place.write("disks.toml", &more);
    service.reload();
    let mut second = Qmp::connect(place.path("second.sock"));
    assert_eq!(second.exports(), [""; 0]);
    place.write("disks.toml", DAEMON);
    service.reload();
    assert!(
        service.log().contains("second.sock ends with the daemon"),
        "{}",
        service.log()
    );
    service.end();
    assert!(!place.has("second.sock"));
}

#[test]
fn overlays_of_one_image_are_opened_anew_under_a_client() {
    let place = Place::new();
    place.must(VELLUM, "io -c 'write -q -P 5 0 1M' d");
    for name in ["a", "b", "c"] {
        let words = [
            "create", "-q", "-f", "qcow2", "-b", "d", "-F", "qcow2", name,
        ];
        place.must(VELLUM, &words);
    }
    let disks = |more: &str| {
        let disks: String = ["a", "b", "c"].map(|name| disk(name, more)).concat();
        DAEMON.to_owned() + "[throttle.t]\niops-total = 100000\n" + &disks
    };
    place.write("disks.toml", disks("throttle = 't'"));
    let service = place.serve("--config disks.toml");
    let busy = Busy::begin(&place, "a");
    place.write(
        "disks.toml",
        disks("throttle = 't'\ndiscard = 'unmap'\ncache = 'none'"),
    );
    let told = service.reload();
    assert!(
        told.trim_end().ends_with("STATUS=3 disks, 3 exports"),
        "{told} {}",
        service.log()
    );
    assert!(busy.end() > 0);
    place.io("a", &["read -P 5 128k 64k"]);
    place.io("b", &["read -P 5 0 1M"]);

    // Another base for one of them, by its name in the file.
    let base = "[[disk]]\nname = 'd'\nimage = 'd'\nformat = 'qcow2'\nread-only = true\n";
    let named = disks("throttle = 't'\noptions = { backing = 'd' }");
    place.write("disks.toml", &(named + base));
    let told = service.reload();
    assert!(
        told.trim_end().ends_with("STATUS=4 disks, 3 exports"),
        "{told} {}",
        service.log()
    );
    place.io("c", &["read -P 5 0 1M"]);
    service.end();
}

/// A disk that cannot go because a job works on it keeps its clients.
#[test]
fn a_reload_that_a_job_makes_impossible_hangs_up_on_nobody() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.must(VELLUM, &["create", "-q", "-f", "qcow2", name, "64M"]);
    }
    place.write("disks.toml", &(DAEMON.to_owned() + &disk("a", "")));
    let service = place.serve("--config disks.toml");
    let mut monitor = place.monitor();
    let file = json!({"driver": "file", "filename": "b"});
    let target = json!({"driver": "qcow2", "node-name": "to", "file": file});
    monitor.must("blockdev-add", target);
    // After the first piece it would take days.
    place.io("a", &["write -P 9 0 16M"]);
    let backup = json!({
        "job-id": "j", "device": "a", "target": "to", "sync": "full", "speed": 1,
        "auto-dismiss": false,
    });
    monitor.must("blockdev-backup", backup);
    let busy = Busy::begin(&place, "a");
    let other = disk("a", "").replace("image = 'a'", "image = 'c'");
    place.write("disks.toml", &(DAEMON.to_owned() + &other));
    let told = service.reload();
    assert!(told.contains("1 not as wanted"), "{told}");
    let log = service.log();
    assert!(
        log.contains("block device is in use by block job: backup"),
        "{log}"
    );
    assert!(busy.end() > 0);
    // Once it is over the next reload does it.
    monitor.must("job-cancel", json!({"id": "j"}));
    while monitor.must("query-jobs", json!({}))[0]["status"] != "concluded" {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let told = service.reload();
    assert!(told.contains("STATUS=1 disks, 1 exports"), "{told}");
    place.io("a", &["read -P 0 0 1M"]);
    service.end();
}

/// A disk that comes with a reload may have a server that does not answer.
#[test]
fn a_reload_that_waits_for_a_server_holds_nobody_up() {
    let place = Place::new();
    let listener = std::os::unix::net::UnixListener::bind(place.path("quiet")).expect("a socket");
    place.write("disks.toml", DAEMON);
    let service = place.serve("--config disks.toml");
    let mut client = place.monitor();
    let slow = "[[disk]]\nname = 'slow'\nimage = 'nbd+unix:///?socket=quiet'\nformat = 'raw'\n";
    place.write("disks.toml", format!("{DAEMON}{slow}"));
    service.signal("-HUP");
    let (_client, _) = listener.accept().expect("the daemon");
    let begun = std::time::Instant::now();
    client.must("query-named-block-nodes", json!({}));
    client.must(
        "blockdev-add",
        json!({"driver": "null-co", "node-name": "n"}),
    );
    client.must("blockdev-del", json!({"node-name": "n"}));
    drop(client);
    service.signal("-TERM");
    service.wait();
    let taken = begun.elapsed();
    assert!(taken < std::time::Duration::from_secs(3), "{taken:?}");
}
