//! [`ThrottleStorage`]: requests wait as long as the limits of their group ask for
//! (`throttle`). Storages of one group share its limits.
//!
//! Invariant: of the waiting requests of one direction only the first looks at
//! the limits, so they go on in the order in which they came.

mod buckets;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_listener::Event;
use parking_lot::{Mutex, MutexGuard};

use crate::{Storage, WriteFlags, ZeroFlags, delegate};
use vellum_io::buffer::total_len;
use vellum_io::{Buffers, Io, lane, spawn};

use buckets::{Buckets, Direction};
pub use buckets::{Limit, MAX_RATE, ThrottleLimits};

#[derive(Debug)]
struct State {
    buckets: Buckets,
    /// Waiting requests by direction, each by its ticket.
    waiting: [VecDeque<u64>; 2],
    next_ticket: u64,
}

/// Limits that one or more storages share.
#[derive(Debug)]
pub struct ThrottleGroup {
    name: String,
    state: Mutex<State>,
    moved: Event,
}

impl ThrottleGroup {
    /// A group called `name`; `limits` should be [valid](ThrottleLimits::contradiction).
    pub fn new(name: impl Into<String>, limits: ThrottleLimits) -> Arc<Self> {
        Arc::new(ThrottleGroup {
            name: name.into(),
            state: Mutex::new(State {
                buckets: Buckets::new(limits),
                waiting: Default::default(),
                next_ticket: 0,
            }),
            moved: Event::new(),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits until a request may go on, and counts it.
    async fn admit(&self, direction: Direction, len_bytes: u64) {
        let place = self.queue(direction);
        loop {
            let moved = self.moved.listen();
            match self.try_admit(&place, len_bytes) {
                Admission::Admitted => return,
                Admission::Behind => moved.await,
                Admission::Wait(time) => lane::sleep(time).await,
            }
        }
    }

    fn queue(&self, direction: Direction) -> QueueEntry<'_> {
        let mut state = self.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.waiting[direction as usize].push_back(ticket);
        QueueEntry {
            group: self,
            direction,
            ticket,
        }
    }

    fn try_admit(&self, place: &QueueEntry<'_>, len_bytes: u64) -> Admission {
        let mut state = self.lock();
        if state.waiting[place.direction as usize].front() != Some(&place.ticket) {
            return Admission::Behind;
        }
        match state.buckets.wait(place.direction, Instant::now()) {
            Some(time) => Admission::Wait(time),
            None => {
                state.buckets.count(place.direction, len_bytes);
                Admission::Admitted
            }
        }
    }
}

enum Admission {
    Admitted,
    Behind,
    Wait(Duration),
}

/// A place in a queue; dropping it leaves the queue.
struct QueueEntry<'a> {
    group: &'a ThrottleGroup,
    direction: Direction,
    ticket: u64,
}

impl Drop for QueueEntry<'_> {
    fn drop(&mut self) {
        let mut state = self.group.lock();
        state.waiting[self.direction as usize].retain(|ticket| *ticket != self.ticket);
        drop(state);
        self.group.moved.notify(usize::MAX);
    }
}

/// A storage whose requests keep to the limits of a group. Needs a lane.
#[derive(Debug)]
pub struct ThrottleStorage {
    inner: Arc<dyn Storage>,
    group: Arc<ThrottleGroup>,
}

impl ThrottleStorage {
    /// Lets the requests on `inner` keep to the limits of `group`.
    pub fn new(inner: Arc<dyn Storage>, group: Arc<ThrottleGroup>) -> Self {
        ThrottleStorage { inner, group }
    }

    fn start<T: 'static>(
        &self,
        direction: Direction,
        len_bytes: u64,
        request: impl FnOnce(&dyn Storage) -> Io<T> + 'static,
    ) -> Io<T> {
        let (inner, group) = (self.inner.clone(), self.group.clone());
        Io::task(spawn(async move {
            group.admit(direction, len_bytes).await;
            request(&*inner).await
        }))
    }
}

impl Storage for ThrottleStorage {
    delegate!(
        inner: capabilities, name, len_bytes, allocate, flush, truncate, block_status,
        allocated_bytes, close,
    );

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        self.start(Direction::Read, total_len(&buffers), move |inner| {
            inner.read(offset_bytes, buffers)
        })
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        self.start(Direction::Write, total_len(&buffers), move |inner| {
            inner.write(offset_bytes, buffers, flags)
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.start(Direction::Write, len_bytes, move |inner| {
            inner.write_zeroes(offset_bytes, len_bytes, flags)
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.start(Direction::Write, len_bytes, move |inner| {
            inner.discard(offset_bytes, len_bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemStorage;
    use vellum_io::Buffer;
    use vellum_io::lane::block_on;

    #[test]
    fn requests_beyond_the_burst_wait_and_keep_their_order() {
        let limits = ThrottleLimits {
            iops_write: Limit::rate(100),
            ..ThrottleLimits::default()
        };
        let group = ThrottleGroup::new("g", limits);
        let memory = Arc::new(MemStorage::new());
        let storages: Vec<_> = (0..2)
            .map(|_| ThrottleStorage::new(memory.clone(), group.clone()))
            .collect();
        let started = Instant::now();
        block_on(async {
            let requests: Vec<_> = (0..21_u8)
                .map(|at| {
                    let buffers = Buffers::from_iter([Buffer::copy_of(&[at])]);
                    let storage = &storages[usize::from(at % 2)];
                    storage.write(0, buffers, WriteFlags::default())
                })
                .collect();
            for request in requests {
                request.await.unwrap();
            }
        });
        // A tenth of a second's worth passes at once, the other ten wait 10 ms each.
        let elapsed = started.elapsed();
        assert!(elapsed >= Duration::from_millis(95), "{elapsed:?}");
        assert_eq!(memory.snapshot(), [20]);
        let reads = Instant::now();
        block_on(async {
            for _ in 0..50 {
                let buffers = Buffers::from_iter([Buffer::zeroed(1)]);
                storages[0].read(0, buffers).await.unwrap();
            }
        });
        assert!(reads.elapsed() < Duration::from_millis(95));
    }
}
