//! A guest with memory and queues, whose client is `vhost`'s: code that others wrote.
#![allow(dead_code)] // each test binary uses a part

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use vellum_io::shared_memory::{SharedBuffer, SharedMemory};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Memory of the guest in bytes.
pub const MEMORY_BYTES: u64 = 32 << 20;
/// Where the guest sees it.
pub const MEMORY_AT: u64 = 0x1000_0000;
/// Where the data of requests may lie.
pub const DATA_AT: u64 = MEMORY_AT + (1 << 20);
/// Entries of a queue.
pub const QUEUE_SIZE: u16 = 64;
/// How long anything may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes of a queue's rings, and of the headers of its requests behind them.
const QUEUE_BYTES: u64 = 64 << 10;
const AVAILABLE_AT: u64 = 16 << 10;
const USED_AT: u64 = 32 << 10;
/// Headers and statuses of requests: 32 bytes for each descriptor.
const HEADERS_AT: u64 = 48 << 10;

/// All that the device may offer but the event index, unless a test asks for it.
pub const EVENT_INDEX: u64 = 1 << 29;
pub const INDIRECT: u64 = 1 << 28;
/// Only while the guest moves elsewhere.
pub const LOG_ALL: u64 = 1 << 26;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;

/// A descriptor: address, length, flags, next.
pub type Descriptor = (u64, u32, u16, u16);

/// Memory that a guest and its client have.
#[derive(Debug, Clone)]
pub struct Memory {
    pub file: Arc<File>,
    pub bytes: SharedBuffer,
}

impl Memory {
    pub fn new() -> Memory {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("guest", flags).expect("memory");
        rustix::fs::ftruncate(&file, MEMORY_BYTES).expect("memory");
        let mapped = SharedMemory::map(file.as_fd(), 0, MEMORY_BYTES).expect("a mapping");
        let bytes = Arc::new(mapped).range(0, MEMORY_BYTES).expect("all of it");
        Memory {
            file: Arc::new(File::from(file)),
            bytes,
        }
    }

    fn at(&self, address: u64) -> usize {
        (address - MEMORY_AT) as usize
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.bytes.copy_from(self.at(address), bytes);
    }

    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.bytes.copy_to(self.at(address), &mut bytes);
        bytes
    }

    /// As the client sees an address of the guest.
    pub fn client_address(&self, address: u64) -> u64 {
        (self.bytes.address() + self.at(address)) as u64
    }

    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: MEMORY_AT,
            memory_size: MEMORY_BYTES,
            userspace_addr: self.bytes.address() as u64,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }
}

/// The driver of a queue.
pub struct Queue {
    pub memory: Memory,
    pub index: usize,
    pub kick: EventFd,
    pub call: EventFd,
    pub error: EventFd,
    pub next_available: u16,
    pub last_used: u16,
    free: Vec<u16>,
    pub event_index: bool,
}

impl Queue {
    pub fn new(memory: &Memory, index: usize, event_index: bool) -> Queue {
        let event = || EventFd::new(EFD_NONBLOCK).expect("an event");
        Queue {
            memory: memory.clone(),
            index,
            kick: event(),
            call: event(),
            error: event(),
            next_available: 0,
            last_used: 0,
            free: (0..QUEUE_SIZE / 4).map(|number| number * 4).rev().collect(),
            event_index,
        }
    }

    /// Where the queue is.
    pub fn base(&self) -> u64 {
        MEMORY_AT + QUEUE_BYTES * self.index as u64
    }

    pub fn set_descriptor(&self, index: u16, descriptor: Descriptor) {
        let at = self.base() + 16 * u64::from(index);
        self.memory.write(at, &descriptor_bytes(descriptor));
    }

    pub fn set_u16(&self, address: u64, value: u16) {
        let at = (address - MEMORY_AT) as usize;
        self.memory.bytes.store_u16(at, value, Ordering::SeqCst);
    }

    pub fn get_u16(&self, address: u64) -> u16 {
        let at = (address - MEMORY_AT) as usize;
        self.memory.bytes.load_u16(at, Ordering::SeqCst)
    }

    /// Makes a chain available, without a kick.
    pub fn offer(&mut self, head: u16) {
        let entry = u64::from(self.next_available % QUEUE_SIZE);
        self.set_u16(self.base() + AVAILABLE_AT + 4 + 2 * entry, head);
        self.next_available = self.next_available.wrapping_add(1);
        self.set_u16(self.base() + AVAILABLE_AT + 2, self.next_available);
    }

    pub fn set_available_index(&self, index: u16) {
        self.set_u16(self.base() + AVAILABLE_AT + 2, index);
    }

    /// Where the guest has the used ring.
    pub fn used_ring(&self) -> u64 {
        self.base() + USED_AT
    }

    /// The page of the next request's status.
    pub fn status_page(&self) -> u64 {
        let head = *self.free.last().expect("a free chain");
        (self.base() + HEADERS_AT + 32 * u64::from(head) + 24) / 4096
    }

    pub fn set_used_index(&self, index: u16) {
        self.set_u16(self.base() + USED_AT + 2, index);
    }

    /// How many the device has used.
    pub fn used_index(&self) -> u16 {
        self.get_u16(self.base() + USED_AT + 2)
    }

    /// Tells the device, unless it does not want to be told.
    pub fn kick(&self) {
        fence(Ordering::SeqCst);
        let wanted = match self.event_index {
            true => {
                let at = self.base() + USED_AT + 4 + 8 * u64::from(QUEUE_SIZE);
                let event = self.get_u16(at);
                // One at a time is offered here, so that is all to be seen.
                event == self.next_available.wrapping_sub(1)
            }
            false => self.get_u16(self.base() + USED_AT) & 1 == 0,
        };
        if wanted {
            self.kick.write(1).expect("a kick");
        }
    }

    /// A chain of a header, data and a status, in three descriptors of four; its head.
    pub fn prepare(&mut self, header: &[u8], data: (u64, u32), device_writes: bool) -> u16 {
        let head = self.free.pop().expect("a free chain");
        let header_at = self.base() + HEADERS_AT + 32 * u64::from(head);
        let status_at = header_at + 24;
        self.memory.write(header_at, header);
        self.memory.write(status_at, &[0xff]);
        let status = (status_at, 1, WRITE, 0);
        self.set_descriptor(head, (header_at, header.len() as u32, NEXT, head + 1));
        if data.1 == 0 {
            self.set_descriptor(head + 1, status);
        } else {
            let flags = if device_writes { NEXT | WRITE } else { NEXT };
            self.set_descriptor(head + 1, (data.0, data.1, flags, head + 2));
            self.set_descriptor(head + 2, status);
        }
        head
    }

    /// What the request said of itself at its end.
    pub fn status(&self, head: u16) -> u8 {
        self.memory
            .read(self.base() + HEADERS_AT + 32 * u64::from(head) + 24, 1)[0]
    }

    /// What was used, if anything.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        let used = self.base() + USED_AT;
        if self.get_u16(used + 2) == self.last_used {
            return None;
        }
        let entry = u64::from(self.last_used % QUEUE_SIZE);
        let bytes = self.memory.read(used + 4 + 8 * entry, 8);
        self.last_used = self.last_used.wrapping_add(1);
        if self.event_index {
            let at = self.base() + AVAILABLE_AT + 4 + 2 * u64::from(QUEUE_SIZE);
            self.set_u16(at, self.last_used);
            fence(Ordering::SeqCst);
        }
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"));
        let head = number(0) as u16;
        self.free.push(head);
        Some((head, number(4)))
    }

    /// Waits until something is used, as a guest does: for the signal.
    pub fn wait_used(&mut self) -> (u16, u32) {
        let begin = Instant::now();
        loop {
            if let Some(used) = self.take_used() {
                return used;
            }
            assert!(begin.elapsed() < PATIENCE, "no request was used");
            if self.call.read().is_err() {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Carries a request out; its status and how many bytes the device says it wrote.
    pub fn request(&mut self, header: &[u8], data: (u64, u32), device_writes: bool) -> (u8, u32) {
        let head = self.prepare(header, data, device_writes);
        self.offer(head);
        self.kick();
        let (used, written) = self.wait_used();
        assert_eq!(used, head);
        (self.status(head), written)
    }

    pub fn read_disk(&mut self, sector: u64, len: u32) -> (u8, Vec<u8>) {
        let at = DATA_AT + (1 << 20) * self.index as u64;
        let (status, _) = self.request(&header(0, sector), (at, len), true);
        (status, self.memory.read(at, len as usize))
    }

    pub fn write_disk(&mut self, sector: u64, bytes: &[u8]) -> u8 {
        let at = DATA_AT + (1 << 20) * self.index as u64;
        self.memory.write(at, bytes);
        self.request(&header(1, sector), (at, bytes.len() as u32), false)
            .0
    }

    pub fn flush(&mut self) -> u8 {
        self.request(&header(4, 0), (0, 0), false).0
    }

    /// Discards (11) or zeroes (13) ranges of sectors.
    pub fn ranges(&mut self, kind: u32, ranges: &[(u64, u32, u32)]) -> u8 {
        let bytes: Vec<u8> = ranges
            .iter()
            .flat_map(|range| range_bytes(*range))
            .collect();
        let at = DATA_AT + (1 << 20) * self.index as u64;
        self.memory.write(at, &bytes);
        self.request(&header(kind, 0), (at, bytes.len() as u32), false)
            .0
    }
}

/// As it lies in a table.
pub fn descriptor_bytes((address, len, flags, next): Descriptor) -> Vec<u8> {
    [
        &address.to_le_bytes()[..],
        &len.to_le_bytes(),
        &flags.to_le_bytes(),
        &next.to_le_bytes(),
    ]
    .concat()
}

/// The header of a request.
pub fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

fn range_bytes((sector, sectors, flags): (u64, u32, u32)) -> Vec<u8> {
    [
        &sector.to_le_bytes()[..],
        &sectors.to_le_bytes(),
        &flags.to_le_bytes(),
    ]
    .concat()
}

/// A client and its guest.
pub struct Guest {
    pub client: Frontend,
    pub memory: Memory,
    pub queues: Vec<Queue>,
    pub features: u64,
    /// What the client keeps of requests in flight.
    pub in_flight: Option<(VhostUserInflight, File)>,
}

impl Guest {
    /// A guest that has not set anything up.
    pub fn connect(socket: &Path) -> Guest {
        let begin = Instant::now();
        let client = loop {
            match std::os::unix::net::UnixStream::connect(socket) {
                Ok(stream) => break Frontend::from_stream(stream, 64),
                Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        Guest {
            client,
            memory: Memory::new(),
            queues: Vec::new(),
            features: 0,
            in_flight: None,
        }
    }

    /// A guest whose queues run.
    pub fn boot(socket: &Path, queues: usize, without: u64) -> Guest {
        let mut guest = Guest::connect(socket);
        guest.agree(without);
        let event_index = guest.features & EVENT_INDEX != 0;
        guest.queues = (0..queues)
            .map(|index| Queue::new(&guest.memory, index, event_index))
            .collect();
        guest.start();
        guest
    }

    /// Agrees upon everything that is offered but `without`.
    pub fn agree(&mut self, without: u64) {
        let client = &mut self.client;
        client.set_owner().expect("owned");
        self.features = client.get_features().expect("features") & !without & !LOG_ALL;
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::REPLY_ACK;
        let offered = client.get_protocol_features().expect("features");
        assert!(offered.contains(wanted), "{offered:?}");
        client.set_protocol_features(wanted).expect("agreed");
        let acknowledge = vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY;
        client.set_hdr_flags(acknowledge);
        client.set_features(self.features).expect("agreed");
    }

    /// Hands memory and queues over.
    pub fn start(&mut self) {
        self.client
            .set_mem_table(&[self.memory.region()])
            .expect("memory");
        let count = self.queues.len() as u16;
        if self.in_flight.is_none() {
            let wanted = VhostUserInflight::new(0, 0, count, QUEUE_SIZE);
            self.in_flight = Some(self.client.get_inflight_fd(&wanted).expect("memory"));
        }
        if let Some((area, file)) = &self.in_flight {
            self.client
                .set_inflight_fd(area, file.as_raw_fd())
                .expect("handed over");
        }
        for index in 0..self.queues.len() {
            self.start_queue(index);
        }
    }

    pub fn start_queue(&mut self, index: usize) {
        let queue = &self.queues[index];
        let (client, base) = (&mut self.client, queue.base());
        client.set_vring_num(index, QUEUE_SIZE).expect("a size");
        client
            .set_vring_base(index, queue.last_used)
            .expect("a base");
        client
            .set_vring_addr(index, &place(&self.memory, base))
            .expect("a place");
        client.set_vring_err(index, &queue.error).expect("an event");
        client.set_vring_call(index, &queue.call).expect("an event");
        client.set_vring_kick(index, &queue.kick).expect("an event");
        client.set_vring_enable(index, true).expect("enabled");
    }

    /// Hangs up, and comes back to the same server.
    pub fn reconnect_after_hanging_up(&mut self, socket: &Path) {
        let (nowhere, _) = std::os::unix::net::UnixStream::pair().expect("a pair");
        self.client = Frontend::from_stream(nowhere, 1);
        self.reconnect(socket);
    }

    /// Comes back with what it had, to a server that knows nothing of it.
    pub fn reconnect(&mut self, socket: &Path) {
        let features = self.features;
        self.client = Guest::connect(socket).client;
        self.agree(!features);
        self.start();
    }

    /// The size of the disk, as the configuration tells it.
    pub fn disk_bytes(&mut self) -> u64 {
        let bytes = self.config(0, 8);
        u64::from_le_bytes(bytes.try_into().expect("eight")) * 512
    }

    pub fn config(&mut self, at: u32, len: u32) -> Vec<u8> {
        let flags = VhostUserConfigFlags::empty();
        let room = vec![0; len as usize];
        self.client
            .get_config(at, len, flags, &room)
            .expect("configuration")
            .1
    }

    pub fn set_write_cache(&mut self, on: bool) {
        let flags = VhostUserConfigFlags::WRITABLE;
        self.client
            .set_config(32, flags, &[u8::from(on)])
            .expect("set");
    }
}

pub fn place(memory: &Memory, base: u64) -> VringConfigData {
    VringConfigData {
        queue_max_size: QUEUE_SIZE,
        queue_size: QUEUE_SIZE,
        flags: 0,
        desc_table_addr: memory.client_address(base),
        used_ring_addr: memory.client_address(base + USED_AT),
        avail_ring_addr: memory.client_address(base + AVAILABLE_AT),
        log_addr: None,
    }
}
