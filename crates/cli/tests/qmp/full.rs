//! Disks whose host's file system is full: requests of exports with `on-full=wait` wait for room, and
//! go on by themselves. On a real file system, with real clients.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::place::{Daemon, Place};

const GUEST: &str = "nbd+unix:///?socket=sock";
const MIB: u64 = 1 << 20;
/// What the file system has.
const ROOM_BYTES: u64 = 16 * MIB;

/// A small file system of its own, in a folder.
struct SmallDisk {
    folder: PathBuf,
}

impl SmallDisk {
    /// One that holds files as those of most hosts do: on blocks, some of which it keeps for itself.
    fn ext4(place: &Place) -> SmallDisk {
        let folder = place.path("small");
        std::fs::create_dir(&folder).expect("a folder");
        place.must("truncate", "-s 48M disk.img");
        place.must("mkfs.ext4", "-q -m 0 disk.img");
        place.must("mount", "-o loop disk.img small");
        SmallDisk { folder }
    }

    fn new(place: &Place) -> SmallDisk {
        let folder = place.path("small");
        std::fs::create_dir(&folder).expect("a folder");
        let size = format!("size={ROOM_BYTES}");
        place.must("mount", &["-t", "tmpfs", "-o", &size, "none", "small"]);
        SmallDisk { folder }
    }

    /// Takes all that is left but so many bytes.
    fn fill_but(&self, bytes: u64) {
        let filler = self.folder.join("filler");
        let left = rustix::fs::statvfs(&self.folder).expect("a file system");
        let left_bytes = left.f_bavail * left.f_frsize;
        let file = std::fs::File::create(filler).expect("a file");
        let mode = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&file, mode, 0, left_bytes - bytes).expect("there is room");
    }

    fn make_room(&self) {
        std::fs::remove_file(self.folder.join("filler")).expect("a file");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.folder).output();
    }
}

/// A daemon with an image on the small disk, and an export of it.
fn serve(place: &Place, format: &str, options: &str) -> Daemon {
    let made = format!("create -q -f {format} small/disk 64M");
    place.img(&made);
    start(place, format, options)
}

fn start(place: &Place, format: &str, options: &str) -> Daemon {
    start_with(place, format, &format!("on-full=wait{options}"))
}

fn start_with(place: &Place, format: &str, options: &str) -> Daemon {
    place.ours(&[
        "--blockdev",
        &format!("{format},node-name=disk,discard=unmap,file.driver=file,file.filename=small/disk"),
        "--nbd-server",
        "addr.type=unix,addr.path=sock,max-connections=0",
        "--export",
        &format!("nbd,id=e,node-name=disk,name=,writable=on,{options}"),
    ])
}

/// A client that writes, and says so only when it is done.
fn client(place: &Place, commands: &[String]) -> Child {
    let mut words = vec!["-f", "raw"];
    words.extend(commands.iter().flat_map(|command| ["-c", command.as_str()]));
    words.push(GUEST);
    Command::new("qemu-io")
        .current_dir(place.root())
        .args(words)
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io")
}

fn must_end_well(client: Child) {
    let output = client.wait_with_output().expect("a child");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && !said.contains("failed"),
        "{said}"
    );
}

/// Writes of a client: from a place on, a pattern for each MiB, flushed now and then.
fn writes(first_mib: u64, count: u64, pattern: u64) -> Vec<String> {
    let write = |n: u64| {
        let mut commands = vec![format!("write -P {} {}M 1M", pattern + n, first_mib + n)];
        commands.extend((n % 3 == 2).then(|| "flush".to_owned()));
        commands
    };
    let mut commands: Vec<String> = (0..count).flat_map(write).collect();
    commands.push("flush".to_owned());
    commands
}

fn check(place: &Place, format: &str, from: &[(u64, u64, u64)]) {
    let mut reads = Vec::new();
    for (first_mib, count, pattern) in from {
        reads.extend((0..*count).map(|n| format!("read -P {} {}M 1M", pattern + n, first_mib + n)));
    }
    let mut words = vec!["-r", "-f", format];
    words.extend(reads.iter().flat_map(|command| ["-c", command.as_str()]));
    words.push("small/disk");
    let said = place.must("qemu-io", &words);
    assert!(!said.contains("failed"), "{said}");
    if format == "qcow2" {
        place.img("check -q small/disk");
        let vellum = env!("CARGO_BIN_EXE_vellum");
        place.must(vellum, "check -q small/disk");
    }
}

fn waiting_goes_on(format: &str, options: &str) {
    let place = Place::new();
    let disk = SmallDisk::new(&place);
    let mut daemon = serve(&place, format, options);
    must_end_well(client(&place, &writes(0, 2, 1)));
    disk.fill_but(2 * MIB + 100_000);
    let mut clients = vec![
        client(&place, &writes(4, 4, 10)),
        client(&place, &writes(20, 3, 20)),
    ];
    let full = daemon.event("BLOCK_IO_ERROR");
    assert_eq!(
        (&full["action"], &full["nospace"], &full["device"]),
        (&json!("stop"), &json!(true), &json!("e"))
    );
    // What needs no room goes on: what was written is read, and written again.
    must_end_well(client(
        &place,
        &["read -P 1 0 1M".into(), "write -P 7 0 64k".into()],
    ));
    must_end_well(client(&place, &["write -P 1 0 64k".into()]));
    for client in &mut clients {
        assert_eq!(client.try_wait().expect("a child"), None, "it waits");
    }
    // Jobs and changes of the graph are not held up.
    daemon.must("query-block-exports", json!({}));
    disk.make_room();
    clients.into_iter().for_each(must_end_well);
    let resumed = daemon.event("X_VELLUM_IO_RESUMED");
    assert!(resumed["waited-ms"].as_f64().expect("a number") > 0.0);
    daemon.end();
    check(&place, format, &[(0, 2, 1), (4, 4, 10), (20, 3, 20)]);
}

#[test]
fn writers_of_a_qcow2_wait_for_room() {
    waiting_goes_on("qcow2", "");
}

#[test]
fn writers_of_a_raw_image_wait_for_room() {
    waiting_goes_on("raw", "");
}

/// What is durable with each write would lose its file's trust if it were one request.
#[test]
fn writers_through_wait_for_room() {
    waiting_goes_on("raw", ",writethrough=on");
    waiting_goes_on("qcow2", ",writethrough=on");
}

#[test]
fn without_the_option_requests_fail_and_the_image_goes_on() {
    let place = Place::new();
    let disk = SmallDisk::new(&place);
    let mut daemon = serve(&place, "qcow2", "");
    let export =
        json!({"type": "nbd", "id": "f", "node-name": "disk", "name": "f", "writable": true});
    daemon.must("block-export-add", export);
    disk.fill_but(100_000);
    let uri = "nbd+unix:///f?socket=sock";
    let words = ["-f", "raw", "-c", "write 0 1M", uri];
    let output = Command::new("qemu-io")
        .current_dir(place.root())
        .args(words)
        .output()
        .expect("qemu-io");
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("No space left"), "{said}");
    assert_eq!(daemon.event("BLOCK_IO_ERROR")["action"], "report");
    disk.make_room();
    must_end_well(client(&place, &writes(0, 2, 1)));
    daemon.end();
    check(&place, "qcow2", &[(0, 2, 1)]);
}

/// A write that meets a full disk on its way into the page cache is no sync that has failed, although it is
/// to be durable at once.
#[test]
fn a_write_that_is_to_be_durable_at_once_waits_for_room_too() {
    let place = Place::new();
    let disk = SmallDisk::new(&place);
    let mut daemon = serve(&place, "qcow2", "");
    // A cluster of which the file has the first piece alone.
    let first = ["write -P 1 0 4k", "flush"].map(str::to_owned);
    must_end_well(client(&place, &first));
    disk.fill_but(0);
    let durable = ["write -f -P 2 32k 4k", "flush"].map(str::to_owned);
    let waits = client(&place, &durable);
    daemon.event("BLOCK_IO_ERROR");
    disk.make_room();
    must_end_well(waits);
    let read = ["read -P 1 0 4k", "read -P 2 32k 4k"].map(str::to_owned);
    must_end_well(client(&place, &read));
    must_end_well(client(&place, &writes(1, 2, 1)));
    daemon.end();
    check(&place, "qcow2", &[(1, 2, 1)]);
}

/// A daemon that is killed while its disk is full has everything that was flushed.
#[test]
fn what_was_flushed_outlives_a_kill_on_a_full_disk() {
    for round in 0..4 {
        let place = Place::new();
        let disk = SmallDisk::new(&place);
        let mut daemon = serve(&place, "qcow2", "");
        must_end_well(client(&place, &writes(0, 3, 1)));
        disk.fill_but(round * 700_000 + 200_000);
        let mut clients = vec![
            client(&place, &writes(8, 9, 30)),
            client(&place, &writes(30, 9, 60)),
        ];
        daemon.event("BLOCK_IO_ERROR");
        daemon.kill();
        for client in &mut clients {
            client.kill().expect("a child");
            client.wait().expect("a child");
        }
        disk.make_room();
        // Clusters may be leaked, and nothing else.
        place.must(env!("CARGO_BIN_EXE_vellum"), "check -q -r leaks small/disk");
        check(&place, "qcow2", &[(0, 3, 1)]);
        let daemon = start(&place, "qcow2", "");
        must_end_well(client(&place, &writes(8, 4, 30)));
        daemon.end();
        check(&place, "qcow2", &[(0, 3, 1), (8, 4, 30)]);
    }
}

/// Whoever is gone keeps nothing waiting: neither a client, nor the end of an export, nor of the
/// daemon.
#[test]
fn what_waits_ends_with_its_client_its_export_and_its_daemon() {
    let place = Place::new();
    let disk = SmallDisk::new(&place);
    let mut daemon = serve(&place, "qcow2", "");
    must_end_well(client(&place, &writes(0, 1, 1)));
    disk.fill_but(100_000);
    let mut gone = client(&place, &writes(4, 2, 10));
    daemon.event("BLOCK_IO_ERROR");
    gone.kill().expect("a child");
    gone.wait().expect("a child");
    daemon.event("X_VELLUM_IO_RESUMED");
    // Nothing of it is written later, over what the next client writes.
    let mut waits = client(&place, &writes(4, 2, 20));
    daemon.must("block-export-del", json!({"id": "e", "mode": "hard"}));
    daemon.event("BLOCK_EXPORT_DELETED");
    waits.wait().expect("it ends");
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "", "writable": true,
        "on-full": "wait"});
    daemon.must("block-export-add", export);
    let mut waits = client(&place, &["write -P 40 4M 1M".into()]);
    daemon.end();
    waits.wait().expect("it ends");
    disk.make_room();
    check(&place, "qcow2", &[(0, 1, 1)]);
}

/// What needs no room goes on after a write that has found none, and the guest frees its own disk.
fn a_guest_frees_its_own_disk(on_full: &str, make: fn(&Place) -> SmallDisk) {
    let place = Place::new();
    let disk = make(&place);
    place.img("create -q -f qcow2 small/disk 64M");
    let mut daemon = start_with(&place, "qcow2", &format!("on-full={on_full}"));
    must_end_well(client(&place, &writes(0, 10, 1)));
    disk.fill_but(MIB);
    let first = client(&place, &["write -P 77 40M 4M".into()]);
    daemon.event("BLOCK_IO_ERROR");
    let in_place = ["write -P 50 9M 64k", "flush", "read -P 50 9M 64k"];
    must_end_well(client(&place, &in_place.map(str::to_owned)));
    let discards = ["discard 0 8M", "flush"];
    must_end_well(client(&place, &discards.map(str::to_owned)));
    // The one that waits goes on with what was given back.
    let said = first.wait_with_output().expect("a child");
    assert_eq!(said.status.success(), on_full == "wait", "{said:?}");
    let again = ["write -P 77 40M 4M", "write -P 78 50M 2M", "flush"];
    must_end_well(client(&place, &again.map(str::to_owned)));
    daemon.kill();
    let vellum = env!("CARGO_BIN_EXE_vellum");
    place.must(vellum, "check -q -r leaks small/disk");
    let all = [
        (40, 1, 77),
        (41, 1, 77),
        (43, 1, 77),
        (50, 1, 78),
        (51, 1, 78),
    ];
    check(&place, "qcow2", &all);
    let reads = ["read -P 0 0 8M", "read -P 50 9M 64k", "read -P 9 8M 1M"];
    place.io("small/disk", &reads);
}

#[test]
fn a_guest_frees_its_own_disk_on_tmpfs() {
    a_guest_frees_its_own_disk("fail", SmallDisk::new);
    a_guest_frees_its_own_disk("wait", SmallDisk::new);
}

#[test]
fn a_guest_frees_its_own_disk_on_ext4() {
    a_guest_frees_its_own_disk("fail", SmallDisk::ext4);
    a_guest_frees_its_own_disk("wait", SmallDisk::ext4);
}
