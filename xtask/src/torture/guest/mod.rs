//! A guest that uses the disk through vhost-user-blk: requests in its own memory, on several queues.
//! It outlives the server. The next one is given the memory that the last one noted its requests
//! in, and what was in flight must end, once, and what was acknowledged must be there.

mod memory;
mod queue;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use vhost::VhostBackend as _;
use vhost::vhost_user::message::{
    VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};

use super::load::Load;
use super::model::{Change, GRANULE_BYTES, Ticket};
use crate::random::Random;
use memory::Memory;
use queue::{DATA_BYTES, Kind, Queue};

/// Granules of a sector, the smallest piece that is asked for.
const SECTOR: usize = 512 / GRANULE_BYTES;
/// Features of the device that are not made use of: indirect descriptors, the index of events.
const NOT_USED: u64 = 1 << 28 | 1 << 29;
/// A write-back cache that can be flushed.
const FLUSH: u64 = 1 << 9;
/// Space may be given back when zeroes are written.
const UNMAP: u32 = 1;
/// How long a server may take for the guest, and for anything.
pub const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_micros(50);
const CONNECT_PAUSE: Duration = Duration::from_millis(3);

/// A guest.
pub struct Guest {
    socket: PathBuf,
    memory: Arc<Memory>,
    drivers: Vec<Driver>,
    client: Option<Frontend>,
    /// What servers note of requests in flight, kept from one to the next.
    in_flight: Option<(VhostUserInflight, File)>,
}

/// Who uses a queue.
struct Driver {
    queue: Queue,
    flights: HashMap<u16, Flight>,
}

/// A request in flight.
enum Flight {
    Data(Ticket),
    Flush(u64),
}

impl Guest {
    /// A guest with so many queues.
    pub fn new(socket: PathBuf, queues: usize) -> Result<Self> {
        let memory = Arc::new(Memory::new(queues * queue::BYTES)?);
        let drivers = (0..queues).map(|index| {
            Ok(Driver {
                queue: Queue::new(&memory, index)?,
                flights: HashMap::new(),
            })
        });
        Ok(Guest {
            socket,
            drivers: drivers.collect::<Result<_>>()?,
            memory,
            client: None,
            in_flight: None,
        })
    }

    /// Works with the disk until the server is dead.
    pub fn run(&mut self, load: &Load<'_>, mut random: Random) {
        let has_old = self.drivers.iter().any(|one| !one.flights.is_empty());
        load.has_old_requests.store(has_old, Ordering::Release);
        if let Err(error) = self.connect(load) {
            // The server may have been killed meanwhile.
            if !load.is_over() {
                load.fail(format!("the guest: {error:#}"));
            }
            return;
        }
        let told = |result: Result<()>| {
            if let Err(error) = result {
                load.fail(format!("a client in the guest: {error:#}"));
            }
        };
        std::thread::scope(|scope| {
            for driver in &mut self.drivers {
                scope.spawn(|| told(driver.end_all(load)));
            }
        });
        if load.is_over() {
            // What did not end is for the next server.
            return;
        }
        load.has_old_requests.store(false, Ordering::Release);
        told(self.drivers[0].read_all(load));
        std::thread::scope(|scope| {
            for driver in &mut self.drivers {
                let mut random = random.fork();
                scope.spawn(move || told(driver.work(load, &mut random)));
            }
        });
    }

    /// Hands everything over to a server, also what the last one had.
    fn connect(&mut self, load: &Load<'_>) -> Result<()> {
        self.client = None;
        let mut client = Frontend::from_stream(wait_for(&self.socket, load)?, 64);
        client.set_owner()?;
        let features = client.get_features()? & !NOT_USED;
        ensure!(features & FLUSH != 0, "the disk has no flushes");
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::REPLY_ACK;
        let offered = client.get_protocol_features()?;
        ensure!(offered.contains(wanted), "the server offers {offered:?}");
        client.set_protocol_features(wanted)?;
        client.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        client.set_features(features)?;
        client.set_mem_table(&[self.memory.region()])?;
        if self.in_flight.is_none() {
            let count = u16::try_from(self.drivers.len())?;
            let wanted = VhostUserInflight::new(0, 0, count, queue::SIZE);
            self.in_flight = Some(client.get_inflight_fd(&wanted)?);
        }
        if let Some((area, file)) = &self.in_flight {
            client.set_inflight_fd(area, file.as_raw_fd())?;
        }
        for (index, driver) in self.drivers.iter().enumerate() {
            let queue = &driver.queue;
            client.set_vring_num(index, queue::SIZE)?;
            // As QEMU does: what was taken and is not used stands in the memory.
            client.set_vring_base(index, queue.used_index())?;
            client.set_vring_addr(index, &queue.place())?;
            client.set_vring_call(index, &queue.call)?;
            client.set_vring_kick(index, &queue.kick)?;
            client.set_vring_enable(index, true)?;
        }
        self.client = Some(client);
        Ok(())
    }
}

fn wait_for(socket: &Path, load: &Load<'_>) -> Result<UnixStream> {
    let begin = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(error) if begin.elapsed() > PATIENCE || load.is_over() => {
                return Err(error).context("the server lets no guest in");
            }
            Err(_) => std::thread::sleep(CONNECT_PAUSE),
        }
    }
}

impl Driver {
    /// Waits for what a server before this one has left.
    fn end_all(&mut self, load: &Load<'_>) -> Result<()> {
        while !self.flights.is_empty() && self.finish(load)? {}
        Ok(())
    }

    /// Reads the whole disk: all that was acknowledged is there, flushed or not.
    fn read_all(&mut self, load: &Load<'_>) -> Result<()> {
        let (all, most) = (load.model.granules(), DATA_BYTES / GRANULE_BYTES);
        for start in (0..all).step_by(most) {
            let granules = start..all.min(start + most);
            if let Some(ticket) = load.model.begin_read(granules) {
                self.send_data(load, ticket, false)?;
            }
            while !self.flights.is_empty() {
                if !self.finish(load)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn work(&mut self, load: &Load<'_>, random: &mut Random) -> Result<()> {
        let hot = random.below(load.model.granules() as u64);
        let mut depth = 1;
        while !load.is_over() {
            if self.flights.is_empty() {
                depth = random.pick(&[1, 2, 4, 8, 16]);
            }
            if self.flights.len() < depth && self.begin(load, random, hot)? {
                continue;
            }
            if !self.flights.is_empty() && !self.finish(load)? {
                break;
            }
        }
        Ok(())
    }

    /// Sends a request; `false` if others are in its way.
    fn begin(&mut self, load: &Load<'_>, random: &mut Random, hot: u64) -> Result<bool> {
        let kind = random.below(100);
        if kind < 5 {
            let sent = load.model.tick();
            let slot = self.queue.send(Kind::Flush, 0, &[])?;
            self.flights
                .insert(slot.context("no room")?, Flight::Flush(sent));
            return Ok(true);
        }
        let size_bytes = (load.model.granules() * GRANULE_BYTES) as u64;
        let range = load.range(random, hot, size_bytes);
        let start = range.start / SECTOR * SECTOR;
        let most = start + DATA_BYTES / GRANULE_BYTES;
        let granules = start..range.end.next_multiple_of(SECTOR).min(most);
        let model = load.model;
        let ticket = match kind {
            5..20 => model.begin_read(granules),
            20..29 => model.begin_change(granules, Change::Zero, false),
            29..35 => model.begin_change(granules, Change::Trim, false),
            _ => model.begin_change(granules, Change::Pattern(model.next_version()), false),
        };
        let Some(ticket) = ticket else {
            return Ok(false);
        };
        self.send_data(load, ticket, random.chance(50))?;
        Ok(true)
    }

    fn send_data(&mut self, load: &Load<'_>, ticket: Ticket, unmaps: bool) -> Result<()> {
        let sector = (ticket.granules.start / SECTOR) as u64;
        let len = ticket.granules.len() * GRANULE_BYTES;
        let segment = |flags: u32| {
            let mut bytes = sector.to_le_bytes().to_vec();
            bytes.extend(((len / 512) as u32).to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes
        };
        let slot = match ticket.change {
            None => self.queue.send(Kind::Read, sector, &vec![0; len])?,
            Some(Change::Pattern(version)) => {
                let bytes = load.model.pattern(ticket.granules.clone(), version);
                self.queue.send(Kind::Write, sector, &bytes)?
            }
            Some(Change::Zero) => {
                let flags = if unmaps { UNMAP } else { 0 };
                self.queue.send(Kind::Zeroes, 0, &segment(flags))?
            }
            Some(Change::Trim) => self.queue.send(Kind::Discard, 0, &segment(0))?,
        };
        self.flights
            .insert(slot.context("no room")?, Flight::Data(ticket));
        Ok(())
    }

    /// Waits for the end of a request; `false` if the server is dead.
    fn finish(&mut self, load: &Load<'_>) -> Result<bool> {
        let begin = Instant::now();
        let (slot, status) = loop {
            if load.is_over() {
                return Ok(false);
            }
            if let Some(used) = self.queue.take_used()? {
                break used;
            }
            let len = self.flights.len();
            ensure!(begin.elapsed() < PATIENCE, "{len} requests do not end");
            if self.queue.call.read().is_err() {
                std::thread::sleep(PAUSE);
            }
        };
        load.answered.fetch_add(1, Ordering::Relaxed);
        load.answered_by_guest.fetch_add(1, Ordering::Relaxed);
        match self.flights.remove(&slot) {
            Some(Flight::Flush(sent)) if status == 0 => load.model.flushed(sent),
            Some(Flight::Flush(_)) => bail!("a flush failed with status {status}"),
            Some(Flight::Data(ticket)) if status == 0 => {
                let checked = match ticket.change {
                    Some(_) => Ok(()),
                    None => {
                        let len = ticket.granules.len() * GRANULE_BYTES;
                        load.model.check_read(&ticket, &self.queue.data(slot, len))
                    }
                };
                load.model.end(&ticket);
                checked?;
            }
            Some(Flight::Data(ticket)) => {
                let (change, granules) = (ticket.change, &ticket.granules);
                bail!("{change:?} of {granules:?} failed with status {status}");
            }
            None => bail!("an answer to nothing"),
        }
        Ok(true)
    }
}
