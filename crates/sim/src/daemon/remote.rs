//! A disk of another machine, through our own client: the machine's server, our own as well,
//! dies now and then, with its memory or with all that its disk had not made durable, and
//! comes back; or the network drops a connection.
//!
//! 1. What a flush of the client acknowledges, or a write with FUA, is on the machine's disk,
//!    whatever dies afterwards.
//! 2. After writes may have been lost no flush succeeds. Where none can have been, one does.
//! 3. Nobody waits for ever, not even beside requests that others have given up.

mod machine;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select;
use vellum_io::{Buffer, Buffers, Error, lane};
use vellum_nbd::client::handshake::Handshake;
use vellum_nbd::client::{Address, ClientOptions, Connection, NbdStorage, Request};
use vellum_nbd::{Channel, proto};
use vellum_storage::{Storage, WriteFlags};

use super::greedy::soon;
use super::setup::Setup;
use crate::failure::{Failure, FailureKind};
use crate::rng::Rng;
use crate::sparse_bytes::SparseBytes;
use machine::Machine;

/// Where the machine's server listens.
const PORT: &str = "remote";
const SECTOR_BYTES: u64 = 512;
/// Sectors of the disk.
const SECTORS: u64 = 96;
/// Longer than the client refuses to look for a server that was not there.
const PATIENCE: Duration = Duration::from_millis(600);

/// A sector and what was written to it: each write has a number of its own.
#[derive(Debug, Clone, Default)]
struct Sector {
    written: Vec<u64>,
    /// How many of these a flush that succeeded covers, at least.
    durable: usize,
    /// How many were acknowledged.
    answered: usize,
    /// Whether a request has failed that may still land, or not.
    open: bool,
}

/// What the clients of one opening of the disk know.
struct ClientKnowledge {
    sectors: RefCell<Vec<Sector>>,
    next: Cell<u64>,
    /// Writes that run, by their numbers.
    running: RefCell<Vec<u64>>,
    /// Up to this number a flush has covered all.
    covered: Cell<u64>,
    /// Writes may have been lost.
    excused: Cell<bool>,
    clients: Cell<u64>,
}

impl ClientKnowledge {
    /// Notes that connections end now.
    fn note_break(&self) {
        if self.next.get() > self.covered.get() + 1 {
            self.excused.set(true);
        }
    }

    /// What a flush that begins now covers.
    fn snapshot(&self) -> (u64, Vec<usize>) {
        let oldest = self.running.borrow().iter().min().copied();
        let upto = oldest.unwrap_or(self.next.get()) - 1;
        let sectors = self.sectors.borrow();
        let answered = sectors.iter().map(|sector| sector.answered);
        (upto, answered.collect())
    }

    fn cover(&self, (upto, answered): (u64, Vec<usize>)) {
        self.covered.set(self.covered.get().max(upto));
        for (sector, answered) in self.sectors.borrow_mut().iter_mut().zip(answered) {
            sector.durable = sector.durable.max(answered);
        }
    }

    /// Looks at what a sector holds, where all up to a write must be there.
    fn check(&self, number: u64, bytes: &[u8], what: &str) -> Result<(), Failure> {
        let sectors = self.sectors.borrow();
        let sector = &sectors[number as usize];
        let word = |at: usize| bytes[8 * at..8 * at + 8].try_into().map(u64::from_le_bytes);
        let version = word(0).unwrap_or_default();
        let whole = (0..bytes.len() / 8).all(|at| word(at).is_ok_and(|word| word == version));
        let place = sector.written.iter().position(|one| *one == version);
        let holds = whole && place.is_some_and(|place| place + 1 >= sector.durable);
        if holds || sector.open {
            return Ok(());
        }
        let message = format!("{what}: sector {number} holds {version}, and {sector:?}");
        Err(Failure::new(FailureKind::Content, message))
    }

    fn check_all(&self, pages: &SparseBytes, what: &str) -> Result<(), Failure> {
        (0..SECTORS).try_for_each(|number| {
            let bytes = pages.bytes(number * SECTOR_BYTES, SECTOR_BYTES);
            self.check(number, &bytes, what)
        })
    }
}

/// Plays the whole scenario.
pub(super) async fn run(setup: Rc<Setup>, clients: u64, requests: u64) {
    let Some(network) = setup.network.clone() else {
        return;
    };
    let machine = Machine::new(network, setup.draw(Rng::next_u64));
    setup.lanes.add(machine.clone());
    for _ in 0..setup.draw(|rng| rng.between(1, 3)) {
        let kept = machine.disk.borrow().contents(0);
        machine.plug(kept);
        if let Err(error) = machine.start() {
            return setup.fail(Failure::error(FailureKind::Setup, "start", &error));
        }
        let played = match setup.draw(|rng| rng.chance(1, 6)) {
            true => give_up_requests(&setup, &machine).await,
            false => play(&setup, &machine, clients, requests).await,
        };
        machine.executor.drop_tasks();
        if let Err(failure) = played {
            setup.fail(failure);
        }
        if setup.failure().is_some() {
            return;
        }
    }
}

/// One opening of the disk, from its beginning to its end.
async fn play(
    setup: &Rc<Setup>,
    machine: &Rc<Machine>,
    clients: u64,
    requests: u64,
) -> Result<(), Failure> {
    let mut options = ClientOptions::new(PORT, Address::Unix(PORT.to_owned()));
    options.writable = true;
    options.dial = Some(machine.network.clone());
    options.max_connections = setup.draw(|rng| rng.between(1, 4)) as usize;
    let opened = NbdStorage::open(options).await;
    let disk = opened.map_err(|error| Failure::error(FailureKind::Open, PORT, &error))?;
    let start = machine.disk.borrow().contents(0);
    let first = |number: u64| {
        let bytes = start.bytes(number * SECTOR_BYTES, 8);
        let version = bytes.try_into().map_or(0, u64::from_le_bytes);
        Sector {
            written: vec![version],
            durable: 1,
            answered: 1,
            open: false,
        }
    };
    let sectors: Vec<Sector> = (0..SECTORS).map(first).collect();
    let newest = sectors.iter().map(|sector| sector.written[0]).max();
    let next = newest.unwrap_or_default() + 1;
    let account = Rc::new(ClientKnowledge {
        sectors: RefCell::new(sectors),
        next: Cell::new(next),
        running: RefCell::default(),
        covered: Cell::new(next - 1),
        excused: Cell::new(false),
        clients: Cell::new(clients),
    });
    for client in 0..clients {
        let own = (SECTORS / clients * client, SECTORS / clients);
        let work = run_client(
            setup.clone(),
            machine.clone(),
            disk.clone(),
            account.clone(),
            own,
        );
        drop(setup.lanes.any().spawn(work.run(requests)));
    }
    while account.clients.get() > 0 && setup.failure().is_none() {
        setup.pause().await;
        lane::sleep(Duration::from_millis(setup.draw(|rng| rng.below(30)))).await;
        if setup.draw(|rng| rng.chance(1, 3)) {
            disturb(setup, machine, &account).await?;
        }
    }
    check_quiet(setup, machine, &disk, &account).await
}

/// Kills the server, or cuts a connection.
async fn disturb(
    setup: &Setup,
    machine: &Machine,
    account: &ClientKnowledge,
) -> Result<(), Failure> {
    let kind = setup.draw(|rng| rng.below(4));
    account.note_break();
    setup.note(format!(
        "disturbed: {kind}, excused: {}",
        account.excused.get()
    ));
    if kind == 0 {
        // Whatever it had asked for may land later than what is asked on another one.
        for sector in account.sectors.borrow_mut().iter_mut() {
            sector.open |= sector.written.len() > sector.answered;
        }
        machine.network.reset(PORT, false);
        return Ok(());
    }
    machine.die(kind != 1);
    let kept = machine.disk.borrow().contents(0);
    account.check_all(&kept, "what the machine has after it was killed")?;
    if setup.draw(|rng| rng.chance(1, 3)) {
        lane::sleep(Duration::from_millis(setup.draw(|rng| rng.below(900)))).await;
    }
    let started = machine.start();
    started.map_err(|error| Failure::error(FailureKind::Setup, "start", &error))
}

/// When all is quiet a flush must succeed, unless writes may be lost.
async fn check_quiet(
    setup: &Setup,
    machine: &Machine,
    disk: &NbdStorage,
    account: &ClientKnowledge,
) -> Result<(), Failure> {
    let mut last = None;
    for _ in 0..6 {
        let begun = account.snapshot();
        match disk.flush().await {
            Ok(()) => {
                account.cover(begun);
                last = None;
                break;
            }
            Err(error) => last = Some(error),
        }
        lane::sleep(PATIENCE).await;
    }
    match last {
        Some(error) if !account.excused.get() => {
            return Err(Failure::error(
                FailureKind::Request,
                "a flush where nothing was lost",
                &error,
            ));
        }
        Some(error) => setup.note(format!("no flush succeeds: {error}")),
        None => account.check_all(&machine.durable(), "after the last flush")?,
    }
    drop(disk.close().await);
    machine.die(true);
    let kept = machine.disk.borrow().contents(0);
    account.check_all(&kept, "after the end")
}

/// A client, with sectors of its own.
struct Client {
    setup: Rc<Setup>,
    machine: Rc<Machine>,
    disk: Arc<NbdStorage>,
    account: Rc<ClientKnowledge>,
    own: (u64, u64),
}

fn run_client(
    setup: Rc<Setup>,
    machine: Rc<Machine>,
    disk: Arc<NbdStorage>,
    account: Rc<ClientKnowledge>,
    own: (u64, u64),
) -> Rc<Client> {
    Rc::new(Client {
        setup,
        machine,
        disk,
        account,
        own,
    })
}

impl Client {
    async fn run(self: Rc<Self>, requests: u64) {
        for _ in 0..requests {
            if self.setup.failure().is_some() {
                break;
            }
            // Each request goes to any lane, and so to any connection.
            let one = self.clone();
            let job = self
                .setup
                .lanes
                .any()
                .spawn(async move { one.request().await });
            if let Err(failure) = job.await {
                self.setup.fail(failure);
            }
            if self.setup.draw(|rng| rng.chance(1, 4)) {
                let time = self.setup.draw(|rng| rng.below(40));
                lane::sleep(Duration::from_millis(time)).await;
            }
        }
        self.account.clients.set(self.account.clients.get() - 1);
    }

    async fn request(&self) -> Result<(), Failure> {
        let (first, count) = self.setup.draw(|rng| {
            let count = rng.between(1, 6.min(self.own.1));
            (self.own.0 + rng.below(self.own.1 - count + 1), count)
        });
        match self.setup.draw(|rng| rng.below(10)) {
            0..=4 => self.write(first, count).await,
            5 | 6 => self.read(first, count).await?,
            _ => self.flush().await?,
        }
        Ok(())
    }

    async fn write(&self, first: u64, count: u64) {
        let fua = self.setup.draw(|rng| rng.chance(1, 6));
        let account = &self.account;
        let version = account.next.get();
        account.next.set(version + 1);
        account.running.borrow_mut().push(version);
        let places = first as usize..(first + count) as usize;
        for sector in &mut account.sectors.borrow_mut()[places.clone()] {
            sector.written.push(version);
        }
        let mut data = Buffer::zeroed((count * SECTOR_BYTES) as usize);
        for word in data.chunks_exact_mut(8) {
            word.copy_from_slice(&version.to_le_bytes());
        }
        let buffers = Buffers::from_iter([data]);
        let flags = WriteFlags { fua };
        let written = self.disk.write(first * SECTOR_BYTES, buffers, flags).await;
        account.running.borrow_mut().retain(|one| *one != version);
        for sector in &mut account.sectors.borrow_mut()[places] {
            match &written {
                Ok(_) => {
                    sector.answered = sector.written.len();
                    if fua {
                        sector.durable = sector.answered;
                    }
                }
                // It may have landed, or land yet.
                Err(_) => sector.open = true,
            }
        }
    }

    async fn read(&self, first: u64, count: u64) -> Result<(), Failure> {
        let buffers = Buffers::from_iter([Buffer::zeroed((count * SECTOR_BYTES) as usize)]);
        let Ok(buffers) = self.disk.read(first * SECTOR_BYTES, buffers).await else {
            return Ok(());
        };
        let sectors = buffers[0].chunks_exact(SECTOR_BYTES as usize);
        for (number, bytes) in (first..).zip(sectors) {
            self.account.check(number, bytes, "a read")?;
        }
        Ok(())
    }

    async fn flush(&self) -> Result<(), Failure> {
        let begun = self.account.snapshot();
        if self.disk.flush().await.is_ok() {
            self.account.cover(begun);
            let durable = self.machine.durable();
            self.account.check_all(&durable, "after a flush")?;
        }
        Ok(())
    }
}

/// Requests on one connection, of which some are given up while they wait: the others end.
async fn give_up_requests(setup: &Rc<Setup>, machine: &Rc<Machine>) -> Result<(), Failure> {
    let joined = async {
        let channel = Channel::from(machine.network.connect(PORT)?);
        let context = proto::CONTEXT_ALLOCATION;
        let (channel, input, session) = Handshake::new(channel).agree("", context).await?;
        Ok::<_, Error>(Connection::new(channel, input, session))
    };
    let connection = joined
        .await
        .map_err(|error| Failure::error(FailureKind::Request, "join", &error))?;
    let mut jobs = Vec::new();
    for _ in 0..setup.draw(|rng| rng.between(2, 150)) {
        let command = setup.draw(|rng| *rng.pick(&[proto::CMD_READ, proto::CMD_FLUSH]));
        let len_bytes = match command {
            proto::CMD_READ => SECTOR_BYTES,
            _ => 0,
        };
        let question = Request {
            command,
            flags: 0,
            offset_bytes: 0,
            len_bytes,
            buffers: Buffers::from_iter([Buffer::zeroed(len_bytes as usize)]),
        };
        let patience = setup.draw(|rng| rng.chance(1, 8).then(|| rng.below(8)));
        let connection = connection.clone();
        jobs.push(setup.lanes.any().spawn(async move {
            let asked = std::pin::pin!(connection.ask(question));
            let Some(turns) = patience else {
                return drop(asked.await);
            };
            let given_up = std::pin::pin!(async {
                for _ in 0..turns {
                    lane::yield_now().await;
                }
            });
            drop(select(asked, given_up).await);
        }));
    }
    let all = async {
        for job in jobs {
            job.await;
        }
    };
    soon(setup, "a request beside one that was given up", all).await;
    Ok(())
}
