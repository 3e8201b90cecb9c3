//! [`EncryptedStorage`]: plain bytes above, encrypted sectors below.
//!
//! Requests of whole sectors are decrypted in place, or encrypted into a copy. Others
//! take the sectors around them; a write then reads these first, and holds them alone
//! meanwhile.
//!
//! Invariant: what others have written to a sector since it was read is never written
//! back: whoever changes a part of a sector holds all of it alone, and every writer
//! holds what it writes.

use std::sync::Arc;

use futures_util::future::join_all;
use vellum_io::buffer::{is_zero, total_len};
use vellum_io::lane::compute;
use vellum_io::spawn_to_completion;
use vellum_storage::{BlockStatus, Capabilities, StorageExtent, WriteFlags, ZeroFlags, delegate};

use super::MasterKey;
use super::SECTOR_BYTES;
use super::Suite;
use super::cipher::SectorCipher;
use crate::{Buffer, Buffers, Error, ErrorKind, Io, Result, Storage};
use vellum_io::range_lock::{Mode, RangeLock};

/// Requests up to this length are worked on where they are: a change of threads takes
/// longer than it spares the lane.
const INLINE_BYTES: usize = 128 << 10;
/// What one thread works on at a time.
const PIECE_BYTES: usize = 128 << 10;
/// What a long write encrypts, and needs memory for, at a time.
const MAX_WRITE_BYTES: usize = 4 << 20;
/// Zeroes that are encrypted at a time.
const ZERO_BYTES: u64 = 1 << 20;

/// Encrypted bytes of another storage, from some offset of it to its end.
#[derive(Debug, Clone)]
pub struct EncryptedStorage {
    inner: Arc<dyn Storage>,
    cipher: Arc<SectorCipher>,
    /// Where sector 0 lies, or would lie, modulo 2^64.
    start_bytes: u64,
    /// Ranges that writes hold, in bytes.
    writing: Arc<RangeLock>,
    /// Sectors of zeroes below were never written, and read as zeroes.
    has_holes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Encrypt,
    Decrypt,
    /// All sectors but those of zeroes.
    DecryptWritten,
}

impl EncryptedStorage {
    /// Shows what is encrypted in `inner` from `start_bytes` on, where the sectors
    /// begin to count.
    ///
    /// # Errors
    /// If the key is not one for that suite.
    pub fn new(
        inner: Arc<dyn Storage>,
        start_bytes: u64,
        suite: &Suite,
        key: &MasterKey,
    ) -> Result<Self> {
        let cipher = SectorCipher::new(suite, key.bytes())?;
        Ok(EncryptedStorage::with_cipher(inner, start_bytes, cipher))
    }

    pub(super) fn with_cipher(
        inner: Arc<dyn Storage>,
        start_bytes: u64,
        cipher: SectorCipher,
    ) -> Self {
        EncryptedStorage {
            inner,
            cipher: Arc::new(cipher),
            start_bytes,
            writing: Arc::default(),
            has_holes: false,
        }
    }

    /// The same, for one in which sectors of zeroes below were never written.
    pub(super) fn with_holes(self) -> Self {
        EncryptedStorage {
            has_holes: true,
            ..self
        }
    }

    /// The same, with the sector of `offset_bytes` at `inner_bytes` of what is below.
    /// Only requests that lie there are to be made.
    pub(crate) fn placed(&self, offset_bytes: u64, inner_bytes: u64) -> Self {
        EncryptedStorage {
            start_bytes: inner_bytes.wrapping_sub(offset_bytes),
            ..self.clone()
        }
    }

    /// Another storage, encrypted with the same key, and the offset at which its first byte is
    /// found: its sectors have numbers that no sector of this one has.
    pub(crate) fn beside(&self, inner: Arc<dyn Storage>) -> (Arc<dyn Storage>, u64) {
        const BASE_BYTES: u64 = 1 << 62;
        let beside = EncryptedStorage {
            inner,
            cipher: self.cipher.clone(),
            start_bytes: BASE_BYTES.wrapping_neg(),
            writing: Arc::default(),
            has_holes: false,
        };
        (Arc::new(beside), BASE_BYTES)
    }

    /// Where an offset lies in the storage below.
    fn below(&self, offset_bytes: u64) -> u64 {
        self.start_bytes.wrapping_add(offset_bytes)
    }

    /// Reads whole sectors.
    async fn read_sectors(self, offset_bytes: u64, read: Io<Buffers>) -> Result<Buffers> {
        let buffers = read.await?;
        let direction = match self.has_holes {
            true => Direction::DecryptWritten,
            false => Direction::Decrypt,
        };
        let mut at = offset_bytes;
        let mut done = Buffers::new();
        for buffer in buffers {
            let len_bytes = buffer.len() as u64;
            done.push(crypt(&self.cipher, at, buffer, direction).await);
            at += len_bytes;
        }
        Ok(done)
    }

    /// Reads the sectors around a range, and copies what was asked for.
    async fn read_around(self, offset_bytes: u64, mut buffers: Buffers) -> Result<Buffers> {
        let around = around(offset_bytes, total_len(&buffers));
        let whole = self.read_whole(around.start, around.end).await?;
        let mut at = (offset_bytes - around.start) as usize;
        for buffer in &mut buffers {
            let end = at + buffer.len();
            buffer.copy_from_slice(&whole[at..end]);
            at = end;
        }
        Ok(buffers)
    }

    async fn read_whole(&self, start: u64, end: u64) -> Result<Buffer> {
        let buffer = Buffer::for_read((end - start) as usize);
        let read = self
            .inner
            .read(self.below(start), Buffers::from_buf([buffer]));
        let sectors = self.clone().read_sectors(start, read).await?;
        Ok(Buffer::join_all(sectors))
    }

    async fn write_all(
        self,
        offset_bytes: u64,
        buffers: Buffers,
        flags: WriteFlags,
    ) -> Result<Buffers> {
        let len_bytes = total_len(&buffers);
        let around = around(offset_bytes, len_bytes);
        let whole = around == (offset_bytes..offset_bytes + len_bytes);
        let mode = if whole { Mode::Shared } else { Mode::Exclusive };
        let _held = self.writing.acquire(around.clone(), mode).await;
        let mut plain = Plain {
            buffers: &buffers,
            index: 0,
            inside: 0,
        };
        let mut at = around.start;
        while at < around.end {
            let end = around.end.min(at + MAX_WRITE_BYTES as u64);
            let mut sectors = Buffer::for_read((end - at) as usize);
            for edge in edges(at..end, offset_bytes..offset_bytes + len_bytes) {
                let old = self.read_whole(edge, edge + SECTOR_BYTES).await?;
                let inside = (edge - at) as usize;
                sectors[inside..inside + old.len()].copy_from_slice(&old);
            }
            let start = (offset_bytes.max(at) - at) as usize;
            let stop = ((offset_bytes + len_bytes).min(end) - at) as usize;
            plain.take(&mut sectors[start..stop]);
            self.write_sectors(at, sectors, flags).await?;
            at = end;
        }
        Ok(buffers)
    }

    /// Encrypts whole sectors and writes them.
    async fn write_sectors(&self, at: u64, sectors: Buffer, flags: WriteFlags) -> Result<()> {
        let sectors = crypt(&self.cipher, at, sectors, Direction::Encrypt).await;
        let buffers = Buffers::from_buf([sectors]);
        self.inner
            .write(self.below(at), buffers, flags)
            .await
            .map(drop)
    }

    async fn write_zero_bytes(self, start: u64, end: u64, flags: ZeroFlags) -> Result<()> {
        let mut at = start;
        while at < end {
            let len_bytes = (end - at).min(ZERO_BYTES);
            let zeroes = Buffers::from_buf([Buffer::zeroed(len_bytes as usize)]);
            let flags = WriteFlags { fua: flags.fua };
            self.clone().write_all(at, zeroes, flags).await?;
            at += len_bytes;
        }
        Ok(())
    }
}

/// The whole sectors around a range.
fn around(offset_bytes: u64, len_bytes: u64) -> std::ops::Range<u64> {
    let end = offset_bytes + len_bytes;
    offset_bytes / SECTOR_BYTES * SECTOR_BYTES..end.next_multiple_of(SECTOR_BYTES)
}

/// The sectors of `whole` of which `written` covers only a part.
fn edges(whole: std::ops::Range<u64>, written: std::ops::Range<u64>) -> impl Iterator<Item = u64> {
    let first = written.start / SECTOR_BYTES * SECTOR_BYTES;
    let last = written.end / SECTOR_BYTES * SECTOR_BYTES;
    let first = (first != written.start).then_some(first);
    let last = (last != written.end).then_some(last);
    let last = last.filter(|last| first != Some(*last));
    let all = first.into_iter().chain(last);
    all.filter(move |edge| whole.contains(edge))
}

/// The bytes of a request, in order.
struct Plain<'a> {
    buffers: &'a Buffers,
    index: usize,
    inside: usize,
}

impl Plain<'_> {
    /// Copies the next bytes.
    fn take(&mut self, mut target: &mut [u8]) {
        while !target.is_empty() && self.index < self.buffers.len() {
            let rest = &self.buffers[self.index][self.inside..];
            let count = rest.len().min(target.len());
            let (now, later) = target.split_at_mut(count);
            now.copy_from_slice(&rest[..count]);
            target = later;
            self.inside += count;
            if self.inside == self.buffers[self.index].len() {
                (self.index, self.inside) = (self.index + 1, 0);
            }
        }
    }
}

/// Encrypts or decrypts whole sectors in place; long ones on all cores.
async fn crypt(
    cipher: &Arc<SectorCipher>,
    offset_bytes: u64,
    mut sectors: Buffer,
    direction: Direction,
) -> Buffer {
    let first = offset_bytes / SECTOR_BYTES;
    if sectors.len() <= INLINE_BYTES {
        run(cipher, first, &mut sectors, direction);
        return sectors;
    }
    let mut first = first;
    let mut pieces = Vec::new();
    while !sectors.is_empty() {
        let length = sectors.len().min(PIECE_BYTES);
        let mut piece = sectors.split_to(length);
        let cipher = cipher.clone();
        pieces.push(compute(move || {
            run(&cipher, first, &mut piece, direction);
            piece
        }));
        first += length as u64 / SECTOR_BYTES;
    }
    Buffer::join_all(join_all(pieces).await)
}

fn run(cipher: &SectorCipher, first: u64, sectors: &mut [u8], direction: Direction) {
    match direction {
        Direction::Encrypt => cipher.encrypt(first, sectors),
        Direction::Decrypt => cipher.decrypt(first, sectors),
        Direction::DecryptWritten => {
            for (number, sector) in (first..).zip(sectors.chunks_mut(SECTOR_BYTES as usize)) {
                if !is_zero(sector) {
                    cipher.decrypt(number, sector);
                }
            }
        }
    }
}

impl Storage for EncryptedStorage {
    delegate!(inner: name, flush, allocated_bytes, free_bytes, disk, close, event_listener);

    fn capabilities(&self) -> Capabilities {
        let below = self.inner.capabilities();
        Capabilities {
            request_alignment_bytes: below.request_alignment_bytes.max(SECTOR_BYTES as u32),
            // In a volume, what was never written decrypts to anything but zeroes.
            can_punch: self.has_holes && below.can_punch,
            can_zero: false,
            has_zero_init: self.has_holes && below.has_zero_init,
            ..below
        }
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.inner.len_bytes()?.saturating_sub(self.start_bytes))
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let whole = |bytes: u64| bytes.is_multiple_of(SECTOR_BYTES);
        if whole(offset_bytes) && buffers.iter().all(|buffer| whole(buffer.len() as u64)) {
            // Started at once, so that requests run side by side.
            let read = self.inner.read(self.below(offset_bytes), buffers);
            return Io::boxed(self.clone().read_sectors(offset_bytes, read));
        }
        Io::boxed(self.clone().read_around(offset_bytes, buffers))
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let write = self.clone().write_all(offset_bytes, buffers, flags);
        Io::task(spawn_to_completion(write))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        if flags.no_fallback {
            // ENOTSUP
            let refused = Error::from_errno("write zeroes", 95).target(self.name());
            return Io::ready(Err(refused));
        }
        let end = offset_bytes + len_bytes;
        let write = self.clone().write_zero_bytes(offset_bytes, end, flags);
        Io::task(spawn_to_completion(write))
    }

    /// Does nothing in a volume: what is given back would read as anything.
    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let start = offset_bytes.next_multiple_of(SECTOR_BYTES);
        let end = (offset_bytes + len_bytes) / SECTOR_BYTES * SECTOR_BYTES;
        match self.has_holes && start < end {
            true => self.inner.discard(self.below(start), end - start),
            false => Io::ready(Ok(())),
        }
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.inner.allocate(self.below(offset_bytes), len_bytes)
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        match len_bytes.checked_add(self.start_bytes) {
            Some(end) => self.inner.truncate(end),
            None => {
                let message = "the volume would be too large";
                let error = Error::new(ErrorKind::InvalidArgument, "truncate", message);
                Io::ready(Err(error.target(self.name())))
            }
        }
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        if self.has_holes {
            return self.inner.block_status(self.below(offset_bytes), len_bytes);
        }
        let inside = self.len_bytes().map(|end| end.saturating_sub(offset_bytes));
        Io::ready(inside.map(|inside| match inside {
            0 => StorageExtent {
                status: BlockStatus::Hole,
                len_bytes,
            },
            inside => StorageExtent {
                status: BlockStatus::Data,
                len_bytes: len_bytes.min(inside),
            },
        }))
    }
}
