//! The servers: ours, and QEMU's storage daemon.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::report::Row;
use crate::process::{self, Daemon};

const START_LIMIT: Duration = Duration::from_secs(10);

/// What serves.
#[derive(Debug, Clone)]
pub enum Program {
    /// `vellum daemon` of this program.
    Vellum(PathBuf),
    /// The real `qemu-storage-daemon`, with a thread of its own for the export that polls as
    /// long as QEMU thinks best.
    Qemu,
}

/// One that runs.
pub struct Server {
    daemon: Daemon,
    folder: PathBuf,
}

impl Server {
    /// Serves a row's image in `folder`, which is empty.
    pub fn start(program: &Program, row: &Row, folder: &Path) -> Result<Self> {
        let image = row.place.folder.join(row.format);
        let mut file = format!(
            "driver=file,node-name=file,filename={},discard=unmap",
            image.display()
        );
        if row.place.direct {
            file.push_str(",cache.direct=on");
        }
        let mut export = format!(
            "type=vhost-user-blk,id=e,node-name=disk,writable=on,num-queues={},addr.type=unix,addr.path=socket",
            row.load.queues
        );
        let mut command = match program {
            Program::Vellum(path) => {
                let mut command = Command::new(path);
                command.arg("daemon");
                command
            }
            Program::Qemu => {
                let mut command = process::program("qemu-storage-daemon")?;
                // Around the page cache native AIO is its fastest, through it io_uring.
                file.push_str(if row.place.direct {
                    ",aio=native"
                } else {
                    ",aio=io_uring"
                });
                export.push_str(",iothread=polls");
                command.args(["--object", "iothread,id=polls"]);
                command
            }
        };
        let node = format!("driver={},node-name=disk,file=file", row.format);
        command.current_dir(folder);
        command.args([
            "--blockdev",
            &file,
            "--blockdev",
            &node,
            "--export",
            &export,
        ]);
        let mut daemon = Daemon::start(&mut command, &folder.join("log"))?;
        let deadline = Instant::now() + START_LIMIT;
        while !folder.join("socket").exists() {
            ensure!(
                !daemon.has_ended()?,
                "the server has ended:{}",
                daemon.last_words()
            );
            ensure!(Instant::now() < deadline, "the server does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Server {
            daemon,
            folder: folder.to_owned(),
        })
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }

    /// Processor time of all its threads so far, in seconds.
    pub fn cpu_seconds(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.daemon.pid()))?;
        let fields = stat.rsplit_once(')').context("/proc tells no fields")?.1;
        let times = fields.split_whitespace().skip(11).take(2);
        let ticks: Vec<u64> = times.map(str::parse).collect::<Result<_, _>>()?;
        ensure!(ticks.len() == 2, "/proc tells no times");
        // SAFETY: sysconf only returns a number.
        let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        Ok(ticks.iter().sum::<u64>() as f64 / per_second as f64)
    }

    /// Ends it.
    pub fn stop(self) -> Result<()> {
        self.daemon.stop()
    }
}
