//! [`NbdStorage`]: an export of another program as a storage.

use std::ops::Range;
use std::sync::Arc;

use super::super::proto;
use super::super::request::Framing;
use super::connection::{Reply, Request};
use super::connection_pool::ConnectionPool;
use super::{Address, ClientOptions, Session};
use vellum_io::align::{Alignment, RangeLocks, gather, scatter};
use vellum_io::buffer::total_len;
use vellum_io::spawn_to_completion;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::{BlockStatus, Capabilities, Storage, StorageExtent, WriteFlags, ZeroFlags};

/// The alignment of requests for a server that does not say what it wants.
const DEFAULT_ALIGNMENT_BYTES: u32 = 512;
/// Zeroes are written out in pieces of this size.
const ZERO_CHUNK_BYTES: u64 = 1 << 20;

/// An export of an NBD server. Its length is fixed.
#[derive(Debug)]
pub struct NbdStorage {
    export: Arc<Export>,
}

/// What the tasks of requests share.
#[derive(Debug)]
struct Export {
    link: ConnectionPool,
    alignment: Alignment,
    /// Longest read or write in bytes.
    most_bytes: u64,
    read_only: bool,
    /// Blocks that are read, changed and written, and what changes whole ones.
    padded: Arc<RangeLocks>,
}

impl NbdStorage {
    /// Connects to a server and opens its export.
    ///
    /// # Errors
    /// In QEMU's words: if nobody listens, the server refuses, or does not keep to the
    /// protocol.
    pub async fn open(options: ClientOptions) -> Result<Arc<Self>> {
        let link = ConnectionPool::open(options).await?;
        let session = link.session();
        let [minimum, _, maximum] = session.block_sizes.unwrap_or([0, 0, u32::MAX]);
        let aligned = |unit: u32| session.size_bytes.is_multiple_of(u64::from(unit));
        let request_bytes = match minimum {
            0 if aligned(DEFAULT_ALIGNMENT_BYTES) => DEFAULT_ALIGNMENT_BYTES,
            0 => 1,
            minimum if !aligned(minimum) => {
                let message = format!(
                    "export length {} is not multiple of minimum block size {minimum}",
                    session.size_bytes
                );
                return Err(Error::new(ErrorKind::Protocol, "connect", message));
            }
            minimum => minimum,
        };
        let read_only = session.flags & proto::FLAG_READ_ONLY != 0 || !link.options().writable;
        let export = Export {
            alignment: Alignment {
                request_bytes,
                memory_bytes: 1,
            },
            most_bytes: u64::from(maximum).min(proto::MAX_PAYLOAD_BYTES),
            read_only,
            link,
            padded: Arc::default(),
        };
        Ok(Arc::new(NbdStorage {
            export: Arc::new(export),
        }))
    }

    /// What was agreed on with the server.
    pub fn session(&self) -> &Session {
        self.export.link.session()
    }

    /// Where the server listens.
    pub fn address(&self) -> &Address {
        &self.export.link.options().address
    }

    /// How often something has gone to the server or come from it, if somebody waits for an
    /// answer: a number that stays the same is that of a server that does not answer.
    pub fn progress(&self) -> Option<u64> {
        self.export.link.progress()
    }

    /// Whether requests wait for the server to be there again (`reconnect-delay`).
    pub fn is_away(&self) -> bool {
        self.export.link.is_away()
    }

    /// Gives the server up: what waits for an answer fails at once, and so does whatever is asked
    /// from now on. What was not flushed may be lost.
    pub fn give_up(&self) {
        self.export.link.give_up();
    }

    fn has(&self, flag: u16) -> bool {
        self.export.has(flag)
    }

    /// Runs a request to its end, whatever becomes of its handle: others may depend on
    /// what it receives for them.
    fn run<T: 'static, F>(&self, work: impl FnOnce(Arc<Export>) -> F) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        Io::task(spawn_to_completion(work(self.export.clone())))
    }

    /// Runs a request that changes the range, or refuses it.
    fn change<T: 'static, F>(
        &self,
        operation: &'static str,
        range: Range<u64>,
        work: impl FnOnce(Arc<Export>) -> F,
    ) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        let refuse = |kind, message: &str| {
            let error = Error::new(kind, operation, message).target(self.name());
            Io::ready(Err(error.at(range.start)))
        };
        if self.export.read_only {
            return refuse(ErrorKind::ReadOnly, "the export is read-only");
        }
        if range.end > self.export.size_bytes() {
            return refuse(ErrorKind::OutOfRange, "the range lies beyond the end");
        }
        self.run(work)
    }
}

fn range(offset_bytes: u64, len_bytes: u64) -> Range<u64> {
    offset_bytes..offset_bytes.saturating_add(len_bytes)
}

impl Storage for NbdStorage {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            request_alignment_bytes: self.export.alignment.request_bytes,
            memory_alignment_bytes: 1,
            can_punch: self.has(proto::FLAG_SEND_TRIM),
            can_zero: self.has(proto::FLAG_SEND_WRITE_ZEROES),
            has_zero_init: false,
            read_only: self.export.read_only,
            growable: false,
        }
    }

    fn name(&self) -> &str {
        &self.export.link.options().name
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.export.size_bytes())
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        self.run(|export| async move { export.read(offset_bytes, buffers).await })
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let range = range(offset_bytes, total_len(&buffers));
        self.change("write", range, |export| async move {
            let buffers = export.write(offset_bytes, buffers, flags.fua).await?;
            export.make_durable(flags.fua).await?;
            Ok(buffers)
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let range = range(offset_bytes, len_bytes);
        if flags.no_fallback && !self.has(proto::FLAG_SEND_FAST_ZERO) {
            let message = "the server writes zeroes out";
            let error = Error::new(ErrorKind::Unsupported, "write zeroes", message);
            return Io::ready(Err(error.target(self.name()).at(offset_bytes)));
        }
        self.change("write zeroes", range.clone(), |export| async move {
            export.write_zeroes(range, flags).await?;
            export.make_durable(flags.fua).await
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let range = range(offset_bytes, len_bytes);
        self.change("discard", range, |export| async move {
            match export.has(proto::FLAG_SEND_TRIM) {
                true => export.discard(offset_bytes, len_bytes).await,
                false => Ok(()),
            }
        })
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        // The protocol has no word for it, and no place that runs out unannounced.
        self.change("allocate", range(offset_bytes, len_bytes), |_| async {
            Ok(())
        })
    }

    fn flush(&self) -> Io<()> {
        self.run(|export| async move { export.flush().await })
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        let message = match len_bytes.cmp(&self.export.size_bytes()) {
            std::cmp::Ordering::Equal => return Io::ready(Ok(())),
            std::cmp::Ordering::Less => "Cannot resize NBD nodes",
            std::cmp::Ordering::Greater => "Cannot grow NBD nodes",
        };
        let error = Error::new(ErrorKind::Unsupported, "truncate", message);
        Io::ready(Err(error.target(self.name())))
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        self.run(|export| async move { export.block_status(offset_bytes, len_bytes).await })
    }

    fn close(&self) -> Io<()> {
        self.run(|export| async move {
            export.link.close().await;
            Ok(())
        })
    }
}

impl Export {
    fn size_bytes(&self) -> u64 {
        self.link.session().size_bytes
    }

    fn has(&self, flag: u16) -> bool {
        self.link.session().flags & flag != 0
    }

    fn fua(&self, fua: bool) -> u16 {
        match fua && self.has(proto::FLAG_SEND_FUA) {
            true => proto::CMD_FLAG_FUA,
            false => 0,
        }
    }

    async fn ask(&self, command: u16, flags: u16, range: Range<u64>) -> Result<Reply> {
        let question = Request {
            command,
            flags,
            offset_bytes: range.start,
            len_bytes: range.end - range.start,
            buffers: Buffers::new(),
        };
        let answer = self.link.ask(question).await;
        answer.map_err(|error| error.at(range.start))
    }

    async fn flush(&self) -> Result<()> {
        match self.has(proto::FLAG_SEND_FLUSH) {
            true => self.link.flush().await,
            false => Ok(()),
        }
    }

    /// What a write with FUA needs where the server does not know that.
    async fn make_durable(&self, fua: bool) -> Result<()> {
        match fua && !self.has(proto::FLAG_SEND_FUA) {
            true => self.flush().await,
            false => Ok(()),
        }
    }

    /// Reads; what lies beyond the end is zeroes.
    async fn read(&self, offset_bytes: u64, buffers: Buffers) -> Result<Buffers> {
        let whole = range(offset_bytes, total_len(&buffers));
        let inside = whole.start..whole.end.min(self.size_bytes()).max(whole.start);
        if inside == whole
            && self
                .alignment
                .fits_range(whole.start, whole.end - whole.start)
        {
            return self
                .transfer(proto::CMD_READ, 0, whole.start, buffers)
                .await;
        }
        let mut buffers = buffers;
        let around = match inside.is_empty() {
            true => inside.clone(),
            false => self
                .alignment
                .around(inside.start, inside.end - inside.start),
        };
        let copy = Buffers::from_iter([Buffer::for_read((around.end - around.start) as usize)]);
        let copy = self
            .transfer(proto::CMD_READ, 0, around.start, copy)
            .await?;
        let copy = Buffer::join_all(copy);
        let mut image = Buffer::zeroed((whole.end - whole.start) as usize);
        let wanted = (inside.end - inside.start) as usize;
        let skip = (inside.start - around.start) as usize;
        image[..wanted].copy_from_slice(&copy[skip..skip + wanted]);
        scatter(&image, &mut buffers);
        Ok(buffers)
    }

    async fn write(&self, offset_bytes: u64, buffers: Buffers, fua: bool) -> Result<Buffers> {
        let len_bytes = total_len(&buffers);
        let flags = self.fua(fua);
        let _held = self
            .padded
            .lock_for_write(self.alignment, offset_bytes, len_bytes)
            .await;
        if self.alignment.fits_range(offset_bytes, len_bytes) {
            return self
                .transfer(proto::CMD_WRITE, flags, offset_bytes, buffers)
                .await;
        }
        // The blocks at both ends hold more than is written.
        let around = self.alignment.around(offset_bytes, len_bytes);
        let copy = Buffer::for_read((around.end - around.start) as usize);
        let copy = Buffers::from_iter([copy]);
        let copy = self
            .transfer(proto::CMD_READ, 0, around.start, copy)
            .await?;
        let mut copy = Buffer::join_all(copy);
        let skip = (offset_bytes - around.start) as usize;
        gather(&buffers, &mut copy[skip..skip + len_bytes as usize]);
        let copy = Buffers::from_iter([copy]);
        self.transfer(proto::CMD_WRITE, flags, around.start, copy)
            .await?;
        Ok(buffers)
    }

    /// Reads or writes aligned ranges, in pieces that the server takes.
    async fn transfer(
        &self,
        command: u16,
        flags: u16,
        offset_bytes: u64,
        buffers: Buffers,
    ) -> Result<Buffers> {
        let len_bytes = total_len(&buffers);
        if len_bytes == 0 {
            return Ok(buffers);
        }
        if len_bytes <= self.most_bytes {
            return self.move_piece(command, flags, offset_bytes, buffers).await;
        }
        let mut buffers = buffers;
        let mut at = 0;
        while at < len_bytes {
            let piece_bytes = self.most_bytes.min(len_bytes - at);
            let mut cut = super::split::cut(buffers, at as usize, piece_bytes as usize);
            let part = std::mem::take(&mut cut.part);
            cut.part = self
                .move_piece(command, flags, offset_bytes + at, part)
                .await?;
            buffers = cut.rejoin();
            at += piece_bytes;
        }
        Ok(buffers)
    }

    async fn move_piece(
        &self,
        command: u16,
        flags: u16,
        offset_bytes: u64,
        buffers: Buffers,
    ) -> Result<Buffers> {
        let question = Request {
            command,
            flags,
            offset_bytes,
            len_bytes: total_len(&buffers),
            buffers,
        };
        let answer = self.link.ask(question).await;
        Ok(answer.map_err(|error| error.at(offset_bytes))?.buffers)
    }

    async fn write_zeroes(&self, range: Range<u64>, flags: ZeroFlags) -> Result<()> {
        let len_bytes = range.end - range.start;
        let inside = self.alignment.inside(range.start, len_bytes);
        if !self.has(proto::FLAG_SEND_WRITE_ZEROES) {
            return self.write_zeroes_out(range, flags.fua).await;
        }
        let ends = match inside.is_empty() {
            true => [range.clone(), 0..0],
            false => [range.start..inside.start, inside.end..range.end],
        };
        for end in ends {
            self.write_zeroes_out(end, flags.fua).await?;
        }
        let mut wire = self.fua(flags.fua);
        if !flags.may_unmap {
            wire |= proto::CMD_FLAG_NO_HOLE;
        }
        if flags.no_fallback {
            wire |= proto::CMD_FLAG_FAST_ZERO;
        }
        let most_bytes = match self.link.session().framing {
            Framing::Extended => u64::MAX,
            _ => self.most_bytes,
        };
        self.in_pieces(proto::CMD_WRITE_ZEROES, wire, inside, most_bytes)
            .await
    }

    async fn write_zeroes_out(&self, range: Range<u64>, fua: bool) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let len_bytes = ZERO_CHUNK_BYTES.min(range.end - at);
            let zeroes = Buffers::from_iter([Buffer::zeroed(len_bytes as usize)]);
            self.write(at, zeroes, fua).await?;
            at += len_bytes;
        }
        Ok(())
    }

    async fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        let inside = self.alignment.inside(offset_bytes, len_bytes);
        self.in_pieces(proto::CMD_TRIM, 0, inside, self.most_asked_bytes())
            .await
    }

    /// Longest range in bytes that a request without data may be about.
    fn most_asked_bytes(&self) -> u64 {
        match self.link.session().framing {
            Framing::Extended => u64::MAX,
            _ => (1 << 31) - u64::from(self.alignment.request_bytes),
        }
    }

    async fn in_pieces(
        &self,
        command: u16,
        flags: u16,
        range: Range<u64>,
        most_bytes: u64,
    ) -> Result<()> {
        let len_bytes = range.end - range.start;
        let _held = self
            .padded
            .lock_for_write(self.alignment, range.start, len_bytes)
            .await;
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at.saturating_add(most_bytes));
            self.ask(command, flags, at..end).await?;
            at = end;
        }
        Ok(())
    }

    async fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Result<StorageExtent> {
        let extent = |status, len_bytes| Ok(StorageExtent { status, len_bytes });
        let size_bytes = self.size_bytes();
        if offset_bytes >= size_bytes {
            return extent(BlockStatus::Hole, len_bytes);
        }
        let len_bytes = len_bytes.min(size_bytes - offset_bytes);
        if self.link.session().context.is_none() {
            return extent(BlockStatus::Data, len_bytes);
        }
        let around = self.alignment.around(offset_bytes, len_bytes);
        let end = around
            .end
            .min(around.start.saturating_add(self.most_asked_bytes()));
        let one = proto::CMD_FLAG_REQ_ONE;
        let answer = self
            .ask(proto::CMD_BLOCK_STATUS, one, around.start..end)
            .await?;
        let Some(first) = answer.status else {
            return extent(BlockStatus::Data, len_bytes);
        };
        // Its start may lie before what was asked for, its end beyond.
        let told_end = around.start.saturating_add(first.len_bytes);
        let told = told_end.saturating_sub(offset_bytes).min(len_bytes);
        if told == 0 {
            // Smaller than a block that can be asked about.
            let rest = self.alignment.around(offset_bytes, 1).end - offset_bytes;
            return extent(BlockStatus::Data, rest.min(len_bytes));
        }
        let flags = first.flags as u32;
        let status = match (
            flags & proto::STATE_HOLE != 0,
            flags & proto::STATE_ZERO != 0,
        ) {
            (false, false) => BlockStatus::Data,
            (false, true) => BlockStatus::Zeroes,
            (true, true) => BlockStatus::Hole,
            (true, false) => BlockStatus::Unknown,
        };
        extent(status, told)
    }
}
