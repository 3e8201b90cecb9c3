//! [`TraceStorage`]: a record of every request, its start and its end.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::{Call, Matching, Policy, Wrapped};
use vellum_io::{Io, spawn};

/// A storage that records its requests.
pub type TraceStorage = Wrapped<Trace>;

/// One recorded request. The moments count starts and ends together, so they
/// tell what ended before what started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The request.
    pub call: Call,
    /// When it started.
    pub started: u64,
    /// When it ended, if it has.
    pub ended: Option<u64>,
    /// Whether it ended well.
    pub succeeded: bool,
}

#[derive(Debug, Default)]
struct Log {
    records: Vec<Record>,
    /// Records that were taken away already.
    taken: usize,
    moment: u64,
}

/// What a [`TraceStorage`] has seen.
#[derive(Debug, Default)]
pub struct Trace(Arc<Mutex<Log>>);

impl TraceStorage {
    /// All requests so far, in the order of their starts.
    pub fn records(&self) -> Vec<Record> {
        self.policy.lock().records.clone()
    }

    /// The requests that match.
    pub fn matching(&self, matching: &Matching) -> Vec<Record> {
        let log = self.policy.lock();
        log.records
            .iter()
            .copied()
            .filter(|record| matching.accepts(&record.call))
            .collect()
    }

    /// How many requests match.
    pub fn count(&self, matching: &Matching) -> usize {
        self.matching(matching).len()
    }

    /// All requests so far, which are then forgotten.
    pub fn take(&self) -> Vec<Record> {
        let mut log = self.policy.lock();
        log.taken += log.records.len();
        std::mem::take(&mut log.records)
    }
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock()
}

impl Trace {
    fn lock(&self) -> MutexGuard<'_, Log> {
        lock(&self.0)
    }
}

impl Log {
    fn now(&mut self) -> u64 {
        self.moment += 1;
        self.moment
    }

    /// Records a start; the result finds the record again.
    fn start(&mut self, call: Call) -> usize {
        let started = self.now();
        self.records.push(Record {
            call,
            started,
            ended: None,
            succeeded: false,
        });
        self.taken + self.records.len() - 1
    }

    fn end(&mut self, index: usize, succeeded: bool) {
        let ended = self.now();
        let record = index
            .checked_sub(self.taken)
            .and_then(|at| self.records.get_mut(at));
        if let Some(record) = record {
            record.ended = Some(ended);
            record.succeeded = succeeded;
        }
    }
}

impl Policy for Trace {
    fn handle<T: 'static>(&self, call: Call, start: impl FnOnce() -> Io<T> + 'static) -> Io<T> {
        let index = self.lock().start(call);
        let log = self.0.clone();
        // A task: the end counts even if nobody waits for it.
        Io::task(spawn(async move {
            let result = start().await;
            lock(&log).end(index, result.is_ok());
            result
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wrap::Operation;
    use crate::{MemStorage, Storage, WriteFlags};
    use vellum_io::lane::block_on;
    use vellum_io::{Buffer, Buffers};

    #[test]
    fn the_record_tells_order_and_ranges() {
        let storage = TraceStorage::new(Arc::new(MemStorage::new()));
        block_on(async {
            let buffers = Buffers::from_buf([Buffer::zeroed(512)]);
            let flags = WriteFlags { fua: true };
            storage.write(1024, buffers, flags).await.unwrap();
            storage.flush().await.unwrap();
        });
        let records = storage.records();
        let call = Call {
            operation: Operation::Write,
            offset_bytes: 1024,
            len_bytes: 512,
            fua: true,
        };
        assert_eq!(records[0].call, call);
        assert!(records[0].succeeded && records[0].ended < Some(records[1].started));
        assert_eq!(storage.count(&Matching::operation(Operation::Flush)), 1);
        assert_eq!(storage.count(&Matching::any().touching(0..1024)), 0);
        assert_eq!(storage.take().len(), 2);
        assert!(storage.records().is_empty());
    }
}
