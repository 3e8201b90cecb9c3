//! What systemd is told, and what it hands over.

use std::collections::BTreeSet;

use serde_json::json;

use crate::place::{Place, VELLUM};
use vellum_testing::Qmp;

const CONFIG: &str = "[daemon]\nmonitors = ['qmp.sock']\nnbd = { path = 'nbd.sock' }\n\
    [[disk]]\nname = 'a'\nimage = 'a'\nformat = 'qcow2'\n[[disk.export]]\ntype = 'nbd'\nname = 'a'\nwritable = true\n";

#[test]
fn the_manager_is_told_of_every_step() {
    let place = Place::new();
    place.write("disks.toml", CONFIG);
    let set = [("WATCHDOG_USEC", "200000")];
    let service = place.start_as(VELLUM, "daemon --config disks.toml", &set);
    let ready = service.wait_told("READY=1");
    assert!(ready.contains("STATUS=1 disks, 1 exports"), "{ready}");
    // Everything is served by then.
    place.io("a", &["read 0 4k"]);
    for _ in 0..3 {
        service.wait_told("WATCHDOG=1");
    }
    service.reload();
    service.end();
}

#[test]
fn without_a_file_it_is_told_too() {
    let place = Place::new();
    let file = "driver=qcow2,node-name=a,file.driver=file,file.filename=a";
    let service = place.serve(&[
        "--blockdev",
        file,
        "--chardev",
        "null,id=m",
        "--monitor",
        "m",
    ]);
    service.end();
}

#[test]
fn sockets_are_taken_over_by_their_paths() {
    let place = Place::new();
    place.write("disks.toml", CONFIG);
    let listen = |name: &str| place.path(name).display().to_string();
    let (monitor, nbd) = (listen("qmp.sock"), listen("nbd.sock"));
    let words =
        format!("-l {monitor} -l {nbd} -E NOTIFY_SOCKET {VELLUM} daemon --config disks.toml");
    let service = place.start_as("systemd-socket-activate", &words, &[]);
    // The first client starts it.
    let mut client = place.monitor();
    service.wait_told("READY=1");
    assert_eq!(client.exports(), ["a-nbd"]);
    place.io("a", &["read 0 4k"]);
    client.must("quit", json!({}));
    drop(client);
    // They are the manager's: whoever comes now waits for the next start.
    assert!(place.has("qmp.sock") && place.has("nbd.sock"));
}

#[test]
fn sockets_are_taken_over_by_their_names() {
    let place = Place::new();
    place.write("disks.toml", "");
    let listen = |name: &str| place.path(name).display().to_string();
    let (monitor, nbd, other) = (listen("m.sock"), listen("nbd.sock"), listen("o.sock"));
    let words = format!(
        "-l {monitor} -l {nbd} -l {other} --fdname=qmp:nbd:x -E NOTIFY_SOCKET \
         {VELLUM} daemon --config disks.toml"
    );
    let service = place.start_as("systemd-socket-activate", &words, &[]);
    let mut client = Qmp::connect(place.path("m.sock"));
    service.wait_told("READY=1");
    let node = json!({"driver": "qcow2", "node-name": "a",
        "file": {"driver": "file", "filename": "a"}});
    client.must("blockdev-add", node);
    client.must(
        "block-export-add",
        json!({"type": "nbd", "id": "a", "node-name": "a", "writable": true}),
    );
    place.io("a", &["read 0 4k"]);
    assert!(
        service.log().contains("the socket 'x' was handed over"),
        "{}",
        service.log()
    );
    client.must("quit", json!({}));
}

/// A file of `packaging/`.
fn packaged(name: &str) -> String {
    let path = format!("{}/../../packaging/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).expect("it is packaged")
}

#[test]
fn the_units_are_understood_and_confine_the_daemon() {
    let place = Place::new();
    // The check wants the programs there.
    place.write(
        "vellum.service",
        packaged("vellum.service").replace("/usr/bin/vellum", VELLUM),
    );
    place.write("vellum.socket", packaged("vellum.socket"));
    let words = ["verify", "--man=no", "./vellum.service", "./vellum.socket"];
    let said = place.run("systemd-analyze", &words).expect(0).err;
    assert_eq!(said, "");
    // 17 of 100, of which 5 are the network.
    let words = [
        "security",
        "--offline=yes",
        "--no-pager",
        "--threshold=20",
        "./vellum.service",
    ];
    place.must("systemd-analyze", &words);
}

/// The system calls that the unit's filter lets through.
fn allowed_calls(place: &Place) -> BTreeSet<String> {
    let unit = packaged("vellum.service");
    let filters = unit
        .lines()
        .filter_map(|line| line.strip_prefix("SystemCallFilter="));
    let (mut allowed, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for filter in filters {
        let (filter, into) = match filter.strip_prefix('~') {
            Some(filter) => (filter, &mut refused),
            None => (filter, &mut allowed),
        };
        let mut sets: Vec<String> = filter.split_whitespace().map(str::to_owned).collect();
        while let Some(set) = sets.pop() {
            let listed = place.must("systemd-analyze", &["syscall-filter", "--no-pager", &set]);
            let members = listed.lines().skip(1).map(str::trim);
            for member in members.filter(|member| !member.starts_with('#')) {
                match member.starts_with('@') {
                    true => sets.push(member.to_owned()),
                    false => drop(into.insert(member.to_owned())),
                }
            }
        }
    }
    allowed.difference(&refused).cloned().collect()
}

#[test]
fn the_filter_of_system_calls_lets_the_daemon_work() {
    let place = Place::new();
    place.write("disks.toml", CONFIG);
    let words = format!("-f -qq -o calls {VELLUM} daemon --config disks.toml --state state");
    let service = place.start_as("strace", &words, &[("WATCHDOG_USEC", "1000000")]);
    service.wait_told("READY=1");
    let mut client = place.monitor();
    let snapshot = json!({
        "node-name": "a", "snapshot-file": "over", "snapshot-node-name": "over",
        "format": "qcow2",
    });
    client.must("blockdev-snapshot-sync", snapshot);
    place.io(
        "a",
        &["write 0 64k", "flush", "discard 0 64k", "read 0 64k"],
    );
    client.must("block-stream", json!({"job-id": "j", "device": "over"}));
    client.take_event("BLOCK_JOB_COMPLETED");
    client.must("quit", json!({}));
    drop(client);
    service.wait();
    let allowed = allowed_calls(&place);
    let text = place.text("calls");
    let made: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.split_whitespace().nth(1)?.split_once('('))
        .map(|(name, _)| name)
        .collect();
    assert!(
        made.contains("io_uring_enter") && made.len() > 30,
        "{made:?}"
    );
    let refused: Vec<&&str> = made
        .iter()
        .filter(|name| !allowed.contains(**name))
        .collect();
    assert!(refused.is_empty(), "{refused:?}");
}
