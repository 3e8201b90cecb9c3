//! `/metrics`: what Prometheus' own checker says of it, and whether the numbers are true.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{DISK, Served, URI};
use crate::place::PATIENCE;

/// What the job may do in a second.
const SPEED: u64 = 1 << 30;

/// Starts a daemon in which there is something of everything: exports with and without requests,
/// a throttle group with waits, a job, a cache budget.
pub fn busy() -> Served {
    let mut words = DISK.to_vec();
    words.extend([
        "--cache-budget",
        "64M",
        "--object",
        "throttle-group,id=slow,x-iops-total=40",
        "--blockdev",
        "driver=throttle,node-name=l,throttle-group=slow,file.driver=file,file.filename=o",
        "--export",
        "nbd,id=idle,node-name=d,name=idle",
        "--blockdev",
        "driver=qcow2,node-name=o,file=l",
        "--export",
        "nbd,id=slow,node-name=o,name=slow,writable=on",
    ]);
    let mut served = Served::new(&words, None);
    served.place.io(
        URI,
        &[
            "write -P 7 0 128k",
            "read -P 7 0 128k",
            "discard 512k 64k",
            "flush",
        ],
    );
    let slow = "nbd+unix:///slow?socket=sock";
    served
        .place
        .io(slow, &["write -P 1 0 512k", "read -P 1 0 512k"]);
    let many: Vec<String> = (0..60)
        .map(|n| format!("write -P 2 {}k 4k", 4 * n))
        .collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    served.place.io(slow, &many);
    // It stays ready, and so does what it copies to.
    let mirror = json!({"target": "copy", "format": "qcow2", "job-id": "j", "speed": SPEED});
    served.must("POST", "/v1/disks/d/mirror", mirror);
    served.daemon.wait("j", "ready");
    // What a survey finds is told from then on.
    assert!(!scrape(&served).contains("vellum_disk_"));
    served.must("GET", "/v1/disks/d/space", Value::Null);
    served
}

pub fn scrape(served: &Served) -> String {
    let answer = served.ask("GET", "/metrics", Value::Null);
    assert_eq!(answer.status, 200);
    let kind = answer.header("content-type").expect("a type");
    assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
    answer.text()
}

/// Samples by their names and labels.
fn samples(text: &str) -> BTreeMap<&str, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').expect("a sample");
            (name, value.parse().expect("a number"))
        })
        .collect()
}

#[test]
fn promtool_has_nothing_to_say_of_a_busy_daemon() {
    let served = busy();
    let text = scrape(&served);
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program of `cargo xtask setup`");
    let mut input = promtool.stdin.take().expect("a pipe");
    input.write_all(text.as_bytes()).expect("it listens");
    drop(input);
    let output = promtool.wait_with_output().expect("it ends");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(
        output.status.success() && said.trim().is_empty(),
        "{said}\n{text}"
    );
    served.daemon.kill();
}

#[test]
fn the_numbers_are_true() {
    let served = busy();
    let text = scrape(&served);
    let samples = samples(&text);
    let value = |name: &str| {
        let found = samples.get(name);
        *found.unwrap_or_else(|| panic!("{name} is not in\n{text}"))
    };
    assert_eq!(
        value(r#"vellum_export_written_bytes_total{export="e",node="d"}"#),
        131_072.0
    );
    assert_eq!(
        value(r#"vellum_export_discarded_bytes_total{export="e",node="d"}"#),
        65_536.0
    );
    let labels = r#"{export="e",node="d",operation="write"}"#;
    let writes = value(&format!("vellum_export_requests_total{labels}"));
    let counted = value(&format!(
        "vellum_export_request_duration_seconds_count{labels}"
    ));
    assert!(writes > 0.0 && writes == counted, "{writes} {counted}");
    let seconds = value(&format!(
        "vellum_export_request_duration_seconds_sum{labels}"
    ));
    assert!(seconds > 0.0, "{seconds}");
    let last = r#"{export="e",node="d",operation="write",le="+Inf"}"#;
    assert_eq!(
        value(&format!(
            "vellum_export_request_duration_seconds_bucket{last}"
        )),
        counted
    );
    assert_eq!(
        value(r#"vellum_export_requests_in_flight{export="e",node="d"}"#),
        0.0
    );
    assert_eq!(
        value(r#"vellum_export_read_bytes_total{export="idle",node="d"}"#),
        0.0
    );
    let idle = r#"vellum_export_request_duration_seconds_count{export="idle""#;
    assert!(!text.contains(idle), "nobody has asked for anything");
    assert!(value(r#"vellum_throttle_group_waits_total{group="slow"}"#) > 0.0);
    assert!(value(r#"vellum_throttle_group_wait_seconds_total{group="slow"}"#) > 0.0);
    assert!(value(r#"vellum_node_cache_hits_total{node="o",cache="l2"}"#) > 0.0);
    assert!(value(r#"vellum_node_cache_misses_total{node="d",cache="l2"}"#) > 0.0);
    assert!(value("vellum_cache_budget_used_bytes") <= value("vellum_cache_budget_bytes"));
    let work = value(r#"vellum_job_work_bytes{job="j",type="mirror"}"#);
    let done = value(r#"vellum_job_done_bytes{job="j",type="mirror"}"#);
    assert!(work > 0.0 && work == done, "{work} {done}");
    assert_eq!(
        value(r#"vellum_job_speed_limit_bytes{job="j",type="mirror"}"#),
        SPEED as f64
    );
    assert_eq!(
        value(r#"vellum_node_size_bytes{node="d",driver="qcow2"}"#),
        f64::from(1 << 20)
    );
    assert!(value(r#"vellum_node_allocated_bytes{node="d",driver="qcow2"}"#) > 0.0);
    assert!(value("vellum_uptime_seconds") > 0.0);
    served.daemon.kill();
}

#[test]
fn where_space_goes_is_told_as_it_was_surveyed() {
    let served = busy();
    let text = scrape(&served);
    let samples = samples(&text);
    let value = |name: &str| {
        let found = samples.get(name);
        *found.unwrap_or_else(|| panic!("{name} is not in\n{text}"))
    };
    let space = served.must("GET", "/v1/disks/d/space", Value::Null);
    for (metric, key) in [
        ("vellum_disk_base_bytes", "base-bytes"),
        ("vellum_disk_snapshot_bytes", "snapshot-bytes"),
        ("vellum_disk_leaked_bytes", "leaked-bytes"),
    ] {
        let told = space[key].as_f64().unwrap_or_else(|| panic!("{space}"));
        assert_eq!(value(&format!(r#"{metric}{{node="d"}}"#)), told, "{key}");
    }
    assert!(space["base-bytes"].as_u64() > Some(0), "{space}");
    assert!(value(r#"vellum_disk_survey_timestamp_seconds{node="d"}"#) > 1e9);
    let host = served.must("GET", "/v1/host", Value::Null);
    assert_eq!(host["surveyed-disks"], 1, "{host}");
    assert_eq!(host["base-bytes"], space["base-bytes"], "{host}");
    served.daemon.kill();
}

#[test]
fn what_is_a_counter_only_grows() {
    let served = busy();
    let text = scrape(&served);
    served.place.io(URI, &["write -P 7 0 4k", "read -P 7 0 4k"]);
    let more = scrape(&served);
    let (before, after) = (counters(&text), counters(&more));
    for (name, value) in before {
        let now = after
            .get(&name)
            .copied()
            .unwrap_or_else(|| panic!("{name} is gone"));
        assert!(now >= value, "{name}: {value}, then {now}");
    }
    served.daemon.kill();
}

fn counters(text: &str) -> BTreeMap<String, f64> {
    let all = samples(text).into_iter();
    let counters = all.filter(|(name, _)| {
        name.split('{')
            .next()
            .is_some_and(|name| name.ends_with("_total"))
    });
    counters
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

#[test]
fn the_counts_of_a_write_log_are_told() {
    let place = crate::place::Place::new();
    let daemon = place.ours(
        "--nbd-server addr.type=unix,addr.path=sock \
             --blockdev driver=qcow2,node-name=w,journal=on,file.driver=file,file.filename=o \
             --export nbd,id=w,node-name=w,name=x,writable=on --metrics unix:ctl",
    );
    let served = Served {
        place,
        daemon,
        port: 0,
    };
    served.place.io(
        URI,
        &["write -P 1 0 4k", "flush", "write -P 2 64k 4k", "flush"],
    );
    let text = scrape(&served);
    let samples = samples(&text);
    for name in [
        "vellum_node_write_log_appends_total",
        "vellum_node_write_log_capacity_bytes",
    ] {
        let value = samples.get(&*format!("{name}{{node=\"w\"}}"));
        assert!(value.is_some_and(|value| *value > 0.0), "{name} in\n{text}");
    }
    served.daemon.end();
}

/// Begins so many writes, and dies with them in flight.
const LEAVE: &str = "
import nbd, os, sys
client = nbd.NBD()
client.connect_uri('nbd+unix:///slow?socket=sock')
for at in range(16):
    client.aio_pwrite(b'x' * 4096, at * 4096)
while client.aio_in_flight() and not client.aio_peek_command_completed():
    client.poll(100)
os._exit(0)
";

#[test]
fn requests_of_a_client_that_has_left_are_not_in_flight_for_ever() {
    let served = Served::new(
        &[
            "--nbd-server",
            "addr.type=unix,addr.path=sock",
            "--object",
            "throttle-group,id=slow,x-iops-write=5",
            "--blockdev",
            "driver=throttle,node-name=l,throttle-group=slow,file.driver=file,file.filename=o",
            "--blockdev",
            "driver=raw,node-name=o,file=l",
            "--export",
            "nbd,id=slow,node-name=o,name=slow,writable=on",
        ],
        None,
    );
    let in_flight = || {
        let stats = served.must("GET", "/v1/stats", Value::Null);
        stats["disks"][0]["in-flight"].as_u64().expect("a number")
    };
    served.place.must("/usr/bin/python3", &["-c", LEAVE]);
    assert!(in_flight() > 0, "those that wait are in flight");
    let begin = Instant::now();
    while in_flight() > 0 {
        assert!(begin.elapsed() < PATIENCE, "{} are", in_flight());
        std::thread::sleep(Duration::from_millis(50));
    }
    served.daemon.end();
}
