//! A split virtqueue in a guest's memory: what it makes available, and what was used.
//!
//! Invariant: everything that is read here may be anything, and something else a moment later.
//! So each number is read once, and checked before it is used.

use std::sync::atomic::{Ordering, fence};

use vellum_io::Result;
use vellum_io::shared_memory::SharedBuffer;

use super::memory::GuestMemory;
use super::message::{RingAddresses, broken};

/// Most entries of a queue.
pub(super) const MAX_QUEUE_SIZE: u16 = 32768;
/// Bytes of a descriptor.
pub(super) const DESCRIPTOR_BYTES: usize = 16;
/// Bytes in front of a ring's entries: flags and index.
const RING_HEAD_BYTES: usize = 4;
const INDEX_AT: usize = 2;
const AVAILABLE_ENTRY_BYTES: usize = 2;
const USED_ENTRY_BYTES: usize = 8;

/// In the available ring: the guest wants no signals.
const NO_INTERRUPT: u16 = 1;
/// In the used ring: the device wants no kicks.
const NO_NOTIFY: u16 = 1;

/// Where a queue is, as a client has described it.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingPlace {
    /// Entries: a power of two.
    pub(super) size: u16,
    pub(super) addresses: RingAddresses,
    /// The next entry of the available ring.
    pub(super) next_available: u16,
    /// Both sides say after which entry they want to be told.
    pub(super) event_index: bool,
}

/// A queue.
#[derive(Debug)]
pub(super) struct Ring {
    size: u16,
    descriptors: SharedBuffer,
    available: SharedBuffer,
    used: SharedBuffer,
    next_available: u16,
    /// What the guest said last of how far the available ring goes.
    known_available: u16,
    next_used: u16,
    event_index: bool,
    /// How far the used ring went when the guest was last told, or did not want to be.
    signalled: Option<u16>,
}

impl Ring {
    /// Finds a queue in memory.
    ///
    /// # Errors
    /// If it is not there, or not aligned.
    pub(super) fn find(place: &RingPlace, memory: &GuestMemory) -> Result<Ring> {
        let size = usize::from(place.size);
        if !place.size.is_power_of_two() {
            return Err(broken(format!("a queue of {size} entries")));
        }
        let find = |address, len_bytes: usize, alignment: usize| {
            let found = memory.find_by_client(address, len_bytes as u64)?;
            match found.address().is_multiple_of(alignment) {
                true => Ok(found),
                false => Err(broken(format!("a ring at {address:#x} is not aligned"))),
            }
        };
        let available_bytes = RING_HEAD_BYTES + AVAILABLE_ENTRY_BYTES * (size + 1);
        // Its last two bytes are needed for the event index alone.
        let used_bytes = RING_HEAD_BYTES + USED_ENTRY_BYTES * size + AVAILABLE_ENTRY_BYTES;
        let addresses = &place.addresses;
        let used = find(addresses.used, used_bytes, 4)?;
        Ok(Ring {
            size: place.size,
            descriptors: find(addresses.descriptors, DESCRIPTOR_BYTES * size, 16)?,
            available: find(addresses.available, available_bytes, 2)?,
            next_used: used.load_u16(INDEX_AT, Ordering::Acquire),
            used,
            next_available: place.next_available,
            known_available: place.next_available,
            event_index: place.event_index,
            signalled: None,
        })
    }

    /// How many entries it has.
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// The table of its descriptors.
    pub(super) fn descriptors(&self) -> &SharedBuffer {
        &self.descriptors
    }

    /// The next entry of the available ring.
    pub(super) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Goes on with the available ring behind what is used or in flight.
    pub(super) fn skip_in_flight(&mut self, in_flight: u16) {
        self.next_available = self.next_used.wrapping_add(in_flight);
        self.known_available = self.next_available;
    }

    /// The next entry of the used ring.
    pub(super) fn next_used(&self) -> u16 {
        self.next_used
    }

    /// The first descriptor of the next request, if there is one.
    ///
    /// # Errors
    /// If the guest claims more requests than there can be, or names no descriptor.
    pub(super) fn next_head(&mut self) -> Result<Option<u16>> {
        if self.next_available == self.known_available {
            self.known_available = self.available.load_u16(INDEX_AT, Ordering::Acquire);
            let count = self.known_available.wrapping_sub(self.next_available);
            if count > self.size {
                let (index, size) = (self.known_available, self.size);
                self.known_available = self.next_available;
                return Err(broken(format!(
                    "the guest claims {count} requests (index {index}) of a queue of {size}"
                )));
            }
            if count == 0 {
                return Ok(None);
            }
        }
        let entry = usize::from(self.next_available % self.size);
        let at = RING_HEAD_BYTES + AVAILABLE_ENTRY_BYTES * entry;
        let head = self.available.load_u16(at, Ordering::Relaxed);
        if head >= self.size {
            let size = self.size;
            return Err(broken(format!("descriptor {head} of a table of {size}")));
        }
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    /// Whether the guest has made anything available that was not taken.
    pub(super) fn has_more(&self) -> bool {
        self.next_available != self.known_available
            || self.available.load_u16(INDEX_AT, Ordering::Acquire) != self.next_available
    }

    /// Gives a request back, into whose memory `written_bytes` bytes were written. Where in the used ring
    /// something was written for that, and how many bytes.
    pub(super) fn push_used(&mut self, head: u16, written_bytes: u32) -> [(usize, usize); 2] {
        let entry = usize::from(self.next_used % self.size);
        let at = RING_HEAD_BYTES + USED_ENTRY_BYTES * entry;
        let mut bytes = [0; USED_ENTRY_BYTES];
        bytes[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        bytes[4..].copy_from_slice(&written_bytes.to_le_bytes());
        self.used.copy_from(at, &bytes);
        self.next_used = self.next_used.wrapping_add(1);
        // Whoever sees the index sees the entry, and what was written before.
        self.used
            .store_u16(INDEX_AT, self.next_used, Ordering::Release);
        [(at, USED_ENTRY_BYTES), (INDEX_AT, 2)]
    }

    /// Whether the guest wants to be told of what was pushed since it was asked last.
    pub(super) fn wants_signal(&mut self) -> bool {
        // What the guest wants is read after what it sees was written.
        fence(Ordering::SeqCst);
        let before = self.signalled.replace(self.next_used);
        if !self.event_index {
            return self.available.load_u16(0, Ordering::Relaxed) & NO_INTERRUPT == 0;
        }
        let event_at = RING_HEAD_BYTES + AVAILABLE_ENTRY_BYTES * usize::from(self.size);
        let event = self.available.load_u16(event_at, Ordering::Relaxed);
        let Some(before) = before else { return true };
        // The guest wants to be told when entry `event` has been used.
        let since_event = self.next_used.wrapping_sub(event).wrapping_sub(1);
        since_event < self.next_used.wrapping_sub(before)
    }

    /// Asks the guest for no more kicks, as far as it can be asked.
    pub(super) fn refuse_kicks(&mut self) {
        // With the event index an entry that is passed already is not asked for again.
        if !self.event_index {
            self.used.store_u16(0, NO_NOTIFY, Ordering::Relaxed);
        }
    }

    /// Asks for a kick with the next request. Whether there is one already, for which no
    /// kick may come.
    pub(super) fn ask_for_kick(&mut self) -> bool {
        match self.event_index {
            true => {
                let event_at = RING_HEAD_BYTES + USED_ENTRY_BYTES * usize::from(self.size);
                self.used
                    .store_u16(event_at, self.next_available, Ordering::Relaxed);
            }
            false => self.used.store_u16(0, 0, Ordering::Relaxed),
        }
        // Either the guest sees that, or this sees its request.
        fence(Ordering::SeqCst);
        self.has_more()
    }
}
