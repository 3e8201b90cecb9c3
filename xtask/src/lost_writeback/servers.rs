//! Servers that go on while writes are lost.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use vellum_testing::Qmp;

use super::Place;
use crate::process::{Daemon, ShortPath};

type Scenario = fn(&mut Place) -> Result<bool>;

const ALL: [(&str, Scenario); 3] = [
    ("cache-in-use", cache_in_use),
    ("flushed-writes", flushed_writes),
    ("state-file", state_file),
];
/// Their names.
pub const NAMES: [&str; 3] = [ALL[0].0, ALL[1].0, ALL[2].0];

const START: Duration = Duration::from_secs(30);
/// Rounds of evictions and reads, and writes with a flush each.
const STEPS: u64 = 12;
const STEP_BYTES: u64 = 320 << 10;

/// Finds one by its name.
pub fn find(name: &str) -> Option<Scenario> {
    let found = ALL.iter().find(|(own, _)| *own == name)?;
    Some(found.1)
}

/// A daemon, and the sockets of its server and its monitor.
struct Served {
    daemon: Daemon,
    nbd: ShortPath,
    qmp: ShortPath,
}

impl Served {
    fn start(place: &Place, words: &[String]) -> Result<Served> {
        let nbd = ShortPath::new(&place.sources, "nbd")?;
        let qmp = ShortPath::new(&place.sources, "qmp")?;
        for socket in ["nbd", "qmp"] {
            // One that was killed leaves its own.
            let _ = std::fs::remove_file(place.sources.join(socket));
        }
        let mut command = std::process::Command::new(&place.vellum);
        let server = format!("addr.type=unix,addr.path={}", nbd.path());
        command
            .args(["daemon", "--nbd-server", &server])
            .args(words);
        let socket = format!("socket,id=m,server=on,wait=off,path={}", qmp.path());
        command.args(["--chardev", &socket, "--monitor", "chardev=m"]);
        let mut daemon = Daemon::start(&mut command, &place.sources.join("log"))?;
        daemon.wait_for_socket(nbd.path(), START)?;
        daemon.wait_for_socket(qmp.path(), START)?;
        Ok(Served { daemon, nbd, qmp })
    }

    fn url(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.nbd.path())
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// A cache whose process goes on: lost blocks are fetched again.
fn cache_in_use(place: &mut Place) -> Result<bool> {
    let folder = place.lossy.join("cache");
    place.proves("mkdir -m 700 $L/cache")?;
    let file = json!({"driver": "file", "filename": place.sources.join("raw")});
    let node = json!({
        "driver": "cache",
        "node-name": "disk",
        "directory": folder,
        "version": "1",
        "read-only": true,
        "file": file,
    });
    place.begin_losing();
    let export = "type=nbd,id=disk,node-name=disk,name=disk";
    let served = Served::start(
        place,
        &words(&["--blockdev", &node.to_string(), "--export", export]),
    )?;
    for _ in 0..STEPS {
        let compared = format!("$V compare -q -f raw -F raw $S/raw '{}'", served.url());
        place.proves(&compared)?;
        place.shell("sync -f $L")?;
        place.mounted.evict()?;
    }
    // The daemon reports at its end that the cache's disk has lost writes.
    served.daemon.kill()?;
    Ok(true)
}

/// A disk that is written to: what a flush has acknowledged is there after a crash.
fn flushed_writes(place: &mut Place) -> Result<bool> {
    place.proves("$V create -q -f qcow2 $L/disk 8M")?;
    place.sync()?;
    place.begin_losing();
    let file = place.lossy.join("disk");
    let node = json!({
        "driver": "qcow2",
        "node-name": "disk",
        "file": {"driver": "file", "filename": file},
    });
    let export = "type=nbd,id=disk,node-name=disk,name=disk,writable=on";
    let started = Served::start(
        place,
        &words(&["--blockdev", &node.to_string(), "--export", export]),
    );
    let Ok(served) = started else {
        // It has met a lost write as it opened the image.
        return Ok(false);
    };
    let mut flushed = Vec::new();
    for step in 0..STEPS {
        let (pattern, at) = (step + 1, step * STEP_BYTES);
        let write = format!(
            "$V io -f raw -c 'write -q -P {pattern} {at} {STEP_BYTES}' -c flush '{}'",
            served.url()
        );
        let written = place.shell(&write)?;
        if written.status.success() {
            flushed.push(format!("-c 'read -q -P {pattern} {at} {STEP_BYTES}'"));
        }
        if place.random.chance(50) {
            place.mounted.evict()?;
        }
    }
    served.daemon.kill()?;
    place.mounted.remount()?;
    if !flushed.is_empty() {
        let reads = flushed.join(" ");
        place.proves(&format!("$V io -r -f qcow2 {reads} $L/disk"))?;
    }
    Ok(!flushed.is_empty())
}

/// A state file: what was acknowledged comes back.
fn state_file(place: &mut Place) -> Result<bool> {
    place.begin_losing();
    let state = place.lossy.join("state.json");
    let arguments = words(&["--state", &state.to_string_lossy()]);
    let Ok(served) = Served::start(place, &arguments) else {
        return Ok(false);
    };
    let mut acknowledged = Vec::new();
    for step in 0..STEPS {
        let name = format!("n{step}");
        let node = json!({"driver": "null-co", "node-name": name, "size": 4096});
        let mut monitor = Qmp::try_connect(served.qmp.path())?;
        if monitor.try_must("blockdev-add", node).is_ok() {
            acknowledged.push(name);
        }
    }
    served.daemon.kill()?;
    place.mounted.remount()?;
    let served = Served::start(place, &arguments).context("the state file is not taken")?;
    let nodes =
        Qmp::try_connect(served.qmp.path())?.try_must("query-named-block-nodes", json!({}))?;
    let nodes = nodes.as_array().context("a list of nodes")?;
    for name in &acknowledged {
        let is_there = nodes.iter().any(|node| node["node-name"] == name.as_str());
        ensure!(is_there, "the node '{name}' was acknowledged, and is gone");
    }
    served.daemon.stop()?;
    Ok(!acknowledged.is_empty())
}
