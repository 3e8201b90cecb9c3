//! The servers: ours, and QEMU's storage daemon and NBD server.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Export;
use super::load::Place;
use super::report::Row;
use crate::process::{self, Daemon};

const START_LIMIT: Duration = Duration::from_secs(10);
/// The name of an export of NBD.
pub const NBD_NAME: &str = "disk";
const SOCKET: &str = "socket";
const FILE: &str = "file";
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
}

impl Server {
    /// Serves a row's image in `folder`, which is empty.
    pub fn start(program: &Program, export: Export, row: &Row, folder: &Path) -> Result<Self> {
        let mut command = match program {
            Program::Vellum { path, more, .. } => {
                let mut command = Command::new(path);
                command.arg("daemon");
                add_export(&mut command, export, row, None, more);
                command
            }
            Program::StorageDaemon(aio) => {
                let mut command = process::program("qemu-storage-daemon")?;
                command.args(["--object", "iothread,id=polls"]);
                add_export(&mut command, export, row, Some(*aio), "");
                command
            }
            Program::Nbd(aio) => {
                let mut command = process::program("qemu-nbd")?;
                command.args(["--persistent", "--shared", CLIENTS_MAX, "--discard=unmap"]);
                command.args(["-f", &row.format, "-x", NBD_NAME, "-k"]);
                command.arg(folder.join(SOCKET));
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
            std::fs::File::create(folder.join(FILE))?;
        }
        let mut server = Server {
            daemon: Some(Daemon::start(&mut command, &folder.join("log"))?),
            folder: folder.to_owned(),
        };
        server.wait_until_it_serves(export, row)?;
        Ok(server)
    }

    fn wait_until_it_serves(&mut self, export: Export, row: &Row) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let serves = match export {
                Export::Fuse => {
                    let found = std::fs::metadata(self.file());
                    found.is_ok_and(|found| found.len() == row.load.disk_bytes)
                }
                Export::Vhost | Export::Nbd => self.socket().exists(),
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

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.folder.join(SOCKET)
    }

    /// The file on which the disk appears.
    pub fn file(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    /// Processor time of all its threads so far, in seconds.
    pub fn cpu_seconds(&self) -> Result<f64> {
        let daemon = self.daemon.as_ref().context("it runs")?;
        let mut clock = 0;
        // SAFETY: it writes a number to where the reference points.
        let failed =
            unsafe { libc::clock_getcpuclockid(daemon.pid().cast_signed(), &raw mut clock) };
        ensure!(failed == 0, "the server has no clock: error {failed}");
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: as above; the clock is that of a child that was not waited for.
        let failed = unsafe { libc::clock_gettime(clock, &raw mut time) };
        ensure!(failed == 0, "{}", std::io::Error::last_os_error());
        Ok(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
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
        let _ = rustix::mount::unmount(self.file(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// The options of a storage daemon: QEMU's with `aio`, or ours with `more` of the export's.
fn add_export(command: &mut Command, export: Export, row: &Row, aio: Option<Aio>, more: &str) {
    let image = row.image();
    let mut file = format!(
        "driver=file,node-name=file,filename={},discard=unmap",
        image.display()
    );
    if row.place.is_direct {
        file.push_str(",cache.direct=on");
    }
    let mut options = match export {
        Export::Vhost => format!(
            "type=vhost-user-blk,num-queues={},addr.type=unix,addr.path={SOCKET}",
            row.load.clients
        ),
        Export::Fuse => format!("type=fuse,mountpoint={FILE}"),
        Export::Nbd => format!("type=nbd,name={NBD_NAME}"),
    };
    options.push_str(",id=e,node-name=disk,writable=on");
    options.push_str(more);
    if let Some(aio) = aio {
        file.push_str(&format!(",aio={}", aio.name()));
        options.push_str(",iothread=polls");
    }
    let node = format!("driver={},node-name=disk,file=file", row.format);
    command.args(["--blockdev", &file, "--blockdev", &node]);
    if export == Export::Nbd {
        let server = format!("addr.type=unix,addr.path={SOCKET},max-connections=0");
        command.args(["--nbd-server", &server]);
    }
    command.args(["--export", &options]);
}
