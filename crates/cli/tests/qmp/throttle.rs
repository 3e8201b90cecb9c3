//! `throttle-group` objects and the nodes that keep their limits.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::place::Step::{Ask, Io, Wait};
use super::place::{NAME, PATIENCE, Place, Step, add, qcow2, same, with};

fn group(id: &str, more: Value) -> Step {
    let arguments = with(json!({"qom-type": "throttle-group", "id": id}), more);
    Ask("object-add", arguments)
}

fn get(path: &str, property: &str) -> Step {
    Ask("qom-get", json!({"path": path, "property": property}))
}

fn set(path: &str, property: &str, value: Value) -> Step {
    let arguments = json!({"path": path, "property": property, "value": value});
    Ask("qom-set", arguments)
}

#[test]
fn groups_are_made_and_changed_alike() {
    let limits = |value: Value| set("/objects/g", "limits", value);
    same(
        &[
            "--object",
            "throttle-group,id=c,x-bps-read=7,limits.iops-write=3",
        ],
        &[
            get("c", "limits"),
            group("g", json!({"limits": {"iops-total": 100}})),
            group("g", json!({"limits": {"iops-total": 100}})),
            get("/objects/g", "limits"),
            get("/objects/no", "limits"),
            get("/objects/g", "nope"),
            get("/objects/g", "x-iops-total"),
            get("/objects/g", "type"),
            limits(json!({"bps-total": 1000})),
            get("g", "limits"),
            limits(json!({"bps-read": 1000})),
            limits(json!({"bps-total": -1})),
            limits(json!({"nosuch": 1})),
            limits(json!({"bps-total": "x"})),
            limits(json!({"bps-total": 1.5})),
            limits(json!(3)),
            limits(json!({"bps-total-max": 1})),
            limits(json!({"bps-total-max-length": 0})),
            limits(json!({"bps-total-max-length": 5_000_000_000_u64})),
            limits(json!({"iops-size": 512})),
            limits(json!({})),
            set("/objects/g", "x-iops-total", json!(3)),
            set("/objects/g", "type", json!("x")),
            set("/objects/g", "nope", json!("x")),
            Ask("qom-set", json!({"path": "g", "property": "limits"})),
            get("/objects/g", "limits"),
            group("h", json!({"x-iops-total": 5, "x-iops-size": 4096})),
            get("h", "limits"),
            group("i", json!({"x-iops-total": -5})),
            group("i", json!({"x-iops-total": 5, "limits": {"iops-total": 7}})),
            get("/objects/i", "limits"),
            group("j", json!({"nosuch": "5"})),
            group("j", json!({"limits": {"nosuch": 5}})),
            group("j", json!({"limits": 5})),
            group("j", json!({"x-bps-read-max-length": 5_000_000_000_u64})),
            group("j", json!({"x-bps-read-max": 5})),
            group("9x", json!({})),
            Ask("object-del", json!({"id": "h"})),
            Ask("object-add", json!({"qom-type": "iothread", "id": "h"})),
            group("h", json!({})),
            Ask(
                "object-add",
                json!({"qom-type": "secret", "id": "h", "data": "a"}),
            ),
            Ask("object-add", json!({"qom-type": "iothread", "id": "g"})),
        ],
    );
}

#[test]
fn nodes_hold_their_group_alike() {
    let throttle = |name: &str, group: &str, file: Value| {
        let options =
            json!({"driver": "throttle", "node-name": name, "throttle-group": group, "file": file});
        Ask("blockdev-add", options)
    };
    let del = |name: &str| Ask("blockdev-del", json!({"node-name": name}));
    let drop = |name: &str| Ask("object-del", json!({"id": name}));
    same(
        &[],
        &[
            group("g", json!({})),
            Ask(
                "blockdev-add",
                json!({"driver": "null-co", "node-name": "n"}),
            ),
            Ask(
                "blockdev-add",
                json!({"driver": "throttle", "node-name": "t", "file": "n"}),
            ),
            throttle("t", "no", json!("n")),
            throttle("t", "g", json!("n")),
            throttle("u", "g", json!({"driver": "null-co"})),
            drop("g"),
            del("n"),
            del("t"),
            drop("g"),
            del("u"),
            drop("g"),
            drop("g"),
            del("n"),
        ],
    );
}

/// A daemon with a throttled disk, to which writes take minutes, and a client that has begun
/// some of them.
fn slow_disk(place: &Place, more: &[&str]) -> (super::place::Daemon, std::process::Child) {
    let mut words = vec![
        "--object",
        "throttle-group,id=g,x-bps-total=1000",
        "--blockdev",
        "driver=null-co,node-name=n,size=1048576",
        "--blockdev",
        "driver=throttle,node-name=t,throttle-group=g,file=n",
        "--nbd-server",
        "addr.type=unix,addr.path=sock",
        "--export",
        "nbd,id=e,node-name=t,writable=on",
    ];
    words.extend(more);
    let mut daemon = place.ours(&words);
    daemon.must("query-block-exports", json!({}));
    let client = std::process::Command::new("qemu-io")
        .current_dir(place.root())
        .args(["-f", "raw", "nbd+unix:///t?socket=sock"])
        .args([
            "-c",
            "aio_write 0 64k",
            "-c",
            "aio_write 0 64k",
            "-c",
            "aio_flush",
        ])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("the program of `cargo xtask setup`");
    std::thread::sleep(Duration::from_millis(300));
    (daemon, client)
}

#[test]
fn what_waits_for_a_limit_holds_no_end_up() {
    let place = Place::new();
    let (mut daemon, mut client) = slow_disk(&place, &[]);
    let began = Instant::now();
    daemon.must("block-export-del", json!({"id": "e", "mode": "hard"}));
    let _ = client.wait();
    daemon.end();
    let (daemon, mut client) = slow_disk(&place, &[]);
    daemon.end();
    let _ = client.wait();
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
}

#[test]
fn a_changed_limit_holds_at_once() {
    let place = Place::new();
    let (mut daemon, mut client) = slow_disk(&place, &[]);
    assert!(client.try_wait().expect("a child").is_none());
    let limits = json!({"path": "g", "property": "limits", "value": {"bps-total": 0}});
    daemon.must("qom-set", limits);
    assert!(client.wait().expect("a child").success());
    daemon.end();
}

#[test]
fn rates_are_those_of_the_real_daemon() {
    let seconds = |real: bool| {
        let place = Place::new();
        let program = match real {
            true => PathBuf::from(NAME),
            false => place.path(NAME),
        };
        let mut daemon = place.start(
            &program,
            "--object throttle-group,id=g,x-iops-total=100,x-iops-size=4096 \
             --blockdev driver=null-co,node-name=n,size=1048576 \
             --blockdev driver=throttle,node-name=t,throttle-group=g,file=n \
             --nbd-server addr.type=unix,addr.path=sock --export nbd,id=e,node-name=t",
        );
        daemon.must("query-block-exports", json!({}));
        let began = Instant::now();
        let reads = "read 0 8k";
        let mut words = vec!["-r", "-f", "raw", "nbd+unix:///t?socket=sock"];
        for _ in 0..60 {
            words.extend(["-c", reads]);
        }
        place.must("qemu-io", &words);
        let took = began.elapsed().as_secs_f64();
        daemon.end();
        took
    };
    // 60 reads count twice; a tenth of a second's worth is free: 1.1 s.
    let (ours, theirs) = (seconds(false), seconds(true));
    assert!(ours > 1.0, "{ours}");
    assert!((ours / theirs - 1.0).abs() < 0.25, "{ours} {theirs}");
}

/// As Proxmox has its disks: the limit stands on top, and jobs work below it.
#[test]
fn what_stands_below_a_limit_is_managed_alike() {
    let limited = |file: Value| {
        let node = json!({
            "driver": "throttle",
            "node-name": "limited",
            "throttle-group": "g",
            "file": file,
        });
        Ask("blockdev-add", node)
    };
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "limited", "name": "e", "writable": true});
    let job = |command, id, arguments: Value| {
        let all = with(json!({"job-id": id}), arguments);
        Ask(command, all)
    };
    let reads: &[&str] = &[
        "read -P 5 0 64k",
        "read -P 2 64k 128k",
        "read -P 3 192k 192k",
        "read -P 6 512k 64k",
    ];
    let socket = json!({"addr": {"type": "unix", "data": {"path": "sock"}}});
    same(
        &[],
        &[
            group("g", json!({})),
            Ask("nbd-server-start", socket),
            add("base", "b", json!(null)),
            limited(qcow2("top", "m", json!("base"))),
            Ask("block-export-add", export),
            Io("e", &["write -P 5 0 64k"]),
            job("block-stream", "stream", json!({"device": "top"})),
            Wait("stream", "null"),
            Io("e", &["write -P 6 512k 64k", "read -P 5 0 64k"]),
            add("over", "o", json!(null)),
            Ask(
                "blockdev-snapshot",
                json!({"node": "top", "overlay": "over"}),
            ),
            Io("e", reads),
            Io("e", &["write -P 7 768k 64k"]),
            job(
                "block-commit",
                "commit",
                json!({"device": "limited", "base-node": "top"}),
            ),
            Wait("commit", "ready"),
            Ask("job-complete", json!({"id": "commit"})),
            Wait("commit", "null"),
            Io("e", &["read -P 7 768k 64k"]),
            Io("e", reads),
        ],
    );
}
