//! `cargo xtask bench fair`: many disks under load in one daemon, and a job with a limit beside them.
//!
//! Each disk is an overlay of one golden image and has a client of its own, fio's of NBD, which asks for
//! one thing after another: 4 KiB at random, seven reads to three writes. Meanwhile one more disk is
//! backed up with a speed. Of a round are told how the slowest hundredth of a disk's requests compares
//! with that of the others, and how fast the job really was. Ours and QEMU's daemon, turn by turn, each
//! on images of its own that are as the other's.

use std::fmt;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vellum_testing::Qmp;

use super::MEMORY_FOLDER;
use super::load::BLOCK_BYTES;
use super::options::Options;
use super::report::median;
use crate::process::{self, Daemon, ShortPath};
use crate::random::Random;
use crate::setup;
use crate::workspace::Workspace;

const MIB: u64 = 1 << 20;
/// What the clients of a disk read and write of it.
const LOADED_BYTES: u64 = 64 * MIB;
/// What the job may do in a second.
const JOB_BYTES_PER_SECOND: u64 = 8 * MIB;
/// How long everything runs before it is measured.
const WARM: Duration = Duration::from_secs(2);
const START_LIMIT: Duration = Duration::from_secs(60);

const GOLDEN: &str = "golden.qcow2";
const COPY: &str = "copy.qcow2";
const NBD_SOCKET: &str = "nbd.sock";
const QMP_SOCKET: &str = "qmp.sock";
/// What fio writes.
const REPORT: &str = "report";

/// What serves the disks.
#[derive(Debug, Clone)]
enum Server {
    Vellum(&'static str, PathBuf),
    Qemu,
}

impl Server {
    fn name(&self) -> &'static str {
        match self {
            Server::Vellum(name, _) => name,
            Server::Qemu => "qemu",
        }
    }

    fn command(&self) -> Result<Command> {
        match self {
            Server::Vellum(_, path) => {
                let mut command = Command::new(path);
                command.arg("daemon");
                Ok(command)
            }
            Server::Qemu => {
                let mut command = process::program("qemu-storage-daemon")?;
                command.args(["--object", "iothread,id=polls"]);
                Ok(command)
            }
        }
    }
}

/// Where the images of a round lie.
struct Place {
    folder: PathBuf,
    /// Around the page cache.
    is_direct: bool,
}

/// What a round came to.
#[derive(Debug, Clone, PartialEq)]
struct Measured {
    /// Requests of all disks in a second.
    per_second: f64,
    /// Of each disk: what 99 of 100 requests do not take longer than, in milliseconds; ascending.
    p99_ms: Vec<f64>,
    /// What the job did in a second, of what it may.
    job_share: f64,
}

impl Measured {
    fn slowest_of_median(&self) -> f64 {
        self.highest() / median(self.p99_ms.clone())
    }

    fn slowest_of_fastest(&self) -> f64 {
        self.highest() / self.lowest()
    }

    fn lowest(&self) -> f64 {
        self.p99_ms.first().copied().unwrap_or(f64::NAN)
    }

    fn highest(&self) -> f64 {
        self.p99_ms.last().copied().unwrap_or(f64::NAN)
    }
}

/// As a row of a table.
impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let middle = median(self.p99_ms.clone());
        write!(
            f,
            "{:.0} | {:.1} | {middle:.1} | {:.1} | {:.2} | {:.2} | {:.3}",
            self.per_second,
            self.lowest(),
            self.highest(),
            self.slowest_of_median(),
            self.slowest_of_fastest(),
            self.job_share,
        )
    }
}

/// The task.
pub fn run(options: &Options) -> Result<()> {
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let vellum = workspace.vellum_or(options.vellum.as_deref())?;
    let mut servers = vec![Server::Vellum("vellum", vellum)];
    if let Some(before) = &options.before {
        servers.push(Server::Vellum("before", before.clone()));
    }
    servers.push(Server::Qemu);
    println!(
        "| {} disks | requests/s | p99 lowest, ms | median | highest | highest/median | \
         highest/lowest | job's speed of its limit |",
        options.disks
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for round in 0..options.rounds {
        for name in ["tmpfs", "disk"] {
            let mut order: Vec<&Server> = servers.iter().collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for server in order {
                let title = format!("{name}, {}", server.name());
                if !options.wants(&title) {
                    continue;
                }
                // One at a time: what a thousand disks have written takes room.
                let folder = match name {
                    "tmpfs" => tempfile::tempdir_in(MEMORY_FOLDER)?,
                    _ => tempfile::tempdir_in(&workspace.target)?,
                };
                let place = Place {
                    folder: folder.path().to_owned(),
                    is_direct: name == "disk",
                };
                let measured = measure(server, &place, options).context(title.clone())?;
                println!("| {title} | {measured} |");
            }
        }
    }
    Ok(())
}

/// The name of a disk, its node and its export; the one that is backed up is the last.
fn name_of(disk: usize) -> String {
    format!("disk{disk:04}")
}

fn measure(server: &Server, place: &Place, options: &Options) -> Result<Measured> {
    let seconds = options.seconds.ceil().max(1.0);
    let job_bytes = JOB_BYTES_PER_SECOND * (seconds as u64 + 2 * WARM.as_secs() + 4);
    make_images(place, options.disks, job_bytes.max(LOADED_BYTES))?;
    let daemon = start(server, place, options.disks)?;
    let socket = ShortPath::new(&place.folder, QMP_SOCKET)?;
    let mut monitor = Qmp::try_connect(socket.path())?;
    let mut fio = load(place, options.disks, seconds)?;
    let job = json!({
        "job-id": "limited", "device": name_of(options.disks), "target": "copy",
        "sync": "full", "speed": JOB_BYTES_PER_SECOND,
    });
    monitor.try_must("blockdev-backup", job)?;
    std::thread::sleep(WARM);
    let (begun, before) = (Instant::now(), dealt_bytes(&mut monitor)?);
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let (elapsed, after) = (begun.elapsed(), dealt_bytes(&mut monitor)?);
    ensure!(fio.wait()?.success(), "fio has failed");
    let said = std::fs::read_to_string(place.folder.join(REPORT))?;
    monitor.try_must(
        "block-job-cancel",
        json!({"device": "limited", "force": true}),
    )?;
    if let Err(failure) = daemon.stop() {
        // QEMU's crashes now and then when it ends; what it did before counts.
        ensure!(matches!(server, Server::Qemu), "{failure:#}");
        eprintln!("note: {failure:#}");
    }
    let (per_second, p99_ms) = read_report(&said)?;
    let speed = (after - before) as f64 / elapsed.as_secs_f64();
    Ok(Measured {
        per_second,
        p99_ms,
        job_share: speed / JOB_BYTES_PER_SECOND as f64,
    })
}

/// A golden image full of noise, an overlay of it for each disk and one more, and what that is copied to.
fn make_images(place: &Place, disks: usize, disk_bytes: u64) -> Result<()> {
    let raw = place.folder.join("raw");
    let mut bytes = vec![0; MIB as usize];
    let mut random = Random::new(1);
    let mut file = std::fs::File::create(&raw)?;
    for _ in 0..disk_bytes / MIB {
        random.fill(&mut bytes);
        file.write_all(&bytes)?;
    }
    let image = |words: &[&str]| {
        let mut command = process::program("qemu-img")?;
        process::output(command.args(words).current_dir(&place.folder)).map(drop)
    };
    image(&["convert", "-f", "raw", "-O", "qcow2", "raw", GOLDEN])?;
    std::fs::remove_file(raw)?;
    std::fs::File::open(place.folder.join(GOLDEN))?.sync_all()?;
    let size = disk_bytes.to_string();
    image(&["create", "-q", "-f", "qcow2", COPY, &size])?;
    image(&[
        "create", "-q", "-f", "qcow2", "-b", GOLDEN, "-F", "qcow2", "overlay",
    ])?;
    for disk in 0..=disks {
        let overlay = place.folder.join(format!("{}.qcow2", name_of(disk)));
        std::fs::copy(place.folder.join("overlay"), overlay)?;
    }
    Ok(())
}

fn start(server: &Server, place: &Place, disks: usize) -> Result<Daemon> {
    let mut command = server.command()?;
    let direct = match place.is_direct {
        true => ",file.cache.direct=on",
        false => "",
    };
    let node = |name: &str, image: &str| {
        format!("driver=qcow2,node-name={name},file.driver=file,file.filename={image}{direct}")
    };
    for disk in 0..=disks {
        let name = name_of(disk);
        command.args(["--blockdev", &node(&name, &format!("{name}.qcow2"))]);
    }
    command.args(["--blockdev", &node("copy", COPY)]);
    let address = format!("addr.type=unix,addr.path={NBD_SOCKET},max-connections=0");
    command.args(["--nbd-server", &address]);
    let thread = match server {
        Server::Vellum(..) => "",
        Server::Qemu => ",iothread=polls",
    };
    for disk in 0..disks {
        let name = name_of(disk);
        let export = format!("type=nbd,id={name},name={name},node-name={name},writable=on");
        command.args(["--export", &format!("{export}{thread}")]);
    }
    let chardev = format!("socket,id=monitor,path={QMP_SOCKET},server=on,wait=off");
    command.args(["--chardev", &chardev, "--monitor", "chardev=monitor"]);
    command.current_dir(&place.folder);
    let pidfile = place.folder.join("pid");
    command.arg("--pidfile").arg(&pidfile);
    let mut daemon = Daemon::start(&mut command, &place.folder.join("log"))?;
    daemon.wait_for_pidfile(&pidfile, START_LIMIT)?;
    Ok(daemon)
}

/// Starts the clients of all disks.
fn load(place: &Place, disks: usize, seconds: f64) -> Result<std::process::Child> {
    let mut plan = format!(
        "[global]\nioengine=nbd\nthread\nrw=randrw\nrwmixread=70\nbs={BLOCK_BYTES}\niodepth=1\n\
         norandommap\ntime_based\nruntime={seconds}\nramp_time={}\nsize={LOADED_BYTES}\n",
        WARM.as_secs()
    );
    for disk in 0..disks {
        let name = name_of(disk);
        plan.push_str(&format!(
            "[{name}]\nuri=nbd+unix:///{name}?socket={NBD_SOCKET}\n"
        ));
    }
    std::fs::write(place.folder.join("plan"), plan)?;
    let mut fio = process::program("fio")?;
    fio.args(["--output-format=json", "--output", REPORT, "plan"]);
    process::spawn(fio.current_dir(&place.folder))
}

/// All requests in a second, and the disks' latencies of 99 of 100, ascending: of reads and writes the
/// longer one.
fn read_report(said: &str) -> Result<(f64, Vec<f64>)> {
    let start = said.find('{').context("fio's report has no JSON")?;
    let report: Value = serde_json::from_str(&said[start..])?;
    let jobs = report["jobs"].as_array().context("no jobs")?;
    let (mut per_second, mut p99_ms) = (0.0, Vec::new());
    for job in jobs {
        ensure!(job["error"] == 0, "an error of {}", job["jobname"]);
        let mut longest_ns = 0.0_f64;
        for direction in ["read", "write"] {
            let part = &job[direction];
            per_second += part["iops"].as_f64().context("no requests")?;
            let found = part["clat_ns"]["percentile"]["99.000000"].as_f64();
            longest_ns = longest_ns.max(found.context("no latency")?);
        }
        p99_ms.push(longest_ns / 1e6);
    }
    p99_ms.sort_by(f64::total_cmp);
    Ok((per_second, p99_ms))
}

/// How many bytes the only job has dealt with.
fn dealt_bytes(monitor: &mut Qmp) -> Result<u64> {
    let jobs = monitor.try_must("query-block-jobs", json!({}))?;
    let offset = jobs[0]["offset"].as_u64();
    offset.context("the job has ended: give it a larger disk")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_of_disks_are_read() -> Result<()> {
        let part = |iops: f64, ns: u64| json!({"iops": iops, "clat_ns": {"percentile": {"99.000000": ns}}});
        let job = |name: &str, read: Value, write: Value| json!({"jobname": name, "error": 0, "read": read, "write": write});
        let report = json!({"jobs": [
            job("a", part(70.0, 3_000_000), part(30.0, 4_000_000)),
            job("b", part(50.0, 2_000_000), part(20.0, 1_000_000)),
        ]});
        let (per_second, p99_ms) = read_report(&format!("a note\n{report}"))?;
        assert_eq!((per_second, &p99_ms[..]), (170.0, &[2.0, 4.0][..]));
        let measured = Measured {
            per_second,
            p99_ms,
            job_share: 1.01,
        };
        assert_eq!(
            measured.to_string(),
            "170 | 2.0 | 3.0 | 4.0 | 1.33 | 2.00 | 1.010"
        );
        assert!(read_report(&report.to_string().replace("\"error\":0", "\"error\":5")).is_err());
        Ok(())
    }
}
