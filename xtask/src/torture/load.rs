//! A client that writes, reads what it wrote, and notes what it was promised.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use vellum_testing::nbd::{Command, Connection, FUA, NO_HOLE};

use super::model::{Change, GRANULE_BYTES, Model, Ticket};
use crate::random::Random;

/// How long clients may take to stop, on a busy machine.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
const RECONNECT_PAUSE: Duration = Duration::from_millis(10);
/// The answer of a server that breaks off what it was asked for, as it hangs up.
const SHUTDOWN: u32 = 108;
/// The answer where there is no room.
const NO_SPACE: u32 = 28;
/// That of QEMU's behind the end of an export of NBD.
const INVALID: u32 = 22;
/// Granules of the longest request.
const MOST_GRANULES: u64 = (256 << 10) / GRANULE_BYTES as u64;
/// Granules of 4 KiB and of a sector.
const PAGE: u64 = 64;
const SECTOR: u64 = 8;

/// What the clients of a server share.
#[derive(Debug)]
pub struct Load<'a> {
    /// What the disk must hold.
    pub model: &'a Model,
    /// Where the server listens.
    pub socket: &'a Path,
    /// The server is dead, or about to be.
    pub over: AtomicBool,
    /// Requests that need room may find that there is none.
    pub is_refused_when_full: bool,
    /// A client whose connection is gone connects again.
    pub returns: bool,
    /// Requests that were answered.
    pub answered: AtomicU64,
    /// Those of them that went through a file.
    pub answered_by_file: AtomicU64,
    /// Those that a guest has sent.
    pub answered_by_guest: AtomicU64,
    /// A guest has requests that the last server has left.
    pub has_old_requests: AtomicBool,
    /// Clients begin nothing more.
    settles: AtomicBool,
    /// Clients that have stopped.
    settled: AtomicU64,
    /// What went wrong first.
    pub failure: Mutex<Option<String>>,
}

/// A request in flight.
enum Flight {
    Data(Ticket),
    Flush(u64),
}

impl<'a> Load<'a> {
    /// Clients that have done nothing yet.
    pub fn new(model: &'a Model, socket: &'a Path, returns: bool) -> Self {
        Load {
            model,
            socket,
            over: AtomicBool::new(false),
            is_refused_when_full: false,
            returns,
            answered: AtomicU64::new(0),
            answered_by_file: AtomicU64::new(0),
            answered_by_guest: AtomicU64::new(0),
            has_old_requests: AtomicBool::new(false),
            settles: AtomicBool::new(false),
            settled: AtomicU64::new(0),
            failure: Mutex::new(None),
        }
    }

    /// Notes a failure; the first one counts.
    pub fn fail(&self, what: String) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(what);
    }

    /// Whether anything went wrong.
    pub fn has_failed(&self) -> bool {
        let failure = self.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Whether the server is dead, or about to be.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// One client, until the server is dead.
    pub fn run(&self, mut random: Random) {
        while !self.is_over() && !self.settles() {
            let structured = random.chance(50);
            match Connection::open(self.socket, structured) {
                Ok(connection) => self.converse(connection, &mut random),
                Err(_) => std::thread::sleep(RECONNECT_PAUSE),
            }
        }
        self.settled.fetch_add(1, Ordering::AcqRel);
    }

    fn settles(&self) -> bool {
        self.settles.load(Ordering::Acquire)
    }

    /// Has so many clients of the socket stop, and flushes what they have written.
    pub fn settle(&self, clients: u64) -> Result<()> {
        self.settles.store(true, Ordering::Release);
        let begun = Instant::now();
        while self.settled.load(Ordering::Acquire) < clients {
            ensure!(
                begun.elapsed() < SETTLE_LIMIT,
                "no answers to some requests"
            );
            std::thread::sleep(RECONNECT_PAUSE);
        }
        let mut connection = Connection::open(self.socket, false)?;
        let sent = self.model.tick();
        connection.send(Command::Flush, 0, 1, (0, 0), &[])?;
        let answer = connection.receive(|_| None)?;
        ensure!(
            answer.error == 0,
            "a flush failed with error {}",
            answer.error
        );
        self.model.flushed(sent);
        Ok(())
    }

    fn converse(&self, mut connection: Connection, random: &mut Random) {
        let mut flights = HashMap::new();
        let result = self.requests(&mut connection, random, &mut flights);
        drop(connection);
        if let Err(error) = result
            && error.downcast_ref::<std::io::Error>().is_none()
            && !error.to_string().contains("hung up")
        {
            self.fail(format!("a client: {error:#}"));
        }
        if flights.is_empty() {
            return;
        }
        // What was begun has ended when clients are let in again (or nobody is left to do it).
        while self.returns && !self.is_over() && Connection::open(self.socket, false).is_err() {
            std::thread::sleep(RECONNECT_PAUSE);
        }
        for flight in flights.into_values() {
            if let Flight::Data(ticket) = flight {
                self.model.lose(&ticket);
            }
        }
    }

    fn requests(
        &self,
        connection: &mut Connection,
        random: &mut Random,
        flights: &mut HashMap<u64, Flight>,
    ) -> Result<()> {
        if !connection.several {
            bail!("the export takes one client only");
        }
        let mut cookie = 0;
        let hot = random.below(self.model.granules() as u64);
        let mut depth = 1;
        loop {
            if self.settles() {
                if flights.is_empty() {
                    return Ok(());
                }
                self.finish(connection, flights)?;
                continue;
            }
            if flights.is_empty() {
                depth = random.pick(&[1, 2, 4, 8, 16, 24]);
            }
            if flights.len() < depth {
                cookie += 1;
                if self.begin(connection, random, flights, cookie, hot)? {
                    continue;
                }
            }
            if !flights.is_empty() {
                self.finish(connection, flights)?;
            }
        }
    }

    /// Sends a request; `false` if others are in its way.
    fn begin(
        &self,
        connection: &mut Connection,
        random: &mut Random,
        flights: &mut HashMap<u64, Flight>,
        cookie: u64,
        hot: u64,
    ) -> Result<bool> {
        let kind = random.below(100);
        if kind < 4 {
            let sent = self.model.tick();
            connection.send(Command::Flush, 0, cookie, (0, 0), &[])?;
            flights.insert(cookie, Flight::Flush(sent));
            return Ok(true);
        }
        let granules = self.range(random, hot, connection.size_bytes);
        let place = (
            (granules.start * GRANULE_BYTES) as u64,
            (granules.len() * GRANULE_BYTES) as u32,
        );
        let fua = random.chance(4);
        let mut flags = if fua { FUA } else { 0 };
        let (command, ticket) = match kind {
            4..20 => (Command::Read, self.model.begin_read(granules)),
            20..29 => {
                flags |= if random.chance(50) { NO_HOLE } else { 0 };
                let ticket = self.model.begin_change(granules, Change::Zero, fua);
                (Command::Zeroes, ticket)
            }
            29..35 => {
                let ticket = self.model.begin_change(granules, Change::Trim, fua);
                (Command::Trim, ticket)
            }
            _ => {
                let change = Change::Pattern(self.model.next_version());
                let ticket = self.model.begin_change(granules, change, fua);
                (Command::Write, ticket)
            }
        };
        let Some(ticket) = ticket else {
            return Ok(false);
        };
        let payload = match ticket.change {
            Some(Change::Pattern(version)) => self.model.pattern(ticket.granules.clone(), version),
            _ => Vec::new(),
        };
        let flags = if command == Command::Read { 0 } else { flags };
        let sent = connection.send(command, flags, cookie, place, &payload);
        flights.insert(cookie, Flight::Data(ticket));
        sent.map(|()| true)
    }

    /// Takes an answer.
    fn finish(
        &self,
        connection: &mut Connection,
        flights: &mut HashMap<u64, Flight>,
    ) -> Result<()> {
        let answer = connection.receive(|cookie| match flights.get(&cookie) {
            Some(Flight::Data(ticket)) if ticket.change.is_none() => Some((
                (ticket.granules.start * GRANULE_BYTES) as u64,
                ticket.granules.len() * GRANULE_BYTES,
            )),
            _ => None,
        })?;
        let Some(flight) = flights.remove(&answer.cookie) else {
            bail!("an answer to nothing");
        };
        self.answered.fetch_add(1, Ordering::Relaxed);
        if answer.error == SHUTDOWN {
            // The export goes: what became of the request nobody will tell.
            flights.insert(answer.cookie, flight);
            bail!("the server has hung up");
        }
        match flight {
            Flight::Flush(sent) if answer.error == 0 => self.model.flushed(sent),
            Flight::Flush(_) => bail!("a flush failed with error {}", answer.error),
            Flight::Data(ticket) if answer.error != 0 => {
                let (change, granules) = (ticket.change, ticket.granules.clone());
                self.model.lose(&ticket);
                if self.is_refused_when_full
                    && change.is_some()
                    && matches!(answer.error, NO_SPACE | INVALID)
                {
                    return Ok(());
                }
                bail!("{change:?} of {granules:?} failed with {}", answer.error);
            }
            Flight::Data(ticket) => {
                if ticket.change.is_none() {
                    let start = ticket.granules.start * GRANULE_BYTES;
                    let mut bytes = vec![0; ticket.granules.len() * GRANULE_BYTES];
                    for (offset, data) in &answer.data {
                        let at = (*offset as usize).wrapping_sub(start);
                        let Some(part) = bytes.get_mut(at..at + data.len()) else {
                            bail!("a read brought what it was not asked for");
                        };
                        part.copy_from_slice(data);
                    }
                    let checked = self.model.check_read(&ticket, &bytes);
                    self.model.end(&ticket);
                    return checked;
                }
                self.model.end(&ticket);
            }
        }
        Ok(())
    }

    /// Where the next request goes: much of it to one place, mostly aligned somehow.
    pub fn range(&self, random: &mut Random, hot: u64, size_bytes: u64) -> std::ops::Range<usize> {
        let all = (size_bytes / GRANULE_BYTES as u64).min(self.model.granules() as u64);
        let near = random.chance(60);
        let start = match near {
            true => (hot + random.below(1 << 14)) % all,
            false => random.below(all),
        };
        let len = match random.below(10) {
            0..3 => PAGE,
            3..5 => random.between(1, 2 * SECTOR),
            5..7 => random.between(1, 4 * PAGE),
            7..9 => SECTOR * random.between(1, 256),
            _ => random.between(1, MOST_GRANULES),
        };
        let unit = random.pick(&[1, SECTOR, SECTOR, PAGE, PAGE, PAGE]);
        let start = start / unit * unit;
        let len = len.next_multiple_of(unit).min(all - start);
        start as usize..(start + len) as usize
    }
}
