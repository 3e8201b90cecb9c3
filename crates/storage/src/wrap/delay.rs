//! [`DelayStorage`]: chosen requests wait, for a time or until they are released,
//! before they reach the storage below.

use std::sync::Arc;
use std::time::Duration;

use event_listener::Event;
use parking_lot::{Mutex, MutexGuard};

use super::{Call, Matching, Policy, Wrapped};
use vellum_io::{Io, lane, spawn};

/// A storage whose chosen requests wait.
pub type DelayStorage = Wrapped<Delays>;

#[derive(Debug, Default)]
struct HoldState {
    state: Mutex<GateState>,
    changed: Event,
}

#[derive(Debug, Default)]
struct GateState {
    arrived: bool,
    released: bool,
}

/// The hold on one request; dropping it releases the request.
#[derive(Debug)]
pub struct HeldRequest(Arc<HoldState>);

#[derive(Debug)]
enum Delay {
    /// The next matching request waits at the gate.
    Hold(Matching, Arc<HoldState>),
    /// Every matching request waits for a time.
    Sleep(Matching, Duration),
}

/// The delays that a [`DelayStorage`] has been told.
#[derive(Debug, Default)]
pub struct Delays(Mutex<Vec<Delay>>);

impl DelayStorage {
    /// Holds the next request that matches until the result is released.
    #[must_use = "dropping the hold releases the request"]
    pub fn hold(&self, matching: Matching) -> HeldRequest {
        let gate = Arc::<HoldState>::default();
        self.policy.lock().push(Delay::Hold(matching, gate.clone()));
        HeldRequest(gate)
    }

    /// Makes every request that matches wait for `time`. Needs a lane.
    pub fn delay(&self, matching: Matching, time: Duration) {
        self.policy.lock().push(Delay::Sleep(matching, time));
    }
}

impl HoldState {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock()
    }

    fn change(&self, change: impl FnOnce(&mut GateState)) {
        change(&mut self.lock());
        self.changed.notify(usize::MAX);
    }

    async fn wait_for(&self, condition: impl Fn(&GateState) -> bool) {
        loop {
            let changed = self.changed.listen();
            if condition(&self.lock()) {
                return;
            }
            changed.await;
        }
    }
}

impl HeldRequest {
    /// Waits until a request has arrived and is held.
    pub async fn arrived(&self) {
        self.0.wait_for(|state| state.arrived).await;
    }

    /// Whether a request has arrived.
    pub fn has_arrived(&self) -> bool {
        self.0.lock().arrived
    }

    /// Lets the request go on.
    pub fn release(self) {}
}

impl Drop for HeldRequest {
    fn drop(&mut self) {
        self.0.change(|state| state.released = true);
    }
}

/// What one request has to wait for.
enum Wait {
    Gate(Arc<HoldState>),
    Sleep(Duration),
}

impl Delays {
    fn lock(&self) -> MutexGuard<'_, Vec<Delay>> {
        self.0.lock()
    }

    fn wait_of(&self, call: &Call) -> Option<Wait> {
        let mut delays = self.lock();
        let at = delays.iter().position(|delay| match delay {
            Delay::Hold(matching, _) | Delay::Sleep(matching, _) => matching.accepts(call),
        })?;
        if let Delay::Sleep(_, time) = &delays[at] {
            return Some(Wait::Sleep(*time));
        }
        match delays.remove(at) {
            Delay::Hold(_, gate) => Some(Wait::Gate(gate)),
            Delay::Sleep(_, time) => Some(Wait::Sleep(time)),
        }
    }
}

impl Policy for Delays {
    fn handle<T: 'static>(&self, call: Call, start: impl FnOnce() -> Io<T> + 'static) -> Io<T> {
        match self.wait_of(&call) {
            None => start(),
            Some(Wait::Gate(gate)) => {
                gate.change(|state| state.arrived = true);
                Io::task(spawn(async move {
                    gate.wait_for(|state| state.released).await;
                    start().await
                }))
            }
            Some(Wait::Sleep(time)) => Io::task(spawn(async move {
                lane::sleep(time).await;
                start().await
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::wrap::Operation;
    use crate::{MemStorage, Storage, WriteFlags};
    use vellum_io::lane::block_on;
    use vellum_io::{Buffer, Buffers};

    fn write(storage: &DelayStorage, offset_bytes: u64, byte: u8) -> Io<Buffers> {
        let buffers = Buffers::from_buf([Buffer::copy_of(&[byte; 512])]);
        storage.write(offset_bytes, buffers, WriteFlags::default())
    }

    #[test]
    fn a_held_write_waits_and_others_pass() {
        let memory = Arc::new(MemStorage::new());
        let storage = DelayStorage::new(memory.clone());
        block_on(async {
            let held = storage.hold(Matching::operation(Operation::Write).touching(0..512));
            let first = write(&storage, 0, 1);
            held.arrived().await;
            write(&storage, 512, 2).await.unwrap();
            assert_eq!((memory.snapshot()[0], memory.snapshot()[512]), (0, 2));
            write(&storage, 0, 3).await.unwrap();
            held.release();
            first.await.unwrap();
            assert_eq!(memory.snapshot()[0], 1);
        });
    }

    #[test]
    fn delays_take_their_time() {
        let storage = DelayStorage::new(Arc::new(MemStorage::new()));
        storage.delay(
            Matching::operation(Operation::Flush),
            Duration::from_millis(30),
        );
        let start = Instant::now();
        block_on(async { storage.flush().await.unwrap() });
        assert!(start.elapsed() >= Duration::from_millis(30));
    }
}
