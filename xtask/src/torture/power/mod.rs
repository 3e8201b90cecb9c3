//! `--power`: power cuts of servers with several lanes, by recording.
//!
//! The image that a daemon serves lies on a `blklogwrites` node: every change of its file, and
//! every flush, stands in a log. Clients note how long the log was when something was sent and
//! when it was acknowledged. In most rounds some of them use the disk as a file ([`super::file`]), or a
//! guest does by vhost-user-blk ([`super::guest`]). Such a guest may see several servers: each is
//! killed, has a log of its own, and leaves the guest's requests in flight to the next.
//! Afterwards the power fails at many places of each log: everything
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
use super::guest::Guest;
use super::model::{GRANULE_BYTES, MOST_LOGS, Model};
use super::round::{self, Life, Report};
use crate::process;
use crate::random::Random;
use log::{Kept, Log, SECTOR_BYTES, Window};

/// The log's name in the disk's folder.
const LOG: &str = "log.writes";
/// The file over which the disk appears, in the same folder.
const FILE: &str = "file";
/// The socket of the guest, there too.
const GUEST: &str = "guest";
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

/// What one server has made of the disk.
struct Session {
    log: Log,
    /// The top's file when the server began.
    start: Vec<u8>,
    /// What of it was durable then.
    durable: Vec<u8>,
}

/// A round: a server under load, or two, and power cuts of them.
pub fn play(
    folder: &Path,
    seed: u64,
    programs: &Programs,
    cuts: Cuts,
    random: &mut Random,
) -> Result<Report> {
    let (mut disk, model) = make(folder, seed, random)?;
    let mut users = Users::choose(&mut disk, random)?;
    let (mut report, mut sessions) = (Report::default(), Vec::<Session>::new());
    for number in 0..users.servers {
        let last = (number, sessions.last());
        let (own, session) = serve(&mut disk, &model, last, &mut users, programs, random)?;
        report.add(own);
        report.returns += u64::from(number > 0);
        if report.failure.is_some() {
            return Ok(report);
        }
        sessions.push(session);
    }
    let disk = (&disk, &model);
    cut(disk, &sessions, cuts, programs, random, &mut report)?;
    Ok(report)
}

/// Who uses the disk, and how many servers it has.
struct Users {
    clients: u64,
    guest: Option<Guest>,
    servers: u64,
}

impl Users {
    fn choose(disk: &mut Disk, random: &mut Random) -> Result<Self> {
        let mut guest = None;
        if random.chance(60) {
            let queues = random.between(1, 3) as usize;
            disk.guest = Some((GUEST.to_owned(), queues));
            guest = Some(Guest::new(disk.folder.join(GUEST), queues)?);
        }
        if guest.is_some() && random.chance(60) {
            // Of what other clients had written, and not flushed, nobody knows after a kill
            // whether it is there.
            return Ok(Users {
                clients: 0,
                guest,
                servers: random.between(2, MOST_LOGS as u64 / 2),
            });
        }
        if random.chance(50) {
            let file = disk.folder.join(FILE);
            drop(File::create(&file)?);
            disk.mountpoint = Some(file);
        }
        Ok(Users {
            clients: random.between(2, 5),
            guest,
            servers: 1,
        })
    }
}

/// Has the power of the servers fail.
fn cut(
    (disk, model): (&Disk, &Model),
    sessions: &[Session],
    cuts: Cuts,
    programs: &Programs,
    random: &mut Random,
    report: &mut Report,
) -> Result<()> {
    let of_each = cuts.number.div_ceil(sessions.len() as u64);
    let longest = std::fs::metadata(disk.folder.join(&disk.top()?.file))?.len();
    let folder = cut_folder(disk)?;
    for (number, session) in sessions.iter().enumerate() {
        let mut replay = Replay {
            session,
            image: session.start.clone(),
            applied: 0,
            longest_bytes: longest as usize,
            folder: folder.clone(),
        };
        for cut in choose(&session.log, of_each, cuts.lie, random) {
            let length = (number, cut.length(&session.log));
            let judged = replay
                .make(&cut, disk, random)
                .and_then(|left| judge(&left, model, length, programs, random));
            report.cuts += 1;
            if judged.is_err() && cuts.lie {
                return Ok(());
            }
            if let Err(error) = judged {
                let entries = session.log.entries.len();
                report.failure = Some(format!(
                    "{cut:?} of {entries} entries of server {number}: {error:#}"
                ));
                return Ok(());
            }
        }
    }
    if cuts.lie {
        report.failure = Some("nobody has noticed that most flushes did nothing".to_owned());
    }
    Ok(())
}

/// Has a server live, with a log of its own.
fn serve(
    disk: &mut Disk,
    model: &Model,
    (number, last): (u64, Option<&Session>),
    users: &mut Users,
    programs: &Programs,
    random: &mut Random,
) -> Result<(Report, Session)> {
    let top = disk.folder.join(&disk.top()?.file);
    let start = std::fs::read(&top)?;
    let durable = match last {
        Some(last) => last.durable_at_the_end()?,
        None => start.clone(),
    };
    let name = format!("{LOG}.{number}");
    let path = disk.folder.join(&name);
    drop(File::create(&path)?);
    model.record(File::open(&path)?);
    disk.log = Some(name);
    let served = round::start_daemon(disk, programs)?;
    // Some are killed while they take over what the last one has left.
    let dies_early = number > 0 && random.chance(25);
    let life = Life {
        time: Duration::from_millis(random.between(5, if dies_early { 60 } else { 300 })),
        settles: false,
        answers: if dies_early {
            0
        } else {
            random.between(300, 2500)
        },
    };
    let users = (users.clients, users.guest.as_mut());
    let report = round::torment(disk, model, served, life, users, random).0;
    let session = Session {
        log: Log::read(&path)?,
        start,
        durable,
    };
    Ok((report, session))
}

impl Session {
    /// What was durable when the server was killed.
    fn durable_at_the_end(&self) -> Result<Vec<u8>> {
        let durable = self.log.windows().last().map_or(0, |last| last.durable);
        let mut image = match durable {
            0 => self.durable.clone(),
            _ => self.start.clone(),
        };
        for (at, entry) in self.log.entries.iter().enumerate() {
            if at < durable || entry.fua {
                self.log.apply(at, &mut image, || true)?;
            }
        }
        Ok(image)
    }

    /// What the power may leave of what the server found, before its first flush.
    fn found(&self, percent: u64, random: &mut Random) -> Vec<u8> {
        let mut image = self.durable.clone();
        image.resize(self.start.len(), 0);
        let sectors = image.chunks_mut(SECTOR_BYTES as usize);
        for (old, new) in sectors.zip(self.start.chunks(SECTOR_BYTES as usize)) {
            if old != new && random.chance(percent) {
                old.copy_from_slice(new);
            }
        }
        image
    }
}

impl Cut {
    /// How long the log was.
    fn length(&self, log: &Log) -> u64 {
        // Nothing could be appended behind a flush before it had ended.
        log.length_before(self.ended.min(self.window.next))
    }
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

/// Cuts all over a log, in its order.
fn choose(log: &Log, number: u64, lie: bool, random: &mut Random) -> Vec<Cut> {
    let mut windows = log.windows();
    if lie {
        let truth = windows.clone();
        for (at, window) in windows.iter_mut().enumerate() {
            window.durable = truth[at - at % 4].durable;
        }
    }
    // Most of what is allocated is allocated early.
    let all = windows.len() as u64;
    let reaches = [all, all.div_ceil(4), all.div_ceil(16)];
    let mut places: Vec<u64> = (0..number)
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
    session: &'a Session,
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
        let log = &self.session.log;
        while self.applied < cut.window.durable {
            log.apply(self.applied, &mut self.image, || true)?;
            self.applied += 1;
        }
        let mut image = match cut.window.durable {
            0 => self.session.found(cut.kept.percent, random),
            _ => self.image.clone(),
        };
        for at in cut.window.durable..cut.ended {
            // FUA is its own promise.
            if log.entries[at].fua {
                log.apply(at, &mut image, || true)?;
            } else if random.chance(cut.kept.percent) {
                let last = at + MAY_BE_TORN >= cut.ended;
                let torn = last && random.chance(cut.kept.torn_percent);
                let sectors = if torn { 50 } else { 100 };
                log.apply(at, &mut image, || random.chance(sectors))?;
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
            guest: None,
            is_ours: disk.is_ours,
            own: String::new(),
            has_policy: false,
            on_full: None,
        })
    }
}

/// Looks at what a power cut has left when the log of this server was so long.
fn judge(
    disk: &Disk,
    model: &Model,
    (server, length): (usize, u64),
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
    // The logs of earlier servers were as long as they came to be.
    let mut bound = [0; MOST_LOGS];
    bound[..server].fill(u64::MAX);
    bound[server] = length;
    model
        .judge(&content, model.at_cut(bound))
        .with_context(|| format!("{} when its log had {length} bytes", top.file))
        .map(drop)
}
