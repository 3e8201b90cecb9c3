//! Requests in flight, in memory that outlives the server: whoever comes after a server that
//! was killed carries out again what it had begun, in the order in which it came.
//!
//! The client keeps the memory and hands it to each server. What is in it is ours:
//!
//! ```text
//! queue:   features u64 | version u16 | entries u16 | last_head u16 | used u16 | entry ...
//! entry:   in_flight u8, 5 bytes of nothing | next u16 | number u64
//! ```
//!
//! A request's entry is that of its first descriptor. It is noted as in flight, with the next
//! number, before anything is done for it. When it is done, it becomes the last one (which
//! names the one before), then it goes into the used ring, then the note is taken back, and
//! last `used` says how far the used ring went. So whatever of that a dead server has done, the used
//! ring tells which of the notes are stale.
//!
//! Invariant: what the memory holds is not trusted: every number is checked before it is used.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vellum_io::shared_memory::{SharedBuffer, SharedMemory};
use vellum_io::{Error, Result};

use super::message::{InFlightArea, broken};
use super::unflushed::{HEAD_BYTES as HEAD_OF_ALL_BYTES, LOG_BYTES, Log, Unflushed};

const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// Parts of different queues share no line of a cache.
const ALIGNMENT_BYTES: usize = 64;
const VERSION: u16 = 1;

const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_HEAD_AT: usize = 12;
const USED_AT: usize = 14;
/// In the head of all: the guest has its write cache off.
const WRITE_THROUGH_AT: usize = 16;
const ENTRY_NEXT_AT: usize = 6;
const ENTRY_NUMBER_AT: usize = 8;

fn queue_bytes(queue_size: u16) -> u64 {
    let bytes = HEAD_BYTES + ENTRY_BYTES * usize::from(queue_size);
    bytes.next_multiple_of(ALIGNMENT_BYTES) as u64
}

/// Bytes of the parts of all queues, behind which what was not flushed follows.
fn notes_bytes(queues: u16, queue_size: u16) -> u64 {
    queue_bytes(queue_size) * u64::from(queues)
}

/// The memory of all queues.
#[derive(Debug)]
pub(super) struct InFlight {
    memory: SharedMemory,
    queues: u16,
    queue_size: u16,
    /// Writes that were not flushed, where they are kept.
    pub(super) unflushed: Option<Arc<Unflushed>>,
}

impl InFlight {
    /// New memory for what a client asks for, with or without logs of writes; it gets the file.
    ///
    /// # Errors
    /// What the system says if there is no memory.
    pub(super) fn create(
        queues: u16,
        queue_size: u16,
        keeps_writes: bool,
    ) -> Result<(InFlightArea, OwnedFd)> {
        let failed = |errno: rustix::io::Errno| {
            Error::from_errno("make memory for requests in flight", errno.raw_os_error())
        };
        // It takes memory only where it is used.
        let len_bytes = notes_bytes(queues, queue_size)
            + HEAD_OF_ALL_BYTES
            + if keeps_writes {
                LOG_BYTES * u64::from(queues)
            } else {
                0
            };
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("vellum-in-flight", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, len_bytes).map_err(failed)?;
        let area = InFlightArea {
            len_bytes,
            offset_bytes: 0,
            queues,
            queue_size,
        };
        Ok((area, file))
    }

    /// Memory that a client hands over.
    ///
    /// # Errors
    /// If it is too small for what it claims to be, or cannot be mapped.
    pub(super) fn map(area: &InFlightArea, file: impl AsFd) -> Result<InFlight> {
        let notes = notes_bytes(area.queues, area.queue_size);
        let least = notes + HEAD_OF_ALL_BYTES;
        if notes == 0 || area.len_bytes < least {
            let (queues, size, len) = (area.queues, area.queue_size, area.len_bytes);
            return Err(broken(format!(
                "{len} bytes for the requests in flight of {queues} queues of {size}"
            )));
        }
        let whole = least + LOG_BYTES * u64::from(area.queues);
        let has_logs = area.len_bytes >= whole;
        let mapped_bytes = if has_logs { whole } else { least };
        let mut in_flight = InFlight {
            memory: SharedMemory::map(file.as_fd(), area.offset_bytes, mapped_bytes)?,
            queues: area.queues,
            queue_size: area.queue_size,
            unflushed: None,
        };
        if has_logs {
            let logs = in_flight.logs()?;
            in_flight.unflushed = Some(Unflushed::open(in_flight.head()?, &logs));
        }
        Ok(in_flight)
    }

    /// What is said of all queues.
    fn head(&self) -> Result<SharedBuffer> {
        let at = notes_bytes(self.queues, self.queue_size);
        self.part(at, HEAD_OF_ALL_BYTES)
    }

    /// A part of the memory that can be read number by number.
    fn part(&self, at_bytes: u64, len_bytes: u64) -> Result<SharedBuffer> {
        let memory = Arc::new(self.memory.clone());
        let part = memory.range(at_bytes, len_bytes);
        let part = part.filter(|part| part.address().is_multiple_of(8));
        part.ok_or_else(|| broken("the memory for requests in flight is damaged"))
    }

    /// Whether the guest had its write cache off.
    ///
    /// # Errors
    /// If the memory is damaged.
    pub(super) fn writes_through(&self) -> Result<bool> {
        Ok(self.head()?.load_u64(WRITE_THROUGH_AT, Ordering::Acquire) == 1)
    }

    /// Notes whether the guest has its write cache off.
    ///
    /// # Errors
    /// If the memory is damaged.
    pub(super) fn set_writes_through(&self, off: bool) -> Result<()> {
        self.head()?
            .store_u64(WRITE_THROUGH_AT, u64::from(off), Ordering::Release);
        Ok(())
    }

    /// The logs of all queues.
    ///
    /// # Errors
    /// If one is damaged.
    pub(super) fn logs(&self) -> Result<Vec<Log>> {
        (0..self.queues).map(|index| self.log(index)).collect()
    }

    /// The log of a queue.
    ///
    /// # Errors
    /// If it is damaged.
    pub(super) fn log(&self, index: u16) -> Result<Log> {
        let first = notes_bytes(self.queues, self.queue_size) + HEAD_OF_ALL_BYTES;
        Log::open(self.part(first + LOG_BYTES * u64::from(index), LOG_BYTES)?)
    }

    /// The part of a queue of `size` entries.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn queue(&self, index: u16, size: u16) -> Result<QueueInFlight> {
        let refuse = || {
            broken(format!(
                "no memory for the requests in flight of queue {index}"
            ))
        };
        if index >= self.queues || size > self.queue_size {
            return Err(refuse());
        }
        let len_bytes = queue_bytes(self.queue_size);
        Ok(QueueInFlight {
            part: self.part(u64::from(index) * len_bytes, len_bytes)?,
            size,
            next_number: 0,
        })
    }
}

/// The notes of one queue.
#[derive(Debug)]
pub(super) struct QueueInFlight {
    part: SharedBuffer,
    size: u16,
    next_number: u64,
}

impl QueueInFlight {
    fn entry(&self, head: u16) -> usize {
        HEAD_BYTES + ENTRY_BYTES * usize::from(head)
    }

    fn is_in_flight(&self, head: u16) -> bool {
        let mut byte = [0];
        self.part.copy_to(self.entry(head), &mut byte);
        byte[0] == 1
    }

    fn number(&self, head: u16) -> u64 {
        let mut bytes = [0; 8];
        self.part
            .copy_to(self.entry(head) + ENTRY_NUMBER_AT, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Takes over what a server before this one has left: the requests that are not done,
    /// in the order in which they came; none if there was no such server. The used ring goes as
    /// far as `used`.
    pub(super) fn recover(&mut self, used: u16) -> Option<Vec<u16>> {
        let load = |at| self.part.load_u16(at, Ordering::Acquire);
        if load(VERSION_AT) != VERSION || load(ENTRIES_AT) != self.size {
            self.reset(used);
            return None;
        }
        // What went into the used ring and was not taken back.
        let stale = used.wrapping_sub(load(USED_AT)).min(self.size);
        let mut head = load(LAST_HEAD_AT);
        for _ in 0..stale {
            if head >= self.size {
                break;
            }
            self.part.copy_from(self.entry(head), &[0]);
            head = load(self.entry(head) + ENTRY_NEXT_AT);
        }
        self.part.store_u16(USED_AT, used, Ordering::Release);
        let heads = (0..self.size).filter(|&head| self.is_in_flight(head));
        let mut heads: Vec<u16> = heads.collect();
        heads.sort_by_key(|&head| self.number(head));
        let last = heads.last().map_or(0, |&head| self.number(head));
        self.next_number = last.wrapping_add(1);
        Some(heads)
    }

    fn reset(&mut self, used: u16) {
        self.part.copy_from(0, &vec![0; self.part.len()]);
        self.part
            .store_u16(ENTRIES_AT, self.size, Ordering::Relaxed);
        self.part.store_u16(USED_AT, used, Ordering::Relaxed);
        self.part.store_u16(VERSION_AT, VERSION, Ordering::Release);
    }

    /// Notes that a request is about to be carried out.
    pub(super) fn begin(&mut self, head: u16) {
        let entry = self.entry(head);
        let number = self.next_number.to_le_bytes();
        self.part.copy_from(entry + ENTRY_NUMBER_AT, &number);
        self.next_number = self.next_number.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.part.copy_from(entry, &[1]);
    }

    /// Notes that a request is done, which `push` puts into the used ring; it returns how
    /// far that goes then.
    pub(super) fn end(&mut self, head: u16, push: impl FnOnce() -> u16) {
        let entry = self.entry(head);
        let before = self.part.load_u16(LAST_HEAD_AT, Ordering::Relaxed);
        self.part
            .store_u16(entry + ENTRY_NEXT_AT, before, Ordering::Relaxed);
        self.part.store_u16(LAST_HEAD_AT, head, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let used = push();
        fence(Ordering::SeqCst);
        self.part.copy_from(entry, &[0]);
        fence(Ordering::SeqCst);
        self.part.store_u16(USED_AT, used, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(size: u16) -> (InFlight, QueueInFlight) {
        let (area, file) = InFlight::create(2, size, false).expect("memory");
        let memory = InFlight::map(&area, file).expect("a mapping");
        let mut queue = memory.queue(1, size).expect("a part");
        assert_eq!(queue.recover(7), None);
        (memory, queue)
    }

    #[test]
    fn what_was_begun_and_not_ended_comes_again_in_its_order() {
        let (memory, mut queue) = notes(8);
        for head in [5, 1, 7, 0] {
            queue.begin(head);
        }
        queue.end(1, || 8);
        let mut next = memory.queue(1, 8).expect("a part");
        assert_eq!(next.recover(8), Some(vec![5, 7, 0]));
        next.begin(1);
        let mut next = memory.queue(1, 8).expect("a part");
        assert_eq!(next.recover(8), Some(vec![5, 7, 0, 1]));
        let mut other = memory.queue(0, 8).expect("a part");
        assert_eq!(other.recover(0), None);
    }

    #[test]
    fn what_is_in_the_used_ring_does_not_come_again() {
        let (memory, mut queue) = notes(8);
        queue.begin(3);
        queue.begin(4);
        // Killed amid the end of 4: in the used ring, and the note still there.
        let before = queue.part.load_u16(LAST_HEAD_AT, Ordering::Relaxed);
        queue
            .part
            .store_u16(queue.entry(4) + ENTRY_NEXT_AT, before, Ordering::Relaxed);
        queue.part.store_u16(LAST_HEAD_AT, 4, Ordering::Relaxed);
        let mut next = memory.queue(1, 8).expect("a part");
        assert_eq!(next.recover(8), Some(vec![3]));
    }

    #[test]
    fn any_bytes_give_heads_that_exist_each_once() {
        let (memory, mut queue) = notes(16);
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..2000 {
            let at = random.usize(..queue.part.len());
            queue.part.copy_from(at, &[random.u8(..)]);
            let mut next = memory.queue(1, 16).expect("a part");
            let mut heads = next.recover(random.u16(..)).unwrap_or_default();
            heads.sort_unstable();
            heads.dedup();
            assert!(heads.iter().all(|&head| head < 16));
            queue = next;
        }
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        let (area, file) = InFlight::create(2, 8, false).expect("memory");
        let claims = |queues, queue_size| InFlightArea {
            queues,
            queue_size,
            ..area
        };
        for area in [claims(3, 8), claims(2, 16), claims(0, 8)] {
            assert!(InFlight::map(&area, &file).is_err());
        }
        let longer = InFlightArea {
            len_bytes: 1 << 20,
            queues: 100,
            ..area
        };
        assert!(InFlight::map(&longer, &file).is_err());
        let memory = InFlight::map(&area, &file).expect("a mapping");
        assert!(memory.queue(2, 8).is_err() && memory.queue(0, 16).is_err());
    }
}
