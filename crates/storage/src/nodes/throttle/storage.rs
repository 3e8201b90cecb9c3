//! A storage whose requests keep the limits of a group.

use std::sync::Arc;

use vellum_io::buffer::total_len;
use vellum_io::{Buffers, Io, spawn};

use crate::{Storage, WriteFlags, ZeroFlags, delegate};

use super::buckets::Direction;
use super::group::{Lifted, Member, ThrottleGroup};

/// A storage whose requests keep to the limits of a group. Needs a lane.
#[derive(Debug)]
pub struct ThrottleStorage {
    inner: Arc<dyn Storage>,
    member: Arc<Member>,
}

impl ThrottleStorage {
    /// Lets the requests on `inner` keep to the limits of `group`, whose member it is until it
    /// is closed or dropped.
    pub fn new(inner: Arc<dyn Storage>, group: Arc<ThrottleGroup>) -> Self {
        ThrottleStorage {
            inner,
            member: Member::join(group),
        }
    }

    /// Lets its requests pass, those that wait and new ones, until the guard is dropped: for
    /// one who waits for them to end. They are counted.
    #[must_use]
    pub fn lift(&self) -> Lifted {
        Member::lift(&self.member)
    }

    fn start<T: 'static>(
        &self,
        direction: Direction,
        len_bytes: u64,
        request: impl FnOnce(&dyn Storage) -> Io<T> + 'static,
    ) -> Io<T> {
        // Most need not wait: these are the request below itself.
        if self.member.try_pass(direction, len_bytes) {
            return request(&*self.inner);
        }
        let (inner, member) = (self.inner.clone(), self.member.clone());
        Io::task(spawn(async move {
            member.admit(direction, len_bytes).await;
            request(&*inner).await
        }))
    }
}

impl Storage for ThrottleStorage {
    delegate!(
        inner: capabilities, name, version, len_bytes, modified_at, allocate, flush, truncate, block_status,
        allocated_bytes, free_bytes, disk,
    );

    fn close(&self) -> Io<()> {
        self.member.leave();
        self.inner.close()
    }

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
    use std::time::{Duration, Instant};

    use vellum_io::Buffer;
    use vellum_io::lane::{self, block_on};

    use crate::MemStorage;
    use crate::nodes::throttle::{Limit, ThrottleLimits};

    use super::*;

    fn storages(limits: ThrottleLimits, count: usize) -> (Arc<MemStorage>, Vec<ThrottleStorage>) {
        let group = ThrottleGroup::new("g", limits);
        let memory = Arc::new(MemStorage::new());
        let storages = (0..count)
            .map(|_| ThrottleStorage::new(memory.clone(), group.clone()))
            .collect();
        (memory, storages)
    }

    fn write(storage: &ThrottleStorage, byte: u8) -> Io<Buffers> {
        let buffers = Buffers::from_iter([Buffer::copy_of(&[byte])]);
        storage.write(0, buffers, WriteFlags::default())
    }

    const HUNDRED_WRITES: ThrottleLimits = ThrottleLimits {
        iops_write: Limit::rate(100),
        ..ThrottleLimits::NONE
    };

    #[test]
    fn requests_beyond_the_burst_wait_and_keep_their_order() {
        let (memory, storages) = storages(HUNDRED_WRITES, 2);
        let started = Instant::now();
        block_on(async {
            let requests: Vec<_> = (0..21_u8)
                .map(|at| write(&storages[usize::from(at % 2)], at))
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
            for _ in 0..1000 {
                let buffers = Buffers::from_iter([Buffer::zeroed(1)]);
                storages[0].read(0, buffers).await.unwrap();
            }
        });
        // As writes they would take 10 s.
        assert!(reads.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_deep_queue_does_not_keep_another_storage_back() {
        let limits = ThrottleLimits {
            iops_write: Limit::rate(10),
            ..ThrottleLimits::NONE
        };
        let (memory, storages) = storages(limits, 2);
        block_on(async {
            let mut deep: Vec<_> = (0..100).map(|_| write(&storages[0], 1)).collect();
            let started = Instant::now();
            write(&storages[1], 2).await.unwrap();
            // Behind two of the others, not behind ninety, which would take 9 s.
            assert!(started.elapsed() < Duration::from_secs(5));
            assert_eq!(memory.snapshot(), [2]);
            let lifted = storages[0].lift();
            for request in deep.drain(..) {
                request.await.unwrap();
            }
            assert!(started.elapsed() < Duration::from_secs(8));
            drop(lifted);
        });
    }

    #[test]
    fn new_limits_hold_for_those_who_wait() {
        let limits = ThrottleLimits {
            iops_total: Limit::rate(1),
            ..ThrottleLimits::NONE
        };
        let (_, storages) = storages(limits, 1);
        block_on(async {
            let started = Instant::now();
            let requests: Vec<_> = (0..50).map(|at| write(&storages[0], at)).collect();
            lane::sleep(Duration::from_millis(20)).await;
            storages[0].member.group().set_limits(ThrottleLimits::NONE);
            for request in requests {
                request.await.unwrap();
            }
            assert!(started.elapsed() < Duration::from_secs(10));
        });
    }

    #[test]
    fn a_group_counts_its_members() {
        let (_, mut storages) = storages(ThrottleLimits::NONE, 2);
        let group = storages[0].member.group().clone();
        assert_eq!(group.members(), 2);
        block_on(async { storages[0].close().await.unwrap() });
        assert_eq!(group.members(), 1);
        storages.clear();
        assert_eq!(group.members(), 0);
    }
}
