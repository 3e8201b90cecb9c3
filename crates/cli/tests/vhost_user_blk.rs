//! `--export type=vhost-user-blk` beside the real daemon's words, and a daemon that is killed under
//! a guest.

#[path = "../../export/tests/it/vhost_user_blk/guest.rs"]
mod guest;

use std::process::Stdio;

use vellum_testing::{Folder, Running, within};

use guest::{DATA_AT, Guest, PATIENCE, header};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
const NAME: &str = "qemu-storage-daemon";
const OURS: &str = "our qemu-storage-daemon";

fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    folder.write("disk", vec![0; 8 << 20]);
    folder.img("create -q -f qcow2 image 8M");
    folder
}

/// Starts our daemon with an export of an image of this format.
fn serve(folder: &Folder, format: &str, options: &str) -> Running {
    let file = if format == "raw" { "disk" } else { "image" };
    let line = format!(
        "--blockdev driver={format},node-name=n,file.driver=file,file.filename={file} \
         --export type=vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=socket,{options}"
    );
    folder.start(OURS, &line)
}

/// What a daemon says that must refuse its export.
fn refusal(folder: &Folder, program: &str, node: &str, export: &str) -> String {
    let mut command = folder.command(program, &["--blockdev", node, "--export", export]);
    let mut daemon = Running::start(command.stderr(Stdio::piped()));
    within(PATIENCE, export, || daemon.has_ended());
    daemon.said().1.expect(1).err
}

#[test]
fn refusals_are_in_the_words_of_the_real_daemon() {
    let folder = folder();
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
        let ours = refusal(&folder, OURS, node, &export);
        let theirs = refusal(&folder, NAME, node, &export);
        assert_eq!(ours, theirs, "{options}");
    }
    for options in ["logical-block-size=100", "logical-block-size=131072"] {
        let export = format!("type=vhost-user-blk,id=e,node-name=n,{unix},{options}");
        let ours = refusal(&folder, OURS, node, &export);
        assert!(
            ours.contains("parameter logical-block-size must be a power of 2 between 512 and ")
        );
    }
}

#[test]
fn a_guest_uses_the_disk_that_the_daemon_exports() {
    let folder = folder();
    let daemon = serve(
        &folder,
        "raw",
        "writable=on,num-queues=2,serial=abc,logical-block-size=4096",
    );
    let mut guest = Guest::boot(&folder.path("socket"), 2, 0);
    assert_eq!(guest.disk_bytes(), 8 << 20);
    assert_eq!(guest.queues[1].write_disk(8, &[5; 4096]), 0);
    assert_eq!(guest.queues[0].flush(), 0);
    assert_eq!(guest.queues[0].read_disk(8, 4096), (0, vec![5; 4096]));
    daemon.end();
    let held = folder.read("disk");
    assert_eq!((held[4095], held[4096], held[8192]), (0, 5, 0));
}

/// Requests are in flight when the daemon is killed, and acknowledged writes are not flushed,
/// again and again; the next daemon goes on.
fn kill_again_and_again(format: &str, seed: u64) {
    let folder = folder();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut daemon = serve(&folder, format, "writable=on");
    let mut guest = Guest::boot(&folder.path("socket"), 1, 0);
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
        daemon.kill();
        daemon = serve(&folder, format, "writable=on");
        guest.reconnect(&folder.path("socket"));
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
    daemon.end();
    if format == "qcow2" {
        folder.img("check -q image");
        folder.img("convert -f qcow2 -O raw image disk");
    }
    let disk = folder.read("disk");
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
fn serve_to_two(folder: &Folder, [nbd, guest]: [&str; 2]) -> Running {
    let line = format!(
        "--blockdev driver=qcow2,node-name=image,file.driver=file,file.filename=image \
         --blockdev driver=raw,node-name=above,file=image --nbd-server addr.type=unix,addr.path=nbd \
         --export type=nbd,id=others,node-name={nbd},name=n,writable=on \
         --export type=vhost-user-blk,id=e,node-name={guest},addr.type=unix,addr.path=socket,writable=on"
    );
    folder.start(OURS, &line)
}

/// What the guest had written and not flushed would be written again over it.
fn kill_beside_another_export(nodes: [&str; 2]) {
    let folder = folder();
    let daemon = serve_to_two(&folder, nodes);
    let mut guest = Guest::boot(&folder.path("socket"), 1, 0);
    let durable = [
        &["write -P 7 0 4k", "flush"][..],
        &["write -f -P 8 4k 4k"],
        &["write -z -f 8k 4k"],
    ];
    for block in 0..4 {
        assert_eq!(guest.queues[0].write_disk(8 * block, &[5; 4096]), 0);
    }
    for commands in durable {
        folder.io("-f raw nbd+unix:///n?socket=nbd", commands);
    }
    daemon.kill();
    let daemon = serve_to_two(&folder, nodes);
    guest.reconnect(&folder.path("socket"));
    for (block, byte) in [7, 8, 0, 5].into_iter().enumerate() {
        let read = guest.queues[0].read_disk(8 * block as u64, 4096);
        assert!(
            read == (0, vec![byte; 4096]),
            "block {block} of {nodes:?}: {:?}",
            &read.1[..1]
        );
    }
    daemon.end();
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
