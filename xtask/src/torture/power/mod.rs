//! `--power`: power cuts of servers with several lanes, by recording.
//!
//! The image that a daemon serves lies on a `blklogwrites` node: every change of its file, and
//! every flush, stands in a log. Clients note how long the log was when something was sent and
//! when it was acknowledged. In most rounds some of them use the disk as a file ([`super::file`]).
//! Afterwards the power fails at many places of the log: everything
//! before a flush that had ended is there, of the rest any part, torn at sectors. Each image
//! that is left must be sound (leaks at worst) and hold what clients had been promised when
//! the log was so long, or what was written later, but not what was sent later than that.

mod log;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::disk::{Disk, Programs};
use super::model::{GRANULE_BYTES, MOST_LOGS, Model};
use super::round::{self, Life, Report};
use crate::process;
use crate::random::Random;
use log::{Kept, Log, Window};

/// The log's name in the disk's folder.
const LOG: &str = "log.writes";
/// The file over which the disk appears, in the same folder.
const FILE: &str = "file";
/// Of what no flush has covered, the last changes may be torn.
const MAY_BE_TORN: usize = 12;
/// One cut in so many is looked at by QEMU's programs, the others by ours.
const BY_QEMU: u64 = 6;

/// The cuts of a round.
#[derive(Debug, Clone, Copy)]
pub struct Cuts {
    /// How many there are.
    pub number: u64,
    /// The disk has done nothing at three of four flushes, which must be noticed.
    pub lie: bool,
}

/// A moment at which the power fails.
#[derive(Debug, Clone, Copy)]
struct Cut {
    window: Window,
    /// Entries before this one had ended.
    ended: usize,
    kept: Kept,
}

/// A round: a server under load, and power cuts of it.
pub fn play(
    folder: &Path,
    seed: u64,
    programs: &Programs,
    cuts: Cuts,
    random: &mut Random,
) -> Result<Report> {
    let (mut disk, model) = make(folder, seed, random)?;
    let top = disk.top()?.file.clone();
    let start = std::fs::read(disk.folder.join(&top))?;
    let path = disk.folder.join(LOG);
    drop(File::create(&path)?);
    model.record(File::open(&path)?);
    disk.log = Some(LOG.to_owned());
    if random.chance(60) {
        let file = disk.folder.join(FILE);
        drop(File::create(&file)?);
        disk.mountpoint = Some(file);
    }
    let served = round::start_daemon(&disk, programs)?;
    let life = Life {
        time: Duration::from_millis(random.between(50, 300)),
        answers: random.between(300, 2500),
    };
    let mut report = round::torment(&mut disk, &model, served, life, random).0;
    if report.failure.is_some() {
        return Ok(report);
    }
    let log = Log::read(&path)?;
    let longest = std::fs::metadata(disk.folder.join(&top))?.len();
    let mut replay = Replay {
        log: &log,
        image: start,
        applied: 0,
        longest_bytes: longest as usize,
        folder: cut_folder(&disk)?,
    };
    for cut in choose(&log, cuts, random) {
        let judged = replay
            .make(&cut, &disk, random)
            .and_then(|cut_disk| judge(&cut_disk, &model, &log, &cut, programs, random));
        report.cuts += 1;
        if judged.is_err() && cuts.lie {
            return Ok(report);
        }
        if let Err(error) = judged {
            let entries = log.entries.len();
            report.failure = Some(format!("{cut:?} of {entries} entries: {error:#}"));
            return Ok(report);
        }
    }
    if cuts.lie {
        report.failure = Some("nobody has noticed that most flushes did nothing".to_owned());
    }
    Ok(report)
}

/// A small disk of which one file changes: that of its top.
fn make(folder: &Path, seed: u64, random: &mut Random) -> Result<(Disk, Model)> {
    let sectors = random.pick(&[2 << 11, 4 << 11, (3 << 11) + 77]);
    for attempt in 0.. {
        let model = Model::new(seed, sectors * 512 / GRANULE_BYTES);
        let place = folder.join(attempt.to_string());
        std::fs::create_dir(&place)?;
        let disk = Disk::make(&place, &model, random)?;
        let names = std::fs::read_dir(&place)?.collect::<std::io::Result<Vec<_>>>()?;
        let has_data_file = names
            .iter()
            .any(|entry| entry.file_name().to_string_lossy().starts_with('d'));
        if !has_data_file && disk.top()?.format == "qcow2" {
            return Ok((disk, model));
        }
        std::fs::remove_dir_all(place)?;
    }
    unreachable!("attempts do not end")
}

/// A folder with what lies below the top, under the same names.
fn cut_folder(disk: &Disk) -> Result<PathBuf> {
    let folder = disk.folder.join("cut");
    std::fs::create_dir(&folder)?;
    for layer in &disk.chain[..disk.chain.len() - 1] {
        std::fs::hard_link(disk.folder.join(&layer.file), folder.join(&layer.file))?;
    }
    Ok(folder)
}

/// Cuts all over the log, in its order.
fn choose(log: &Log, cuts: Cuts, random: &mut Random) -> Vec<Cut> {
    let mut windows = log.windows();
    if cuts.lie {
        let truth = windows.clone();
        for (at, window) in windows.iter_mut().enumerate() {
            window.durable = truth[at - at % 4].durable;
        }
    }
    // Most of what is allocated is allocated early.
    let all = windows.len() as u64;
    let reaches = [all, all.div_ceil(4), all.div_ceil(16)];
    let mut places: Vec<u64> = (0..cuts.number)
        .map(|_| {
            let reach = random.pick(&reaches);
            random.below(reach)
        })
        .collect();
    places.sort_unstable();
    places
        .into_iter()
        .map(|at| {
            let window = windows[at as usize];
            let ended = match random.chance(30) {
                true => window.last,
                false => random.between(window.durable as u64, window.last as u64) as usize,
            };
            let kept = Kept::random(random);
            Cut {
                window,
                ended,
                kept,
            }
        })
        .collect()
}

/// The image at one place of the log after the other.
struct Replay<'a> {
    log: &'a Log,
    /// With the first `applied` entries.
    image: Vec<u8>,
    applied: usize,
    /// What the file came to be: space may be made ahead of what is written.
    longest_bytes: usize,
    folder: PathBuf,
}

impl Replay<'_> {
    /// Makes the disk that is left by a cut. Cuts come in the log's order.
    fn make(&mut self, cut: &Cut, disk: &Disk, random: &mut Random) -> Result<Disk> {
        while self.applied < cut.window.durable {
            self.log.apply(self.applied, &mut self.image, || true)?;
            self.applied += 1;
        }
        let mut image = self.image.clone();
        for at in cut.window.durable..cut.ended {
            // FUA is its own promise.
            if self.log.entries[at].fua {
                self.log.apply(at, &mut image, || true)?;
            } else if random.chance(cut.kept.percent) {
                let last = at + MAY_BE_TORN >= cut.ended;
                let torn = last && random.chance(cut.kept.torn_percent);
                let sectors = if torn { 50 } else { 100 };
                self.log.apply(at, &mut image, || random.chance(sectors))?;
            }
        }
        if image.len() < self.longest_bytes {
            image.resize(self.longest_bytes, 0);
        }
        let top = disk.top()?;
        std::fs::write(self.folder.join(&top.file), image)?;
        Ok(Disk {
            folder: self.folder.clone(),
            chain: disk.chain.clone(),
            pivot: None,
            old_size_bytes: None,
            files: disk.files,
            log: None,
            mountpoint: None,
        })
    }
}

/// Looks at what a power cut has left.
fn judge(
    disk: &Disk,
    model: &Model,
    log: &Log,
    cut: &Cut,
    programs: &Programs,
    random: &mut Random,
) -> Result<()> {
    let top = disk.top()?;
    let by_qemu = random.below(BY_QEMU) == 0;
    let content = if by_qemu {
        disk.check(top, programs, random)?;
        disk.content(top, &mut process::program("qemu-img")?)?
    } else {
        let ours = || {
            let mut ours = Command::new(&programs.vellum);
            ours.arg("img");
            ours
        };
        disk.check_by(top, programs, random, ours())?;
        disk.content(top, &mut ours())?
    };
    // Nothing could be appended behind a flush before it had ended.
    let length = log.length_before(cut.ended.min(cut.window.next));
    let mut bound = [0; MOST_LOGS];
    bound[0] = length;
    model
        .judge(&content, model.at_cut(bound))
        .with_context(|| format!("{} when its log had {length} bytes", top.file))
        .map(drop)
}
