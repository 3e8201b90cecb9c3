//! [`LogWritesStorage`]: records every write, flush and discard in a log that the
//! Linux target dm-log-writes and its tools understand (`blklogwrites`).
//!
//! ```text
//! sector 0        magic u64 | version u64 | entries u64 | sector size u32   (all little-endian)
//! sector 1 on     entry: sector u64 | sectors u64 | flags u64 | data length u64
//!                 the data of a write, from the next sector on
//! ```
//!
//! Invariant: entries stand in the log in the order in which their requests ended,
//! and the number in sector 0 counts only entries that stand there whole.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::align::RangeLocks;
use crate::buffer::total_len;
use crate::{
    Buffer, Buffers, Error, ErrorKind, Io, Result, Storage, WriteFlags, ZeroFlags, pass_on, spawn,
};

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MAX_SECTOR_BYTES: u64 = 1 << 23;

/// How the log is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogOptions {
    /// The unit of the log; `None` takes that of the log that is continued, or 512.
    pub sector_bytes: u64,
    /// Continue the log that is there.
    pub append: bool,
    /// The number of entries is written after so many entries, and at a flush.
    pub update_interval: u64,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions {
            sector_bytes: 512,
            append: false,
            update_interval: 4096,
        }
    }
}

/// Whether a log may have sectors of this size.
pub fn is_valid_sector_size(sector_bytes: u64) -> bool {
    sector_bytes.is_power_of_two() && (512..MAX_SECTOR_BYTES).contains(&sector_bytes)
}

#[derive(Debug, Clone, Copy)]
struct Position {
    next_sector: u64,
    entries: u64,
}

#[derive(Debug)]
struct Log {
    storage: Arc<dyn Storage>,
    sector_bytes: u64,
    update_interval: u64,
    position: Mutex<Position>,
    /// Held by the one who appends.
    appending: RangeLocks,
}

/// A storage whose changes are recorded in a log. Requests must be aligned to the
/// log's sectors ([`super::debug::DebugStorage::aligned`]).
#[derive(Debug)]
pub struct LogWritesStorage {
    inner: Arc<dyn Storage>,
    log: Arc<Log>,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

fn word(bytes: &[u8], at: usize) -> u64 {
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
    /// continued is none.
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
        Ok(LogWritesStorage {
            inner,
            log: Arc::new(Log {
                storage: log,
                sector_bytes,
                update_interval: options.update_interval,
                position: Mutex::new(position),
                appending: RangeLocks::default(),
            }),
        })
    }

    /// The unit that requests must be aligned to.
    pub fn sector_bytes(&self) -> u64 {
        self.log.sector_bytes
    }

    /// Makes a change, then records it.
    fn logged<T: 'static>(&self, request: Io<T>, entry: Entry) -> Io<T> {
        let log = self.log.clone();
        Io::task(spawn(async move {
            let result = request.await?;
            log.append(entry).await?;
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

/// What is recorded of a change.
struct Entry {
    offset_bytes: u64,
    len_bytes: u64,
    flags: u64,
    data: Data,
}

enum Data {
    None,
    Bytes(Vec<u8>),
    Zeroes,
}

impl Log {
    fn position(&self) -> MutexGuard<'_, Position> {
        self.position.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn append(&self, entry: Entry) -> Result<()> {
        let _one = self.appending.hold(0..1).await;
        let Position {
            next_sector,
            entries,
        } = *self.position();
        let unit = self.sector_bytes;
        let mut head = vec![0; unit as usize];
        let words = [
            entry.offset_bytes / unit,
            entry.len_bytes / unit,
            entry.flags,
            0,
        ];
        for (at, word) in words.into_iter().enumerate() {
            head[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        let at_bytes = next_sector * unit;
        let mut end = next_sector + 1;
        if let Data::Bytes(bytes) = &entry.data {
            head.extend_from_slice(bytes);
        }
        let buffers = Buffers::from_iter([Buffer::copy_of(&head)]);
        self.storage
            .write(at_bytes, buffers, WriteFlags::default())
            .await?;
        if !matches!(entry.data, Data::None) {
            end += entry.len_bytes / unit;
        }
        if matches!(entry.data, Data::Zeroes) {
            self.storage
                .write_zeroes(at_bytes + unit, entry.len_bytes, ZeroFlags::default())
                .await?;
        }
        let entries = entries + 1;
        *self.position() = Position {
            next_sector: end,
            entries,
        };
        if entry.flags & FLUSH != 0 || entries.is_multiple_of(self.update_interval) {
            self.write_head(entries).await?;
        }
        Ok(())
    }

    async fn write_head(&self, entries: u64) -> Result<()> {
        let mut head = vec![0; self.sector_bytes as usize];
        for (at, word) in [MAGIC, VERSION, entries].into_iter().enumerate() {
            head[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        // Valid sizes fit 32 bits.
        head[24..28].copy_from_slice(&self.sector_bytes.to_le_bytes()[..4]);
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
    pass_on!(
        inner: capabilities, name, len_bytes, read, allocate, truncate, block_status,
        allocated_bytes,
    );

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let bytes: Vec<u8> = buffers.iter().flat_map(|b| b.iter().copied()).collect();
        let entry = Entry {
            offset_bytes,
            len_bytes: total_len(&buffers),
            flags: if flags.fua { FUA } else { 0 },
            data: Data::Bytes(bytes),
        };
        self.logged(self.inner.write(offset_bytes, buffers, flags), entry)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let entry = Entry {
            offset_bytes,
            len_bytes,
            flags: if flags.fua { FUA } else { 0 },
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
            data: Data::None,
        };
        self.logged(self.inner.discard(offset_bytes, len_bytes), entry)
    }

    fn flush(&self) -> Io<()> {
        let entry = Entry {
            offset_bytes: 0,
            len_bytes: 0,
            flags: FLUSH,
            data: Data::None,
        };
        self.logged(self.inner.flush(), entry)
    }

    fn close(&self) -> Io<()> {
        let (log, inner) = (self.log.clone(), self.inner.close());
        Io::task(spawn(async move {
            let entries = log.position().entries;
            log.write_head(entries).await?;
            inner.await
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemStorage;
    use crate::lane::block_on;

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
