//! Bytes that follow each other on disk: collected while a write is under way, and
//! written with the next one.
//!
//! Compressed data ends anywhere in a sector, and the next begins there. So one
//! write at a time goes out, of whole units (sectors, or what direct I/O wants): what
//! shares a unit with bytes that were written before is written again with these
//! same bytes, kept in memory, and zeroes fill up the last unit. A power cut leaves
//! the old sector or the new one, and what was durable stands in both.
//!
//! Invariant: nothing else writes to the units from the first byte appended to the
//! end of the last unit; the units after that are anybody's.
//!
//! Bytes go out with the next write that anybody begins, which may be over before their owner
//! asks for one. So each write tells how it went to those whose bytes it had ([`Batch`]): that
//! a later one succeeds says nothing of them.

use std::sync::{Arc, OnceLock};

use futures_util::future::join_all;
use vellum_io::sync::{Mutex, MutexGuard};
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::{Storage, WriteFlags};

use crate::qcow2::commit::coalesce::{Coalescer, Leader, Role};

/// See the module's head.
pub(crate) struct Appender {
    file: Arc<dyn Storage>,
    unit_bytes: u64,
    pending: Mutex<Pending>,
    turns: Coalescer,
}

/// What the next write has.
#[derive(Default)]
struct Pending {
    segments: Vec<Segment>,
    batch: Arc<Batch>,
}

/// Bytes that go out with one write, and how that went.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    outcome: OnceLock<Result<()>>,
}

impl Batch {
    /// Of a write that is over, or that nobody ends any more.
    fn outcome(&self) -> Result<()> {
        let abandoned = || Err(Leader::abandoned());
        self.outcome.get().cloned().unwrap_or_else(abandoned)
    }
}

/// Bytes side by side on disk.
#[derive(Debug, Default, PartialEq, Eq)]
struct Segment {
    /// Where they begin; a multiple of the unit.
    start: u64,
    bytes: Vec<u8>,
    /// There are bytes that were not in a write yet.
    appended_since: bool,
}

impl Segment {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// What a next segment begins with that continues this one.
    fn tail(&self, unit_bytes: u64) -> Segment {
        let start = self.end() / unit_bytes * unit_bytes;
        Segment {
            start,
            bytes: self.bytes[(start - self.start) as usize..].to_vec(),
            appended_since: false,
        }
    }

    /// The bytes, filled up with zeroes to whole units.
    fn padded(&self, unit_bytes: u64) -> Buffer {
        let len_bytes = (self.bytes.len() as u64).next_multiple_of(unit_bytes);
        let mut buffer = Buffer::for_read(len_bytes as usize);
        let (used, rest) = buffer.split_at_mut(self.bytes.len());
        used.copy_from_slice(&self.bytes);
        rest.fill(0);
        buffer
    }
}

impl std::fmt::Debug for Appender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Appender")
    }
}

impl Appender {
    /// For a file in which whole units of `unit_bytes` are the appender's own.
    pub(crate) fn new(file: Arc<dyn Storage>, unit_bytes: u64) -> Self {
        Appender {
            file,
            unit_bytes,
            pending: Mutex::default(),
            turns: Coalescer::default(),
        }
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock()
    }

    /// Adds bytes for `offset`, which is where the last ones ended or a multiple of
    /// the unit. Returns what they go out with, for [`Appender::write`].
    pub(crate) fn append(&self, offset: u64, bytes: &[u8]) -> Arc<Batch> {
        let mut pending = self.pending();
        match pending.segments.last_mut() {
            Some(last) if last.end() == offset => {
                last.bytes.extend_from_slice(bytes);
                last.appended_since = true;
            }
            _ => pending.segments.push(Segment {
                start: offset,
                bytes: bytes.to_vec(),
                appended_since: true,
            }),
        }
        pending.batch.clone()
    }

    /// Takes what is to be written, and keeps what the next bytes continue.
    fn take(&self) -> Pending {
        let mut pending = self.pending();
        let tail = pending
            .segments
            .last()
            .map(|last| last.tail(self.unit_bytes));
        let mut taken = std::mem::take(&mut *pending);
        pending.segments.extend(tail);
        taken.segments.retain(|segment| segment.appended_since);
        taken
    }

    /// Waits until what was appended as `own` is written; no barrier. When it fails nobody
    /// knows what of it is.
    pub(crate) async fn write(&self, own: &[Arc<Batch>]) -> Result<()> {
        if let Role::Leader(turn) = self.turns.join().await {
            let taken = self.take();
            let writes = taken.segments.into_iter().map(|segment| {
                let buffers = Buffers::from_iter([segment.padded(self.unit_bytes)]);
                self.file
                    .write(segment.start, buffers, WriteFlags::default())
            });
            // All of them end before anybody gives the space of one back.
            let writes: Vec<_> = writes.collect();
            let mut results = join_all(writes).await.into_iter();
            let written = results.try_for_each(|written| written.map(drop));
            let outcome = taken.batch.outcome.get_or_init(|| written).clone();
            drop(turn.end(outcome));
        }
        // A turn that began after this call is over, so all are that had bytes of these.
        own.iter().try_for_each(|batch| batch.outcome())
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use vellum_io::lane;
    use vellum_storage::MemStorage;
    use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

    use super::*;

    fn appender() -> (Appender, Arc<dyn Storage>) {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        (Appender::new(file.clone(), 512), file)
    }

    #[test]
    fn what_shares_a_unit_is_written_again() {
        let (appender, _) = appender();
        appender.append(1024, &[1; 700]);
        appender.append(1724, &[2; 100]);
        let taken = appender.take().segments;
        assert_eq!(taken.len(), 1);
        assert_eq!((taken[0].start, taken[0].bytes.len()), (1024, 800));
        assert!(appender.take().segments.is_empty(), "nothing is new");
        appender.append(1824, &[3; 10]);
        appender.append(8192, &[4; 512]);
        appender.append(8704, &[5; 512]);
        let taken = appender.take().segments;
        assert_eq!((taken[0].start, taken[0].bytes.len()), (1536, 298));
        assert_eq!(
            taken[0].bytes[..288],
            [[1; 188].as_slice(), &[2; 100]].concat()
        );
        assert_eq!((taken[1].start, taken[1].bytes.len()), (8192, 1024));
        let padded = taken[0].padded(512);
        assert_eq!((padded.len(), &padded[296..300]), (512, &[3, 3, 0, 0][..]));
    }

    #[test]
    fn what_was_appended_is_there_after_a_write() {
        let (appender, file) = appender();
        lane::block_on(async move {
            let first = [appender.append(512, b"first ")];
            appender.write(&first).await.expect("memory takes all");
            let second = [appender.append(518, b"second")];
            let (one, two) = futures_util::join!(appender.write(&second), appender.write(&[]));
            one.and(two).expect("memory takes all");
            let read = file
                .read(512, Buffers::from_iter([Buffer::zeroed(14)]))
                .await;
            assert_eq!(read.expect("memory")[0][..], *b"first second\0\0");
            assert_eq!(file.len_bytes().expect("memory"), 1024);
        });
    }

    #[test]
    fn a_later_write_that_succeeds_hides_no_failed_one() {
        let faults = FaultStorage::new(Arc::new(MemStorage::new()));
        let matching = Matching::operation(Operation::Write);
        faults.fail(matching, 0, Times::Once, 28);
        let appender = Appender::new(faults, 512);
        lane::block_on(async move {
            let first = [appender.append(0, b"lost")];
            // Somebody else's write has them, before their owner asks for one.
            let other = appender.write(&[]).await;
            other.expect("nothing of its own was lost");
            let second = [appender.append(512, b"kept")];
            let written = futures_util::join!(appender.write(&second), appender.write(&first));
            written.0.expect("memory takes these");
            assert_eq!(written.1.expect_err("it was not written").errno(), 28);
        });
    }
}
