//! `cargo xtask bench many`: many disks that nobody uses: all in one daemon of ours, with policies for
//! their chains too, all in one of QEMU's, and a daemon of QEMU's for each.
//!
//! Each disk is an overlay of one golden image and a writable export of NBD. Told are how long it takes
//! until all are served, what memory that is (proportional sets, of the kernel's memory nothing),
//! descriptors, and the processor time of doing nothing. Of daemons of QEMU's as many are started as
//! memory lets.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;
use vellum_testing::Qmp;

use super::MEMORY_FOLDER;
use super::metrics::get;
use super::options::Options;
use super::report::median;
use crate::process::{self, Daemon};
use crate::setup;
use crate::workspace::Workspace;

const GOLDEN: &str = "golden.qcow2";
const DISK_SIZE: &str = "10G";
const WRITTEN: &str = "write -q -P 7 0 64M";
const QMP_SOCKET: &str = "qmp.sock";
const HTTP_SOCKET: &str = "http.sock";
const START_LIMIT: Duration = Duration::from_secs(600);
/// How long daemons do nothing before, and while, that is measured.
const CALM: Duration = Duration::from_secs(3);
const IDLE: Duration = Duration::from_secs(10);
/// So many daemons are started at a time.
const AT_ONCE: usize = 16;
/// So much memory is left to others.
const LEFT_BYTES: u64 = 4 << 30;
/// How often an answer is asked for.
const TIMES: usize = 11;
/// What is asked over HTTP.
const PATHS: [&str; 5] = [
    "/v1/disks",
    "/v1/stats",
    "/v1/chains",
    "/v1/jobs",
    "/metrics",
];

/// Who serves the disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    /// One daemon of ours, with nothing else.
    Plain,
    /// With a monitor, HTTP, and these policies.
    Kept(Policies),
    /// One of QEMU's.
    Qemu,
    /// One of QEMU's for each disk.
    QemuEach,
}

/// Which policies the chains of all disks have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policies {
    None,
    /// That bounds layers.
    Layers,
    /// That bounds what is in overlays, of which each disk has one: files grow without a word, so all
    /// are looked at again and again.
    Bytes,
}

const SERVERS: [Server; 6] = [
    Server::Plain,
    Server::Kept(Policies::None),
    Server::Kept(Policies::Layers),
    Server::Kept(Policies::Bytes),
    Server::Qemu,
    Server::QemuEach,
];

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Server::Plain => "vellum, one daemon",
            Server::Kept(Policies::None) => "vellum, with monitor and metrics",
            Server::Kept(Policies::Layers) => "vellum, with policies for layers",
            Server::Kept(Policies::Bytes) => "vellum, with policies for bytes of an overlay",
            Server::Qemu => "qemu, one daemon",
            Server::QemuEach => "qemu, a daemon each",
        })
    }
}

/// Daemons that serve disks.
struct Served {
    daemons: Vec<Daemon>,
    started: Duration,
    disks: usize,
}

/// The task.
pub fn run(options: &Options) -> Result<()> {
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let vellum = workspace.vellum_or(options.vellum.as_deref())?;
    println!(
        "| server | disks | start, s | memory, MiB | KiB a disk | descriptors | processor, ms a second of nothing |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    let mut answers = Vec::new();
    for server in SERVERS {
        if !options.wants(&server.to_string()) {
            continue;
        }
        let folder = tempfile::tempdir_in(MEMORY_FOLDER)?;
        make_images(folder.path(), options.disks)?;
        let served = serve(server, &vellum, folder.path(), options.disks)?;
        if let Server::Kept(policies) = server {
            set_policies(policies, folder.path(), served.disks)?;
        }
        println!("| {server} | {} |", row(&served)?);
        if let Server::Kept(_) = server {
            answers.push((server, ask(&served, folder.path())?));
        }
        end(server, served)?;
    }
    for (server, lines) in answers {
        println!("\n{server}, {} disks: median of {TIMES}, ms", options.disks);
        for line in lines {
            println!("  {line}");
        }
    }
    Ok(())
}

fn name_of(disk: usize) -> String {
    format!("disk{disk:05}")
}

fn make_images(folder: &Path, disks: usize) -> Result<()> {
    let program = |name: &str, words: &[&str]| {
        let mut command = process::program(name)?;
        process::output(command.args(words).current_dir(folder)).map(drop)
    };
    program(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", GOLDEN, DISK_SIZE],
    )?;
    program("qemu-io", &["-c", WRITTEN, GOLDEN])?;
    let words = [
        "create", "-q", "-f", "qcow2", "-b", GOLDEN, "-F", "qcow2", "overlay",
    ];
    program("qemu-img", &words)?;
    for disk in 0..disks {
        let overlay = folder.join(format!("{}.qcow2", name_of(disk)));
        std::fs::copy(folder.join("overlay"), overlay)?;
    }
    Ok(())
}

/// A command that serves some of the disks at a socket.
fn command(
    server: Server,
    vellum: &Path,
    disks: std::ops::Range<usize>,
    socket: &str,
) -> Result<Command> {
    let mut command = match server {
        Server::Plain | Server::Kept(_) => {
            let mut command = Command::new(vellum);
            command.arg("daemon");
            command
        }
        Server::Qemu | Server::QemuEach => process::program("qemu-storage-daemon")?,
    };
    for disk in disks.clone() {
        let name = name_of(disk);
        let node =
            format!("driver=qcow2,node-name={name},file.driver=file,file.filename={name}.qcow2");
        command.args(["--blockdev", &node]);
    }
    let address = format!("addr.type=unix,addr.path={socket},max-connections=0");
    command.args(["--nbd-server", &address]);
    for disk in disks {
        let name = name_of(disk);
        let export = format!("type=nbd,id=e-{name},name={name},node-name={name},writable=on");
        command.args(["--export", &export]);
    }
    if let Server::Kept(_) = server {
        let chardev = format!("socket,id=monitor,path={QMP_SOCKET},server=on,wait=off");
        command.args(["--chardev", &chardev, "--monitor", "chardev=monitor"]);
        command.args(["--metrics", &format!("unix:{HTTP_SOCKET}")]);
    }
    Ok(command)
}

/// Daemons that are being started.
struct Starting<'a> {
    server: Server,
    vellum: &'a Path,
    folder: &'a Path,
    begun: Instant,
    daemons: Vec<Daemon>,
}

/// Starts the daemons, several at once, and waits until the last disk is served.
fn serve(server: Server, vellum: &Path, folder: &Path, disks: usize) -> Result<Served> {
    let mut starting = Starting {
        server,
        vellum,
        folder,
        begun: Instant::now(),
        daemons: Vec::new(),
    };
    let mut served = disks;
    if server == Server::QemuEach {
        for disk in 0..disks {
            if available_bytes()? < LEFT_BYTES {
                served = disk;
                break;
            }
            starting.begin(disk..disk + 1)?;
            if disk >= AT_ONCE {
                starting.wait_for(disk - AT_ONCE)?;
            }
        }
    } else {
        starting.begin(0..disks)?;
    }
    for number in 0..starting.daemons.len() {
        starting.wait_for(number)?;
    }
    Ok(Served {
        started: starting.begun.elapsed(),
        daemons: starting.daemons,
        disks: served,
    })
}

impl Starting<'_> {
    fn path(&self, number: usize, kind: &str) -> PathBuf {
        self.folder.join(format!("daemon{number}.{kind}"))
    }

    fn begin(&mut self, disks: std::ops::Range<usize>) -> Result<()> {
        let number = self.daemons.len();
        let socket = format!("daemon{number}.sock");
        let mut command = command(self.server, self.vellum, disks, &socket)?;
        command.arg("--pidfile").arg(self.path(number, "pid"));
        command.current_dir(self.folder);
        let daemon = Daemon::start(&mut command, &self.path(number, "log"))?;
        self.daemons.push(daemon);
        Ok(())
    }

    /// Waits until all disks of a daemon are served: then there is the file with its number.
    fn wait_for(&mut self, number: usize) -> Result<()> {
        let pidfile = self.path(number, "pid");
        let left = START_LIMIT.saturating_sub(self.begun.elapsed());
        self.daemons[number].wait_for_pidfile(&pidfile, left)
    }
}

/// Memory that programs may still have.
fn available_bytes() -> Result<u64> {
    let told = std::fs::read_to_string("/proc/meminfo")?;
    Ok(1024 * kib_of(&told, "MemAvailable:")?)
}

/// A number of `/proc`, in KiB.
fn kib_of(told: &str, key: &str) -> Result<u64> {
    let found = told.lines().find_map(|line| line.strip_prefix(key));
    let number = found.and_then(|rest| rest.trim().strip_suffix("kB"));
    let number = number.with_context(|| format!("no {key}"))?;
    Ok(number.trim().parse()?)
}

fn set_policies(policies: Policies, folder: &Path, disks: usize) -> Result<()> {
    let socket = process::ShortPath::new(folder, QMP_SOCKET)?;
    let mut monitor = Qmp::try_connect(socket.path())?;
    for disk in 0..disks {
        let name = name_of(disk);
        let mut policy = json!({"node-name": name});
        match policies {
            Policies::None => return Ok(()),
            Policies::Layers => policy["max-layers"] = json!(4),
            Policies::Bytes => {
                policy["max-overlay-bytes"] = json!(1_u64 << 40);
                let snapshot = json!({
                    "node-name": name, "snapshot-file": format!("{name}.over"),
                    "snapshot-node-name": format!("over-{name}"),
                });
                monitor.try_must("blockdev-snapshot-sync", snapshot)?;
            }
        }
        monitor.try_must("x-vellum-set-chain-policy", policy)?;
    }
    Ok(())
}

/// What they take, as cells of the table.
fn row(served: &Served) -> Result<String> {
    std::thread::sleep(CALM);
    let (mut kib, mut descriptors) = (0, 0);
    for daemon in &served.daemons {
        let folder = PathBuf::from(format!("/proc/{}", daemon.pid()));
        let told = std::fs::read_to_string(folder.join("smaps_rollup"))?;
        kib += kib_of(&told, "Pss:")?;
        descriptors += std::fs::read_dir(folder.join("fd"))?.count();
    }
    let before = cpu_seconds(served)?;
    let begun = Instant::now();
    std::thread::sleep(IDLE);
    let used = cpu_seconds(served)? - before;
    Ok(format!(
        "{} | {:.2} | {:.1} | {:.1} | {descriptors} | {:.2}",
        served.disks,
        served.started.as_secs_f64(),
        kib as f64 / 1024.0,
        kib as f64 / served.disks as f64,
        1e3 * used / begun.elapsed().as_secs_f64(),
    ))
}

/// Processor time of all daemons so far.
fn cpu_seconds(served: &Served) -> Result<f64> {
    let times = served.daemons.iter().map(Daemon::cpu_seconds);
    times.sum()
}

/// How long answers take, and the daemon's processor time for them: lines for people.
fn ask(served: &Served, folder: &Path) -> Result<Vec<String>> {
    let socket = process::ShortPath::new(folder, QMP_SOCKET)?;
    let mut monitor = Qmp::try_connect(socket.path())?;
    let mut lines = Vec::new();
    for path in PATHS {
        lines.push(asked(served, path, || {
            get(&folder.join(HTTP_SOCKET), path).map(drop)
        })?);
    }
    for command in [
        "query-block-exports",
        "x-vellum-query-chain-policies",
        "query-jobs",
    ] {
        let mut query = || {
            monitor.try_must(command, json!({}))?;
            Ok(())
        };
        lines.push(asked(served, command, &mut query)?);
    }
    Ok(lines)
}

fn asked(served: &Served, name: &str, mut ask: impl FnMut() -> Result<()>) -> Result<String> {
    let (mut took, mut used) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        let (before, begun) = (cpu_seconds(served)?, Instant::now());
        ask()?;
        took.push(1e3 * begun.elapsed().as_secs_f64());
        used.push(1e3 * (cpu_seconds(served)? - before));
    }
    let (took, used) = (median(took), median(used));
    Ok(format!("{name}: {took:.1}, processor {used:.1}"))
}

fn end(server: Server, served: Served) -> Result<()> {
    for daemon in served.daemons {
        match server {
            // A thousand that end by themselves would take long.
            Server::QemuEach => daemon.kill()?,
            _ => daemon.stop()?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_the_kernel_are_read() -> Result<()> {
        let told = "Rss:   300 kB\nPss:                 123 kB\nPss_Dirty: 7 kB\n";
        assert_eq!(kib_of(told, "Pss:")?, 123);
        kib_of(told, "Swap:").expect_err("it is not there");
        assert!(available_bytes()? > 0);
        Ok(())
    }
}
