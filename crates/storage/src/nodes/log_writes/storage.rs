//! A storage that logs what is written to it.

use std::sync::Arc;

use event_listener::Event;
use parking_lot::{Mutex, MutexGuard};
use vellum_io::align::RangeLocks;
use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result, spawn_to_completion};

use crate::{Storage, WriteFlags, ZeroFlags, delegate};

use super::entry::{DISCARD, Data, Entry, FLUSH, FUA, MAGIC, VERSION, encoded_head};
use super::queue::{Position, Queue};

const MAX_SECTOR_BYTES: u64 = 1 << 23;

/// Data that may wait in memory for the end of a flush, in bytes.
const MOST_WAITING_BYTES: u64 = 64 << 20;

/// How the log is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogOptions {
    /// The unit of the log; `None` takes that of the log that is continued, or 512.
    pub sector_bytes: u64,
    /// Continue the log that is there.
    pub append: bool,
    /// The number of entries is written after so many entries, and at a flush.
    pub update_interval: u64,
    /// Nothing is written to the log, as to the storage whose changes it would have.
    pub read_only: bool,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions {
            sector_bytes: 512,
            append: false,
            update_interval: 4096,
            read_only: false,
        }
    }
}

/// Whether a log may have sectors of this size.
pub fn is_valid_sector_size(sector_bytes: u64) -> bool {
    sector_bytes.is_power_of_two() && (512..MAX_SECTOR_BYTES).contains(&sector_bytes)
}

#[derive(Debug)]
struct Log {
    storage: Arc<dyn Storage>,
    sector_bytes: u64,
    update_interval: u64,
    queue: Mutex<Queue>,
    /// Held by the one who appends.
    appending: RangeLocks,
    appended: Event,
}

/// The place of a flush, until it has ended in one way or the other.
struct Flush {
    log: Arc<Log>,
    number: u64,
}

impl Drop for Flush {
    fn drop(&mut self) {
        self.log.queue().failed(self.number);
        self.log.appended.notify(usize::MAX);
    }
}

/// A storage whose changes are recorded in a log. Requests must be aligned to the
/// log's sectors ([`crate::nodes::debug::DebugStorage::aligned`]).
#[derive(Debug)]
pub struct LogWritesStorage {
    inner: Arc<dyn Storage>,
    log: Arc<Log>,
    read_only: bool,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(found) = bytes.get(at..at + 8) {
        word.copy_from_slice(found);
    }
    u64::from_le_bytes(word)
}

async fn read(storage: &dyn Storage, offset_bytes: u64, len: usize) -> Result<Buffer> {
    let buffers = Buffers::from_iter([Buffer::for_read(len)]);
    Ok(Buffer::join_all(storage.read(offset_bytes, buffers).await?))
}

impl LogWritesStorage {
    /// Records the changes of `inner` in `log`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] in QEMU's words where the log that is to be
    /// continued is none; failures of the log, which is begun before anything changes.
    pub async fn open(
        inner: Arc<dyn Storage>,
        log: Arc<dyn Storage>,
        options: LogOptions,
    ) -> Result<Self> {
        let (sector_bytes, position) = match options.append {
            true => find_end(&*log).await?,
            false => {
                let start = Position {
                    next_sector: 1,
                    entries: 0,
                };
                (options.sector_bytes, start)
            }
        };
        let log = Log {
            storage: log,
            sector_bytes,
            update_interval: options.update_interval,
            queue: Mutex::new(Queue::new(position)),
            appending: RangeLocks::default(),
            appended: Event::new(),
        };
        if !options.append && !options.read_only {
            // Entries of a log from before would be taken for those of this one.
            log.write_head(0).await?;
        }
        Ok(LogWritesStorage {
            inner,
            log: Arc::new(log),
            read_only: options.read_only,
        })
    }

    /// The unit that requests must be aligned to.
    pub fn sector_bytes(&self) -> u64 {
        self.log.sector_bytes
    }

    /// Makes a change, then records it.
    fn logged<T: 'static>(&self, request: Io<T>, entry: Entry) -> Io<T> {
        let log = self.log.clone();
        Io::task(spawn_to_completion(async move {
            let result = request.await?;
            log.record(entry).await?;
            Ok(result)
        }))
    }
}

/// The sector size of a log, and where it goes on.
async fn find_end(log: &dyn Storage) -> Result<(u64, Position)> {
    let head = read(log, 0, 28).await?;
    if word(&head, 0) != MAGIC {
        return Err(invalid("Invalid log superblock magic"));
    }
    let version = word(&head, 8);
    if version != VERSION {
        return Err(invalid(format!("Unsupported log version {version}")));
    }
    let entries = word(&head, 16);
    let mut size = [0; 8];
    size[..4].copy_from_slice(&head[24..28]);
    let sector_bytes = u64::from_le_bytes(size);
    if !is_valid_sector_size(sector_bytes) {
        return Err(invalid(format!("Invalid log sector size {sector_bytes}")));
    }
    let end_sector = log.len_bytes()? / sector_bytes;
    let mut next_sector = 1_u64;
    for _ in 0..entries {
        if next_sector >= end_sector {
            return Err(invalid("The log ends before its last entry"));
        }
        let entry = read(log, next_sector * sector_bytes, 32).await?;
        let data_sectors = match word(&entry, 16) & DISCARD {
            0 => word(&entry, 8),
            _ => 0,
        };
        next_sector = next_sector.saturating_add(1).saturating_add(data_sectors);
    }
    let position = Position {
        next_sector,
        entries,
    };
    Ok((sector_bytes, position))
}

impl Log {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Records what has ended. Where a flush under way has to stand before it, it waits in
    /// memory, and only who was promised more waits with it.
    async fn record(&self, entry: Entry) -> Result<()> {
        let durable = entry.flags & FUA != 0;
        let number = self.queue().ended(entry)?;
        loop {
            let appended = self.appended.listen();
            self.append_all().await?;
            if !self.must_wait(number, durable) {
                return Ok(());
            }
            appended.await;
        }
    }

    fn must_wait(&self, number: u64, durable: bool) -> bool {
        let queue = self.queue();
        let full = queue.waiting_bytes() > MOST_WAITING_BYTES;
        !queue.is_gone(number) && (durable || full)
    }

    /// Appends what may be appended.
    async fn append_all(&self) -> Result<()> {
        let _one = self.appending.lock_exclusive(0..1).await;
        loop {
            let (entry, position) = {
                let mut queue = self.queue();
                queue.check()?;
                match queue.next() {
                    Some(entry) => (entry, queue.position),
                    None => return Ok(()),
                }
            };
            let result = self.append(entry, position).await;
            self.appended.notify(usize::MAX);
            if let Err(error) = result {
                self.queue().break_off(error.clone());
                return Err(error);
            }
        }
    }

    async fn append(&self, entry: Entry, position: Position) -> Result<()> {
        let unit = self.sector_bytes;
        let at_bytes = position.next_sector * unit;
        let buffers = Buffers::from_iter([Buffer::copy_of(&entry.encoded(unit))]);
        self.storage
            .write(at_bytes, buffers, WriteFlags::default())
            .await?;
        let mut end = position.next_sector + 1;
        if !matches!(entry.data, Data::None) {
            end += entry.len_bytes / unit;
        }
        if matches!(entry.data, Data::Zeroes) {
            self.storage
                .write_zeroes(at_bytes + unit, entry.len_bytes, ZeroFlags::default())
                .await?;
        }
        let entries = position.entries + 1;
        self.queue().position = Position {
            next_sector: end,
            entries,
        };
        if entry.flags & FLUSH != 0 || entries.is_multiple_of(self.update_interval) {
            self.write_head(entries).await?;
        }
        Ok(())
    }

    async fn write_head(&self, entries: u64) -> Result<()> {
        let head = encoded_head(self.sector_bytes, entries);
        let buffers = Buffers::from_iter([Buffer::copy_of(&head)]);
        // What is counted must stand there first.
        self.storage.flush().await?;
        self.storage
            .write(0, buffers, WriteFlags::default())
            .await?;
        self.storage.flush().await
    }
}

impl Storage for LogWritesStorage {
    delegate!(
        inner: capabilities, name, len_bytes, modified_at, read, allocate, truncate, block_status,
        allocated_bytes, free_bytes, disk,
    );

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let bytes: Vec<u8> = buffers.iter().flat_map(|b| b.iter().copied()).collect();
        let entry = Entry {
            offset_bytes,
            len_bytes: total_len(&buffers),
            flags: if flags.fua { FUA } else { 0 },
            meanwhile: 0,
            data: Data::Bytes(bytes),
        };
        self.logged(self.inner.write(offset_bytes, buffers, flags), entry)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let entry = Entry {
            offset_bytes,
            len_bytes,
            flags: if flags.fua { FUA } else { 0 },
            meanwhile: 0,
            data: Data::Zeroes,
        };
        self.logged(
            self.inner.write_zeroes(offset_bytes, len_bytes, flags),
            entry,
        )
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let entry = Entry {
            offset_bytes,
            len_bytes,
            flags: DISCARD,
            meanwhile: 0,
            data: Data::None,
        };
        self.logged(self.inner.discard(offset_bytes, len_bytes), entry)
    }

    fn flush(&self) -> Io<()> {
        if self.read_only {
            return self.inner.flush();
        }
        let log = self.log.clone();
        // Its place is that of now.
        let number = match log.queue().flushing() {
            Ok(number) => number,
            Err(error) => return Io::ready(Err(error)),
        };
        let flush = Flush { log, number };
        let request = self.inner.flush();
        Io::task(spawn_to_completion(async move {
            request.await?;
            flush.log.queue().flushed(flush.number);
            flush.log.append_all().await
        }))
    }

    fn close(&self) -> Io<()> {
        if self.read_only {
            return self.inner.close();
        }
        let (log, inner) = (self.log.clone(), self.inner.close());
        Io::task(spawn_to_completion(async move {
            log.append_all().await?;
            let entries = log.queue().position.entries;
            log.write_head(entries).await?;
            inner.await
        }))
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::block_on;

    use crate::MemStorage;
    use crate::wrap::{DelayStorage, FaultStorage, Matching, Operation, Times};

    use super::*;

    fn buffers(byte: u8) -> Buffers {
        Buffers::from_iter([Buffer::copy_of(&[byte; 512])])
    }

    #[test]
    fn every_change_stands_in_the_log_and_a_log_goes_on() {
        let data = Arc::new(MemStorage::new());
        let log = Arc::new(MemStorage::new());
        block_on(async {
            let options = LogOptions::default();
            let storage = LogWritesStorage::open(data.clone(), log.clone(), options);
            let storage = storage.await.unwrap();
            let flags = WriteFlags { fua: true };
            storage.write(1024, buffers(1), flags).await.unwrap();
            let zeroes = ZeroFlags::default();
            storage.write_zeroes(0, 1024, zeroes).await.unwrap();
            storage.discard(512, 512).await.unwrap();
            storage.flush().await.unwrap();
            let more = LogOptions {
                append: true,
                sector_bytes: 4096,
                ..options
            };
            let storage = LogWritesStorage::open(data, log.clone(), more)
                .await
                .unwrap();
            assert_eq!(storage.sector_bytes(), 512);
            storage
                .write(0, buffers(2), WriteFlags::default())
                .await
                .unwrap();
            storage.close().await.unwrap();
        });
        let bytes = log.snapshot();
        let words = |sector: usize| [0, 8, 16, 24].map(|at| word(&bytes, sector * 512 + at));
        assert_eq!(words(0), [MAGIC, 1, 5, 512]);
        assert_eq!(words(1), [2, 1, FUA, 0]);
        assert_eq!(bytes[1024..1536], [1; 512]);
        assert_eq!(words(3), [0, 2, 0, 0]);
        assert_eq!(words(6), [1, 1, DISCARD, 0]);
        assert_eq!(words(7), [0, 0, FLUSH, 0]);
        assert_eq!(words(8), [0, 1, 0, 0]);
        assert_eq!(bytes.len(), 10 * 512);
    }

    /// A storage whose flushes can be held, recorded; and its log.
    async fn held() -> (Arc<DelayStorage>, Arc<LogWritesStorage>, Arc<MemStorage>) {
        let data = DelayStorage::new(Arc::new(MemStorage::new()));
        let log = Arc::new(MemStorage::new());
        let options = LogOptions::default();
        let storage = LogWritesStorage::open(data.clone(), log.clone(), options).await;
        (data, Arc::new(storage.unwrap()), log)
    }

    /// The first three words of each entry, and the fifth.
    fn entries(log: &MemStorage) -> Vec<[u64; 4]> {
        let bytes = log.snapshot();
        let (mut entries, mut sector) = (Vec::new(), 1);
        while sector * 512 < bytes.len() {
            let words = [0, 8, 16, 32].map(|at| word(&bytes, sector * 512 + at));
            sector += 1 + words[1] as usize;
            entries.push(words);
        }
        entries
    }

    #[test]
    fn a_flush_stands_behind_what_had_ended_when_it_was_asked_for_and_before_the_rest() {
        let log = block_on(async {
            let (data, storage, log) = held().await;
            let plain = WriteFlags::default();
            storage.write(0, buffers(1), plain).await.unwrap();
            let hold = data.hold(Matching::operation(Operation::Flush));
            let flush = storage.flush();
            hold.arrived().await;
            // Ends, and its writer knows, while the disk has not done with the flush.
            storage.write(512, buffers(2), plain).await.unwrap();
            assert_eq!(entries(&log), [[0, 1, 0, 0]]);
            hold.release();
            flush.await.unwrap();
            storage.write(1024, buffers(3), plain).await.unwrap();
            log
        });
        let expected = [[0, 1, 0, 0], [0, 0, FLUSH, 1], [1, 1, 0, 0], [2, 1, 0, 0]];
        assert_eq!(entries(&log), expected);
    }

    #[test]
    fn a_durable_write_stands_in_the_log_when_it_has_ended() {
        let log = block_on(async {
            let (data, storage, log) = held().await;
            let hold = data.hold(Matching::operation(Operation::Flush));
            let flush = storage.flush();
            hold.arrived().await;
            storage
                .write(0, buffers(1), WriteFlags::default())
                .await
                .unwrap();
            let durable = storage.write(0, buffers(2), WriteFlags { fua: true });
            assert!(entries(&log).is_empty());
            hold.release();
            durable.await.unwrap();
            assert_eq!(entries(&log).len(), 3);
            flush.await.unwrap();
            log
        });
        let expected = [[0, 0, FLUSH, 2], [0, 1, 0, 0], [0, 1, FUA, 0]];
        assert_eq!(entries(&log), expected);
    }

    #[test]
    fn a_flush_that_ends_first_ends_those_before_it() {
        let log = block_on(async {
            let (data, storage, log) = held().await;
            let plain = WriteFlags::default();
            let hold = data.hold(Matching::operation(Operation::Flush));
            let first = storage.flush();
            hold.arrived().await;
            storage.write(0, buffers(1), plain).await.unwrap();
            storage.flush().await.unwrap();
            storage.write(512, buffers(2), plain).await.unwrap();
            hold.release();
            first.await.unwrap();
            log
        });
        let expected = [
            [0, 0, FLUSH, 1],
            [0, 1, 0, 0],
            [0, 0, FLUSH, 0],
            [1, 1, 0, 0],
        ];
        assert_eq!(entries(&log), expected);
    }

    #[test]
    fn a_flush_that_fails_leaves_no_entry_and_stops_nobody() {
        let log = block_on(async {
            let data = FaultStorage::new(Arc::new(MemStorage::new()));
            let flushes = Matching::operation(Operation::Flush);
            data.fail(flushes, 0, Times::Once, libc::EIO);
            let log = Arc::new(MemStorage::new());
            let options = LogOptions::default();
            let storage = LogWritesStorage::open(data, log.clone(), options);
            let storage = storage.await.unwrap();
            storage.flush().await.unwrap_err();
            let durable = WriteFlags { fua: true };
            storage.write(0, buffers(1), durable).await.unwrap();
            log
        });
        assert_eq!(entries(&log), [[0, 1, FUA, 0]]);
    }

    #[test]
    fn a_log_with_a_hole_takes_nothing_more() {
        let log = Arc::new(MemStorage::new());
        let failing = FaultStorage::new(log.clone());
        block_on(async {
            let options = LogOptions::default();
            let data = Arc::new(MemStorage::new());
            let storage = LogWritesStorage::open(data, failing.clone(), options).await;
            let storage = storage.unwrap();
            let writes = Matching::operation(Operation::Write);
            failing.fail(writes, 0, Times::Once, libc::EIO);
            let plain = WriteFlags::default();
            storage.write(0, buffers(1), plain).await.unwrap_err();
            storage.write(0, buffers(2), plain).await.unwrap_err();
            storage.flush().await.unwrap_err();
        });
        assert_eq!(count(&log), 0);
        assert!(entries(&log).is_empty());
    }

    /// How many entries a log says that it has.
    fn count(log: &MemStorage) -> u64 {
        word(&log.snapshot(), 16)
    }

    #[test]
    fn a_log_that_begins_anew_has_nothing_of_the_one_before() {
        let log = Arc::new(MemStorage::new());
        let data = Arc::new(MemStorage::new());
        block_on(async {
            let open = |options| LogWritesStorage::open(data.clone(), log.clone(), options);
            let plain = WriteFlags::default();
            let first = open(LogOptions::default()).await.unwrap();
            first.write(0, buffers(1), plain).await.unwrap();
            first.close().await.unwrap();
            assert_eq!(count(&log), 1);
            let only_read = LogOptions {
                read_only: true,
                ..LogOptions::default()
            };
            let second = open(only_read).await.unwrap();
            second.flush().await.unwrap();
            second.close().await.unwrap();
            assert_eq!(count(&log), 1, "nobody has changed anything");
            // What it holds is not in the log yet when the power fails.
            let third = open(LogOptions::default()).await.unwrap();
            third.write(512, buffers(2), plain).await.unwrap();
            assert_eq!(count(&log), 0);
        });
    }

    #[test]
    fn a_log_that_cannot_be_begun_is_no_log() {
        let failing = FaultStorage::new(Arc::new(MemStorage::new()));
        let writes = Matching::operation(Operation::Write);
        failing.fail(writes, 0, Times::Once, libc::EIO);
        let data = Arc::new(MemStorage::new());
        block_on(LogWritesStorage::open(data, failing, LogOptions::default())).unwrap_err();
    }

    #[test]
    fn what_is_no_log_is_not_continued() {
        let open = |bytes: Vec<u8>| {
            let log = Arc::new(MemStorage::with_bytes(bytes));
            let options = LogOptions {
                append: true,
                ..LogOptions::default()
            };
            let opened = LogWritesStorage::open(Arc::new(MemStorage::new()), log, options);
            block_on(opened).unwrap_err().message().to_owned()
        };
        assert_eq!(open(vec![1; 512]), "Invalid log superblock magic");
        let mut head = Vec::new();
        head.extend(MAGIC.to_le_bytes());
        head.extend(1_u64.to_le_bytes());
        head.extend(u64::MAX.to_le_bytes());
        head.extend(3_u32.to_le_bytes());
        assert_eq!(open(head.clone()), "Invalid log sector size 3");
        head[24..28].copy_from_slice(&512_u32.to_le_bytes());
        assert_eq!(open(head), "The log ends before its last entry");
    }
}
