//! A client's session: what it has agreed upon, and the queues that it has set up.
//!
//! Invariants:
//! - While anything that a queue was started with changes (memory, features, its place, its
//!   kicks), the queue stands still: its requests are done, and it is started anew.
//! - When the last queue has stopped, or the memory for requests in flight is replaced, everything that
//!   was acknowledged is durable: the client may free that memory, and with it the logs of writes.
//! - A session that ends has no queue: everything that was begun on the device is complete.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::{Either, select};
use vellum_io::lane::{self, LaneOptions, LaneThread};
use vellum_io::{Error, Result};

use super::channel::{Channel, Peer, Received};
use super::config::{WRITE_CACHE_AT, feature};
use super::control::RunningQueue;
use super::descriptors::{duplicate, optional, single};
use super::dirty_log::DirtyLog;
use super::disk::Disk;
use super::in_flight::InFlight;
use super::memory::{GuestMemory, MAX_REGIONS};
use super::message::{
    ConfigPart, Header, InFlightArea, MAX_CONFIG_BYTES, Message, RegionDescription, RingAddresses,
    broken, config_changed, encode_ring_state, protocol_feature,
};
use super::queue::QueueSetup;
use super::recovery::{make, take_over};
use super::ring::{MAX_QUEUE_SIZE, RingPlace};
use crate::nbd::Stop;

/// What the protocol between client and server has here.
const PROTOCOL_FEATURES: u64 = protocol_feature::MULTIPLE_QUEUES
    | protocol_feature::LOG_MEMORY
    | protocol_feature::REPLY_ACK
    | protocol_feature::BACKEND_REQUESTS
    | protocol_feature::CONFIG
    | protocol_feature::IN_FLIGHT
    | protocol_feature::MEMORY_SLOTS;

/// So many messages are taken before others on the lane have their turn.
const MESSAGES_A_TURN: usize = 16;

/// What the sessions of an export share, one after the other.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) disk: Arc<Disk>,
    pub(super) queues: u16,
    /// A lane for each queue that was ever started.
    pub(super) lanes: RefCell<Vec<Option<LaneThread>>>,
    /// Where the client hears of what it did not ask for.
    pub(super) backend: RefCell<Option<Rc<Channel>>>,
    pub(super) stop: Stop,
}

/// What a queue is, as far as the client has said.
#[derive(Debug, Default)]
struct QueueState {
    size: u16,
    addresses: Option<RingAddresses>,
    base: u16,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    error: Option<OwnedFd>,
    enabled: bool,
    running: Option<RunningQueue>,
}

/// What a message is answered with.
enum Answer {
    /// That it was carried out, if the client wants to know.
    Done,
    Payload(Vec<u8>),
    WithDescriptor(Vec<u8>, OwnedFd),
}

/// A session.
pub(super) struct Session {
    shared: Rc<Shared>,
    features: u64,
    protocol_features: u64,
    memory: GuestMemory,
    queues: Vec<QueueState>,
    in_flight: Option<InFlight>,
    /// Where the client is told of memory that was written, if it has agreed upon that.
    dirty: Option<Arc<DirtyLog>>,
    peer: Peer,
}

/// Serves a client until it leaves or the export ends.
pub(super) async fn serve(shared: Rc<Shared>, channel: Channel) {
    let mut session = Session::new(shared.clone(), channel.peer());
    if let Err(failure) = session.talk(&channel).await
        && !shared.stop.is_requested()
    {
        shared
            .disk
            .log(&format!("a client is given up: {}", failure.message()));
    }
    shared.backend.take();
    session.end().await;
}

impl Shared {
    /// Takes the size of the device in; whether it is another one.
    pub(super) async fn update_size(&self) -> bool {
        let before_bytes = self.disk.geometry().size_bytes;
        let is_another = self.disk.update_size();
        if self.disk.geometry().size_bytes < before_bytes {
            // What was written behind the end must not come back if the disk grows again.
            if let Err(failure) = self.disk.kept.flush().await {
                self.disk.log(failure.message());
            }
        }
        is_another
    }

    /// Tells the client, if there is one that listens, of another configuration.
    pub(super) fn tell_of_config(&self) {
        let backend = self.backend.borrow().clone();
        // A client that has not read what it was told is told by that: nobody waits for it.
        if let Some(backend) = backend
            && let Err(failure) = backend.send_at_once(&config_changed())
        {
            self.disk.log(failure.message());
            self.backend.take();
        }
    }

    /// What `work` gives; `None` if the export ends first.
    async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        match select(pin!(work), pin!(self.stop.wait())).await {
            Either::Left((done, _)) => Some(done),
            Either::Right(_) => None,
        }
    }

    /// Starts a queue on its lane.
    fn start(&self, setup: QueueSetup) -> Result<RunningQueue> {
        let number = setup.number;
        let mut lanes = self.lanes.borrow_mut();
        let lane = lanes.get_mut(usize::from(number));
        let lane = lane.ok_or_else(|| broken(format!("there is no queue {number}")))?;
        if lane.is_none() {
            let name = format!("queue-{number}");
            *lane = Some(LaneThread::start(&name, LaneOptions::default())?);
        }
        match lane {
            Some(lane) => Ok(RunningQueue::start(lane.remote(), setup)),
            None => Err(broken(format!("queue {number} has no lane"))),
        }
    }
}

impl Session {
    fn new(shared: Rc<Shared>, peer: Peer) -> Session {
        let queues = (0..shared.queues).map(|_| QueueState::default()).collect();
        Session {
            shared,
            features: 0,
            protocol_features: 0,
            memory: GuestMemory::default(),
            queues,
            in_flight: None,
            dirty: None,
            peer,
        }
    }

    /// Answers messages until there are no more.
    async fn talk(&mut self, channel: &Channel) -> Result<()> {
        let shared = self.shared.clone();
        let mut messages = 0_usize;
        while !shared.stop.is_requested() {
            messages += 1;
            if messages.is_multiple_of(MESSAGES_A_TURN) {
                // A client that asks for no answers never has this task wait.
                lane::yield_now().await;
            }
            let Some(received) = shared.unless_stopped(channel.receive()).await else {
                return Ok(());
            };
            let Some(Received {
                header,
                message,
                descriptors,
            }) = received?
            else {
                return Ok(());
            };
            let answer = match self.carry_out(message, descriptors).await {
                Ok(answer) => answer,
                Err(failure) if self.acknowledges(&header) => {
                    self.shared.disk.log(failure.message());
                    Answer::Payload(1_u64.to_ne_bytes().to_vec())
                }
                Err(failure) => return Err(failure),
            };
            let (payload, descriptor) = match answer {
                Answer::Payload(payload) => (payload, None),
                Answer::WithDescriptor(payload, descriptor) => (payload, Some(descriptor)),
                Answer::Done if self.acknowledges(&header) => (vec![0; 8], None),
                Answer::Done => continue,
            };
            let bytes = header.reply(&payload);
            let sent = channel.send(&bytes, descriptor.as_ref().map(AsFd::as_fd));
            match shared.unless_stopped(sent).await {
                Some(sent) => sent?,
                None => return Ok(()),
            }
        }
        Ok(())
    }

    fn acknowledges(&self, header: &Header) -> bool {
        self.protocol_features & protocol_feature::REPLY_ACK != 0 && header.needs_reply()
    }

    async fn carry_out(&mut self, message: Message, descriptors: Vec<OwnedFd>) -> Result<Answer> {
        let number = |number: u64| Ok(Answer::Payload(number.to_ne_bytes().to_vec()));
        match message {
            Message::GetFeatures => return number(self.shared.disk.geometry().features()),
            Message::SetFeatures(features) => self.set_features(features).await?,
            Message::SetOwner => {}
            Message::ResetOwner | Message::ResetDevice => self.reset().await,
            Message::GetProtocolFeatures => return number(PROTOCOL_FEATURES),
            Message::SetProtocolFeatures(features) => self.protocol_features = features,
            Message::GetQueueCount => return number(u64::from(self.shared.queues)),
            Message::GetMemorySlots => return number(MAX_REGIONS as u64),
            Message::SetMemoryTable(regions) => self.set_memory(&regions, descriptors).await?,
            Message::AddRegion(region) => {
                let file = single(descriptors)?;
                self.change_memory(|memory| memory.add(region, file))
                    .await?;
            }
            Message::RemoveRegion(region) => {
                self.change_memory(|memory| memory.remove(region)).await?;
            }
            Message::SetLog(area) => {
                let log = DirtyLog::map(area, single(descriptors)?)?;
                self.stop_all().await;
                self.dirty = Some(Arc::new(log));
                self.start_all()?;
                return Ok(Answer::Payload(area.encode()));
            }
            // The client looks by itself.
            Message::SetLogDescriptor => {}
            Message::SetBackendChannel => {
                let channel = Channel::new(single(descriptors)?);
                *self.shared.backend.borrow_mut() = Some(Rc::new(channel));
            }
            Message::GetConfig(part) => return Ok(Answer::Payload(self.config(part).encode())),
            Message::SetConfig(part) => self.set_config(&part)?,
            Message::GetInFlight(area) => {
                let (area, file) = make(&self.shared.disk, self.shared.queues, &area)?;
                return Ok(Answer::WithDescriptor(area.encode(), file));
            }
            Message::SetInFlight(area) => {
                self.set_in_flight(&area, single(descriptors)?).await?;
            }
            of_queue => return self.carry_out_for_queue(of_queue, descriptors).await,
        }
        self.start_all()?;
        Ok(Answer::Done)
    }

    async fn carry_out_for_queue(
        &mut self,
        message: Message,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Answer> {
        match message {
            Message::SetRingSize { queue, size } => {
                let size = u16::try_from(size)
                    .ok()
                    .filter(|size| size.is_power_of_two() && *size <= MAX_QUEUE_SIZE);
                let size = size.ok_or_else(|| broken(format!("the size of queue {queue}")))?;
                self.stopped(queue).await?.size = size;
            }
            Message::SetRingAddresses { queue, addresses } => {
                self.stopped(queue).await?.addresses = Some(addresses);
            }
            Message::SetRingBase { queue, base } => {
                self.stopped(queue).await?.base = (base & 0xffff) as u16;
            }
            Message::GetRingBase { queue } => {
                let state = self.stopped(queue).await?;
                state.kick = None;
                let base = u32::from(state.base);
                self.flush_if_stopped().await;
                return Ok(Answer::Payload(encode_ring_state(queue, base)));
            }
            Message::SetKick {
                queue,
                has_descriptor,
            } => {
                let kick = optional(descriptors, has_descriptor)?;
                let kick = kick.ok_or_else(|| broken("a queue that must be polled"))?;
                self.stopped(queue).await?.kick = Some(kick);
            }
            Message::SetCall {
                queue,
                has_descriptor,
            } => {
                let call = optional(descriptors, has_descriptor)?;
                let state = self.queue(queue)?;
                if let Some(running) = &state.running {
                    running.set_call(duplicate(&call));
                }
                state.call = call;
            }
            Message::SetError {
                queue,
                has_descriptor,
            } => {
                let error = optional(descriptors, has_descriptor)?;
                let state = self.queue(queue)?;
                if let Some(running) = &state.running {
                    running.set_error(duplicate(&error));
                }
                state.error = error;
            }
            Message::SetRingEnable { queue, enable } => {
                let is_other = self.queue(queue)?.enabled != enable;
                if is_other {
                    self.stopped(queue).await?.enabled = enable;
                }
            }
            _ => {}
        }
        self.start_all()?;
        Ok(Answer::Done)
    }

    fn queue(&mut self, queue: u32) -> Result<&mut QueueState> {
        let state = usize::try_from(queue).ok();
        let state = state.and_then(|queue| self.queues.get_mut(queue));
        state.ok_or_else(|| broken(format!("there is no queue {queue}")))
    }

    /// A queue that stands still.
    async fn stopped(&mut self, queue: u32) -> Result<&mut QueueState> {
        let disk = self.shared.disk.clone();
        let state = self.queue(queue)?;
        state.stop(&disk).await;
        Ok(state)
    }

    async fn stop_all(&mut self) {
        for state in &mut self.queues {
            state.stop(&self.shared.disk).await;
        }
    }

    /// Flushes what was acknowledged once no queue runs: a client that resets the device frees the
    /// memory with the logs, while its guest goes on and relies on what it has written.
    async fn flush_if_stopped(&self) {
        if self.queues.iter().any(|state| state.running.is_some()) {
            return;
        }
        // The client cannot be told, and keeps the logs unless it resets the device.
        if let Err(failure) = self.shared.disk.kept.flush_all().await {
            self.shared.disk.log(failure.message());
        }
    }

    /// Starts the queues of which everything is known.
    fn start_all(&mut self) -> Result<()> {
        let enables = self.features & feature::PROTOCOL != 0;
        let is_logged = self.features & feature::LOG_ALL != 0;
        for (number, state) in self.queues.iter_mut().enumerate() {
            let (Some(addresses), Some(kick)) = (state.addresses, &state.kick) else {
                continue;
            };
            let wanted = state.enabled || !enables;
            if state.running.is_some() || !wanted || state.size == 0 {
                continue;
            }
            // From now on this server has what the guest has written.
            self.shared.disk.kept.overtaken.end();
            // As many as there are numbers of queues.
            let number = number as u16;
            let notes = match &self.in_flight {
                Some(in_flight) => Some(in_flight.queue(number, state.size)?),
                None => None,
            };
            let unflushed = self
                .in_flight
                .as_ref()
                .and_then(|one| one.unflushed.clone())
                .filter(|_| self.shared.disk.keeps_writes);
            let log = match (&self.in_flight, unflushed) {
                (Some(in_flight), Some(all)) => Some((in_flight.log(number)?, all)),
                _ => None,
            };
            // Made by a server that needed no log, such as one of a raw file.
            let lacks_log =
                self.shared.disk.keeps_writes && self.in_flight.is_some() && log.is_none();
            let setup = QueueSetup {
                number,
                disk: self.shared.disk.clone(),
                peer: self.peer.clone(),
                ending: self.shared.stop.clone(),
                memory: self.memory.for_another_lane(),
                ring: RingPlace {
                    size: state.size,
                    addresses,
                    next_available: state.base,
                    event_index: self.features & feature::EVENT_INDEX != 0,
                },
                notes,
                log,
                lacks_log,
                dirty: self.dirty.clone().filter(|_| is_logged),
                kick: kick
                    .try_clone()
                    .map_err(|e| Error::from_io("start queue", &e))?,
                call: duplicate(&state.call),
                error: duplicate(&state.error),
                indirect: self.features & feature::INDIRECT != 0,
                guest_flushes: self.features & (feature::FLUSH | feature::CONFIG_WCE) != 0,
            };
            state.running = Some(self.shared.start(setup)?);
        }
        Ok(())
    }

    async fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.shared.disk.geometry().features();
        if unknown != 0 {
            return Err(broken(format!("features {unknown:#x} were not offered")));
        }
        if features != self.features {
            self.stop_all().await;
            self.features = features;
        }
        Ok(())
    }

    async fn set_memory(
        &mut self,
        regions: &[RegionDescription],
        files: Vec<OwnedFd>,
    ) -> Result<()> {
        if regions.len() != files.len() {
            let (regions, files) = (regions.len(), files.len());
            return Err(broken(format!(
                "{regions} regions of memory in {files} files"
            )));
        }
        let mut memory = GuestMemory::default();
        for (region, file) in regions.iter().zip(files) {
            memory.add(*region, file)?;
        }
        self.stop_all().await;
        self.memory = memory;
        Ok(())
    }

    /// Changes the memory, unless that is refused: then the queues go on as they are.
    async fn change_memory(
        &mut self,
        change: impl FnOnce(&mut GuestMemory) -> Result<()>,
    ) -> Result<()> {
        let mut memory = self.memory.for_another_lane();
        change(&mut memory)?;
        self.stop_all().await;
        self.memory = memory;
        Ok(())
    }

    /// Takes over what the client keeps of requests in flight. If that fails, the queues go on with what
    /// they have.
    async fn set_in_flight(&mut self, area: &InFlightArea, file: OwnedFd) -> Result<()> {
        self.stop_all().await;
        if let Err(failure) = self.shared.disk.kept.flush_all().await {
            // The logs in the memory of before are still needed.
            self.start_all()?;
            return Err(failure);
        }
        let is_over = || self.shared.stop.is_requested() || self.peer.has_left();
        match take_over(&self.shared.disk, area, file, is_over).await {
            Ok(taken) => {
                self.shared.disk.kept.set(taken.unflushed.clone());
                if self.shared.disk.keeps_writes && taken.unflushed.is_none() {
                    self.shared.disk.log(
                        "the client's memory for requests in flight was made by another server and \
                         has no room for unflushed writes: writes go through to the disk, which is \
                         slower, until the client resets the device",
                    );
                }
                self.in_flight = Some(taken);
                Ok(())
            }
            Err(failure) => {
                self.start_all()?;
                Err(failure)
            }
        }
    }

    fn config(&self, part: ConfigPart) -> ConfigPart {
        let mut space = [0; MAX_CONFIG_BYTES];
        let config = self.shared.disk.geometry().config();
        space[..config.len()].copy_from_slice(&config);
        let start = part.offset_bytes as usize;
        let found = space.get(start..start.saturating_add(part.bytes.len()));
        // No bytes say that there is no such part.
        let bytes = found.unwrap_or_default().to_vec();
        ConfigPart { bytes, ..part }
    }

    fn set_config(&mut self, part: &ConfigPart) -> Result<()> {
        match (part.offset_bytes as usize, &part.bytes[..]) {
            (WRITE_CACHE_AT, &[value @ 0..=1]) => {
                if let Some(in_flight) = &self.in_flight {
                    in_flight.set_writes_through(value == 0)?;
                }
                self.shared.disk.set_write_back(value == 1);
                Ok(())
            }
            (at, bytes) => {
                let len = bytes.len();
                Err(broken(format!(
                    "{len} bytes of configuration at {at} cannot be set"
                )))
            }
        }
    }

    /// Forgets what was set up.
    async fn reset(&mut self) {
        self.stop_all().await;
        self.flush_if_stopped().await;
        for state in &mut self.queues {
            *state = QueueState::default();
        }
        self.features = 0;
        self.dirty = None;
        self.shared.disk.set_write_back(true);
    }

    /// Ends all queues. Nobody waits for what they do.
    async fn end(&mut self) {
        for state in &self.queues {
            if let Some(running) = &state.running {
                running.abandon();
            }
        }
        self.stop_all().await;
        self.in_flight = None;
        if let Err(failure) = self.shared.disk.kept.flush_all().await {
            // The next server writes it again.
            self.shared.disk.log(failure.message());
        }
        self.shared.disk.kept.set(None);
    }
}

impl QueueState {
    /// Has the queue stand still: its requests are done.
    async fn stop(&mut self, disk: &Disk) {
        if let Some(running) = self.running.take() {
            match running.stop().await {
                Ok(base) => self.base = base,
                Err(failure) => disk.log(failure.message()),
            }
        }
    }
}
