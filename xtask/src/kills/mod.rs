//! `cargo xtask kills`: a real Linux guest on vhost-user-blk, whose daemon is killed in the middle
//! of its writes and started again, time after time.
//!
//! The guest makes files durable and reads them back, and must not notice anything but a pause. In
//! the end its file system is clean, and so is the image. Then it is started once more, and
//! daemon and machine are killed together: what the guest has made durable is in the image. At
//! last it looks at what its disk says of itself, while that becomes larger, and read-only; and
//! machines take it over from each other while it writes.
//!
//! The seed decides when the daemon is killed; what it is killed in the middle of is up to the
//! moment.

mod after;
mod moved;
mod seen;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lexopt::{Arg, ValueExt as _};

use crate::guest::{Disk, Guest, Running};
use crate::process::{self, Daemon, ShortPath};
use crate::random::Random;
use crate::setup;
use crate::workspace::{self, Workspace};

const DISK_BYTES: u64 = 512 << 20;
const SOCKET: &str = "disk.sock";
const RAW: &str = "disk.raw";
const QCOW2: &str = "disk.qcow2";
const START_LIMIT: Duration = Duration::from_secs(10);
/// The guest is emulated, and other programs may want the machine too.
const GUEST_LIMIT: Duration = Duration::from_secs(120);
/// How the guest's lines begin that say that a file is durable.
const DURABLE: &str = "GUEST: durable ";
/// Files that the guest still has when it is killed, at least.
const LAST_FILES: usize = 30;

/// The task.
pub fn run(arguments: lexopt::Parser) -> Result<()> {
    let options = Options::parse(arguments)?;
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let vellum = workspace.vellum_or(options.vellum.as_deref())?;
    let guest = Guest::build(&workspace.target.join("guest"))?;
    let folder = workspace.fresh_folder("kills")?;
    println!("seed {}", options.plan.seed);
    let begin = Instant::now();
    let kills = Kills::new(&vellum, &guest, &folder, options.plan)?;
    let report =
        kills.play(&|kill| println!("  {:>4.0} s  kill {kill}", begin.elapsed().as_secs_f64()))?;
    std::fs::remove_dir_all(&folder)?;
    println!("{report}");
    Ok(())
}

/// What is done.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Decides when the daemon is killed.
    pub seed: u64,
    /// How often.
    pub times: usize,
    /// Of the disk, and processors of the guest.
    pub queues: u16,
    /// `qcow2` or `raw`.
    pub format: &'static str,
    /// Pauses between kills, in ms.
    pub pause_ms: (u64, u64),
    /// How often another machine takes the guest over.
    pub moves: usize,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            seed: 1,
            times: 50,
            queues: 1,
            format: "qcow2",
            pause_ms: (50, 1200),
            moves: 0,
        }
    }
}

#[derive(Default)]
struct Options {
    vellum: Option<PathBuf>,
    plan: Plan,
}

impl Options {
    fn parse(mut arguments: lexopt::Parser) -> Result<Self> {
        let mut options = Self::default();
        while let Some(argument) = arguments.next()? {
            let plan = &mut options.plan;
            match argument {
                Arg::Long("times") => plan.times = arguments.value()?.parse()?,
                Arg::Long("moves") => plan.moves = arguments.value()?.parse()?,
                Arg::Long("seed") => plan.seed = arguments.value()?.parse()?,
                Arg::Long("queues") => plan.queues = arguments.value()?.parse()?,
                Arg::Long("raw") => plan.format = "raw",
                Arg::Long("vellum") => {
                    options.vellum = Some(workspace::existing(arguments.value()?.into())?);
                }
                other => return Err(other.unexpected().into()),
            }
        }
        Ok(options)
    }
}

/// A disk, its daemon and its guest.
pub struct Kills<'a> {
    vellum: &'a Path,
    guest: &'a Guest,
    folder: &'a Path,
    plan: Plan,
    socket: ShortPath,
}

impl<'a> Kills<'a> {
    /// In an empty folder.
    pub fn new(vellum: &'a Path, guest: &'a Guest, folder: &'a Path, plan: Plan) -> Result<Self> {
        Ok(Kills {
            vellum,
            guest,
            folder,
            plan,
            socket: ShortPath::new(folder, SOCKET)?,
        })
    }

    /// Plays the plan; `on_kill` is told the number of each kill. What to say of it.
    pub fn play(&self, on_kill: &dyn Fn(usize)) -> Result<String> {
        self.make_disk()?;
        let files = self.kill_the_daemon(on_kill)?;
        let first = self.check()?;
        let durable = self.kill_both()?;
        let second = self.check()?;
        self.holds(&durable)?;
        self.look()?;
        self.check()?;
        let moved = match self.plan.moves {
            0 => String::new(),
            moves => {
                let said = self.move_guest(moves)?;
                self.check()?;
                format!("; {said}")
            }
        };
        Ok(format!(
            "{} kills, {files} files read back; guest, fsck and image clean ({first}; at last {second}); \
             resized and read-only as said{moved}",
            self.plan.times
        ))
    }

    fn image(&self) -> &'static str {
        match self.plan.format {
            "raw" => RAW,
            _ => QCOW2,
        }
    }

    fn make_disk(&self) -> Result<()> {
        let file = std::fs::File::create(self.folder.join(RAW))?;
        file.set_len(DISK_BYTES)?;
        process::output(self.program("mkfs.ext4")?.args(["-q", "-F", RAW]))?;
        if self.plan.format != "raw" {
            let words = ["convert", "-f", "raw", "-O", "qcow2", RAW, QCOW2];
            process::output(self.program("qemu-img")?.args(words))?;
        }
        Ok(())
    }

    /// How many files the guest has made durable meanwhile.
    fn kill_the_daemon(&self, on_kill: &dyn Fn(usize)) -> Result<usize> {
        let mut daemon = self.serve()?;
        let mut guest = self.boot()?;
        let mut random = Random::new(self.plan.seed);
        for kill in 1..=self.plan.times {
            let (low, high) = self.plan.pause_ms;
            std::thread::sleep(Duration::from_millis(random.between(low, high)));
            let before = durable(&guest.console()?).len();
            daemon.kill()?;
            on_kill(kill);
            std::thread::sleep(Duration::from_millis(random.pick(&[0, 0, 50, 300])));
            daemon = self.serve()?;
            // Of some kills the guest sees the end before the next, of others not.
            if random.chance(50) || kill == self.plan.times {
                guest
                    .wait_for(DURABLE, before + 2, GUEST_LIMIT)
                    .with_context(|| format!("after kill {kill}"))?;
            }
        }
        guest.say("stop")?;
        let console = guest.wait()?;
        daemon.stop()?;
        Ok(durable(&console).len())
    }

    /// Kills daemon and machine at once; the files that must be there.
    fn kill_both(&self) -> Result<Vec<(String, String)>> {
        let daemon = self.serve()?;
        let mut guest = self.boot()?;
        guest.wait_for(DURABLE, LAST_FILES, GUEST_LIMIT)?;
        daemon.kill()?;
        let console = guest.console()?;
        drop(guest);
        Ok(durable(&console))
    }

    fn serve(&self) -> Result<Daemon> {
        self.serve_as("writable=on", &[])
    }

    /// Serves the disk with these options of the export, and more words for the daemon.
    fn serve_as(&self, options: &str, words: &[&str]) -> Result<Daemon> {
        // What a dead daemon has left behind is not waited for.
        let socket = self.folder.join(SOCKET);
        if socket.exists() {
            std::fs::remove_file(&socket)?;
        }
        let (format, image) = (self.plan.format, self.image());
        let node = format!(
            "driver={format},node-name=disk,discard=unmap,file.driver=file,file.filename={image},file.discard=unmap"
        );
        let export = format!(
            "type=vhost-user-blk,id=guest,node-name=disk,{options},num-queues={},addr.type=unix,addr.path={}",
            self.plan.queues,
            self.socket.path()
        );
        let mut command = Command::new(self.vellum);
        command.current_dir(self.folder);
        command.args(["daemon", "--blockdev", &node, "--export", &export]);
        command.args(words);
        let mut daemon = Daemon::start(&mut command, &self.folder.join("daemon.log"))?;
        daemon.wait_for_file(&socket, START_LIMIT)?;
        Ok(daemon)
    }

    fn boot(&self) -> Result<Running> {
        let mut guest = self.start_guest(include_str!("../../guest/kills.sh"), "")?;
        guest.wait_for("GUEST: begins", 1, GUEST_LIMIT)?;
        Ok(guest)
    }

    /// A guest on the disk, with a script and what that wants to know.
    fn start_guest(&self, script: &str, wanted: &str) -> Result<Running> {
        let disk = Disk::VhostUser {
            socket: self.socket.path(),
            queues: self.plan.queues,
        };
        let files = [("wanted", wanted.as_bytes())];
        self.guest.start(self.folder, &disk, script, &files)
    }

    fn program(&self, name: &str) -> Result<Command> {
        let mut command = process::program(name)?;
        command.current_dir(self.folder);
        Ok(command)
    }
}

/// Files that a console calls durable: their names, and the md5 of what they hold.
fn durable(console: &str) -> Vec<(String, String)> {
    let lines = console
        .lines()
        .filter_map(|line| line.strip_prefix(DURABLE));
    let words = lines.filter_map(|line| line.trim().split_once(' '));
    // The last line may still be on its way.
    let whole = words.filter(|(_, sum)| sum.len() == 32);
    whole
        .map(|(number, sum)| (format!("f{number}"), sum.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_durable_once_their_line_is_whole() {
        let sum = "0123456789abcdef0123456789abcdef";
        let console = format!(
            "GUEST: begins\r\n{DURABLE}7 {sum}\r\n{DURABLE}8 {}",
            &sum[..31]
        );
        assert_eq!(durable(&console), [("f7".to_owned(), sum.to_owned())]);
    }
}
