//! The driver's side of a queue: chains of a header, data and a status.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Result, ensure};
use vhost::VringConfigData;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::memory::Memory;

/// Its entries.
pub const SIZE: u16 = 64;
/// Requests in flight: each has four descriptors.
const SLOTS: u16 = SIZE / 4;
/// Room for the data of a request in bytes.
pub const DATA_BYTES: usize = 256 << 10;

const AVAILABLE_AT: usize = 4 << 10;
const USED_AT: usize = 8 << 10;
const HEADERS_AT: usize = 12 << 10;
const HEADER_BYTES: usize = 32;
/// In the room of a header.
const STATUS_AT: usize = 24;
const DATA_AT: usize = 64 << 10;
/// Bytes of a queue, with the data of its requests.
pub const BYTES: usize = DATA_AT + SLOTS as usize * DATA_BYTES;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Read.
    Read = 0,
    /// Write.
    Write = 1,
    /// Make durable.
    Flush = 4,
    /// Give space back.
    Discard = 11,
    /// Write zeroes.
    Zeroes = 13,
}

/// A queue.
pub struct Queue {
    memory: Arc<Memory>,
    start: usize,
    /// Tells the server.
    pub kick: EventFd,
    /// Tells the guest.
    pub call: EventFd,
    next_available: u16,
    /// How far the guest has looked.
    last_used: u16,
    free: Vec<u16>,
}

impl Queue {
    /// Queue `index`.
    pub fn new(memory: &Arc<Memory>, index: usize) -> Result<Self> {
        Ok(Queue {
            memory: memory.clone(),
            start: index * BYTES,
            kick: EventFd::new(EFD_NONBLOCK)?,
            call: EventFd::new(EFD_NONBLOCK)?,
            next_available: 0,
            last_used: 0,
            free: (0..SLOTS).collect(),
        })
    }

    /// Where its rings are.
    pub fn place(&self) -> VringConfigData {
        let address = |at| self.memory.address(self.start + at);
        VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: address(0),
            used_ring_addr: address(USED_AT),
            avail_ring_addr: address(AVAILABLE_AT),
            log_addr: None,
        }
    }

    fn data_at(&self, slot: u16) -> usize {
        self.start + DATA_AT + usize::from(slot) * DATA_BYTES
    }

    fn header_at(&self, slot: u16) -> usize {
        self.start + HEADERS_AT + usize::from(slot) * HEADER_BYTES
    }

    fn set_descriptor(&self, index: u16, place: (usize, usize), flags: u16) {
        let mut bytes = (place.0 as u64).to_le_bytes().to_vec();
        bytes.extend((place.1 as u32).to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend((index + 1).to_le_bytes());
        self.memory
            .write(self.start + usize::from(index) * 16, &bytes);
    }

    /// Sends a request; the slot that it has until it ends, or nothing if all are taken.
    pub fn send(&mut self, kind: Kind, sector: u64, data: &[u8]) -> Result<Option<u16>> {
        let Some(slot) = self.free.pop() else {
            return Ok(None);
        };
        let (header_at, data_at) = (self.header_at(slot), self.data_at(slot));
        let mut header = (kind as u64).to_le_bytes().to_vec();
        header.extend(sector.to_le_bytes());
        self.memory.write(header_at, &header);
        self.memory.write(header_at + STATUS_AT, &[0xff]);
        if kind != Kind::Read {
            self.memory.write(data_at, data);
        }
        let head = slot * 4;
        self.set_descriptor(head, (header_at, header.len()), NEXT);
        let mut last = head + 1;
        if !data.is_empty() {
            let own = if kind == Kind::Read { WRITE } else { 0 };
            self.set_descriptor(last, (data_at, data.len()), NEXT | own);
            last += 1;
        }
        self.set_descriptor(last, (header_at + STATUS_AT, 1), WRITE);
        let available = self.start + AVAILABLE_AT;
        let entry = usize::from(self.next_available % SIZE);
        self.memory.store(available + 4 + 2 * entry, head);
        self.next_available = self.next_available.wrapping_add(1);
        self.memory.store(available + 2, self.next_available);
        fence(Ordering::SeqCst);
        if self.memory.load(self.start + USED_AT) & 1 == 0 {
            self.kick.write(1)?;
        }
        Ok(Some(slot))
    }

    /// How many requests servers have ended.
    pub fn used_index(&self) -> u16 {
        self.memory.load(self.start + USED_AT + 2)
    }

    /// A request that has ended: its slot and status. The slot is free again.
    pub fn take_used(&mut self) -> Result<Option<(u16, u8)>> {
        let used = self.start + USED_AT;
        if self.used_index() == self.last_used {
            return Ok(None);
        }
        let entry = used + 4 + 8 * usize::from(self.last_used % SIZE);
        let head = self.memory.load(entry);
        self.last_used = self.last_used.wrapping_add(1);
        let slot = head / 4;
        let is_known = head.is_multiple_of(4) && slot < SLOTS && !self.free.contains(&slot);
        ensure!(
            is_known,
            "the server ends request {head}, which is not in flight"
        );
        self.free.push(slot);
        let status = self.memory.read(self.header_at(slot) + STATUS_AT, 1)[0];
        Ok(Some((slot, status)))
    }

    /// What a read has brought, until the next request.
    pub fn data(&self, slot: u16, len: usize) -> Vec<u8> {
        self.memory.read(self.data_at(slot), len)
    }
}
