//! How long a guest's writes take beside a backup to a slow target, and while limits change.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::json;
use vellum_testing::nbd::Connection;

use crate::place::{Daemon, NAME, Place, with};

const SIZE_BYTES: u64 = 256 << 20;
const BLOCK_BYTES: u64 = 4096;
/// No write may take longer while limits change, on a machine that does nothing else.
const STALL: Duration = Duration::from_secs(2);
/// So many times as long as a write without limits beside may one with limits take more in the short run: it is
/// one of hundreds of tests that run at once, and has five writers here. The run of ten minutes is by itself, and
/// insists on [`STALL`].
const AS_BUSY: u32 = 10;
const SEED: u64 = 3144;

/// A guest that writes at random places, one write after another.
struct Guest {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Duration>>,
}

impl Guest {
    fn start(socket: &Path, seed: u64, sizes_bytes: &'static [u64]) -> Guest {
        let over = Arc::new(AtomicBool::new(false));
        let (is_over, socket) = (over.clone(), socket.to_owned());
        let thread = std::thread::spawn(move || {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut client = Connection::open(&socket, false).expect("a server");
            let mut times = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                let len_bytes = sizes_bytes[random.usize(..sizes_bytes.len())];
                let at = random.u64(..SIZE_BYTES / len_bytes) * len_bytes;
                let bytes = vec![random.u8(..); len_bytes as usize];
                let begun = Instant::now();
                client.write(at, &bytes).expect("a write");
                times.push(begun.elapsed());
            }
            times
        });
        Guest { over, thread }
    }

    /// How long each write took.
    fn end(self) -> Vec<Duration> {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().expect("the guest is served")
    }
}

fn start(place: &Place, program: &Path, more: &[&str], node: &str) -> Daemon {
    let export = format!("nbd,id=e,node-name={node},name=,writable=on");
    let server = [
        "--nbd-server",
        "addr.type=unix,addr.path=sock,max-connections=0",
    ];
    let words = [&server, more, &["--export", &export]].concat();
    place.start(program, &words)
}

/// Changes the limits of the group `g` for `time` while four guests write, and one to a daemon without limits:
/// no write is to take longer than [`STALL`], and `as_busy` times that one's longest.
fn change_limits(time: Duration, as_busy: u32) {
    let free = Place::new();
    let words = format!("driver=null-co,node-name=disk,size={SIZE_BYTES}");
    let without = start(&free, &free.path(NAME), &["--blockdev", &words], "disk");
    let measured = Guest::start(&free.path("sock"), SEED, &[BLOCK_BYTES]);
    let place = Place::new();
    let image = format!("driver=null-co,node-name=disk,size={SIZE_BYTES}");
    let limited = "driver=throttle,node-name=th,throttle-group=g,file=disk";
    let words = [
        "--object",
        "throttle-group,id=g",
        "--blockdev",
        &image,
        "--blockdev",
        limited,
    ];
    let mut daemon = start(&place, &place.path(NAME), &words, "th");
    let socket = place.path("sock");
    let sizes_bytes = &[BLOCK_BYTES, 16 * BLOCK_BYTES];
    let guests: Vec<Guest> = (0..4)
        .map(|guest| Guest::start(&socket, SEED + guest, sizes_bytes))
        .collect();
    let mut random = fastrand::Rng::with_seed(SEED);
    println!("seed {SEED}");
    let begun = Instant::now();
    while begun.elapsed() < time {
        let chosen = match random.u8(..5) {
            0 => json!({}),
            1 => json!({"iops-total": random.u32(50..5000)}),
            2 => json!({"bps-total": random.u32(1 << 20..1 << 28)}),
            3 => json!({"iops-write": random.u32(50..500), "iops-write-max": 1000}),
            _ => {
                json!({"bps-write": 4 << 20, "iops-write": random.u32(100..300), "iops-size": 8192})
            }
        };
        // What is not named stays as it is.
        let none = json!({
            "iops-total": 0, "bps-total": 0, "iops-write": 0, "iops-write-max": 0, "bps-write": 0,
            "iops-size": 0,
        });
        let limits = with(none, chosen);
        let change = json!({"path": "/objects/g", "property": "limits", "value": limits});
        daemon.must("qom-set", change);
        std::thread::sleep(Duration::from_millis(random.u64(1..400)));
    }
    let times: Vec<Duration> = guests.into_iter().flat_map(Guest::end).collect();
    daemon.end();
    let measured = measured.end();
    without.end();
    let longest = |times: &[Duration]| times.iter().max().copied().unwrap_or_default();
    let (with_limits, without) = (longest(&times), longest(&measured));
    let count = times.len();
    println!("{count} writes, the longest {with_limits:?}, without limits {without:?}");
    assert!(with_limits < STALL + as_busy * without);
}

#[test]
fn limits_that_change_stall_nobody() {
    change_limits(Duration::from_secs(6), AS_BUSY);
}

#[test]
#[ignore = "takes ten minutes"]
fn limits_that_change_for_ten_minutes_stall_nobody() {
    change_limits(Duration::from_secs(600), 0);
}

/// Users are held for a moment when a mirror ends under a writer, and how long is told.
#[test]
fn a_mirror_tells_how_long_it_held_users() {
    let place = Place::new();
    place.img(&format!("create -q -f qcow2 disk {SIZE_BYTES}"));
    place.img(&format!("create -q -f qcow2 target {SIZE_BYTES}"));
    place.io("disk", &["write -P 1 0 64M"]);
    let words = [
        "--blockdev",
        "driver=qcow2,node-name=disk,file.driver=file,file.filename=disk",
        "--blockdev",
        "driver=qcow2,node-name=to,file.driver=file,file.filename=target",
    ];
    let mut daemon = start(&place, &place.path(NAME), &words, "disk");
    let guest = Guest::start(&place.path("sock"), SEED, &[BLOCK_BYTES]);
    let mirror = json!({"job-id": "j", "device": "disk", "target": "to", "sync": "full",
                        "auto-dismiss": false});
    daemon.must("blockdev-mirror", mirror);
    daemon.wait("j", "ready");
    let held = |jobs: &serde_json::Value| jobs[0]["x-vellum-held-ms"].as_f64();
    assert_eq!(held(&daemon.must("query-block-jobs", json!({}))), None);
    daemon.must("job-complete", json!({"id": "j"}));
    daemon.wait("j", "concluded");
    let held = held(&daemon.must("query-block-jobs", json!({}))).expect("it was held");
    let longest = guest.end().into_iter().max().unwrap_or_default();
    println!("held for {held} ms, the longest write {longest:?}");
    // The machine may be busy with anything; a copy of all the disk takes longer.
    assert!(held > 0.0 && held < STALL.as_secs_f64() * 1e3, "{held} ms");
    daemon.end();
    place.img("check -q target");
}

/// What a guest met in some seconds: its writes in a second, the median, 99th hundredth and longest.
fn row(socket: &Path, time: Duration) -> String {
    let guest = Guest::start(socket, SEED, &[BLOCK_BYTES]);
    std::thread::sleep(time);
    let mut times = guest.end();
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    let rate = times.len() as f64 / time.as_secs_f64();
    let (median, p99, longest) = (at(0.5), at(0.99), at(1.0));
    format!("{rate:.0}/s, median {median:?}, p99 {p99:?}, longest {longest:?}")
}

/// A guest's writes without and with a backup to a target of 1 MiB/s.
fn back_up(name: &str, program: &Path) {
    let place = Place::new();
    place.img(&format!("create -q -f qcow2 disk {SIZE_BYTES}"));
    place.io("disk", &["write -P 1 0 256M"]);
    place.img(&format!("create -q -f raw slow {SIZE_BYTES}"));
    let words = [
        "--object",
        "throttle-group,id=g,limits.bps-total=1048576",
        "--blockdev",
        "driver=throttle,node-name=to,throttle-group=g,file.driver=file,file.filename=slow",
        "--blockdev",
        "driver=qcow2,node-name=disk,file.driver=file,file.filename=disk",
    ];
    let mut daemon = start(&place, program, &words, "disk");
    let socket = place.path("sock");
    row(&socket, Duration::from_secs(2));
    println!("{name}, idle: {}", row(&socket, Duration::from_secs(10)));
    let backup = json!({"device": "disk", "target": "to", "sync": "full", "job-id": "j"});
    daemon.must("blockdev-backup", backup);
    println!("{name}, backup: {}", row(&socket, Duration::from_secs(20)));
    let jobs = daemon.must("query-block-jobs", json!({}));
    assert_eq!(jobs[0]["status"], "running", "{jobs}");
    daemon.kill();
}

/// The rows of docs/PERFORMANCE.md.
#[test]
#[ignore = "measures"]
fn both_daemons_back_up_to_a_slow_target() {
    let ours = Place::new();
    let program = ours.fast();
    for _ in 0..2 {
        back_up("vellum", &program);
        back_up(NAME, &PathBuf::from(NAME));
    }
}
