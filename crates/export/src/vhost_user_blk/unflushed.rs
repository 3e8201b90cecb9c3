//! Writes that were acknowledged and not flushed, in memory that outlives the server.
//!
//! A format keeps some of what was written in the memory of the process until it is flushed: new
//! entries of its tables, parts of clusters. To a guest that is the cache of its disk, and a disk whose
//! cache is lost has lost its power, and the guest with it. If only the server dies, the guest goes
//! on, and flushes later what is no longer there. So what a queue acknowledges is copied into a
//! log that the client keeps, beside the notes of requests in flight, until a flush covers it; and
//! the next server writes it again, before anything else.
//!
//! ```text
//! head:  owner u64 | flushed u64
//! log:   tail u32, head u32 | record ...            one for each queue
//! record: number u64 | offset u64 | len u32, kind u32 | data, up to a multiple of 8
//! ```
//!
//! Invariants:
//! - Records have numbers in the order in which they were acknowledged, over all queues. A record that
//!   has a number below `flushed` is durable; all others are in a log, whole.
//! - A record has its number when its write is done in the device, and before it is acknowledged. So a
//!   flush that begins now covers every number that was given out.
//! - What the memory holds is not trusted: every number is checked before it is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vellum::BlockDevice;
use vellum_io::shared_memory::SharedBuffer;
use vellum_io::{Buffer, Result};

use super::message::broken;

/// Bytes of the head.
pub(super) const HEAD_BYTES: u64 = 64;
/// Bytes of the log of a queue. When it is full, what it holds is flushed.
pub(super) const LOG_BYTES: u64 = 48 << 20;

const FLUSHED_AT: usize = 8;
/// Where the records of a log begin.
const RECORDS_AT: usize = 64;
const RECORD_HEAD_BYTES: usize = 24;
const KIND_DATA: u32 = 1;
const KIND_ZEROES: u32 = 2;
const KIND_UNMAP: u32 = 3;
/// The rest of the log has no records.
const KIND_WRAP: u32 = 4;

/// What all queues share.
#[derive(Debug)]
pub(super) struct Unflushed {
    head: SharedBuffer,
    next_number: AtomicU64,
    flushed: AtomicU64,
    /// Held while `flushed` grows, in the memory and here.
    growing: Mutex<()>,
}

/// What is to be written again.
#[derive(Debug)]
pub(super) enum Change {
    Data(Buffer),
    /// Zeroes of a length, whose space may be given back or not.
    Zeroes(u64, bool),
}

impl Unflushed {
    /// What `logs` hold; `owner` is this server.
    pub(super) fn open(head: SharedBuffer, logs: &[Log]) -> Arc<Unflushed> {
        let flushed = head.load_u64(FLUSHED_AT, Ordering::Acquire);
        let last = logs.iter().map(|log| log.records().last_number()).max();
        let next = last
            .flatten()
            .map_or(0, |last| last.wrapping_add(1))
            .max(flushed)
            .max(1);
        Arc::new(Unflushed {
            head,
            next_number: AtomicU64::new(next),
            flushed: AtomicU64::new(flushed),
            growing: Mutex::new(()),
        })
    }

    /// Whose records these are; none if nobody's.
    pub(super) fn owner(&self) -> u64 {
        self.head.load_u64(0, Ordering::Acquire)
    }

    /// Takes the records over.
    pub(super) fn own(&self, owner: u64) {
        self.head.store_u64(0, owner, Ordering::Release);
    }

    /// What a flush covers that begins now.
    pub(super) fn begin_flush(&self) -> u64 {
        self.next_number.load(Ordering::SeqCst)
    }

    /// Whether everything is durable that was acknowledged.
    pub(super) fn is_flushed(&self) -> bool {
        self.begin_flush() <= self.flushed.load(Ordering::SeqCst)
    }

    /// Flushes the device, and notes what that covers.
    ///
    /// # Errors
    /// As [`BlockDevice::flush`].
    pub(super) async fn flush(&self, device: &dyn BlockDevice) -> Result<()> {
        let covered = self.begin_flush();
        device.flush().await?;
        self.end_flush(covered);
        Ok(())
    }

    /// Notes that a flush has succeeded, which covers the numbers below `covered`.
    pub(super) fn end_flush(&self, covered: u64) {
        let _growing = self.growing.lock();
        if covered > self.flushed.load(Ordering::Relaxed) {
            // First in the memory: a record is dropped only after the next server knows.
            self.head.store_u64(FLUSHED_AT, covered, Ordering::SeqCst);
            self.flushed.store(covered, Ordering::SeqCst);
        }
    }

    /// Whether there are records that are not flushed.
    pub(super) fn has_records(&self, logs: &[Log]) -> bool {
        let flushed = self.flushed.load(Ordering::Acquire);
        let last = logs.iter().map(|log| log.records().last_number()).max();
        last.flatten().is_some_and(|last| last >= flushed)
    }

    /// Hands every record that is not flushed to `each`, in their order.
    pub(super) async fn replay(
        &self,
        logs: &[Log],
        mut each: impl AsyncFnMut(u64, Change) -> Result<()>,
    ) -> Result<()> {
        let flushed = self.flushed.load(Ordering::Acquire);
        let mut readers: Vec<Records<'_>> = logs.iter().map(Log::records).collect();
        loop {
            let numbers = readers.iter().map(Records::number).enumerate();
            let next = numbers
                .filter_map(|(log, number)| Some((number?, log)))
                .min();
            let Some((number, log)) = next else {
                return Ok(());
            };
            if let Some((offset_bytes, change)) = readers[log].take(number >= flushed)? {
                each(offset_bytes, change).await?;
            }
        }
    }
}

/// The log of one queue.
#[derive(Debug)]
pub(super) struct Log {
    part: SharedBuffer,
    tail: usize,
    head: usize,
}

impl Log {
    /// The log in a part of the memory.
    ///
    /// # Errors
    /// If it says of itself what cannot be.
    pub(super) fn open(part: SharedBuffer) -> Result<Log> {
        let ends = part.load_u64(0, Ordering::Acquire);
        let (tail, head) = ((ends & 0xffff_ffff) as usize, (ends >> 32) as usize);
        let room = part.len().saturating_sub(RECORDS_AT);
        if tail > room || head > room || !tail.is_multiple_of(8) || !head.is_multiple_of(8) {
            return Err(broken("the log of unflushed writes is damaged"));
        }
        Ok(Log { part, tail, head })
    }

    fn room(&self) -> usize {
        self.part.len() - RECORDS_AT
    }

    fn store_ends(&self) {
        let ends = (self.head as u64) << 32 | self.tail as u64;
        self.part.store_u64(0, ends, Ordering::SeqCst);
    }

    fn records(&self) -> Records<'_> {
        Records {
            log: self,
            at: self.tail,
            steps: self.room() / RECORD_HEAD_BYTES,
        }
    }

    /// Drops what is flushed.
    fn trim(&mut self, flushed: u64) {
        let mut records = self.records();
        while records.number().is_some_and(|number| number < flushed) {
            if records.skip().is_err() {
                break;
            }
        }
        let tail = records.at;
        if tail == self.tail {
            return;
        }
        self.tail = tail;
        if self.tail == self.head {
            // From the beginning again: that memory is there already.
            (self.tail, self.head) = (0, 0);
        }
        self.store_ends();
    }

    /// Appends what was written, in `pieces`; `false` if there is no room before a flush.
    pub(super) fn append_data(&mut self, all: &Unflushed, offset_bytes: u64, data: &[u8]) -> bool {
        self.append(all, KIND_DATA, offset_bytes, data.len() as u64, data)
    }

    /// Appends that a range was made zeroes; `false` if there is no room before a flush.
    pub(super) fn append_zeroes(
        &mut self,
        all: &Unflushed,
        offset_bytes: u64,
        len_bytes: u64,
        unmap: bool,
    ) -> bool {
        let kind = if unmap { KIND_UNMAP } else { KIND_ZEROES };
        self.append(all, kind, offset_bytes, len_bytes, &[])
    }

    fn append(
        &mut self,
        all: &Unflushed,
        kind: u32,
        offset_bytes: u64,
        len_bytes: u64,
        data: &[u8],
    ) -> bool {
        let Ok(len) = u32::try_from(len_bytes) else {
            return false;
        };
        let needed = RECORD_HEAD_BYTES + data.len().next_multiple_of(8);
        let at = match self.place(needed) {
            Some(at) => at,
            None => {
                self.trim(all.flushed.load(Ordering::Acquire));
                match self.place(needed) {
                    Some(at) => at,
                    None => return false,
                }
            }
        };
        if at != self.head && self.head + RECORD_HEAD_BYTES <= self.room() {
            self.write_head(self.head, 0, 0, 0, KIND_WRAP);
        }
        self.part
            .copy_from(RECORDS_AT + at + RECORD_HEAD_BYTES, data);
        let number = all.next_number.fetch_add(1, Ordering::SeqCst);
        self.write_head(at, number, offset_bytes, len, kind);
        self.head = at + needed;
        self.store_ends();
        true
    }

    /// Where a record of so many bytes fits. The log is empty only where its ends meet, so they never
    /// do otherwise.
    fn place(&self, needed: usize) -> Option<usize> {
        if self.head >= self.tail {
            if self.head + needed <= self.room() {
                return Some(self.head);
            }
            return (needed < self.tail).then_some(0);
        }
        (self.head + needed < self.tail).then_some(self.head)
    }

    fn write_head(&self, at: usize, number: u64, offset_bytes: u64, len: u32, kind: u32) {
        let mut bytes = [0; RECORD_HEAD_BYTES];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..16].copy_from_slice(&offset_bytes.to_le_bytes());
        bytes[16..20].copy_from_slice(&len.to_le_bytes());
        bytes[20..].copy_from_slice(&kind.to_le_bytes());
        self.part.copy_from(RECORDS_AT + at, &bytes);
    }
}

/// The records of a log, one after the other.
#[derive(Debug)]
struct Records<'a> {
    log: &'a Log,
    at: usize,
    /// There cannot be more.
    steps: usize,
}

#[derive(Debug, Clone, Copy)]
struct RecordHead {
    number: u64,
    offset_bytes: u64,
    len: u32,
    kind: u32,
}

impl Records<'_> {
    /// The next record, and where it is.
    fn peek(&self) -> Option<(usize, RecordHead)> {
        let mut at = self.at;
        for _ in 0..2 {
            if at == self.log.head || self.steps == 0 {
                return None;
            }
            if at + RECORD_HEAD_BYTES <= self.log.room() {
                let mut bytes = [0; RECORD_HEAD_BYTES];
                self.log.part.copy_to(RECORDS_AT + at, &mut bytes);
                let head = RecordHead::decode(&bytes);
                if head.kind != KIND_WRAP {
                    return Some((at, head));
                }
            }
            at = 0;
        }
        None
    }

    fn number(&self) -> Option<u64> {
        self.peek().map(|(_, head)| head.number)
    }

    fn last_number(mut self) -> Option<u64> {
        let mut last = None;
        while let Some(number) = self.number() {
            last = last.max(Some(number));
            if self.skip().is_err() {
                break;
            }
        }
        last
    }

    fn skip(&mut self) -> Result<()> {
        self.take(false).map(drop)
    }

    /// Goes on behind the next record, which is given back if it is wanted.
    fn take(&mut self, wanted: bool) -> Result<Option<(u64, Change)>> {
        let Some((at, head)) = self.peek() else {
            return Ok(None);
        };
        let damaged = || broken("the log of unflushed writes is damaged");
        let data_bytes = if head.kind == KIND_DATA {
            head.len as usize
        } else {
            0
        };
        let end = at + RECORD_HEAD_BYTES + data_bytes.next_multiple_of(8);
        if end > self.log.room() {
            return Err(damaged());
        }
        self.at = end;
        self.steps -= 1;
        if !wanted {
            return Ok(None);
        }
        let change = match head.kind {
            KIND_DATA => {
                let mut data = Buffer::for_read(data_bytes);
                self.log
                    .part
                    .copy_to(RECORDS_AT + at + RECORD_HEAD_BYTES, &mut data);
                Change::Data(data)
            }
            KIND_ZEROES | KIND_UNMAP => {
                Change::Zeroes(u64::from(head.len), head.kind == KIND_UNMAP)
            }
            _ => return Err(damaged()),
        };
        Ok(Some((head.offset_bytes, change)))
    }
}

impl RecordHead {
    fn decode(bytes: &[u8; RECORD_HEAD_BYTES]) -> RecordHead {
        let mut number = [0; 8];
        let mut at = |from: usize| {
            number.copy_from_slice(&bytes[from..from + 8]);
            u64::from_le_bytes(number)
        };
        let (first, second, third) = (at(0), at(8), at(16));
        RecordHead {
            number: first,
            offset_bytes: second,
            len: (third & 0xffff_ffff) as u32,
            kind: (third >> 32) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use vellum_io::lane::block_on;
    use vellum_io::shared_memory::SharedMemory;

    use super::*;

    struct Memory(Arc<SharedMemory>);

    impl Memory {
        fn new(log_bytes: u64) -> Memory {
            let file = tempfile::tempfile().expect("a file");
            file.set_len(64 + 2 * log_bytes).expect("a length");
            let memory = SharedMemory::map(file.as_fd(), 0, 64 + 2 * log_bytes);
            Memory(Arc::new(memory.expect("a mapping")))
        }

        /// As a server finds it.
        fn open(&self) -> (Arc<Unflushed>, Vec<Log>) {
            let log_bytes = (self.0.len() as u64 - 64) / 2;
            let part = |number: u64| self.0.range(64 + number * log_bytes, log_bytes);
            let logs = [part(0), part(1)].map(|part| Log::open(part.expect("a part")));
            let logs: Vec<Log> = logs.into_iter().map(|log| log.expect("a log")).collect();
            let head = self.0.range(0, HEAD_BYTES).expect("a head");
            (Unflushed::open(head, &logs), logs)
        }

        /// Offsets and first bytes of what the next server would write.
        fn replayed(&self) -> Vec<(u64, u8)> {
            let (all, logs) = self.open();
            let mut seen = Vec::new();
            block_on(all.replay(&logs, async |offset, change| {
                seen.push(match change {
                    Change::Data(data) => (offset, data[0]),
                    Change::Zeroes(..) => (offset, 0),
                });
                Ok(())
            }))
            .expect("replayed");
            seen
        }
    }

    #[test]
    fn what_is_not_flushed_comes_again_in_the_order_of_all_queues() {
        let memory = Memory::new(4096);
        let (all, mut logs) = memory.open();
        assert!(logs[0].append_data(&all, 10, &[1; 100]));
        assert!(logs[1].append_data(&all, 10, &[2; 5]));
        assert!(logs[0].append_zeroes(&all, 30, 1 << 20, true));
        assert!(logs[1].append_data(&all, 40, &[4]));
        assert_eq!(memory.replayed(), [(10, 1), (10, 2), (30, 0), (40, 4)]);
        let covered = all.begin_flush();
        assert!(logs[0].append_data(&all, 50, &[5]));
        all.end_flush(covered);
        assert_eq!(memory.replayed(), [(50, 5)]);
        all.end_flush(1);
        assert_eq!(
            memory.replayed(),
            [(50, 5)],
            "an older flush takes nothing back"
        );
    }

    #[test]
    fn a_log_goes_round_and_never_over_what_is_not_flushed() {
        let memory = Memory::new(1024);
        let (all, mut logs) = memory.open();
        let mut random = fastrand::Rng::with_seed(3);
        let mut expected: Vec<(u64, u64, u8)> = Vec::new();
        for round in 0..5000_u64 {
            let byte = round as u8 | 1;
            let data = vec![byte; random.usize(1..200)];
            let number = all.begin_flush();
            match logs[0].append_data(&all, round, &data) {
                true => expected.push((number, round, byte)),
                false => {
                    let covered = number - random.u64(0..=2).min(number - 1);
                    all.end_flush(covered);
                    expected.retain(|(number, ..)| *number >= covered);
                }
            }
            if round % 50 == 0 {
                let seen: Vec<_> = expected.iter().map(|&(_, at, byte)| (at, byte)).collect();
                assert_eq!(memory.replayed(), seen, "{round}");
            }
        }
    }

    #[test]
    fn any_bytes_end() {
        let memory = Memory::new(1024);
        let mut random = fastrand::Rng::with_seed(4);
        let range = memory.0.range(0, 64 + 2048).expect("all");
        for _ in 0..5000 {
            let at = random.usize(..range.len());
            range.copy_from(at, &[random.u8(..)]);
            let parts = [memory.0.range(64, 1024), memory.0.range(64 + 1024, 1024)];
            let logs = parts.map(|part| Log::open(part.expect("a part")));
            let logs: Vec<Log> = logs.into_iter().flatten().collect();
            let head = memory.0.range(0, HEAD_BYTES).expect("a head");
            let all = Unflushed::open(head, &logs);
            // Whatever comes of it, it ends.
            let _ = block_on(all.replay(&logs, async |_, _| Ok(())));
            range.copy_from(64, &[0; 8]);
            range.copy_from(64 + 1024, &[0; 8]);
        }
    }
}
