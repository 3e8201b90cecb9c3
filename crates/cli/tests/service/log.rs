//! `--log`: what happens, a line each, that programs and people read.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::place::Place;

const CONFIG: &str = "[daemon]\nmonitors = ['qmp.sock']\nnbd = { path = 'nbd.sock' }\n\
    [[disk]]\nname = 'a'\nimage = 'a'\nformat = 'qcow2'\n\
    [[disk.export]]\ntype = 'nbd'\nname = 'a'\nwritable = true\n";

/// What a daemon logs in its life.
fn logged(format: &str) -> String {
    let place = Place::new();
    place.write("disks.toml", CONFIG);
    let service = place.serve(&["--config", "disks.toml", "--log", format]);
    place.io("a", &["write 0 4k"]);
    let mut client = place.monitor();
    let stream = json!({"job-id": "j", "device": "a"});
    client.must("block-stream", stream);
    client.take_event("BLOCK_JOB_COMPLETED");
    place.write(
        "disks.toml",
        CONFIG.replace("image = 'a'", "image = 'no such'"),
    );
    service.reload();
    service.signal("-TERM");
    service.wait();
    place.text("log")
}

const EVENTS: [&str; 10] = [
    "bdrv_open_common",
    "block_export_added",
    "block_export_removed",
    "config_applied",
    "daemon_started",
    "daemon_stopping",
    "job_completed",
    "message",
    "nbd_client_connected",
    "node_closed",
];

#[test]
fn lines_for_programs_are_json() {
    let text = logged("json");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {line}")))
        .collect();
    let events: BTreeSet<&str> = lines
        .iter()
        .filter_map(|line| line["event"].as_str())
        .collect();
    for event in EVENTS {
        assert!(events.contains(event), "{event} is not in {text}");
    }
    for line in &lines {
        let time = line["time"].as_str().expect("a time");
        assert!(time.len() == 27 && time.ends_with('Z'), "{time}");
    }
    let wrong: Vec<&Value> = lines
        .iter()
        .filter(|line| line["level"] == "error")
        .collect();
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    let message = wrong[0]["message"].as_str().expect("a message");
    assert!(
        message.starts_with("disks.toml:5:8: disk 'a': Could not open 'no such'"),
        "{message}"
    );
}

#[test]
fn lines_for_people_are_short() {
    let text = logged("text");
    let told: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.split(' ').nth(2))
        .collect();
    for event in EVENTS {
        assert!(told.contains(event), "{event} is not in {text}");
    }
    assert!(
        text.contains(" info block_export_added id=a-nbd node=a kind=nbd"),
        "{text}"
    );
}
