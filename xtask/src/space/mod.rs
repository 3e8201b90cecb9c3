//! `cargo xtask space`: a real Linux guest on images whose storage is full or nearly full.
//!
//! The guest fills ext4, deletes half of the files, trims and fills again, twice. It must see no
//! error, and its file system must stay writable:
//!
//! - `full`: the image lies in a place of fixed length (a raw NBD export; a loop device with
//!   `--loop`), as long as `measure` calls fully allocated;
//! - `thin`: the image lies on a file system that is smaller than the disk, and the guest keeps less
//!   than fits;
//! - `wait`: on such a file system the guest writes more than fits, through an export with
//!   `on-full=wait`; the file system becomes larger once it is full.
//!
//! Each over vhost-user-blk and over NBD. With `--real` QEMU's daemon serves `full` and `thin`.

mod thin;

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lexopt::{Arg, ValueExt as _};

use crate::fixed_length::{Kind, Place, fully_allocated_bytes};
use crate::guest::{Disk, Guest};
use crate::process::{self, Daemon};
use crate::setup;
use crate::workspace::{self, Workspace};
use thin::Thin;

/// Sockets have short names there, and images lie in memory.
const MEMORY_FOLDER: &str = "/dev/shm";
const SCRIPT: &str = include_str!("../../guest/space.sh");
const START_LIMIT: Duration = Duration::from_secs(30);
/// The guest is emulated: a case takes a minute or two on a busy machine.
const GUEST_LIMIT: Duration = Duration::from_secs(900);
const MIB: u64 = 1 << 20;
const PLACE: &str = "place";
const RAW: &str = "disk.raw";
const SOCKET: &str = "disk.sock";
/// So many fills follow the first one.
const ROUNDS: u32 = 2;
/// Size of the thin file system, and of the files that the guest keeps, in percent of the disk.
const THIN_PERCENT: u64 = 60;
const KEPT_PERCENT: u64 = 40;

/// Where the image lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    Full,
    Thin,
    Wait,
}

/// How the guest reaches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    Vhost,
    Nbd,
}

/// What is played.
#[derive(Debug, Clone, Copy)]
struct Case {
    room: Room,
    over: Over,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let room = match self.room {
            Room::Full => "full",
            Room::Thin => "thin",
            Room::Wait => "wait",
        };
        let over = match self.over {
            Over::Vhost => "vhost",
            Over::Nbd => "nbd",
        };
        write!(f, "{room}-{over}")
    }
}

struct Options {
    vellum: Option<PathBuf>,
    is_real: bool,
    kind: Kind,
    disk_bytes: u64,
    /// A part of the name of a case; all of it must be there.
    only: Vec<String>,
}

/// The task.
pub fn run(arguments: lexopt::Parser) -> Result<()> {
    let options = parse(arguments)?;
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let program = match options.is_real {
        true => process::find_program("qemu-storage-daemon")
            .context("qemu-storage-daemon is not installed")?,
        false => workspace.vellum_or(options.vellum.as_deref())?,
    };
    let guest = Guest::build(&workspace.target.join("guest"))?;
    let rooms = match options.is_real {
        true => &[Room::Full, Room::Thin][..],
        false => &[Room::Full, Room::Thin, Room::Wait],
    };
    let overs = [Over::Vhost, Over::Nbd];
    let cases = rooms
        .iter()
        .flat_map(|room| overs.map(|over| Case { room: *room, over }));
    let (mut passed, mut failed) = (0, 0);
    for case in cases {
        let name = case.to_string();
        if !options.only.iter().all(|word| name.contains(word.as_str())) {
            continue;
        }
        let begin = Instant::now();
        match play(case, &options, &program, &guest) {
            Ok(said) => {
                passed += 1;
                println!("{name}: {said} ({:.0} s)", begin.elapsed().as_secs_f64());
            }
            Err(error) => {
                failed += 1;
                println!("{name} failed: {error:#}");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    ensure!(failed == 0, "a guest has met an image without room");
    Ok(())
}

fn parse(mut arguments: lexopt::Parser) -> Result<Options> {
    let mut options = Options {
        vellum: None,
        is_real: false,
        kind: Kind::Nbd,
        disk_bytes: 192 * MIB,
        only: Vec::new(),
    };
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("vellum") => {
                options.vellum = Some(workspace::existing(arguments.value()?.into())?);
            }
            Arg::Long("real") => options.is_real = true,
            Arg::Long("loop") => options.kind = Kind::Loop,
            Arg::Long("mib") => options.disk_bytes = arguments.value()?.parse::<u64>()? * MIB,
            Arg::Long("only") => options.only.push(arguments.value()?.string()?),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(options)
}

/// Plays a case in a folder of its own, and returns what to say of it.
fn play(case: Case, options: &Options, program: &Path, guest: &Guest) -> Result<String> {
    let mut builder = tempfile::Builder::new();
    let folder = builder.prefix("vellum-space-").tempdir_in(MEMORY_FOLDER)?;
    let stage = Stage {
        case,
        options,
        program,
        folder: folder.path(),
    };
    match case.room {
        Room::Full => {
            let len_bytes = fully_allocated_bytes(options.disk_bytes, "")?;
            std::fs::File::create(folder.path().join(PLACE))?.set_len(len_bytes)?;
            let place = Place::open(options.kind, folder.path(), PLACE)?;
            stage.fill_image(&place.address.name())?;
            let said = stage.play(guest, &place.address.options(), None)?;
            let check = stage.check(&place.address.name())?;
            place.close()?;
            Ok(format!("{said}; {check}"))
        }
        Room::Thin | Room::Wait => {
            let Some(mut thin) =
                Thin::mount(folder.path(), options.disk_bytes * THIN_PERCENT / 100)?
            else {
                return Ok("left out: only root may mount a file system".into());
            };
            let image = thin.path().join("disk.qcow2").display().to_string();
            stage.fill_image(&image)?;
            let file = format!("file.driver=file,file.filename={image}");
            let is_waiting = case.room == Room::Wait;
            let said = stage.play(guest, &file, is_waiting.then_some(&mut thin))?;
            let check = stage.check(&image)?;
            Ok(format!("{said}; {check}"))
        }
    }
}

/// A case being played.
struct Stage<'a> {
    case: Case,
    options: &'a Options,
    program: &'a Path,
    folder: &'a Path,
}

impl Stage<'_> {
    fn tool(&self, name: &str) -> Result<Command> {
        let mut command = process::program(name)?;
        command.current_dir(self.folder);
        Ok(command)
    }

    /// Makes the image, with an empty file system in it.
    fn fill_image(&self, image: &str) -> Result<()> {
        let raw = std::fs::File::create(self.folder.join(RAW))?;
        raw.set_len(self.options.disk_bytes)?;
        process::output(self.tool("mkfs.ext4")?.args(["-q", "-F", RAW]))?;
        let words = ["convert", "-f", "raw", "-O", "qcow2", RAW, image];
        process::output(self.tool("qemu-img")?.args(words))?;
        std::fs::remove_file(self.folder.join(RAW))?;
        Ok(())
    }

    fn serve(&self, file: &str) -> Result<Daemon> {
        let socket = self.folder.join(SOCKET);
        let node = format!("driver=qcow2,node-name=disk,discard=unmap,{file},file.discard=unmap");
        let mut command = Command::new(self.program);
        if !self.options.is_real {
            command.arg("daemon");
        }
        command.current_dir(self.folder).args(["--blockdev", &node]);
        let mut export = match self.case.over {
            Over::Vhost => format!(
                "type=vhost-user-blk,id=x,node-name=disk,writable=on,addr.type=unix,addr.path={}",
                socket.display()
            ),
            Over::Nbd => {
                let server = format!("addr.type=unix,addr.path={}", socket.display());
                command.args(["--nbd-server", &server]);
                "type=nbd,id=x,node-name=disk,name=disk,writable=on".to_owned()
            }
        };
        if self.case.room == Room::Wait {
            export.push_str(",on-full=wait");
        }
        command.args(["--export", &export]);
        let mut daemon = Daemon::start(&mut command, &self.folder.join("daemon.log"))?;
        daemon.wait_for_file(&socket, START_LIMIT)?;
        Ok(daemon)
    }

    /// Has the guest work on the image that `file` names; a file system that becomes full grows.
    fn play(&self, guest: &Guest, file: &str, grows: Option<&mut Thin>) -> Result<String> {
        let daemon = self.serve(file)?;
        let socket = self.folder.join(SOCKET).display().to_string();
        let blockdev =
            format!("driver=nbd,discard=unmap,export=disk,server.type=unix,server.path={socket}");
        let disk = match self.case.over {
            Over::Vhost => Disk::VhostUser {
                socket: &socket,
                queues: 1,
            },
            Over::Nbd => Disk::Opened(&blockdev),
        };
        let disk_mib = self.options.disk_bytes / MIB;
        let most_mib = match self.case.room {
            Room::Thin => disk_mib * KEPT_PERCENT / 100,
            Room::Full | Room::Wait => disk_mib * 2,
        };
        let wanted = format!("{ROUNDS} {most_mib}\n");
        let files = [("wanted", wanted.as_bytes())];
        let mut running = guest.start(self.folder, &disk, SCRIPT, &files)?;
        let grown = match grows {
            None => "",
            Some(thin) => {
                thin.grow_once_full(self.options.disk_bytes * 2, GUEST_LIMIT, || {
                    running.has_ended()
                })?;
                ", which waited for room"
            }
        };
        let console = running.wait_within(GUEST_LIMIT);
        let words = daemon.last_words();
        let console = console.with_context(|| format!("the server said: {words}"))?;
        daemon.stop()?;
        let fills = console.lines().filter(|line| line.contains("GUEST: fill "));
        let files = fills.filter_map(|line| line.trim().rsplit(' ').nth(2)?.parse::<u64>().ok());
        let most = files.max().unwrap_or(0);
        if most == 0 {
            bail!("the guest has filled nothing:\n{console}");
        }
        Ok(format!(
            "up to {most} MiB of files in {disk_mib} MiB{grown}"
        ))
    }

    fn check(&self, image: &str) -> Result<String> {
        let said = process::output(self.tool("qemu-img")?.args(["check", "-f", "qcow2", image]))?;
        let lines: Vec<&str> = said.lines().collect();
        Ok(lines.join("; "))
    }
}
