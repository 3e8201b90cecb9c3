//! Exports that keep a log of what their guests have written and not flushed, and the others that
//! write to the same disk.
//!
//! The next server writes such a log again. What another export has made durable since would be
//! lost under it. So a flush of a disk, by whichever export, is one for the logs of that disk, too,
//! before it is answered.
//!
//! A log that a guest has not handed over yet cannot be flushed. Ranges that are changed until then are recorded
//! (`overtaken.rs`), and the log is replayed outside of them.
//!
//! Invariant: when a flush or a durable write through [`UnflushedLogs::flushed_with`] is complete, no log of
//! the same disk holds anything that was acknowledged before it began.

mod overtaken;

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use vellum::{BlockDevice, Buffer, DiskIdentity, Io, RequestFlags, Result, ZeroRequest, delegate};
use vellum_io::shared_memory::SharedBuffer;

pub(crate) use overtaken::Overtaken;

/// A log of writes that were acknowledged and not flushed.
pub(crate) trait UnflushedLog: Send + Sync {
    /// The disk that they are on.
    fn disk(&self) -> Option<DiskIdentity>;

    /// Makes durable what was acknowledged, so that the log is done with it.
    ///
    /// # Errors
    /// As [`BlockDevice::flush`].
    fn flush(self: Arc<Self>) -> Io<()>;

    /// What others have changed since the start of the export.
    fn overtaken(&self) -> &Overtaken;
}

struct Entry {
    export: u64,
    log: Weak<dyn UnflushedLog>,
}

/// The logs of the exports of a program: given to each of them when it is made. Clones share them.
#[derive(Clone, Default)]
pub struct UnflushedLogs {
    entries: Arc<Mutex<Vec<Entry>>>,
    exports: Arc<AtomicU64>,
    /// Logs that guests have not handed over.
    awaited: Arc<AtomicUsize>,
}

impl fmt::Debug for UnflushedLogs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let logs = self.entries.lock().len();
        f.debug_struct("UnflushedLogs")
            .field("logs", &logs)
            .finish()
    }
}

impl PartialEq for UnflushedLogs {
    /// Whether both are the same logs.
    fn eq(&self, other: &UnflushedLogs) -> bool {
        Arc::ptr_eq(&self.entries, &other.entries)
    }
}

impl Eq for UnflushedLogs {}

impl UnflushedLogs {
    /// The device for an export that has no log of its own: what it makes durable nobody's log undoes.
    pub fn flushed_with(&self, device: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
        self.others_flushed_with(self.new_export(), device)
    }

    /// A number for an export with a log.
    pub(crate) fn new_export(&self) -> u64 {
        self.exports.fetch_add(1, Ordering::Relaxed)
    }

    /// As [`UnflushedLogs::flushed_with`] for one whose own log is its own matter.
    pub(crate) fn others_flushed_with(
        &self,
        export: u64,
        device: Arc<dyn BlockDevice>,
    ) -> Arc<dyn BlockDevice> {
        Arc::new(FlushingDevice {
            device,
            logs: self.clone(),
            export,
        })
    }

    /// Adds the log of an export, for as long as there is one.
    pub(crate) fn add(&self, export: u64, log: Weak<dyn UnflushedLog>) {
        let mut entries = self.entries.lock();
        entries.retain(|entry| entry.log.strong_count() > 0);
        entries.push(Entry { export, log });
    }

    /// What a new log notes until its guest is there.
    pub(crate) fn await_log(&self) -> Overtaken {
        Overtaken::new(self.awaited.clone())
    }

    /// The logs of others that may be of a disk.
    fn of_disk(&self, export: u64, disk: Option<DiskIdentity>) -> Vec<Arc<dyn UnflushedLog>> {
        let entries = self.entries.lock();
        let others = entries.iter().filter(|entry| entry.export != export);
        let others = others.filter_map(|entry| entry.log.upgrade());
        others
            .filter(|log| match (log.disk(), disk) {
                (Some(of_log), Some(disk)) => of_log == disk,
                _ => true,
            })
            .collect()
    }
}

/// A device whose durable changes are such for the logs of the same disk.
#[derive(Debug)]
struct FlushingDevice {
    device: Arc<dyn BlockDevice>,
    logs: UnflushedLogs,
    export: u64,
}

impl FlushingDevice {
    /// Ends what has made changes durable.
    fn flush_logs_after<T: 'static>(&self, durable: Io<T>) -> Io<T> {
        let (logs, export) = (self.logs.clone(), self.export);
        let device = self.device.clone();
        Io::start(async move {
            let done = durable.await?;
            for log in logs.of_disk(export, device.identity()) {
                log.flush().await?;
            }
            Result::Ok(done)
        })
    }

    /// Notes a change of a range before it begins, where a log is awaited.
    fn overtake<T: 'static>(
        &self,
        (offset_bytes, len_bytes): (u64, u64),
        change: impl FnOnce(&dyn BlockDevice) -> Io<T> + 'static,
    ) -> Io<T> {
        if !self.has_awaited_logs() {
            return change(&*self.device);
        }
        let (logs, export) = (self.logs.clone(), self.export);
        let device = self.device.clone();
        Io::start(async move {
            for log in logs.of_disk(export, device.identity()) {
                log.overtaken().add(offset_bytes, len_bytes).await;
            }
            change(&*device).await
        })
    }

    fn has_awaited_logs(&self) -> bool {
        self.logs.awaited.load(Ordering::SeqCst) > 0
    }

    fn flush_logs_if<T: 'static>(&self, is_durable: bool, change: Io<T>) -> Io<T> {
        match is_durable {
            true => self.flush_logs_after(change),
            false => change,
        }
    }
}

impl BlockDevice for FlushingDevice {
    delegate!(
        device: info, size_bytes, read, read_into, copy_up, block_status, truncate, resize, clear, close,
        backing, storage, format_device, identity, allocated_bytes,
    );

    fn stands_for(&self) -> Option<Arc<dyn BlockDevice>> {
        self.device.stands_for()
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        let range = (offset_bytes, buffer.len() as u64);
        let change = move |device: &dyn BlockDevice| device.write(offset_bytes, buffer, flags);
        self.flush_logs_if(flags.fua, self.overtake(range, change))
    }

    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: RequestFlags,
    ) -> Option<Io<()>> {
        // The caller writes a copy instead, which waits its turn.
        if self.has_awaited_logs() {
            return None;
        }
        let change = self.device.write_from(offset_bytes, from, flags)?;
        Some(self.flush_logs_if(flags.fua, change))
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        let range = (offset_bytes, buffer.len() as u64);
        let change =
            move |device: &dyn BlockDevice| device.write_compressed(offset_bytes, buffer, flags);
        self.flush_logs_if(flags.fua, self.overtake(range, change))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        let change =
            move |device: &dyn BlockDevice| device.write_zeroes(offset_bytes, len_bytes, request);
        let change = self.overtake((offset_bytes, len_bytes), change);
        self.flush_logs_if(request.fua, change)
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.overtake((offset_bytes, len_bytes), move |device| {
            device.discard(offset_bytes, len_bytes)
        })
    }

    fn flush(&self) -> Io<()> {
        self.flush_logs_after(self.device.flush())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use vellum::{Raw, RawOptions};
    use vellum_io::lane::block_on;
    use vellum_storage::MemStorage;

    use super::*;

    fn disk() -> Arc<dyn BlockDevice> {
        let file = Arc::new(MemStorage::with_bytes(vec![0; 4096]));
        Raw::open(file, RawOptions::default()).expect("a device")
    }

    /// Counts how often it is flushed.
    struct CountingLog {
        disk: Option<DiskIdentity>,
        flushes: AtomicUsize,
        fails: bool,
        overtaken: Overtaken,
    }

    impl CountingLog {
        fn of(disk: Option<DiskIdentity>) -> Arc<CountingLog> {
            Arc::new(CountingLog {
                disk,
                flushes: AtomicUsize::new(0),
                fails: false,
                overtaken: UnflushedLogs::default().await_log(),
            })
        }

        fn flushes(&self) -> usize {
            self.flushes.load(Ordering::SeqCst)
        }
    }

    impl UnflushedLog for CountingLog {
        fn disk(&self) -> Option<DiskIdentity> {
            self.disk
        }

        fn flush(self: Arc<Self>) -> Io<()> {
            self.flushes.fetch_add(1, Ordering::SeqCst);
            Io::ready(match self.fails {
                true => Err(vellum_io::Error::from_errno("flush", 5)),
                false => Ok(()),
            })
        }

        fn overtaken(&self) -> &Overtaken {
            &self.overtaken
        }
    }

    fn add(logs: &UnflushedLogs, log: &Arc<CountingLog>) -> u64 {
        let export = logs.new_export();
        let weak: Weak<CountingLog> = Arc::downgrade(log);
        logs.add(export, weak);
        export
    }

    #[test]
    fn logs_of_the_same_disk_are_flushed_with_it_and_others_are_not() {
        let (device, logs) = (disk(), UnflushedLogs::default());
        let same = CountingLog::of(device.identity());
        let other = disk();
        let elsewhere = CountingLog::of(other.identity());
        let unknown = CountingLog::of(None);
        let own = add(&logs, &same);
        add(&logs, &elsewhere);
        add(&logs, &unknown);
        let flushes = || [&same, &elsewhere, &unknown].map(|log| log.flushes());
        let shown = logs.flushed_with(device.clone());
        let its_own = logs.others_flushed_with(own, device);
        block_on(async {
            let zeroes = || Buffer::copy_of(&[0; 512]);
            let plain = RequestFlags::default();
            shown.write(0, zeroes(), plain).await.expect("written");
            assert_eq!(flushes(), [0; 3]);
            shown.flush().await.expect("flushed");
            assert_eq!(flushes(), [1, 0, 1]);
            let durable = plain.fua(true);
            shown.write(0, zeroes(), durable).await.expect("written");
            let request = ZeroRequest::default().fua(true);
            shown.write_zeroes(0, 512, request).await.expect("zeroed");
            assert_eq!(flushes(), [3, 0, 3]);
            its_own.flush().await.expect("flushed");
            assert_eq!(flushes(), [3, 0, 4]);
        });
    }

    #[test]
    fn a_flush_fails_that_a_log_does_not_know_of() {
        let (device, logs) = (disk(), UnflushedLogs::default());
        let log = Arc::new(CountingLog {
            disk: device.identity(),
            flushes: AtomicUsize::new(0),
            fails: true,
            overtaken: UnflushedLogs::default().await_log(),
        });
        add(&logs, &log);
        let shown = logs.flushed_with(device);
        block_on(async {
            assert!(shown.flush().await.is_err());
            drop(log);
            shown.flush().await.expect("the export is gone");
        });
    }
}
