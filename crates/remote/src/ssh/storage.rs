//! [`SshStorage`]: a file on another machine as a storage.
//!
//! A file that is only read outlives its connections: another one is made, if the file is still what it
//! was, for as long as there is hope. One that is written does not: what the server had not made durable may be lost, and whoever has
//! written must learn of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result, lane};
use vellum_storage::{Capabilities, SourceVersion, Storage, WriteFlags, ZeroFlags, tells_version};

use super::answer::Answer;
use super::options::SshOptions;
use super::pieces::{cut, join, lengths};
use super::session::Session;
use crate::beyond_end::BeyondEnd;
use crate::blocking;
use crate::failed_flush::FailedFlush;
use crate::failure;

/// Zeroes are written out in pieces of this size, so many at a time.
const ZERO_CHUNK_BYTES: u64 = 1 << 20;
/// The pause before the second attempt to read anew; it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A file on another machine.
#[derive(Debug)]
pub struct SshStorage {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    options: SshOptions,
    session: Mutex<Arc<Session>>,
    /// One at a time connects anew; why that has failed the last time.
    connecting: async_lock::Mutex<Option<Error>>,
    /// How often it has failed.
    failures: AtomicU64,
    len_bytes: AtomicU64,
    /// Why a flush has failed: none succeeds after it (rule 11).
    failed_flush: FailedFlush,
    told_no_fsync: AtomicBool,
    /// Somebody keeps copies of a version: only its bytes are read from now on.
    keeps_version: AtomicBool,
    closed: AtomicBool,
}

impl SshStorage {
    /// Connects and opens the file, or makes it.
    ///
    /// # Errors
    /// What `ssh` says, and the server; if nobody answers in time.
    pub async fn open(options: SshOptions) -> Result<Arc<Self>> {
        if options.host.is_empty() || options.host.starts_with('-') {
            let message = format!("'{}' is no host", options.host);
            return Err(Error::new(ErrorKind::InvalidArgument, "open", message));
        }
        let session = connect(&options).await?;
        let len_bytes = session.state().len_bytes;
        Ok(Arc::new(SshStorage {
            shared: Arc::new(Shared {
                options,
                session: Mutex::new(Arc::new(session)),
                connecting: async_lock::Mutex::new(None),
                failures: AtomicU64::new(0),
                len_bytes: AtomicU64::new(len_bytes),
                failed_flush: FailedFlush::default(),
                told_no_fsync: AtomicBool::new(false),
                keeps_version: AtomicBool::new(false),
                closed: AtomicBool::new(false),
            }),
        }))
    }

    fn refuse<T>(&self, operation: &'static str) -> Io<T> {
        let error = Error::new(ErrorKind::ReadOnly, operation, "the file is read-only");
        Io::ready(Err(error.target(self.name())))
    }
}

async fn connect(options: &SshOptions) -> Result<Session> {
    let given = options.clone();
    let opened = blocking::run(move || Session::open(&given)).await;
    opened.map_err(|error| error.target(&options.name))
}

impl Shared {
    fn session(&self) -> Arc<Session> {
        self.session.lock().clone()
    }

    fn named(&self, error: Error, offset_bytes: u64) -> Error {
        error.target(&self.options.name).at(offset_bytes)
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    async fn read(&self, offset_bytes: u64, mut buffers: Buffers) -> Result<Buffers> {
        let lengths = lengths(&buffers);
        let mut session = self.session();
        let mut patience = None;
        loop {
            let failed = match self.read_version(&session, offset_bytes, buffers).await {
                Ok(Some(buffers)) => return Ok(buffers),
                Ok(None) => return Err(self.changed()),
                Err(error) => self.named(error, offset_bytes),
            };
            let is_lost = session.is_dead() && !self.options.writable;
            if !is_lost || self.closed.load(Ordering::Acquire) {
                return Err(failed);
            }
            let patience = patience.get_or_insert_with(|| Patience::new(self.options.timeout));
            if !patience.pause().await {
                return Err(failed);
            }
            session = self.connect_anew(&session).await?;
            buffers = lengths.iter().copied().map(Buffer::for_read).collect();
        }
    }

    /// Reads; nothing if the file is not what it was, where somebody wants to know.
    async fn read_version(
        &self,
        session: &Session,
        offset_bytes: u64,
        buffers: Buffers,
    ) -> Result<Option<Buffers>> {
        let begun = read(session, offset_bytes, buffers);
        if !self.keeps_version.load(Ordering::Acquire) {
            return begun.finish(session).await.map(Some);
        }
        let looked = session.look();
        let read = begun.finish(session).await?;
        Ok(looked.wait().await?.then_some(read))
    }

    fn changed(&self) -> Error {
        failure::changed(&self.options.name, "its length or its time")
    }

    /// Another session than one that is dead.
    async fn connect_anew(&self, dead: &Arc<Session>) -> Result<Arc<Session>> {
        let failures = self.failures.load(Ordering::Acquire);
        let mut last = self.connecting.lock().await;
        let now = self.session();
        if !Arc::ptr_eq(&now, dead) {
            return Ok(now);
        }
        if let Some(error) = &*last
            && self.failures.load(Ordering::Acquire) != failures
        {
            // It was tried while this one waited: a hundred that wait are told together.
            return Err(error.clone());
        }
        let connected = match connect(&self.options).await {
            Ok(session) if session.state() != dead.state() => Err(self.changed()),
            connected => connected,
        };
        match connected {
            Ok(session) => {
                let session = Arc::new(session);
                *self.session.lock() = session.clone();
                Ok(session)
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::AcqRel);
                *last = Some(error.clone());
                Err(error)
            }
        }
    }

    async fn write(&self, offset_bytes: u64, buffers: Buffers, fua: bool) -> Result<Buffers> {
        let end_bytes = offset_bytes.saturating_add(total_len(&buffers));
        self.len_bytes.fetch_max(end_bytes, Ordering::AcqRel);
        let lengths = lengths(&buffers);
        let session = self.session();
        let mut at = offset_bytes;
        let begun: Vec<_> = cut(buffers, session.most_write_bytes())
            .into_iter()
            .map(|part| {
                let part_bytes = total_len(&part);
                let written = session.write(at, part);
                at += part_bytes;
                written
            })
            .collect();
        let mut pieces = Vec::new();
        let mut failed = None;
        for written in begun {
            // All of them end before the request does.
            match written.wait().await {
                Ok(part) => pieces.extend(part),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if let Some(error) = failed {
            return Err(self.named(error, offset_bytes));
        }
        if fua {
            self.flush().await?;
        }
        Ok(join(pieces, &lengths))
    }

    async fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, fua: bool) -> Result<()> {
        let end_bytes = offset_bytes.saturating_add(len_bytes);
        let mut at = offset_bytes;
        while at < end_bytes {
            let part_bytes = ZERO_CHUNK_BYTES.min(end_bytes - at);
            let zeroes = Buffers::from_iter([Buffer::zeroed(part_bytes as usize)]);
            self.write(at, zeroes, false).await?;
            at += part_bytes;
        }
        match fua {
            true => self.flush().await,
            false => Ok(()),
        }
    }

    async fn flush(&self) -> Result<()> {
        self.failed_flush.check()?;
        let session = self.session();
        if !session.has_fsync() {
            if !self.told_no_fsync.swap(true, Ordering::Relaxed) {
                (self.options.notice)(&format!(
                    "{}: the server cannot make writes durable (it lacks fsync@openssh.com): \
                     what is flushed may be lost if it fails",
                    self.options.name
                ));
            }
            return Ok(());
        }
        let flushed = session.fsync().wait().await;
        let flushed = flushed.map(|_| ());
        let flushed = flushed.map_err(|error| error.target(&self.options.name));
        self.failed_flush.note(flushed)
    }

    async fn truncate(&self, len_bytes: u64) -> Result<()> {
        let set = self.session().set_len(len_bytes).wait().await;
        set.map_err(|error| error.target(&self.options.name))?;
        self.len_bytes.store(len_bytes, Ordering::Release);
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let closed = self.session().close().await;
        match closed {
            Err(error) if self.options.writable => Err(error.target(&self.options.name)),
            _ => Ok(()),
        }
    }
}

/// How long a read is tried again whose connections break.
struct Patience {
    ends: Instant,
    /// Before the next attempt; the first one comes at once.
    pause: Duration,
}

impl Patience {
    /// The first connection has broken.
    fn new(timeout: Duration) -> Patience {
        Patience {
            ends: lane::now() + timeout,
            pause: Duration::ZERO,
        }
    }

    /// Waits before another attempt; `false` if there is to be none.
    async fn pause(&mut self) -> bool {
        let pause = self.pause;
        self.pause = (2 * pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        if pause.is_zero() {
            return true;
        }
        if lane::now() + pause >= self.ends {
            return false;
        }
        lane::sleep(pause).await;
        true
    }
}

/// Reads that were begun: where each begins, its length, and its answer.
struct Begun {
    lengths: Vec<usize>,
    parts: Vec<(u64, u64, Answer)>,
}

/// Begins to read.
fn read(session: &Session, offset_bytes: u64, buffers: Buffers) -> Begun {
    let lengths = lengths(&buffers);
    let mut at = offset_bytes;
    let parts = cut(buffers, session.most_read_bytes())
        .into_iter()
        .map(|part| {
            let (begin, part_bytes) = (at, total_len(&part));
            at += part_bytes;
            (begin, part_bytes, session.read(begin, part))
        })
        .collect();
    Begun { lengths, parts }
}

impl Begun {
    /// What was read; what the file has no bytes for, since it is shorter now, is zeroes.
    async fn finish(self, session: &Session) -> Result<Buffers> {
        let mut pieces = Vec::new();
        for (begin, part_bytes, answer) in self.parts {
            let (part, read_bytes) = answer.wait().await?;
            match read_bytes == part_bytes {
                true => pieces.extend(part),
                false => {
                    let rest = read_rest(session, begin, part_bytes, (part, read_bytes)).await?;
                    pieces.push(rest);
                }
            }
        }
        Ok(join(pieces, &self.lengths))
    }
}

/// Reads on where a server has given less than it was asked for.
async fn read_rest(
    session: &Session,
    begin_bytes: u64,
    len_bytes: u64,
    first: (Buffers, u64),
) -> Result<Buffer> {
    let mut whole = Buffer::zeroed(len_bytes as usize);
    let (mut part, mut read_bytes) = first;
    let mut done = 0;
    while read_bytes > 0 {
        let mut got = Buffer::join_all(part);
        got.truncate(read_bytes as usize);
        whole[done..done + got.len()].copy_from_slice(&got);
        done += got.len();
        if done == whole.len() {
            break;
        }
        let wanted = Buffers::from_iter([Buffer::for_read(whole.len() - done)]);
        (part, read_bytes) = session
            .read(begin_bytes + done as u64, wanted)
            .wait()
            .await?;
    }
    Ok(whole)
}

impl Storage for SshStorage {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            has_zero_init: true,
            read_only: !self.shared.options.writable,
            growable: true,
            ..Capabilities::default()
        }
    }

    fn name(&self) -> &str {
        &self.shared.options.name
    }

    /// Of a file that is only read: the caller is given bytes of that version alone from then on. SFTP tells whole
    /// seconds, so the version of a file that was changed a moment ago is unknown.
    fn version(&self) -> SourceVersion {
        let state = self.shared.session().state();
        let is_settled = |modified: &u32| {
            let modified = UNIX_EPOCH + Duration::from_secs(u64::from(*modified));
            tells_version(modified, SystemTime::now())
        };
        let modified = state.modified.filter(is_settled);
        let Some(modified) = modified.filter(|_| !self.shared.options.writable) else {
            return SourceVersion::Unknown;
        };
        self.shared.keeps_version.store(true, Ordering::Release);
        SourceVersion::Known(format!("{} {modified}", state.len_bytes))
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.shared.len_bytes())
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let inside_bytes = self.shared.len_bytes().saturating_sub(offset_bytes);
        let shared = self.shared.clone();
        if total_len(&buffers) <= inside_bytes {
            return Io::start(async move { shared.read(offset_bytes, buffers).await });
        }
        let (inside, beyond) = BeyondEnd::split(buffers, inside_bytes);
        if inside_bytes == 0 {
            return Io::ready(Ok(beyond.join(inside)));
        }
        Io::start(async move { Ok(beyond.join(shared.read(offset_bytes, inside).await?)) })
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let shared = self.shared.clone();
        match shared.options.writable {
            true => Io::start(async move { shared.write(offset_bytes, buffers, flags.fua).await }),
            false => self.refuse("write"),
        }
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let shared = self.shared.clone();
        if !shared.options.writable {
            return self.refuse("write zeroes");
        }
        if flags.no_fallback {
            let message = "SFTP knows no zeroes but those that are written out";
            let error = Error::new(ErrorKind::Unsupported, "write zeroes", message);
            return Io::ready(Err(error.target(self.name()).at(offset_bytes)));
        }
        Io::start(async move {
            shared
                .write_zeroes(offset_bytes, len_bytes, flags.fua)
                .await
        })
    }

    fn discard(&self, _offset_bytes: u64, _len_bytes: u64) -> Io<()> {
        match self.shared.options.writable {
            true => Io::ready(Ok(())),
            false => self.refuse("discard"),
        }
    }

    fn flush(&self) -> Io<()> {
        let shared = self.shared.clone();
        match shared.options.writable {
            true => Io::start(async move { shared.flush().await }),
            false => Io::ready(Ok(())),
        }
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        let shared = self.shared.clone();
        match shared.options.writable {
            true => Io::start(async move { shared.truncate(len_bytes).await }),
            false => self.refuse("truncate"),
        }
    }

    fn close(&self) -> Io<()> {
        let shared = self.shared.clone();
        Io::start(async move { shared.close().await })
    }
}
