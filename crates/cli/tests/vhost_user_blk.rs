//! `--export type=vhost-user-blk` beside the real daemon's words, and a daemon that is killed under
//! a guest.

#[path = "../../export/tests/it/vhost_user_blk/guest.rs"]
mod guest;

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use guest::{DATA_AT, Guest, PATIENCE, header};

const NAME: &str = "qemu-storage-daemon";

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        symlink(env!("CARGO_BIN_EXE_vellum"), folder.path().join(NAME)).expect("a link");
        let disk = std::fs::File::create(folder.path().join("disk")).expect("a disk");
        disk.set_len(8 << 20).expect("a length");
        let place = Place(folder);
        place.qemu_img(&["create", "-q", "-f", "qcow2", "image", "8M"]);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, program: PathBuf, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.0.path()).args(words);
        command
    }

    fn qemu_img(&self, words: &[&str]) {
        let done = self.command("qemu-img".into(), words).status();
        let done = done.expect("qemu-img; run `cargo xtask setup`");
        assert!(done.success(), "{words:?}");
    }

    /// Starts our daemon with an export of an image of this format.
    fn serve(&self, format: &str, options: &str) -> Child {
        let file = if format == "raw" { "disk" } else { "image" };
        let node = format!("driver={format},node-name=n,file.driver=file,file.filename={file}");
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=socket,{options}"
        );
        let words = ["--blockdev", &node, "--export", &export];
        let mut command = self.command(self.path(NAME), &words);
        command.spawn().expect("the program runs")
    }

    /// What a daemon says that must refuse its export.
    fn refusal(&self, program: PathBuf, node: &str, export: &str) -> String {
        let words = ["--blockdev", node, "--export", export];
        let mut command = self.command(program, &words);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("a daemon");
        let begin = Instant::now();
        while child.try_wait().expect("a child").is_none() {
            if begin.elapsed() > PATIENCE {
                // It is killed, and its words will not do.
                let _ = child.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = child.wait_with_output().expect("a child");
        assert_eq!(output.status.code(), Some(1), "{export}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

fn end(mut child: Child) {
    let pid = child.id().to_string();
    let told = Command::new("kill").args(["-TERM", &pid]).status();
    assert!(told.expect("kill").success());
    assert_eq!(child.wait().expect("a child").code(), Some(0));
}

#[test]
fn refusals_are_in_the_words_of_the_real_daemon() {
    let place = Place::new();
    let node = "driver=file,node-name=n,filename=disk";
    let read_only = "driver=file,node-name=n,filename=disk,read-only=on";
    let unix = "addr.type=unix,addr.path=socket";
    for (node, options) in [
        (node, "num-queues=0,addr.type=unix,addr.path=socket"),
        (node, "addr.type=inet,addr.host=a,addr.port=1"),
        (node, "addr.type=unix"),
        (node, "addr.type=fd,addr.str=77"),
        (node, "writable=maybe,addr.type=unix,addr.path=socket"),
        (node, "foo=1,addr.type=unix,addr.path=socket"),
        (node, "iothread=x,addr.type=unix,addr.path=socket"),
        (node, "num-queues=100000,addr.type=unix,addr.path=socket"),
        (read_only, "writable=on,addr.type=unix,addr.path=socket"),
        (node, "name=x,addr.type=unix,addr.path=socket"),
    ] {
        let export = format!("type=vhost-user-blk,id=e,node-name=n,{options}");
        let ours = place.refusal(place.path(NAME), node, &export);
        let theirs = place.refusal(PathBuf::from(NAME), node, &export);
        assert_eq!(ours, theirs, "{options}");
    }
    for options in ["logical-block-size=100", "logical-block-size=131072"] {
        let export = format!("type=vhost-user-blk,id=e,node-name=n,{unix},{options}");
        let ours = place.refusal(place.path(NAME), node, &export);
        assert!(
            ours.contains("parameter logical-block-size must be a power of 2 between 512 and ")
        );
    }
}

#[test]
fn a_guest_uses_the_disk_that_the_daemon_exports() {
    let place = Place::new();
    let daemon = place.serve(
        "raw",
        "writable=on,num-queues=2,serial=abc,logical-block-size=4096",
    );
    let mut guest = Guest::boot(&place.path("socket"), 2, 0);
    assert_eq!(guest.disk_bytes(), 8 << 20);
    assert_eq!(guest.queues[1].write_disk(8, &[5; 4096]), 0);
    assert_eq!(guest.queues[0].flush(), 0);
    assert_eq!(guest.queues[0].read_disk(8, 4096), (0, vec![5; 4096]));
    end(daemon);
    let held = std::fs::read(place.path("disk")).expect("the disk");
    assert_eq!((held[4095], held[4096], held[8192]), (0, 5, 0));
}

/// Requests are in flight when the daemon is killed, and acknowledged writes are not flushed,
/// again and again; the next daemon goes on.
fn kill_again_and_again(format: &str, seed: u64) {
    let place = Place::new();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut daemon = place.serve(format, "writable=on");
    let mut guest = Guest::boot(&place.path("socket"), 1, 0);
    let mut held = vec![0_u8; 512];
    for round in 1..=10_u8 {
        let mut running = Vec::new();
        for _ in 0..random.u32(20..200) {
            let queue = &mut guest.queues[0];
            if running.len() == 12 {
                finish_one(queue, &mut running);
            }
            let block = random.usize(..held.len());
            if running.iter().any(|&(_, other)| other == block) {
                continue;
            }
            held[block] = round;
            let at = DATA_AT + 4096 * block as u64;
            queue.memory.write(at, &[round; 4096]);
            let head = queue.prepare(&header(1, 8 * block as u64), (at, 4096), false);
            queue.offer(head);
            queue.kick();
            running.push((head, block));
        }
        daemon.kill().expect("killed");
        daemon.wait().expect("a child");
        daemon = place.serve(format, "writable=on");
        guest.reconnect(&place.path("socket"));
        while !running.is_empty() {
            finish_one(&mut guest.queues[0], &mut running);
        }
        if round % 3 == 0 {
            assert_eq!(guest.queues[0].flush(), 0);
        }
        for (block, &byte) in held.iter().enumerate() {
            let read = guest.queues[0].read_disk(8 * block as u64, 4096);
            assert!(
                read == (0, vec![byte; 4096]),
                "block {block} in round {round}"
            );
        }
    }
    end(daemon);
    if format == "qcow2" {
        place.qemu_img(&["check", "-q", "image"]);
        place.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "image", "disk"]);
    }
    let disk = std::fs::read(place.path("disk")).expect("the disk");
    for (block, &byte) in held.iter().enumerate() {
        let found = &disk[4096 * block..][..4096];
        assert!(found.iter().all(|&found| found == byte), "{block}");
    }
}

#[test]
fn a_daemon_of_a_raw_disk_that_is_killed_costs_the_guest_nothing() {
    kill_again_and_again("raw", 17);
}

/// Of a format that keeps what is written in memory until it is flushed.
#[test]
fn a_daemon_of_an_image_that_is_killed_costs_the_guest_nothing() {
    kill_again_and_again("qcow2", 18);
}

/// A daemon that shows an image to NBD clients and to a guest, by nodes of these names: that of the
/// image, and one that stands on it.
fn serve_to_two(place: &Place, [nbd, guest]: [&str; 2]) -> Child {
    let nbd = format!("type=nbd,id=others,node-name={nbd},name=n,writable=on");
    let guest = format!(
        "type=vhost-user-blk,id=e,node-name={guest},addr.type=unix,addr.path=socket,writable=on"
    );
    let words = [
        "--blockdev",
        "driver=qcow2,node-name=image,file.driver=file,file.filename=image",
        "--blockdev",
        "driver=raw,node-name=above,file=image",
        "--nbd-server",
        "addr.type=unix,addr.path=nbd",
        "--export",
        &nbd,
        "--export",
        &guest,
    ];
    let mut command = place.command(place.path(NAME), &words);
    command.spawn().expect("the program runs")
}

/// What the guest had written and not flushed would be written again over it.
fn kill_beside_another_export(nodes: [&str; 2]) {
    let place = Place::new();
    let mut daemon = serve_to_two(&place, nodes);
    let mut guest = Guest::boot(&place.path("socket"), 1, 0);
    let durable = [
        &["-c", "write -P 7 0 4k", "-c", "flush"][..],
        &["-c", "write -f -P 8 4k 4k"],
        &["-c", "write -z -f 8k 4k"],
    ];
    for block in 0..4 {
        assert_eq!(guest.queues[0].write_disk(8 * block, &[5; 4096]), 0);
    }
    for commands in durable {
        let url = "nbd+unix:///n?socket=nbd";
        let words = [&["-f", "raw"][..], commands, &[url]].concat();
        let mut command = place.command("qemu-io".into(), &words);
        let done = command.stdout(Stdio::null()).status();
        assert!(done.expect("qemu-io; run `cargo xtask setup`").success());
    }
    daemon.kill().expect("killed");
    daemon.wait().expect("a child");
    daemon = serve_to_two(&place, nodes);
    guest.reconnect(&place.path("socket"));
    for (block, byte) in [7, 8, 0, 5].into_iter().enumerate() {
        let read = guest.queues[0].read_disk(8 * block as u64, 4096);
        assert!(
            read == (0, vec![byte; 4096]),
            "block {block} of {nodes:?}: {:?}",
            &read.1[..1]
        );
    }
    end(daemon);
}

#[test]
fn what_another_export_has_made_durable_outlives_a_kill_beside_a_guest() {
    kill_beside_another_export(["image", "image"]);
}

#[test]
fn what_is_made_durable_above_or_below_a_guests_node_outlives_a_kill() {
    kill_beside_another_export(["above", "image"]);
    kill_beside_another_export(["image", "above"]);
}

fn finish_one(queue: &mut guest::Queue, running: &mut Vec<(u16, usize)>) {
    let (head, _) = queue.wait_used();
    let at = running.iter().position(|&(other, _)| other == head);
    running.swap_remove(at.expect("a request that runs"));
    assert_eq!(queue.status(head), 0);
}
