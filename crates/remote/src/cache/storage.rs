//! [`CacheStorage`]: a file on another machine with a cache on this host, as a storage to be read.

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smallvec::SmallVec;
use vellum_io::buffer::total_len;
use vellum_io::lane::{self, sleep};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::Storage;

use super::directory::{Directory, Files, Opened};
use super::fill::{Cache, PIECE_BLOCKS};
use super::layout::{ABSENT, BLOCK_BYTES, Identity};
use super::place::Place;
use super::table::{SharedTable, Table};
use super::trace::{self, Trace};

/// A read that finds blocks thrown out again and again goes to the server in the end.
const ATTEMPTS: u32 = 16;

/// Longest text of a trace.
const MOST_TRACE_BYTES: u64 = 16 << 20;

/// How a file is cached.
#[derive(Debug, Clone)]
pub struct CacheOptions {
    /// The folder, which many files and processes share; only this user may write there.
    pub directory: PathBuf,
    /// Bytes that the folder takes at most, about; `None`: as many as there are.
    pub limit_bytes: Option<u64>,
    /// As [`HttpOptions::readahead_bytes`](crate::HttpOptions::readahead_bytes).
    pub readahead_bytes: u64,
    /// So long a read waits for a server that does not answer.
    pub outage: Duration,
    /// Everything is brought here in the background.
    pub prefetch: bool,
    /// So many bytes a second at most.
    pub prefetch_bytes_per_second: Option<u64>,
    /// What is wanted is recorded, in its order, in a file beside the cache's.
    pub record_trace: bool,
    /// A recorded order in which blocks are brought here first. By default the one that lies beside
    /// the cache's files, if there is one.
    pub trace: Option<PathBuf>,
    /// Gets a line for the user: that the server does not answer, or is not needed any more.
    pub notice: fn(&str),
}

impl CacheOptions {
    /// A cache in this folder.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        CacheOptions {
            directory: directory.into(),
            limit_bytes: None,
            readahead_bytes: 256 << 10,
            outage: Duration::from_secs(120),
            prefetch: false,
            prefetch_bytes_per_second: None,
            record_trace: false,
            trace: None,
            notice: |_| {},
        }
    }
}

/// What a cache has of a file, before its server is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// What tells the version from others.
    pub version: String,
    /// The file's length.
    pub len_bytes: u64,
}

/// A file on another machine of which this host keeps what was read. It may only be read.
#[derive(Debug)]
pub struct CacheStorage {
    cache: Arc<Cache>,
}

impl CacheStorage {
    /// A cache in front of `below`. `source` says which file that is, in whatever words, and
    /// `version` which version of it: what is cached of one is never shown as another one's. On a
    /// lane, which works for it as long as it is open.
    ///
    /// # Errors
    /// If the folder cannot be used; [`ErrorKind::NoSpace`] if the file is too long for it.
    pub async fn open(
        source: &str,
        version: &str,
        below: Arc<dyn Storage>,
        options: CacheOptions,
    ) -> Result<Arc<Self>> {
        let identity = Identity {
            source: source.to_owned(),
            version: version.to_owned(),
            len_bytes: below.len_bytes()?,
        };
        Self::start(identity, below.name().to_owned(), Some(below), options).await
    }

    /// A cache that holds all of a file, without its server: what [`CacheStorage::find_whole`] has
    /// found.
    ///
    /// # Errors
    /// As [`CacheStorage::open`].
    pub async fn open_alone(
        source: &str,
        found: &Found,
        name: &str,
        options: CacheOptions,
    ) -> Result<Arc<Self>> {
        let identity = Identity {
            source: source.to_owned(),
            version: found.version.clone(),
            len_bytes: found.len_bytes,
        };
        Self::start(identity, name.to_owned(), None, options).await
    }

    /// The version of a file that was used last, if a folder holds all of it. `version`: this one. `None` if
    /// there is none: an older one is not shown for one that is not whole.
    pub async fn find_whole(
        directory: &Path,
        source: &str,
        version: Option<&str>,
    ) -> Option<Found> {
        let directory = Directory::open(directory).ok()?;
        let mut last: Option<(Opened, Identity, Files)> = None;
        for stem in directory.stems().ok()? {
            let Some((header, files)) = directory.look_into(&stem) else {
                continue;
            };
            let identity = Identity {
                source: source.to_owned(),
                version: version.map_or(header.version, str::to_owned),
                len_bytes: header.len_bytes,
            };
            if identity.stem() != stem {
                continue;
            }
            // Somebody takes it away.
            let Ok(opened) = directory.opened(&stem) else {
                continue;
            };
            if last.as_ref().is_none_or(|(before, ..)| *before < opened) {
                last = Some((opened, identity, files));
            }
        }
        let (_, identity, files) = last?;
        let place = Place::of_files(identity, files).ok()?;
        let found = Found {
            version: place.identity.version.clone(),
            len_bytes: place.identity.len_bytes,
        };
        is_whole(&place).await.then_some(found)
    }

    async fn start(
        identity: Identity,
        name: String,
        below: Option<Arc<dyn Storage>>,
        options: CacheOptions,
    ) -> Result<Arc<Self>> {
        let directory = Directory::open(&options.directory)?;
        identity.check_len(options.limit_bytes)?;
        let files = directory.files(&identity)?;
        let groups = identity.groups();
        let table = SharedTable::map(&files.index, &identity.table())?;
        let table = Table::new(table, groups);
        let place = Place::of_files(identity, files)?;
        Ok(Self::with(Cache::new(
            name,
            place,
            table,
            below,
            Some(directory),
            options,
        )))
    }

    /// A cache in storages that nobody shares, for tests that cut the power.
    #[doc(hidden)]
    pub fn in_storages(
        below: Arc<dyn Storage>,
        data: Arc<dyn Storage>,
        index: Arc<dyn Storage>,
        options: CacheOptions,
    ) -> Result<Arc<Self>> {
        let identity = Identity {
            source: String::new(),
            version: String::new(),
            len_bytes: below.len_bytes()?,
        };
        let groups = identity.groups();
        let file = tempfile::tempfile();
        let file = file.and_then(|file| file.set_len(identity.table().end).map(|()| file));
        let file = file.map_err(|error| Error::from_io("make", &error))?;
        let table = Table::new(SharedTable::map(&file, &identity.table())?, groups);
        let place = Place::of_storages(identity, data, index);
        let name = below.name().to_owned();
        Ok(Self::with(Cache::new(
            name,
            place,
            table,
            Some(below),
            None,
            options,
        )))
    }

    fn with(cache: Cache) -> Arc<Self> {
        if cache.options.record_trace {
            cache.state.lock().trace = Some(Trace::default());
        }
        let cache = Arc::new(cache);
        if cache.below.is_some() {
            // Nobody waits for it: the lane may stand still.
            lane::spawn(cache.clone().fetch_ahead());
        }
        Arc::new(CacheStorage { cache })
    }

    /// Bytes that were fetched from the server since this was opened.
    pub fn fetched_bytes(&self) -> u64 {
        self.cache.fetched_bytes()
    }

    fn refuse<T>(&self, operation: &'static str) -> Io<T> {
        let message = "a cache of a file on another machine is read-only";
        let error = Error::new(ErrorKind::ReadOnly, operation, message);
        Io::ready(Err(error.target(&self.cache.name)))
    }
}

/// Copies bytes to buffers, which get zeroes beyond their end.
fn copy_out(bytes: &[u8], skip_bytes: u64, buffers: &mut Buffers) {
    let mut rest = bytes.get(skip_bytes as usize..).unwrap_or_default();
    for buffer in buffers {
        let (part, behind) = rest.split_at(rest.len().min(buffer.len()));
        buffer[..part.len()].copy_from_slice(part);
        buffer[part.len()..].fill(0);
        rest = behind;
    }
}

/// The text of a trace, if it is a file of a length that traces have.
fn read_trace(path: &Path) -> Option<String> {
    let found = fs::metadata(path).ok()?;
    let is_trace = found.is_file() && found.len() <= MOST_TRACE_BYTES;
    is_trace.then(|| fs::read_to_string(path).ok())?
}

/// Whether there is an entry for each block.
async fn is_whole(place: &Place) -> bool {
    for group in 0..place.identity.groups() {
        let entries = place.entries(&place.identity.group_blocks(group)).await;
        if !entries.is_ok_and(|entries| entries.iter().all(|entry| *entry != ABSENT)) {
            return false;
        }
    }
    true
}

impl Cache {
    /// The blocks that a range of bytes lies in, as far as the file reaches.
    fn blocks_of(&self, offset_bytes: u64, len_bytes: u64) -> Range<u64> {
        let len = self.identity().len_bytes;
        let end = offset_bytes.saturating_add(len_bytes).min(len);
        let start = offset_bytes.min(end);
        start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES).max(start / BLOCK_BYTES)
    }

    /// Notes a read, for what is fetched ahead and for the trace.
    fn note(self: &Arc<Self>, blocks: &Range<u64>) {
        if self.below.is_none() {
            return;
        }
        let ahead = {
            let mut state = self.state.lock();
            if let Some(trace) = &mut state.trace {
                trace.note(blocks.clone());
            }
            let room = 4 * PIECE_BLOCKS * super::fill::MOST_PIECES as u64;
            let room = room.saturating_sub(state.on_way.len() as u64);
            state.streams.note(blocks.clone(), room)
        };
        let end = self.identity().blocks();
        let ahead = ahead.start.min(end)..ahead.end.min(end);
        if !ahead.is_empty() && self.can_store() {
            self.want(ahead, false);
        }
    }

    /// Reads, and brings here what is not.
    async fn read_slowly(
        self: Arc<Self>,
        offset_bytes: u64,
        mut buffers: Buffers,
    ) -> Result<Buffers> {
        let blocks = self.blocks_of(offset_bytes, total_len(&buffers));
        for _ in 0..ATTEMPTS {
            if self.is_closed() {
                return Err(self.closed_error());
            }
            if !self.can_store() {
                break;
            }
            // A long read does not have everything on its way at once.
            let mut next = blocks.start;
            while next < blocks.end {
                let end = blocks.end.min(next + 4 * PIECE_BLOCKS);
                for one in self.want(next..end, true) {
                    one.wait().await?;
                }
                next = end;
            }
            let Some(seen) = self.table.whole(blocks.clone()) else {
                continue;
            };
            match self.place.read_whole(&blocks).await {
                Ok(Some(bytes)) if self.table.is_unchanged(&seen) => {
                    copy_out(
                        &bytes,
                        offset_bytes - blocks.start * BLOCK_BYTES,
                        &mut buffers,
                    );
                    return Ok(buffers);
                }
                Ok(Some(_)) => {}
                // The disk has lost some of them since they were found whole.
                Ok(None) => self.table.forget(blocks.clone()),
                // The server has the bytes, too.
                Err(_) => break,
            }
        }
        self.server()?.read(offset_bytes, buffers).await
    }

    /// Brings here what a trace names, then everything if that is wanted.
    async fn fetch_ahead(self: Arc<Self>) {
        let identity = self.identity();
        let beside = self.directory.as_ref().map(|at| at.trace(identity));
        let path = self.options.trace.clone().or(beside);
        let text = path.and_then(|path| read_trace(&path));
        let runs = text.and_then(|text| trace::parse(&text, identity.len_bytes));
        for run in runs.unwrap_or_default() {
            if !self.bring_ahead(run).await {
                return;
            }
        }
        if self.options.prefetch && self.bring_ahead(0..identity.blocks()).await {
            self.is_complete().await;
        }
    }

    /// Brings blocks here that nobody waits for; whether all of them are here.
    async fn bring_ahead(self: &Arc<Self>, blocks: Range<u64>) -> bool {
        let mut next = blocks.start;
        while next < blocks.end {
            if self.is_closed() || !self.can_store() {
                return false;
            }
            let end = blocks.end.min(next + 4 * PIECE_BLOCKS);
            let waits = self.want(next..end, false);
            let bytes = waits.len() as u64 * BLOCK_BYTES;
            for one in waits {
                if one.wait().await.is_err() {
                    return false;
                }
            }
            if let Some(most) = self.options.prefetch_bytes_per_second {
                sleep(Duration::from_secs_f64(bytes as f64 / most.max(1) as f64)).await;
            }
            next = end;
        }
        true
    }

    /// Everything is here: makes it durable, and says so.
    async fn is_complete(&self) {
        if is_whole(&self.place).await && self.flush().await.is_ok() {
            self.say("all of it is in the cache now; the server is not needed any more");
        }
    }

    /// Data first: an entry whose block was lost costs a fetch, from a server that may be away.
    async fn flush(&self) -> Result<()> {
        self.place.data.flush().await?;
        self.place.index.flush().await
    }

    fn write_trace(&self) {
        let Some(trace) = self.state.lock().trace.take() else {
            return;
        };
        let Some(directory) = &self.directory else {
            return;
        };
        if trace.is_empty() {
            return;
        }
        let path = directory.trace(self.identity());
        let new = path.with_extension("trace.new");
        let mut options = fs::File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options
            .open(&new)
            .and_then(|mut file| file.write_all(trace.text().as_bytes()))
            .and_then(|()| fs::rename(&new, &path));
        if let Err(error) = written {
            self.say(&format!("the trace could not be written: {error}"));
        }
    }
}

impl Drop for CacheStorage {
    /// Whoever does not close it still has nobody work for it.
    fn drop(&mut self) {
        self.cache.closed.store(true, Ordering::Release);
        self.cache.write_trace();
    }
}

impl Storage for CacheStorage {
    vellum_storage::read_only!();

    fn name(&self) -> &str {
        &self.cache.name
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.cache.identity().len_bytes)
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let blocks = self.cache.blocks_of(offset_bytes, total_len(&buffers));
        self.cache.table.tick();
        self.cache.note(&blocks);
        let cache = self.cache.clone();
        let Some(seen) = cache.table.durable(blocks) else {
            return Io::start(cache.read_slowly(offset_bytes, buffers));
        };
        let lens: SmallVec<[usize; 4]> = buffers.iter().map(|one| one.len()).collect();
        let read = cache.place.data.read(offset_bytes, buffers);
        Io::boxed(async move {
            let buffers = match read.await {
                Ok(buffers) if cache.table.is_unchanged(&seen) => return Ok(buffers),
                Ok(buffers) => buffers,
                Err(_) => lens.into_iter().map(Buffer::for_read).collect(),
            };
            cache.read_slowly(offset_bytes, buffers).await
        })
    }

    fn close(&self) -> Io<()> {
        let cache = self.cache.clone();
        cache.closed.store(true, Ordering::Release);
        Io::start(async move {
            let below = cache.below.as_ref();
            // What waits for the server ends with it.
            let closed = match below {
                Some(below) => below.close().await,
                None => Ok(()),
            };
            cache.tasks_end().await;
            cache.write_trace();
            cache.flush().await?;
            closed
        })
    }
}

#[cfg(test)]
mod tests {
    use vellum_storage::MemStorage;
    use vellum_storage::wrap::{DelayStorage, FaultStorage, Matching, Operation, Times};

    use super::super::evict;
    use super::*;

    /// A cache with its data behind a storage that can be held up, and the table as another process
    /// has it.
    fn cache(bytes: Vec<u8>) -> (Arc<CacheStorage>, Arc<DelayStorage>, SharedTable) {
        let identity = Identity {
            source: String::new(),
            version: String::new(),
            len_bytes: bytes.len() as u64,
        };
        let groups = identity.groups();
        let file = tempfile::tempfile().unwrap();
        file.set_len(identity.table().end).unwrap();
        let map = || SharedTable::map(&file, &identity.table()).unwrap();
        let (table, other) = (Table::new(map(), groups), map());
        let data = DelayStorage::new(Arc::new(MemStorage::new()));
        let place = Place::of_storages(identity, data.clone(), Arc::new(MemStorage::new()));
        let below = Arc::new(MemStorage::with_bytes(bytes));
        let options = CacheOptions::new("");
        let cache = Cache::new("x".to_owned(), place, table, Some(below), None, options);
        (CacheStorage::with(cache), data, other)
    }

    async fn read(storage: &CacheStorage, offset: u64, len: usize) -> Vec<u8> {
        let buffers = Buffers::from_iter([Buffer::for_read(len)]);
        let read = storage.read(offset, buffers).await.unwrap();
        Buffer::join_all(read).to_vec()
    }

    #[test]
    fn bytes_that_were_thrown_out_while_they_were_read_are_read_again() {
        vellum_io::lane::block_on(async {
            let (storage, data, table) = cache(vec![7; 1 << 20]);
            assert!(read(&storage, 0, 1 << 20).await == [7; 1 << 20]);
            for offset in [0, 70_000] {
                let held = data.hold(Matching::operation(Operation::Read));
                let reading = lane::spawn({
                    let storage = storage.clone();
                    async move { read(&storage, offset, 4096).await }
                });
                while !held.has_arrived() {
                    lane::yield_now().await;
                }
                table.set_generation(0, table.generation(0) | 1);
                evict::finish(&storage.cache.place, &table, 0)
                    .await
                    .unwrap();
                held.release();
                assert!(reading.await == [7; 4096]);
            }
            // Of a group that is being thrown out nothing is used.
            table.set_generation(0, table.generation(0) | 1);
            assert!(storage.cache.table.whole(0..1).is_none());
            assert!(read(&storage, 0, 1 << 20).await == [7; 1 << 20]);
            assert!(table.generation(0).is_multiple_of(2));
        });
    }

    /// A disk that takes what is written, reports a failure at each sync, and has lost the bytes then.
    #[derive(Debug)]
    struct Losing(MemStorage);

    impl Storage for Losing {
        vellum_storage::delegate!(
            0: capabilities, name, len_bytes, read, write, write_zeroes, discard, truncate, block_status
        );

        fn flush(&self) -> Io<()> {
            let len_bytes = self.0.snapshot().len() as u64;
            let lost = self.0.write_zeroes(0, len_bytes, Default::default());
            Io::boxed(async move {
                lost.await?;
                Err(Error::from_errno("flush", 5))
            })
        }
    }

    #[test]
    fn what_the_disk_loses_before_a_sync_is_not_read() {
        let below = Arc::new(MemStorage::with_bytes(vec![7; 5 << 20]));
        lane::block_on(async {
            let data = Arc::new(Losing(MemStorage::new()));
            let index = Arc::new(MemStorage::new());
            let options = CacheOptions::new("");
            let storage = CacheStorage::in_storages(below, data.clone(), index, options).unwrap();
            for round in 0..20 {
                let at = (round % 5) << 20;
                assert!(
                    read(&storage, at, 65536).await == [7; 65536],
                    "round {round}"
                );
                // Also without one that the cache knows of.
                drop(data.flush().await);
                assert!(
                    read(&storage, at + 100, 300).await == [7; 300],
                    "round {round}"
                );
            }
        });
    }

    #[test]
    fn what_is_durable_is_read_without_another_look() {
        lane::block_on(async {
            let (storage, _, _) = cache(vec![7; 1 << 20]);
            read(&storage, 0, 1 << 20).await;
            storage.cache.tasks_end().await;
            assert!(storage.cache.table.durable(0..16).is_some());
            assert!(read(&storage, 100, 4096).await == [7; 4096]);
        });
    }

    #[test]
    fn a_half_gone_group_that_cannot_be_repaired_is_passed_by() {
        let below = Arc::new(MemStorage::with_bytes(vec![7; 1 << 20]));
        let index = FaultStorage::new(Arc::new(MemStorage::new()));
        let writes = Matching::operation(Operation::Write);
        index.fail(writes, 0, Times::Always, 28);
        let data = Arc::new(MemStorage::new());
        lane::block_on(async {
            let options = CacheOptions::new(Path::new(""));
            let storage = CacheStorage::in_storages(below, data, index.clone(), options).unwrap();
            storage.cache.table.shared().set_generation(0, 1);
            let buffers = Buffers::from_iter([Buffer::for_read(4096)]);
            let read = storage.read(0, buffers).await.unwrap();
            assert!(read[0].iter().all(|&byte| byte == 7));
            storage.close().await.unwrap();
        });
    }
}
