//! What systemd is told, and what it hands over.

use serde_json::json;

use crate::place::{Client, Place, VELLUM};

const CONFIG: &str = "[daemon]\nmonitors = ['qmp.sock']\nnbd = { path = 'nbd.sock' }\n\
    [[disk]]\nname = 'a'\nimage = 'a'\nformat = 'qcow2'\n[[disk.export]]\ntype = 'nbd'\nname = 'a'\nwritable = true\n";

#[test]
fn the_manager_is_told_of_every_step() {
    let place = Place::new();
    place.write("disks.toml", CONFIG);
    let set = [("WATCHDOG_USEC", "200000")];
    let service = place.start_as(&[VELLUM, "daemon"], &["--config", "disks.toml"], &set);
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
    let manager = [
        "systemd-socket-activate",
        "-l",
        &monitor,
        "-l",
        &nbd,
        "-E",
        "NOTIFY_SOCKET",
    ];
    let program = [&manager[..], &[VELLUM, "daemon"]].concat();
    let service = place.start_as(&program, &["--config", "disks.toml"], &[]);
    // The first client starts it.
    let mut client = Client::connect(&place.path("qmp.sock"));
    service.wait_told("READY=1");
    assert_eq!(client.exports(), ["a-nbd"]);
    place.io("a", &["read 0 4k"]);
    client.must("quit", json!({}));
    drop(client);
    // They are the manager's: whoever comes now waits for the next start.
    assert!(place.path("qmp.sock").exists() && place.path("nbd.sock").exists());
}

#[test]
fn sockets_are_taken_over_by_their_names() {
    let place = Place::new();
    place.write("disks.toml", "");
    let listen = |name: &str| place.path(name).display().to_string();
    let (monitor, nbd, other) = (listen("m.sock"), listen("nbd.sock"), listen("o.sock"));
    let manager = [
        "systemd-socket-activate",
        "-l",
        &monitor,
        "-l",
        &nbd,
        "-l",
        &other,
        "--fdname=qmp:nbd:x",
        "-E",
        "NOTIFY_SOCKET",
    ];
    let program = [&manager[..], &[VELLUM, "daemon"]].concat();
    let service = place.start_as(&program, &["--config", "disks.toml"], &[]);
    let mut client = Client::connect(&place.path("m.sock"));
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
