//! Power cuts: a storage that remembers what was asked of it, and what a disk may hold if the power
//! goes at one moment of that.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::storage::{Capabilities, MemStorage, WriteFlags, ZeroFlags};
use vellum::{Buffers, Io, Result, Storage};

#[derive(Debug, Clone)]
enum Event {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    Length(u64),
    Barrier,
}

/// See the module's head.
#[derive(Debug)]
pub struct Recorded {
    inner: MemStorage,
    before: Vec<u8>,
    events: Mutex<Vec<Event>>,
}

impl Recorded {
    pub fn new(bytes: Vec<u8>) -> Arc<Recorded> {
        Arc::new(Recorded {
            inner: MemStorage::with_bytes(bytes.clone()),
            before: bytes,
            events: Mutex::default(),
        })
    }

    /// How many things happened.
    pub fn moment(&self) -> usize {
        self.events.lock().len()
    }

    /// What the disk may hold after a cut at a moment: everything up to the last barrier, and any sectors of
    /// what came after it.
    pub fn cut(&self, moment: usize, random: &mut fastrand::Rng) -> Vec<u8> {
        let events = &self.events.lock()[..moment];
        let is_barrier = |event: &Event| matches!(event, Event::Barrier);
        let durable = events.iter().rposition(is_barrier).unwrap_or(0);
        let mut bytes = self.before.clone();
        let mut end = bytes.len();
        for (index, event) in events.iter().enumerate() {
            if index > durable && random.bool() {
                continue;
            }
            match event {
                Event::Write(at, content) => {
                    let at = *at as usize;
                    end = end.max(at + content.len());
                    bytes.resize(end, 0);
                    let is_torn = index > durable && random.bool();
                    for (index, sector) in content.chunks(512).enumerate() {
                        if !is_torn || random.bool() {
                            let at = at + index * 512;
                            bytes[at..at + sector.len()].copy_from_slice(sector);
                        }
                    }
                }
                Event::Zero(at, len) => {
                    let (from, to) = (*at as usize, (at + len) as usize);
                    end = end.max(to);
                    bytes.resize(end, 0);
                    bytes[from..to].fill(0);
                }
                Event::Length(len) => {
                    end = *len as usize;
                    bytes.resize(end, 0);
                }
                Event::Barrier => {}
            }
        }
        bytes
    }

    fn note(&self, event: Event) {
        self.events.lock().push(event);
    }
}

impl Storage for Recorded {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn len_bytes(&self) -> Result<u64> {
        self.inner.len_bytes()
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        self.inner.read(offset_bytes, buffers)
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let content = buffers.iter().flat_map(|buffer| buffer.iter().copied());
        self.note(Event::Write(offset_bytes, content.collect()));
        self.inner.write(offset_bytes, buffers, flags)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.note(Event::Zero(offset_bytes, len_bytes));
        self.inner.write_zeroes(offset_bytes, len_bytes, flags)
    }

    fn flush(&self) -> Io<()> {
        self.note(Event::Barrier);
        self.inner.flush()
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.note(Event::Length(len_bytes));
        self.inner.truncate(len_bytes)
    }
}

/// Sectors of a disk at two moments: after a cut between them each is as at one or the other.
pub fn assert_between(read: &[u8], before: &[u8], after: &[u8], what: &str) {
    assert_eq!(read.len(), before.len(), "{what}");
    for (at, sector) in read.chunks(512).enumerate() {
        let range = at * 512..at * 512 + sector.len();
        let is_known = sector == &before[range.clone()] || sector == &after[range];
        assert!(is_known, "{what}: sector {at}");
    }
}
