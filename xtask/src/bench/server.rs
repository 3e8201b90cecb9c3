//! The servers: ours, and QEMU's storage daemon and NBD server.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::Export;
use super::load::Place;
use super::report::Row;
use crate::process::{self, Daemon};

const START_LIMIT: Duration = Duration::from_secs(10);
/// Where all disks of NBD are served.
const NBD_SOCKET: &str = "socket";
/// Clients of `qemu-nbd` at once, at most.
const CLIENTS_MAX: &str = "16";

/// How QEMU reads and writes files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aio {
    IoUring,
    /// Around the page cache only.
    Native,
}

impl Aio {
    fn name(self) -> &'static str {
        match self {
            Aio::IoUring => "io_uring",
            Aio::Native => "native",
        }
    }
}

/// What serves.
#[derive(Debug, Clone)]
pub enum Program {
    /// `vellum daemon` of this program.
    Vellum {
        name: &'static str,
        path: PathBuf,
        /// More options of its export.
        more: &'static str,
        /// More words of its command line.
        words: &'static [&'static str],
    },
    /// The real `qemu-storage-daemon`, with a thread of its own for the export that polls as
    /// long as QEMU thinks best.
    StorageDaemon(Aio),
    /// The real `qemu-nbd`.
    Nbd(Aio),
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Program::Vellum { name, .. } => f.write_str(name),
            Program::StorageDaemon(aio) => write!(f, "qsd {}", aio.name()),
            Program::Nbd(aio) => write!(f, "qemu-nbd {}", aio.name()),
        }
    }
}

impl Program {
    /// Whether it can serve images there.
    pub fn suits(&self, place: &Place) -> bool {
        match self {
            Program::Vellum { .. } => true,
            Program::StorageDaemon(aio) | Program::Nbd(aio) => {
                *aio == Aio::IoUring || place.is_direct
            }
        }
    }

    /// Whether it is one of QEMU's.
    pub fn is_qemu(&self) -> bool {
        !matches!(self, Program::Vellum { .. })
    }
}

/// One that runs.
pub struct Server {
    daemon: Option<Daemon>,
    folder: PathBuf,
    disks: usize,
}

/// The name of a disk's node and of its export of NBD.
pub fn name_of(disk: usize) -> String {
    format!("disk{disk}")
}

impl Server {
    /// Serves the images of rows in `folder`, which is empty; `qemu-nbd` serves one.
    pub fn start(program: &Program, export: Export, rows: &[&Row], folder: &Path) -> Result<Self> {
        let mut command = match program {
            Program::Vellum {
                path, more, words, ..
            } => {
                let mut command = Command::new(path);
                command.arg("daemon").args(*words);
                add_exports(&mut command, export, rows, None, more);
                command
            }
            Program::StorageDaemon(aio) => {
                let mut command = process::program("qemu-storage-daemon")?;
                command.args(["--object", "iothread,id=polls"]);
                add_exports(&mut command, export, rows, Some(*aio), "");
                command
            }
            Program::Nbd(aio) => {
                let [row] = rows else {
                    bail!("qemu-nbd serves one disk");
                };
                let mut command = process::program("qemu-nbd")?;
                command.args(["--persistent", "--shared", CLIENTS_MAX, "--discard=unmap"]);
                command.args(["-f", &row.format, "-x", &name_of(0), "-k"]);
                command.arg(folder.join(NBD_SOCKET));
                command.arg(format!("--aio={}", aio.name()));
                if row.place.is_direct {
                    command.arg("--cache=none");
                }
                command.arg(row.image());
                command
            }
        };
        command.current_dir(folder);
        if export == Export::Fuse {
            for disk in 0..rows.len() {
                std::fs::File::create(folder.join(file_of(disk)))?;
            }
        }
        let mut server = Server {
            daemon: Some(Daemon::start(&mut command, &folder.join("log"))?),
            folder: folder.to_owned(),
            disks: rows.len(),
        };
        for (disk, row) in rows.iter().enumerate() {
            server.wait_until_it_serves(export, disk, row)?;
        }
        Ok(server)
    }

    fn wait_until_it_serves(&mut self, export: Export, disk: usize, row: &Row) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let serves = match export {
                Export::Fuse => {
                    let found = std::fs::metadata(self.file(disk));
                    found.is_ok_and(|found| found.len() == row.load.disk_bytes)
                }
                Export::Vhost | Export::Nbd => self.socket(export, disk).exists(),
            };
            if serves {
                return Ok(());
            }
            let daemon = self.daemon.as_mut().context("it was started")?;
            ensure!(
                !daemon.has_ended()?,
                "the server has ended:{}",
                daemon.last_words()
            );
            ensure!(Instant::now() < deadline, "the server does not serve");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Where it listens for clients of a disk.
    pub fn socket(&self, export: Export, disk: usize) -> PathBuf {
        match export {
            Export::Nbd => self.folder.join(NBD_SOCKET),
            _ => self.folder.join(vhost_socket_of(disk)),
        }
    }

    /// The file on which a disk appears.
    pub fn file(&self, disk: usize) -> PathBuf {
        self.folder.join(file_of(disk))
    }

    /// Processor time of all its threads so far, in seconds.
    pub fn cpu_seconds(&self) -> Result<f64> {
        let daemon = self.daemon.as_ref().context("it runs")?;
        daemon.cpu_seconds()
    }

    /// Ends it.
    pub fn stop(mut self) -> Result<()> {
        let daemon = self.daemon.take().context("it runs")?;
        daemon.stop()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.daemon.take());
        // What a server that was killed has left mounted; else there is nothing.
        for disk in 0..self.disks {
            let flags = rustix::mount::UnmountFlags::DETACH;
            let _ = rustix::mount::unmount(self.file(disk), flags);
        }
    }
}

fn vhost_socket_of(disk: usize) -> String {
    format!("socket{disk}")
}

fn file_of(disk: usize) -> String {
    format!("file{disk}")
}

/// The options of a storage daemon: QEMU's with `aio`, or ours with `more` of each export's.
fn add_exports(command: &mut Command, export: Export, rows: &[&Row], aio: Option<Aio>, more: &str) {
    if export == Export::Nbd {
        let server = format!("addr.type=unix,addr.path={NBD_SOCKET},max-connections=0");
        command.args(["--nbd-server", &server]);
    }
    for (disk, row) in rows.iter().enumerate() {
        add_export(command, export, (disk, row), aio, more);
    }
}

fn add_export(
    command: &mut Command,
    export: Export,
    (disk, row): (usize, &Row),
    aio: Option<Aio>,
    more: &str,
) {
    let (name, image) = (name_of(disk), row.image());
    let mut file = format!(
        "driver=file,node-name={name}-file,filename={},discard=unmap",
        image.display()
    );
    if row.place.is_direct {
        file.push_str(",cache.direct=on");
    }
    let mut options = match export {
        Export::Vhost => format!(
            "type=vhost-user-blk,num-queues={},addr.type=unix,addr.path={}",
            row.load.clients,
            vhost_socket_of(disk)
        ),
        Export::Fuse => format!("type=fuse,mountpoint={}", file_of(disk)),
        Export::Nbd => format!("type=nbd,name={name}"),
    };
    options.push_str(&format!(",id={name},node-name={name},writable=on{more}"));
    if let Some(aio) = aio {
        file.push_str(&format!(",aio={}", aio.name()));
        options.push_str(",iothread=polls");
    }
    let node = format!("driver={},node-name={name},file={name}-file", row.format);
    command.args(["--blockdev", &file, "--blockdev", &node]);
    command.args(["--export", &options]);
}
