//! Power cuts: a storage that remembers what was asked of it, and what a disk may hold if the power
//! goes at one moment of that.
#![allow(dead_code, reason = "each test uses some of it")]

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::storage::{Capabilities, MemStorage, WriteFlags, ZeroFlags};
use vellum::{BlockDevice, Buffer, Buffers, Io, RequestFlags, Result, Storage, ZeroRequest};

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

/// What a disk holds for good from each of some moments on, the first before any change.
pub type States = Vec<(usize, Vec<u8>)>;

/// What a disk holds for good at a moment, and what it is to hold next.
pub fn around(states: &States, moment: usize) -> (&[u8], &[u8]) {
    let at = states.iter().rposition(|(at, _)| *at <= moment).unwrap();
    (&states[at].1, &states[(at + 1).min(states.len() - 1)].1)
}

/// Writes to a disk, whose content is `bytes`, and closes it; in rounds that end with a flush, to each place once a
/// round.
pub async fn write_in_rounds(
    device: &dyn BlockDevice,
    file: &Recorded,
    mut bytes: Vec<u8>,
    random: &mut fastrand::Rng,
) -> States {
    const PLACE_BYTES: usize = 128 << 10;
    let mut states = vec![(file.moment(), bytes.clone())];
    for round in 1..4 {
        let mut places: Vec<usize> = (0..bytes.len() / PLACE_BYTES).collect();
        random.shuffle(&mut places);
        for (number, place) in places.into_iter().take(8).enumerate() {
            let len = 512 * random.usize(1..80);
            let at = place * PLACE_BYTES + 512 * random.usize(0..=(PLACE_BYTES - len) / 512);
            if number == 0 {
                bytes[at..at + len].fill(0);
                let zeroed = device.write_zeroes(at as u64, len as u64, ZeroRequest::default());
                zeroed.await.unwrap();
            } else {
                bytes[at..at + len].fill(round);
                let buffer = Buffer::copy_of(&bytes[at..at + len]);
                let written = device.write(at as u64, buffer, RequestFlags::default());
                written.await.unwrap();
            }
        }
        device.flush().await.unwrap();
        states.push((file.moment(), bytes.clone()));
    }
    device.close().await.unwrap();
    states
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

/// Cuts the power at each `step`th moment of what a disk has gone through: what `read` finds then is what was
/// there for good, or was about to be.
pub async fn assert_kept(
    (file, states): (&Recorded, &States),
    step: usize,
    random: &mut fastrand::Rng,
    what: &str,
    read: impl AsyncFn(Arc<dyn Storage>) -> Vec<u8>,
) {
    for moment in (states[0].0..=file.moment()).step_by(step) {
        let (before, after) = around(states, moment);
        let cut = Arc::new(MemStorage::with_bytes(file.cut(moment, random)));
        let what = format!("{what}, cut at {moment}");
        assert_between(&read(cut).await, before, after, &what);
    }
}

/// Writes to an image that reads as `content`, and cuts the power while it does.
pub async fn assert_flushed_is_kept(
    (image, content): (Vec<u8>, Vec<u8>),
    what: &str,
    open: impl AsyncFn(Arc<dyn Storage>) -> Arc<dyn BlockDevice>,
) {
    let random = &mut fastrand::Rng::with_seed(2);
    let file = Recorded::new(image);
    let device = open(file.clone()).await;
    let states = write_in_rounds(&*device, &file, content, random).await;
    let read = async |cut| {
        let device = open(cut).await;
        let buffer = Buffer::for_read(device.size_bytes() as usize);
        device.read(0, buffer).await.unwrap().to_vec()
    };
    assert_kept((&file, &states), 3, random, what, read).await;
}
