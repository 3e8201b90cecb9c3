//! Jobs of a daemon that write a whole image into a place: mirror, backup, commit, stream.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use vellum_testing::Qmp;

use super::super::runner::Answer;
use super::super::scenario::Tool;
use super::copies::{self, OVERLAY, OVERLAYS, SOURCE};
use super::load::Batch;
use super::play::{BASE, Game, words};
use crate::fixed_length::Place;
use crate::process::{self, Daemon};

const START_LIMIT: Duration = Duration::from_secs(30);
const JOB_LIMIT: Duration = Duration::from_secs(90);
const LOOK_PAUSE: Duration = Duration::from_millis(5);
const MONITOR: &str = "monitor";
const PIDFILE: &str = "pid";

/// What a job does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `blockdev-mirror` into an empty image in the place.
    Mirror,
    /// `blockdev-backup` into an empty image in the place.
    Backup,
    /// `block-commit` into the base, which is in the place.
    Commit,
    /// `block-stream` into the overlay, which is in the place.
    Stream,
}

/// A job, and what the images hold before it.
#[derive(Debug, Clone)]
pub struct Job {
    /// What it does.
    pub kind: Kind,
    /// What the base holds.
    pub base: Batch,
    /// What the source or the overlay holds.
    pub overlay: Batch,
}

/// Has a daemon of each program carry the job out.
pub fn play(game: &mut Game<'_>, job: &Job) -> Result<()> {
    let size = game.scenario.size_bytes.to_string();
    let len_bytes = game.measure(&["--size", &size])?;
    let len_bytes = len_bytes.place_bytes(game.scenario.room, false);
    let places = match job.kind {
        Kind::Mirror | Kind::Backup => {
            game.fill_file(SOURCE, 16, &job.overlay)?;
            match game.create(len_bytes, &[])? {
                Some(places) => places,
                None => return Ok(()),
            }
        }
        Kind::Commit => {
            copies::make_chain(game, &job.base, &job.overlay)?;
            for overlay in OVERLAYS {
                game.runner.copy_file(OVERLAY, overlay)?;
            }
            game.open_copies(BASE, len_bytes)?
        }
        Kind::Stream => {
            copies::make_chain(game, &job.base, &job.overlay)?;
            game.open_copies(OVERLAY, len_bytes)?
        }
    };
    let mut answers = Vec::new();
    for (index, place) in places.iter().enumerate() {
        answers.push(run(game, job.kind, index, place)?);
    }
    copies::conclude(game, &places, &answers)
}

/// The nodes of a daemon, and the command that begins the job.
fn plan(kind: Kind, index: usize, place: &Place) -> (Vec<String>, &'static str, Value) {
    let file = place.address.options();
    let target = format!("driver=qcow2,node-name=target,discard=unmap,{file},file.discard=unmap");
    let node = |name: &str, file: &str| {
        format!("driver=qcow2,node-name={name},file.driver=file,file.filename={file}")
    };
    let copy = json!({"job-id": "j", "device": "source", "target": "target", "sync": "full",
        "auto-dismiss": false});
    match kind {
        Kind::Mirror => (
            vec![target, node("source", SOURCE)],
            "blockdev-mirror",
            copy,
        ),
        Kind::Backup => (
            vec![target, node("source", SOURCE)],
            "blockdev-backup",
            copy,
        ),
        Kind::Commit => (
            vec![target, node("top", OVERLAYS[index]) + ",backing=target"],
            "block-commit",
            json!({"job-id": "j", "device": "top", "base-node": "target", "auto-dismiss": false}),
        ),
        Kind::Stream => (
            vec![
                node("base", BASE) + ",read-only=on",
                target + ",backing=base",
            ],
            "block-stream",
            json!({"job-id": "j", "device": "target", "auto-dismiss": false}),
        ),
    }
}

/// One daemon's job. An error of the job is an answer; one of the daemon is a failure.
fn run(game: &mut Game<'_>, kind: Kind, index: usize, place: &Place) -> Result<Answer> {
    let (nodes, name, arguments) = plan(kind, index, place);
    let folder = game.runner.folder().to_owned();
    let mut all: Vec<String> = nodes
        .into_iter()
        .flat_map(|node| ["--blockdev".into(), node])
        .collect();
    let path = folder.join(MONITOR);
    let chardev = format!("socket,id=m,path={},server=on,wait=off", path.display());
    let pidfile = folder.join(PIDFILE);
    all.extend(words(&["--chardev", &chardev, "--monitor", "m"]));
    all.extend(["--pidfile".into(), pidfile.to_string_lossy().into_owned()]);
    let (mut command, name_shown) = match game.setting.tools[index] {
        Tool::Qemu => (
            process::program("qemu-storage-daemon")?,
            "qemu-storage-daemon",
        ),
        Tool::Vellum => {
            all.insert(0, "daemon".into());
            (Command::new(game.runner.vellum()), "vellum")
        }
    };
    let mut shown = Command::new(name_shown);
    let shown = process::shown(shown.args(&all));
    let lines = [format!("{shown} &"), format!("# QMP: {name} {arguments}")];
    game.runner.script.extend(lines);
    for left in [&path, &pidfile] {
        let _ = std::fs::remove_file(left);
    }
    let mut daemon = Daemon::start(
        command.args(&all).current_dir(&folder),
        &folder.join("daemon.log"),
    )?;
    daemon.wait_for_pidfile(&pidfile, START_LIMIT)?;
    let error = converse(&path, name, arguments, daemon)?;
    Ok(Answer {
        code: i32::from(error.is_some()),
        output: String::new(),
        errors: error
            .map(|error| format!("{name} failed: {error}"))
            .unwrap_or_default(),
    })
}

/// The error that the job ends with, if any.
fn converse(path: &Path, name: &str, arguments: Value, daemon: Daemon) -> Result<Option<String>> {
    let mut monitor = Qmp::try_connect(path)?;
    monitor.try_must(name, arguments)?;
    let deadline = Instant::now() + JOB_LIMIT;
    let error = loop {
        let jobs = monitor.try_must("query-jobs", json!({}))?;
        let job = &jobs[0];
        match job["status"].as_str() {
            Some("ready") => {
                monitor.try_must("job-complete", json!({"id": "j"}))?;
            }
            Some("concluded") => break job["error"].as_str().map(str::to_owned),
            _ => {}
        }
        if Instant::now() > deadline {
            bail!("{name} does not end: {jobs}");
        }
        std::thread::sleep(LOOK_PAUSE);
    };
    monitor.try_must("job-dismiss", json!({"id": "j"}))?;
    monitor.try_must("quit", json!({}))?;
    daemon.wait(START_LIMIT)?;
    Ok(error)
}
