//! A disk that is moved to another machine while a client writes faster than the link between
//! them: a network namespace with a limited link, which root may make.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use vellum_testing::nbd::Connection;

use crate::place::{Daemon, NAME, Place};

const SIZE_BYTES: u64 = 64 << 20;
/// The client writes here, again and again.
const HOT_BLOCKS: u64 = 24;
const BLOCK_BYTES: u64 = 1 << 20;
const PORT: &str = "10809";

/// What to do where the network cannot be made.
const NEEDED: &str = "a network of its own takes root, and `ip` and `tc` of `cargo xtask setup`";

/// A network of its own, in which every byte goes over a link of 100 Mbit/s.
struct Network(Child);

impl Network {
    /// Panics where there is no right or no program to make one.
    fn new() -> Network {
        // A packet that is longer than a burst would never pass.
        let link = "ip link set lo up mtu 1500 && \
                    tc qdisc add dev lo root tbf rate 100mbit burst 32kbit latency 400ms && \
                    echo up && exec sleep 1000";
        let child = Command::new("unshare")
            .args(["-n", "sh", "-c", link])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = child.expect(NEEDED);
        let mut said = [0; 3];
        let output = child.stdout.as_mut().expect("a pipe");
        if output.read_exact(&mut said).is_err() {
            let output = child.wait_with_output().expect("the end of a child");
            panic!("{NEEDED}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Network(child)
    }

    /// A script that runs `program` in it.
    fn enter(&self, place: &Place, name: &str, program: &Path) -> PathBuf {
        let path = place.path(name);
        let (pid, program) = (self.0.id(), program.display());
        let script = format!("#!/bin/sh\nexec nsenter -t {pid} -n {program} \"$@\"\n");
        std::fs::write(&path, script).expect("a script");
        place.must("chmod", &["+x", name]);
        path
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a client has met that wrote until it was told to end.
struct Written {
    /// What each of the hot blocks holds.
    last: Vec<u8>,
    bytes: u64,
    /// When each write began, and how long it took.
    times: Vec<(Instant, Duration)>,
}

fn write_until(path: &Path, over: &AtomicBool) -> Written {
    let mut client = Connection::open(path, false).expect("a server");
    let mut written = Written {
        last: vec![0; HOT_BLOCKS as usize],
        bytes: 0,
        times: Vec::new(),
    };
    for turn in 0_u64.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let (block, byte) = (turn * 7 % HOT_BLOCKS, (turn % 251 + 1) as u8);
        let bytes = vec![byte; BLOCK_BYTES as usize];
        let begun = Instant::now();
        client.write(block * BLOCK_BYTES, &bytes).expect("a write");
        written.times.push((begun, begun.elapsed()));
        written.last[block as usize] = byte;
        written.bytes += BLOCK_BYTES;
    }
    written
}

/// How a disk was moved.
#[derive(Debug)]
struct Move {
    ready: Duration,
    /// From the command to complete it.
    done: Duration,
    /// The longest write from that command on.
    longest_write: Duration,
    /// Bytes that were written until it was ready, in a second.
    bytes_per_second: u64,
}

fn start(place: &Place, program: &Path, network: &Network) -> (Daemon, Daemon) {
    let name = |role: &str| format!("{role}-{NAME}");
    let file = |name: &str| format!("driver=file,node-name=disk,filename={name}");
    let target = network.enter(place, &name("target"), program);
    let server = format!("addr.type=inet,addr.host=127.0.0.1,addr.port={PORT}");
    let export = "nbd,id=e,node-name=disk,name=,writable=on";
    let arguments = [
        "--nbd-server",
        &server,
        "--blockdev",
        &file("there"),
        "--export",
        export,
    ];
    let target = place.start(&target, &arguments);
    let source = network.enter(place, &name("source"), program);
    let server = "addr.type=unix,addr.path=sock";
    let arguments = [
        "--nbd-server",
        server,
        "--blockdev",
        &file("here"),
        "--export",
        export,
    ];
    (place.start(&source, &arguments), target)
}

/// Moves a disk with a program; `limit` is how long each part may take.
fn move_with(program: &Path, limit: Duration) -> Move {
    let network = Network::new();
    let place = Place::new();
    for name in ["here", "there"] {
        place.img(&format!("create -q -f raw {name} {SIZE_BYTES}"));
    }
    place.must(
        "qemu-io",
        &["-f", "raw", "-c", "write -P 255 0 64M", "here"],
    );
    let (mut source, target) = start(&place, program, &network);
    let node = json!({
        "driver": "nbd",
        "node-name": "to",
        "server": {"type": "inet", "host": "127.0.0.1", "port": PORT},
    });
    source.must("blockdev-add", node);
    let (over, path) = (Arc::new(AtomicBool::new(false)), place.path("sock"));
    let writer = {
        let over = over.clone();
        std::thread::spawn(move || write_until(&path, &over))
    };
    let begun = Instant::now();
    let mirror = json!({"job-id": "j", "device": "disk", "target": "to", "sync": "full"});
    source.must("blockdev-mirror", mirror);
    let is_ready = source.wait_within("j", "ready", limit);
    let ready = begun.elapsed();
    let completed = Instant::now();
    let is_done = is_ready && {
        source.must("job-complete", json!({"id": "j"}));
        source.wait_within("j", "null", limit)
    };
    let done = completed.elapsed();
    over.store(true, Ordering::Relaxed);
    let written = writer.join().expect("a client");
    source.kill();
    target.end();
    if !is_done {
        return Move {
            ready,
            done,
            longest_write: limit,
            bytes_per_second: 0,
        };
    }
    let there = place.read("there");
    for (block, byte) in written.last.iter().enumerate() {
        let at = block * BLOCK_BYTES as usize;
        let bytes = &there[at..at + BLOCK_BYTES as usize];
        assert!(
            bytes.iter().all(|one| one == byte),
            "block {block} was lost"
        );
    }
    let rest = &there[(HOT_BLOCKS * BLOCK_BYTES) as usize..];
    assert!(rest.iter().all(|byte| *byte == 255));
    let before = |time: &&(Instant, Duration)| time.0 < begun + ready;
    let count = written.times.iter().filter(before).count() as f64;
    let last = written
        .times
        .iter()
        .filter(|time| time.0 + time.1 >= completed);
    let last = last.filter(|time| time.0 < completed + done);
    Move {
        ready,
        done,
        longest_write: last.map(|time| time.1).max().unwrap_or_default(),
        bytes_per_second: (count * BLOCK_BYTES as f64 / ready.as_secs_f64()) as u64,
    }
}

#[test]
fn a_disk_is_moved_over_a_link_that_is_slower_than_its_client() {
    let ours = Place::new();
    let moved = move_with(&ours.path(NAME), Duration::from_secs(120));
    println!("{moved:?}");
    assert!(moved.bytes_per_second > 0 && moved.longest_write < Duration::from_secs(10));
    assert!(moved.ready < Duration::from_secs(60), "{moved:?}");
    assert!(moved.done < Duration::from_secs(20), "{moved:?}");
}

/// The rows of docs/PERFORMANCE.md.
#[test]
#[ignore = "takes minutes: the other daemon is not ready before its client ends"]
fn both_daemons_move_a_disk() {
    let ours = Place::new();
    let program = ours.fast();
    for (name, program) in [("vellum", program), (NAME, PathBuf::from(NAME))] {
        println!("{name}: {:?}", move_with(&program, Duration::from_secs(90)));
    }
}
