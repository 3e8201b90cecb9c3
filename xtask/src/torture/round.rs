//! One round: starts a server and its clients, kills the server, and verifies what is left.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use vellum_testing::nbd::Connection;

use super::changes::{Backup, Changes, Counts, export};
use super::disk::{Disk, Layer, OnFull, Programs};
use super::file;
use super::fixed::Leaked;
use super::guest::{self, Guest};
use super::load::Load;
use super::model::{GRANULE_BYTES, Model};
use super::monitor::Monitor;
use super::service;
use crate::process;
use crate::random::Random;

/// How long a server may take to let the first client in.
const START_LIMIT: Duration = Duration::from_secs(60);
const START_PAUSE: Duration = Duration::from_millis(3);
/// A busy machine answers less in this time than it is asked to.
const ANSWERS_LIMIT: Duration = Duration::from_secs(20);

/// What a round did.
#[derive(Debug, Default)]
pub struct Report {
    /// Requests that were answered.
    pub answered: u64,
    /// Those of them that went through a file.
    pub answered_by_file: u64,
    /// Those that a guest has sent.
    pub answered_by_guest: u64,
    /// Servers to which a guest came back after the last one was killed.
    pub returns: u64,
    /// Flushes that were acknowledged.
    pub flushes: u64,
    /// Changes of the graph, in words.
    pub history: Vec<String>,
    /// Backups that were looked at.
    pub backups: u64,
    /// Daemons that came back by themselves.
    pub services: u64,
    /// What was done about space.
    pub counts: Counts,
    /// Power cuts that were looked at.
    pub cuts: u64,
    /// What the kill has leaked, of an image of fixed length.
    pub leaked: Option<Leaked>,
    /// What is wrong.
    pub failure: Option<String>,
    /// What the server said last.
    pub last_words: String,
}

impl Report {
    /// Adds what another server has done in the same round.
    pub fn add(&mut self, other: Report) {
        self.answered += other.answered;
        self.answered_by_file += other.answered_by_file;
        self.answered_by_guest += other.answered_by_guest;
        // Counted from the start of the round.
        self.flushes = other.flushes;
        self.history.extend(other.history);
        self.failure = other.failure;
        self.last_words = other.last_words;
    }
}

/// A server that is ended, in its way, with this value.
pub struct Server {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
    /// What is mounted over, until it is dead.
    mountpoint: Option<PathBuf>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It is dead already, unless something failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(mountpoint) = &self.mountpoint {
            let mut unmount = Command::new("fusermount3");
            // If it fails, the folder cannot be removed, which says so.
            let _ = unmount.args(["-u", "-z"]).arg(mountpoint).output();
        }
    }
}

impl Server {
    /// Starts a server that listens in the folder.
    pub fn start(mut command: Command, folder: &Path) -> Result<Self> {
        let (socket, log) = (folder.join("socket"), folder.join("log"));
        // Left by the last one, which had no time to remove it.
        if socket.exists() {
            std::fs::remove_file(&socket)?;
        }
        let child = process::spawn_piped(command.stderr(File::create(&log)?).current_dir(folder))?;
        Ok(Server {
            child,
            socket,
            log,
            mountpoint: None,
        })
    }

    /// Starts a daemon that has a monitor on its standard input and output.
    pub fn start_with_monitor(command: Command, disk: &Disk) -> Result<(Self, Option<Monitor>)> {
        let mut server = Server::start(command, &disk.folder)?;
        server.mountpoint = disk.mountpoint.clone();
        let mut monitor = Monitor::take(&mut server.child);
        server.wait()?;
        if monitor.greet().is_err() {
            bail!("the monitor says nothing");
        }
        Ok((server, Some(monitor)))
    }

    /// Waits until a client may come.
    pub fn wait(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        while let Err(error) = Connection::open(&self.socket, false) {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            if let Some(status) = self.child.try_wait()? {
                bail!("the server ended with {status}: {log}");
            }
            if Instant::now() > deadline {
                bail!("the server lets nobody in ({error:#}): {log}");
            }
            std::thread::sleep(START_PAUSE);
        }
        Ok(())
    }

    fn kill(&mut self, load: &Load<'_>) {
        let early = self.child.try_wait();
        // Clients may see the end before this thread goes on.
        load.over.store(true, Ordering::Release);
        let killed = self.child.kill().and_then(|()| self.child.wait());
        if let Ok(Some(status)) = early {
            load.fail(format!("the server ended by itself with {status}"));
        }
        if let Err(error) = killed {
            load.fail(format!("the server cannot be killed: {error}"));
        }
    }
}

/// `vellum nbd`.
pub fn nbd_command(disk: &Disk, programs: &Programs, random: &mut Random) -> Result<Command> {
    let top = disk.top()?;
    let mut command = programs.command("nbd", "qemu-nbd")?;
    let cache = random.pick(&["writeback", "writeback", "writethrough"]);
    command
        .args(["-t", "-e", "0", "--discard=unmap", "-f", top.format])
        .arg(format!("--cache={cache}"))
        .arg("-k")
        .arg(disk.folder.join("socket"))
        .arg(&top.file)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    Ok(command)
}

/// `vellum daemon`, with every image as a node.
fn daemon_command(disk: &Disk, programs: &Programs) -> Result<Command> {
    let mut command = programs.command("daemon", "qemu-storage-daemon")?;
    let top = disk.top()?;
    let mut below: Option<&Layer> = None;
    for layer in &disk.chain {
        let mut file = json!({
            "driver": "file", "filename": layer.file, "discard": "unmap", "auto-read-only": true,
        });
        if let Some(log) = &disk.log
            && layer.file == top.file
        {
            file = json!({
                "driver": "blklogwrites", "file": file, "discard": "unmap",
                "log": {"driver": "file", "filename": log},
            });
        }
        let mut node = json!({
            "driver": layer.format, "node-name": layer.node(), "file": file, "discard": "unmap",
            "read-only": layer.file != top.file,
        });
        if layer.format == "qcow2" {
            node["backing"] = below.map_or(json!(null), |below| json!(below.node()));
        }
        below = Some(layer);
        command.arg("--blockdev").arg(node.to_string());
    }
    let path = disk.folder.join("socket");
    command
        .arg("--nbd-server")
        .arg(format!(
            "addr.type=unix,addr.path={},max-connections=0",
            path.display()
        ))
        .arg("--export")
        .arg(export(&top.node(), disk.on_full).to_string());
    if let Some(mountpoint) = &disk.mountpoint {
        let export = json!({
            "type": "fuse", "id": "file", "node-name": top.node(), "writable": true,
            "mountpoint": mountpoint,
        });
        command.arg("--export").arg(export.to_string());
    }
    if let Some((socket, queues)) = &disk.guest {
        let export = json!({
            "type": "vhost-user-blk", "id": "guest", "node-name": top.node(), "writable": true,
            "num-queues": queues, "addr": {"type": "unix", "path": disk.folder.join(socket)},
        });
        command.arg("--export").arg(export.to_string());
    }
    command
        .args(["--chardev", "stdio,id=m", "--monitor", "m"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    Ok(command)
}

/// How long a server lives: so long, and until it has answered so much.
#[derive(Debug, Clone, Copy)]
pub struct Life {
    /// At least.
    pub time: Duration,
    /// Requests that it must have answered, if it does so in a while.
    pub answers: u64,
    /// Then the clients stop, and flush what they have written.
    pub settles: bool,
}

/// Starts a server of the disk, mostly one with a monitor.
fn start(
    disk: &Disk,
    programs: &Programs,
    random: &mut Random,
) -> Result<(Server, Option<Monitor>)> {
    if random.chance(75) {
        return start_daemon(disk, programs);
    }
    let command = nbd_command(disk, programs, random)?;
    let mut server = Server::start(command, &disk.folder)?;
    server.wait()?;
    Ok((server, None))
}

/// Starts a daemon of the disk, with its monitor.
pub fn start_daemon(disk: &Disk, programs: &Programs) -> Result<(Server, Option<Monitor>)> {
    Server::start_with_monitor(daemon_command(disk, programs)?, disk)
}

/// Plays a round on a disk, and leaves the disk as it is after it.
pub fn play(
    disk: &mut Disk,
    model: &Model,
    programs: &Programs,
    random: &mut Random,
) -> Result<Report> {
    if !disk.own.is_empty() {
        return service::play(disk, model, programs, random);
    }
    let served = start(disk, programs, random)?;
    disk.has_policy = disk.is_ours && served.1.is_some() && random.chance(20);
    let time = match disk.on_full {
        // A policy is looked at after two seconds: kills fall around its job.
        _ if disk.has_policy => Duration::from_millis(random.between(2000, 6000)),
        Some(_) => Duration::from_millis(random.between(500, 3000)),
        None => lifetime(random),
    };
    let life = Life {
        time,
        answers: 0,
        settles: false,
    };
    let clients = random.between(2, 5);
    let (mut report, backups) = torment(disk, model, served, life, (clients, None), random);
    if report.failure.is_none() {
        let judged = judge(disk, model, programs, random, &backups);
        report.failure = judged.err().map(|error| format!("{error:#}"));
    }
    report.backups = backups.len() as u64;
    Ok(report)
}

/// Has clients and the monitor work with a server, and kills it. What the monitor has backed
/// up is for the caller to look at.
pub fn torment(
    disk: &mut Disk,
    model: &Model,
    (mut server, monitor): (Server, Option<Monitor>),
    life: Life,
    (clients, guest): (u64, Option<&mut Guest>),
    random: &mut Random,
) -> (Report, Vec<Backup>) {
    let mut report = Report::default();
    let socket = server.socket.clone();
    let mut load = Load::new(model, &socket, monitor.is_some());
    load.is_refused_when_full = disk.on_full == Some(OnFull::Fail);
    let mut lifetime = life.time;
    let backups = std::thread::scope(|scope| {
        if let Some(guest) = guest {
            let (random, load) = (random.fork(), &load);
            scope.spawn(move || guest.run(load, random));
        }
        for number in 0..clients {
            let random = random.fork();
            let load = &load;
            match disk.mountpoint.clone() {
                Some(mountpoint) if number % 2 == 0 => {
                    scope.spawn(move || file::run(load, &mountpoint, random))
                }
                _ => scope.spawn(move || load.run(random)),
            };
        }
        let changes = monitor.map(|monitor| {
            let random = random.fork();
            let (disk, load) = (&mut *disk, &load);
            scope.spawn(move || {
                let mut changes = Changes::new(monitor, disk, load, random);
                changes.run();
                (changes.history, changes.backups, changes.counts)
            })
        });
        let begun = Instant::now();
        std::thread::sleep(life.time);
        while load.answered.load(Ordering::Relaxed) < life.answers && is_awaited(&load, begun) {
            std::thread::sleep(START_PAUSE);
        }
        if life.settles
            && let Err(error) = load.settle(clients)
        {
            load.fail(format!("the clients cannot stop: {error:#}"));
        }
        lifetime = begun.elapsed();
        server.kill(&load);
        let done = changes.map(|changes| changes.join());
        match done {
            Some(Ok((history, backups, counts))) => {
                report.history = history;
                report.counts = counts;
                backups
            }
            _ => Vec::new(),
        }
    });
    report.answered = load.answered.load(Ordering::Relaxed);
    report.answered_by_file = load.answered_by_file.load(Ordering::Relaxed);
    report.answered_by_guest = load.answered_by_guest.load(Ordering::Relaxed);
    report.flushes = model.counts().1;
    report.history.push(format!("killed after {lifetime:?}"));
    report.failure = load.failure.into_inner().unwrap_or_default();
    let log = std::fs::read_to_string(&server.log).unwrap_or_default();
    let tail: Vec<&str> = log.lines().rev().take(3).collect();
    report.last_words = format!("{tail:?}");
    (report, backups)
}

/// Whether more answers of a server are waited for that lives since then.
fn is_awaited(load: &Load<'_>, begun: Instant) -> bool {
    // A guest gives up by itself, and says so.
    let limit = match load.has_old_requests.load(Ordering::Acquire) {
        true => 2 * guest::PATIENCE,
        false => ANSWERS_LIMIT,
    };
    begun.elapsed() < limit && !load.has_failed()
}

/// When a server dies: mostly soon, so that there are many deaths.
pub fn lifetime(random: &mut Random) -> Duration {
    let most = random.pick(&[100, 300, 700, 700, 1500, 3000]);
    Duration::from_millis(random.between(50, most))
}

/// Looks at what a dead server has left.
pub fn judge(
    disk: &mut Disk,
    model: &Model,
    programs: &Programs,
    random: &mut Random,
    backups: &[Backup],
) -> Result<()> {
    for layer in &disk.chain {
        disk.check(layer, programs, random)?;
    }
    let first = judge_chain(disk, disk.top()?, model, programs);
    let found = match (first, disk.pivot.take()) {
        (Ok(found), _) => found,
        (Err(error), None) => return Err(error),
        (Err(error), Some(height)) => {
            // Its users may have been led to the base already: then that is the disk.
            let base = &disk.chain[height - 1];
            let found = judge_chain(disk, base, model, programs).with_context(|| {
                format!("neither the top is right ({error:#}) nor the base of its commit")
            })?;
            disk.chain.truncate(height);
            found
        }
    };
    for backup in backups {
        disk.check(&backup.layer, programs, random)?;
        let content = disk.content(&backup.layer, &mut process::program("qemu-img")?)?;
        model
            .judge(&content, backup.moment)
            .with_context(|| format!("backup {}", backup.layer.file))?;
    }
    let size_bytes = found.len() * GRANULE_BYTES;
    let sizes = [Some(size_bytes as u64), disk.old_size_bytes.take()];
    let expected = (model.granules() * GRANULE_BYTES) as u64;
    ensure!(
        size_bytes as u64 == expected || sizes[1] == sizes[0],
        "the disk has {size_bytes} bytes, not {expected}"
    );
    model.restart(found);
    disk.tidy()
}

/// Reads a chain with both programs: both must see the same, and what was promised.
fn judge_chain(disk: &Disk, top: &Layer, model: &Model, programs: &Programs) -> Result<Vec<u32>> {
    let theirs = disk.content(top, &mut process::program("qemu-img")?)?;
    let judged = model.judge(&theirs, model.after_kill());
    let found = judged.with_context(|| format!("{}, read by qemu-img", top.file))?;
    if !programs.real {
        let ours = disk.content(top, Command::new(&programs.vellum).arg("img"))?;
        ensure!(ours == theirs, "{}: vellum reads other bytes", top.file);
    }
    Ok(found)
}
