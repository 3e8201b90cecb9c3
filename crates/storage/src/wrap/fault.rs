//! [`FaultStorage`]: chosen requests fail and never reach the storage below.

use parking_lot::Mutex;

use super::{Call, Matching, Operation, Policy, Wrapped};
use vellum_io::{Error, Io};

/// A storage whose chosen requests fail.
pub type FaultStorage = Wrapped<Faults>;

/// How often a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// Once; later requests pass.
    Once,
    /// From then on always.
    Always,
}

#[derive(Debug)]
struct Fault {
    matching: Matching,
    /// Matching requests that still pass before the fault strikes.
    pass: usize,
    times: Times,
    errno: i32,
}

/// The faults that a [`FaultStorage`] has been told.
#[derive(Debug, Default)]
pub struct Faults(Mutex<Vec<Fault>>);

impl FaultStorage {
    /// Lets `pass` requests of those that match go by, and fails the next with
    /// `errno`, once or always.
    pub fn fail(&self, matching: Matching, pass: usize, times: Times, errno: i32) {
        self.policy.lock().push(Fault {
            matching,
            pass,
            times,
            errno,
        });
    }

    /// Forgets all faults.
    pub fn heal(&self) {
        self.policy.lock().clear();
    }
}

impl Faults {
    fn lock(&self) -> parking_lot::MutexGuard<'_, Vec<Fault>> {
        self.0.lock()
    }

    /// The error number that strikes `call`, if any does.
    fn strike(&self, call: &Call) -> Option<i32> {
        let mut faults = self.lock();
        for at in 0..faults.len() {
            let fault = &mut faults[at];
            if !fault.matching.accepts(call) {
                continue;
            }
            if fault.pass > 0 {
                fault.pass -= 1;
                continue;
            }
            let (errno, times) = (fault.errno, fault.times);
            if times == Times::Once {
                faults.remove(at);
            }
            return Some(errno);
        }
        None
    }
}

impl Policy for Faults {
    fn handle<T: 'static>(&self, call: Call, start: impl FnOnce() -> Io<T> + 'static) -> Io<T> {
        match self.strike(&call) {
            Some(errno) => {
                let error = Error::from_errno(verb(call.operation), errno);
                Io::ready(Err(error.target("fault").at(call.offset_bytes)))
            }
            None => start(),
        }
    }
}

fn verb(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "read",
        Operation::Write => "write",
        Operation::WriteZeroes => "write zeroes",
        Operation::Discard => "discard",
        Operation::Allocate => "allocate",
        Operation::Flush => "flush",
        Operation::Truncate => "truncate",
        Operation::BlockStatus => "block status",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{MemStorage, Storage, WriteFlags};
    use vellum_io::lane::block_on;
    use vellum_io::{Buffer, Buffers};

    fn write(storage: &FaultStorage, offset_bytes: u64) -> vellum_io::Result<Buffers> {
        let buffers = Buffers::from_buf([Buffer::zeroed(512)]);
        block_on(storage.write(offset_bytes, buffers, WriteFlags::default()))
    }

    #[test]
    fn the_third_write_fails_once() {
        let storage = FaultStorage::new(Arc::new(MemStorage::new()));
        storage.fail(
            Matching::operation(Operation::Write),
            2,
            Times::Once,
            libc::ENOSPC,
        );
        assert!(write(&storage, 0).is_ok());
        assert!(block_on(storage.flush()).is_ok());
        assert!(write(&storage, 512).is_ok());
        let error = write(&storage, 1024).unwrap_err();
        assert_eq!(
            (error.errno(), error.offset_bytes()),
            (libc::ENOSPC, Some(1024))
        );
        assert_eq!(storage.len_bytes().unwrap(), 1024);
        assert!(write(&storage, 1024).is_ok());
    }

    #[test]
    fn a_bad_sector_stays_bad_until_healed() {
        let storage = FaultStorage::new(Arc::new(MemStorage::new()));
        storage.fail(
            Matching::any().touching(512..1024),
            0,
            Times::Always,
            libc::EIO,
        );
        assert!(write(&storage, 0).is_ok());
        assert!(write(&storage, 1024).is_ok());
        for _ in 0..2 {
            assert_eq!(write(&storage, 512).unwrap_err().errno(), libc::EIO);
        }
        storage.heal();
        assert!(write(&storage, 512).is_ok());
    }
}
