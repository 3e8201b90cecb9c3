//! `cargo xtask demo`: the main job from end to end, on real input.
//!
//! A file system made from this machine's own files becomes a qcow2 with an
//! overlay, the overlay is served over NBD, real clients and a real Linux guest
//! read and write it, and at the end Vellum and QEMU must agree on every byte
//! and every count. What was measured is printed and kept in the target folder.

mod clients;
mod outside;
mod stages;
mod tree;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use lexopt::Arg;

use crate::guest::{Disk, Guest};
use crate::kills::{Kills, Plan};
use crate::process::{self, Daemon, ShortPath};
use crate::setup;
use crate::workspace::{self, Workspace};
use stages::{Outcome, Stages, Watch};
use tree::Tree;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Size of the file system, and so of the image under the overlay.
const FILE_SYSTEM_BYTES: u64 = 2 * GIB;
/// The overlay is longer than its backing file; fio and qemu-io work beyond the file system.
const OVERLAY_BYTES: u64 = 3 * GIB;
const SCRATCH_OFFSET_BYTES: u64 = FILE_SYSTEM_BYTES;
const SCRATCH_BYTES: u64 = 512 * MIB;
const SERVER_START_LIMIT: Duration = Duration::from_secs(10);

const FILE_SYSTEM: &str = "usr.raw";
const BASE: &str = "base.qcow2";
const OVERLAY: &str = "overlay.qcow2";
const SOCKET: &str = "nbd.sock";
/// Of the server that has its disk from the other one.
const RELAY_SOCKET: &str = "relay.sock";
const EXPORT: &str = "disk";
const REPORT: &str = "demo-report.md";

/// The task.
pub fn run(arguments: lexopt::Parser) -> Result<()> {
    let options = Options::parse(arguments)?;
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let vellum = match options.vellum {
        Some(path) => path,
        None => workspace.build_vellum()?,
    };
    let folder = workspace.fresh_folder("demo")?;
    let demo = Demo {
        vellum,
        guest_folder: workspace.target.join("guest"),
        socket: ShortPath::new(&folder, SOCKET)?,
        relay_socket: ShortPath::new(&folder, RELAY_SOCKET)?,
        folder,
    };
    let mut stages = Stages::default();
    demo.play(&mut stages)?;
    std::fs::remove_dir_all(&demo.folder)?;

    let report = workspace.target.join(REPORT);
    std::fs::write(&report, stages.table())?;
    println!(
        "\n{}\nThe table is in {}.",
        stages.table(),
        report.display()
    );
    println!("Every byte and every count agreed.");
    Ok(())
}

#[derive(Default)]
struct Options {
    /// A program to show instead of this work tree's.
    vellum: Option<PathBuf>,
}

impl Options {
    fn parse(mut arguments: lexopt::Parser) -> Result<Self> {
        let mut options = Self::default();
        while let Some(argument) = arguments.next()? {
            match argument {
                Arg::Long("vellum") => {
                    options.vellum = Some(workspace::existing(arguments.value()?.into())?);
                }
                other => return Err(other.unexpected().into()),
            }
        }
        Ok(options)
    }
}

struct Demo {
    vellum: PathBuf,
    guest_folder: PathBuf,
    /// Where all files of the demo are; every command runs in it.
    folder: PathBuf,
    socket: ShortPath,
    relay_socket: ShortPath,
}

/// A file that a guest wrote, by its name in the file system, with the file here that
/// holds its md5 sum.
const WRITTEN: [(&str, &str); 2] = [
    ("/written-by-the-guest/random", "guest.md5"),
    ("/written-through-two-servers/random", "relayed.md5"),
];

impl Demo {
    fn uri(&self) -> String {
        format!("nbd+unix:///{EXPORT}?socket={}", self.socket.path())
    }

    fn play(&self, stages: &mut Stages) -> Result<()> {
        let guest = stages.run("unpack a Linux guest", Watch::Nothing, |_| {
            Ok((Guest::build(&self.guest_folder)?, Outcome::Done))
        })?;
        let tree = self.make_file_system(stages)?;
        self.make_images(stages)?;
        let server = self.serve(stages)?;
        self.read_untouched(stages)?;
        self.run_guest(stages, &guest, &tree)?;
        self.run_guest_behind_two(stages, &guest)?;
        self.run_guest_in_its_memory(stages, &guest)?;
        self.write_beyond(stages)?;
        self.copy_all(stages, "final.raw")?;
        self.stop(stages, server)?;
        self.verify(stages)
    }

    /// A real ext4 from files under /usr. The files are kept to compare sums with.
    fn make_file_system(&self, stages: &mut Stages) -> Result<Tree> {
        let folder = self.folder.join("usr");
        let tree = stages.run(
            "copy files from /usr",
            Watch::Bytes(tree::LIMIT_BYTES),
            |bar| {
                let tree = Tree::copy(Path::new("/usr"), &folder, &|bytes| bar.inc(bytes))?;
                let said = format!("{} files", tree.files.len());
                let outcome = Outcome::Bytes(tree.bytes, said);
                Ok((tree, outcome))
            },
        )?;
        let watch = self.watch(FILE_SYSTEM, tree.bytes);
        stages.run("mkfs.ext4 -d, 2 GiB", watch, |_| {
            process::output(
                self.program("mkfs.ext4")?
                    .args(["-q", "-F", "-L", "vellum", "-d", "usr", FILE_SYSTEM])
                    .arg(format!("{}M", FILE_SYSTEM_BYTES / MIB)),
            )?;
            Ok(((), Outcome::Bytes(tree.bytes, String::new())))
        })?;
        std::fs::remove_dir_all(&folder)?;
        Ok(tree)
    }

    fn make_images(&self, stages: &mut Stages) -> Result<()> {
        let bytes = outside::allocated_bytes(&self.folder.join(FILE_SYSTEM))?;
        stages.run("vellum convert to qcow2", self.watch(BASE, bytes), |_| {
            self.vellum_output(&["convert", "-f", "raw", "-O", "qcow2", FILE_SYSTEM, BASE])?;
            Ok(((), Outcome::Bytes(bytes, String::new())))
        })?;
        stages.run("qemu-img compare with the source", Watch::Nothing, |_| {
            self.qemu_img(&["compare", "-f", "raw", "-F", "qcow2", FILE_SYSTEM, BASE])?;
            Ok(((), Outcome::Said("identical".into())))
        })?;
        stages.run("vellum create an overlay", Watch::Nothing, |_| {
            let size = OVERLAY_BYTES.to_string();
            let options = "extended_l2=on,cluster_size=128k";
            self.vellum_output(&[
                "create", "-f", "qcow2", "-o", options, "-b", BASE, "-F", "qcow2", OVERLAY, &size,
            ])?;
            Ok(((), Outcome::Said(format!("{options}, 3 GiB"))))
        })
    }

    fn serve(&self, stages: &mut Stages) -> Result<Daemon> {
        stages.run("vellum nbd serves the overlay", Watch::Nothing, |_| {
            let server = self.start_server(&self.socket, "nbd.log", ["qcow2", OVERLAY])?;
            Ok((server, Outcome::Said("NBD on a unix socket".into())))
        })
    }

    /// Serves an image of some format on a socket.
    fn start_server(
        &self,
        socket: &ShortPath,
        log: &str,
        [format, image]: [&str; 2],
    ) -> Result<Daemon> {
        let mut command = Command::new(&self.vellum);
        command
            .current_dir(&self.folder)
            .args(["nbd", "-f", format, "-k", socket.path()])
            .args(["-x", EXPORT, "-e", "8", "-t", "--discard=unmap", image]);
        let mut server = Daemon::start(&mut command, &self.folder.join(log))?;
        server.wait_for_socket(socket.path(), SERVER_START_LIMIT)?;
        Ok(server)
    }

    fn run_guest(&self, stages: &mut Stages, guest: &Guest, tree: &Tree) -> Result<()> {
        stages.run(
            "boot Linux on it: read, write, trim, fsck",
            Watch::Nothing,
            |_| {
                let script = include_str!("../../guest/demo.sh");
                let sums = tree.sums.as_bytes();
                let files = [("sums", sums)];
                let disk = disk(&self.socket);
                let console = guest.run(&self.folder, &Disk::Opened(&disk), script, &files)?;
                self.keep_sum(&console, WRITTEN[0].1)?;
                let said = format!("{} files agree; fsck clean", tree.sums.lines().count());
                Ok(((), Outcome::Said(said)))
            },
        )
    }

    /// The same disk once more, through a server that has it from the first one.
    fn run_guest_behind_two(&self, stages: &mut Stages, guest: &Guest) -> Result<()> {
        stages.run("boot Linux behind a second server", Watch::Nothing, |_| {
            let relay = self.start_server(&self.relay_socket, "relay.log", ["raw", &self.uri()])?;
            let script = include_str!("../../guest/relay.sh");
            let sum = std::fs::read(self.folder.join(WRITTEN[0].1))?;
            let files = [("sum", sum.as_slice())];
            let disk = disk(&self.relay_socket);
            let console = guest.run(&self.folder, &Disk::Opened(&disk), script, &files)?;
            self.keep_sum(&console, WRITTEN[1].1)?;
            relay.stop()?;
            Ok((
                (),
                Outcome::Said("read, written, trimmed; fsck clean".into()),
            ))
        })
    }

    /// A disk of its own on vhost-user-blk, whose daemon is killed while the guest writes.
    fn run_guest_in_its_memory(&self, stages: &mut Stages, guest: &Guest) -> Result<()> {
        let title = "boot Linux on vhost-user-blk, kill the daemon";
        stages.run(title, Watch::Nothing, |_| {
            let folder = self.folder.join("kills");
            std::fs::create_dir(&folder)?;
            let plan = Plan {
                times: 3,
                queues: 2,
                ..Plan::default()
            };
            let said = Kills::new(&self.vellum, guest, &folder, plan)?.play(&|_| ())?;
            std::fs::remove_dir_all(&folder)?;
            Ok(((), Outcome::Said(said)))
        })
    }

    fn keep_sum(&self, console: &str, file: &str) -> Result<()> {
        let sum = outside::guest_word(console, "GUEST: md5 ")?;
        Ok(std::fs::write(self.folder.join(file), sum)?)
    }

    fn stop(&self, stages: &mut Stages, server: Daemon) -> Result<()> {
        stages.run("stop the server", Watch::Nothing, |_| {
            let peak = server.peak_memory_bytes()?;
            server.stop()?;
            if self.folder.join(SOCKET).exists() {
                bail!("the server left its socket behind");
            }
            let said = format!("peak memory {:.1} MiB", peak as f64 / MIB as f64);
            Ok(((), Outcome::Said(said)))
        })
    }

    fn watch(&self, file: &str, bytes: u64) -> Watch {
        Watch::File(self.folder.join(file), bytes)
    }

    fn program(&self, name: &str) -> Result<Command> {
        let mut command = process::program(name)?;
        command.current_dir(&self.folder);
        Ok(command)
    }

    fn vellum_output(&self, arguments: &[&str]) -> Result<String> {
        process::output(
            Command::new(&self.vellum)
                .current_dir(&self.folder)
                .args(arguments),
        )
    }

    fn qemu_img(&self, arguments: &[&str]) -> Result<String> {
        process::output(self.program("qemu-img")?.args(arguments))
    }
}

/// A guest's disk: the export behind a socket.
fn disk(socket: &ShortPath) -> String {
    format!(
        "driver=nbd,discard=unmap,export={EXPORT},server.type=unix,server.path={}",
        socket.path()
    )
}
