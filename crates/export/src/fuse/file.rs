//! The disk as a file: what is done to it, and its attributes.
//!
//! Invariants:
//! - The disk never becomes shorter but by a request to set its size: whoever makes it longer
//!   looks at its size in its turn.
//! - No request reaches beyond the end of the disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use vellum::{BlockDevice, Preallocation, RequestFlags, ZeroRequest, target_of};
use vellum_io::shared_memory::SharedBuffer;
use vellum_io::{Buffer, Error, ErrorKind, Io, lane};

use crate::accounting::Accounting;
use crate::nbd::Stop;
use crate::size_turns::SizeTurns;

use super::proto::{
    self, Allocate, Attributes, Body, Operation, Seek, SetAttributes, Time, Transfer, set,
};

/// Why a request fails.
pub(super) type Errno = i32;

/// The unit in which the file system tells its size.
const BLOCK_BYTES: u32 = 4096;
/// What the size of a format's disk is a multiple of.
const SECTOR_BYTES: u64 = 512;
/// Most that is made zero at once: a power of two.
const ZERO_BYTES: u64 = 1 << 30;
/// How long the kernel may rely on attributes.
const ATTRIBUTES_SECONDS: u64 = 1;
/// So many extents are looked at before others on the lane have their turn.
const EXTENTS_A_TURN: u32 = 32;

/// The handle of a descriptor that was opened only to read.
const OPENED_TO_READ: u64 = 0;
/// The handle of one that may write: what it has written is flushed when it is closed.
pub(super) const OPENED_TO_WRITE: u64 = 1;

/// Who may do what.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rights {
    pub(super) writable: bool,
    /// Writes beyond the end make it longer.
    pub(super) growable: bool,
    /// Its size may be set.
    pub(super) resizable: bool,
    /// Others than the user who mounted it may use it.
    pub(super) allow_other: bool,
}

/// The file.
#[derive(Debug)]
pub(super) struct File {
    device: Arc<dyn BlockDevice>,
    /// Counts what is asked for.
    pub(super) accounting: Arc<Accounting>,
    rights: Rights,
    kept: Mutex<Kept>,
    /// It was changed since somebody asked when.
    touched: AtomicBool,
    size_turns: SizeTurns,
    /// Nobody waits for answers any more.
    stop: Stop,
}

/// What no disk has.
#[derive(Debug)]
struct Kept {
    atime: Time,
    mtime: Time,
    mode: u32,
    uid: u32,
    gid: u32,
}

fn now() -> Time {
    // A clock before 1970 is as good as one that stands there.
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let since = since.unwrap_or_default();
    Time {
        seconds: since.as_secs(),
        nanoseconds: since.subsec_nanos(),
    }
}

fn errno(error: &Error) -> Errno {
    error.errno()
}

impl File {
    pub(super) fn new(
        device: Arc<dyn BlockDevice>,
        accounting: Arc<Accounting>,
        rights: Rights,
        size_turns: SizeTurns,
        stop: Stop,
    ) -> File {
        let write = if rights.writable { libc::S_IWUSR } else { 0 };
        let now = now();
        File {
            device,
            accounting,
            rights,
            kept: Mutex::new(Kept {
                atime: now,
                mtime: now,
                mode: libc::S_IFREG | libc::S_IRUSR | write,
                uid: rustix::process::getuid().as_raw(),
                gid: rustix::process::getgid().as_raw(),
            }),
            touched: AtomicBool::new(false),
            size_turns,
            stop,
        }
    }

    /// Does what is neither a read nor a write; what is answered.
    pub(super) async fn perform(&self, operation: Operation) -> Result<Body, Errno> {
        match operation {
            Operation::GetAttributes => {}
            Operation::SetAttributes(wanted) => self.set_attributes(wanted).await?,
            Operation::Open(open_flags) => {
                self.truncate_on_open(open_flags).await?;
                let flags = proto::OPEN_DIRECT_IO | proto::OPEN_PARALLEL_DIRECT_WRITES;
                let reads_only = open_flags & libc::O_ACCMODE as u32 == libc::O_RDONLY as u32;
                let handle = if reads_only {
                    OPENED_TO_READ
                } else {
                    OPENED_TO_WRITE
                };
                return Ok(proto::opened(handle, flags));
            }
            Operation::StatFs => {
                let (blocks, free, block_bytes) = self.blocks();
                return Ok(proto::file_system(blocks, free, block_bytes));
            }
            Operation::Release | Operation::Flush(OPENED_TO_READ) => return Ok(Body::default()),
            // `umount` returns before the server has closed the image. It needs all files closed, so what
            // was written is in the image by then, and a copy of it has that.
            Operation::Sync | Operation::Flush(_) => {
                let synced = self.device.flush().await;
                return synced
                    .map(|()| Body::default())
                    .map_err(|error| errno(&error));
            }
            Operation::Allocate(wanted) => {
                return self.allocate(wanted).await.map(|()| Body::default());
            }
            Operation::Seek(wanted) => return self.seek(wanted).await.map(proto::sought),
            // Reads and writes go another way; the greeting comes once.
            Operation::Init(_)
            | Operation::Read(_)
            | Operation::Write(_)
            | Operation::Silent
            | Operation::Unknown => return Err(libc::ENOSYS),
        }
        Ok(self.attributes().encode(ATTRIBUTES_SECONDS))
    }

    /// What it is.
    fn attributes(&self) -> Attributes {
        let size_bytes = self.device.size_bytes();
        let mut kept = self.kept.lock();
        if self.touched.swap(false, Ordering::Relaxed) {
            kept.mtime = now();
        }
        Attributes {
            size_bytes,
            blocks: self.allocated_bytes(size_bytes).div_ceil(512),
            atime: kept.atime,
            mtime: kept.mtime,
            mode: kept.mode,
            uid: kept.uid,
            gid: kept.gid,
            block_size_bytes: BLOCK_BYTES,
        }
    }

    /// What the image takes on the host; all of the disk, where nobody knows.
    fn allocated_bytes(&self, size_bytes: u64) -> u64 {
        allocated_bytes(&*self.device).unwrap_or(size_bytes)
    }

    /// The size of the file system and what of it is free: blocks and their length.
    fn blocks(&self) -> (u64, u64, u32) {
        let size_bytes = self.device.size_bytes();
        let blocks = size_bytes.div_ceil(u64::from(BLOCK_BYTES));
        let used = self.allocated_bytes(size_bytes) / u64::from(BLOCK_BYTES);
        (blocks, blocks.saturating_sub(used), BLOCK_BYTES)
    }

    /// Sets what is asked for, or nothing.
    async fn set_attributes(&self, wanted: SetAttributes) -> Result<(), Errno> {
        self.check_attributes(&wanted)?;
        if wanted.valid & set::SIZE != 0 {
            let _turn = self.size_turns.take(&*self.device).await;
            let truncate = self.device.truncate(wanted.size_bytes);
            truncate.await.map_err(|error| errno(&error))?;
            self.touched.store(true, Ordering::Relaxed);
        }
        let mut kept = self.kept.lock();
        let has = |bit: u32| wanted.valid & bit != 0;
        if has(set::MODE) {
            kept.mode = libc::S_IFREG | wanted.mode & 0o7777;
        }
        if has(set::UID) {
            kept.uid = wanted.uid;
        }
        if has(set::GID) {
            kept.gid = wanted.gid;
        }
        let time = |explicit: u32, implicit: u32, time: Time| match (has(implicit), has(explicit)) {
            (true, _) => Some(now()),
            (false, true) => Some(time),
            (false, false) => None,
        };
        if let Some(atime) = time(set::ATIME, set::ATIME_NOW, wanted.atime) {
            kept.atime = atime;
        }
        if let Some(mtime) = time(set::MTIME, set::MTIME_NOW, wanted.mtime) {
            kept.mtime = mtime;
            self.touched.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Truncates the disk for an open with `O_TRUNC` where writes make it longer again. Elsewhere the
    /// size and the data stay, as with a block device: a disk that was cut to nothing could not be written.
    async fn truncate_on_open(&self, open_flags: u32) -> Result<(), Errno> {
        if open_flags & libc::O_TRUNC as u32 == 0 {
            return Ok(());
        }
        self.check_writable()?;
        if !self.rights.growable {
            return Ok(());
        }
        let _turn = self.size_turns.take(&*self.device).await;
        let truncated = self.device.truncate(0).await;
        self.touched.store(true, Ordering::Relaxed);
        truncated.map_err(|error| errno(&error))
    }

    fn check_attributes(&self, wanted: &SetAttributes) -> Result<(), Errno> {
        let known = set::MODE
            | set::UID
            | set::GID
            | set::SIZE
            | set::ATIME
            | set::MTIME
            | set::HANDLE
            | set::ATIME_NOW
            | set::MTIME_NOW
            | set::LOCK_OWNER
            | set::CTIME
            | set::KILL_SUIDGID;
        let has = |bits: u32| wanted.valid & bits != 0;
        let rights = &self.rights;
        if has(!known) || has(set::UID | set::GID) && !rights.allow_other {
            return Err(libc::EOPNOTSUPP);
        }
        if has(set::MODE) {
            if wanted.mode & 0o222 != 0 && !rights.writable {
                return Err(libc::EROFS);
            }
            // Nobody else gets that far.
            if wanted.mode & 0o077 != 0 && !rights.allow_other {
                return Err(libc::EPERM);
            }
        }
        if has(set::SIZE) {
            self.check_writable()?;
            if !rights.resizable && wanted.size_bytes != self.device.size_bytes() {
                return Err(libc::EPERM);
            }
        }
        Ok(())
    }

    fn check_writable(&self) -> Result<(), Errno> {
        match self.rights.writable {
            true => Ok(()),
            false => Err(libc::EACCES),
        }
    }

    /// Whether an operation changes nothing, or something that may be changed.
    pub(super) fn takes(&self, operation: &Operation) -> bool {
        let rights = &self.rights;
        match operation {
            Operation::Write(transfer) => {
                rights.writable && (rights.growable || self.left(transfer.offset_bytes) > 0)
            }
            Operation::Allocate(_) => rights.writable,
            _ => true,
        }
    }

    /// Starts a read, of what there is up to the end; `None` if there is nothing.
    pub(super) fn read(&self, transfer: Transfer) -> Option<Io<Buffer>> {
        let left = self.left(transfer.offset_bytes);
        let len_bytes = u64::from(transfer.len_bytes).min(left);
        let buffer = (len_bytes > 0).then(|| Buffer::for_read(len_bytes as usize))?;
        Some(self.device.read(transfer.offset_bytes, buffer))
    }

    /// As [`File::read`], straight into `memory`, which has room for all of it; how much it will
    /// be. `None`: not this range, as it lies.
    pub(super) fn read_into(
        &self,
        transfer: Transfer,
        mut memory: SharedBuffer,
    ) -> Option<(Io<()>, usize)> {
        let left = self.left(transfer.offset_bytes);
        let len_bytes = u64::from(transfer.len_bytes).min(left) as usize;
        if len_bytes < memory.len() {
            memory = memory.piece(0, len_bytes);
        }
        let io = self.device.read_into(transfer.offset_bytes, &[memory])?;
        Some((io, len_bytes))
    }

    /// How much there is from an offset on, in bytes.
    fn left(&self, offset_bytes: u64) -> u64 {
        self.device.size_bytes().saturating_sub(offset_bytes)
    }

    /// Starts a write where it needs nothing but that; otherwise gives the data back.
    pub(super) fn write_at_once(
        &self,
        transfer: Transfer,
        data: Buffer,
    ) -> Result<Io<Buffer>, Buffer> {
        match self.writes_at_once(transfer, data.len()) {
            Some(flags) => Ok(self.device.write(transfer.offset_bytes, data, flags)),
            None => Err(data),
        }
    }

    /// As [`File::write_at_once`], straight from `memory`. `None`: not so, and nothing was done.
    pub(super) fn write_from(&self, transfer: Transfer, memory: SharedBuffer) -> Option<Io<()>> {
        let flags = self.writes_at_once(transfer, memory.len())?;
        self.device
            .write_from(transfer.offset_bytes, &[memory], flags)
    }

    /// How a write is done that needs nothing but that.
    fn writes_at_once(&self, transfer: Transfer, len_bytes: usize) -> Option<RequestFlags> {
        let fits = len_bytes as u64 <= self.left(transfer.offset_bytes);
        if !fits || !self.rights.writable {
            return None;
        }
        self.touched.store(true, Ordering::Relaxed);
        let is_durable = transfer.open_flags & libc::O_DSYNC as u32 != 0;
        Some(RequestFlags::default().fua(is_durable))
    }

    /// Writes what fits, or makes the file longer if it may, and returns how much was written.
    pub(super) async fn write(&self, transfer: Transfer, data: Buffer) -> Result<u32, Errno> {
        self.check_writable()?;
        let mut data = data;
        let end = end_of(transfer.offset_bytes, data.len() as u64)?;
        if self.rights.growable {
            self.grow(end, end, Preallocation::Off).await?;
        }
        // Somebody may have made it shorter meanwhile.
        let left = self.left(transfer.offset_bytes);
        data.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        if data.is_empty() {
            return Err(libc::EIO);
        }
        let len_bytes = data.len() as u32;
        match self.write_at_once(transfer, data) {
            Ok(io) => io.await.map_err(|error| errno(&error))?,
            Err(_) => return Err(libc::EIO),
        };
        Ok(len_bytes)
    }

    /// Makes the file `end` long unless it is longer, with space for what lies behind `from`.
    async fn grow(&self, from: u64, end: u64, ahead: Preallocation) -> Result<(), Errno> {
        let _turn = self.size_turns.take(&*self.device).await;
        let grown = async {
            if from > self.device.size_bytes() && from < end {
                resize(&*self.device, from, Preallocation::Off).await?;
            }
            if end > self.device.size_bytes() {
                return resize(&*self.device, end, ahead).await;
            }
            Ok(())
        };
        let result: vellum_io::Result<()> = grown.await;
        self.touched.store(true, Ordering::Relaxed);
        result.map_err(|error| errno(&error))
    }

    /// `fallocate(2)`.
    async fn allocate(&self, wanted: Allocate) -> Result<(), Errno> {
        self.check_writable()?;
        let (from, end) = (
            wanted.offset_bytes,
            end_of(wanted.offset_bytes, wanted.len_bytes)?,
        );
        let mode = wanted.mode as i32;
        let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let size_bytes = self.device.size_bytes();
        let grows = !keeps_size && end > size_bytes;
        match mode & !libc::FALLOC_FL_KEEP_SIZE {
            0 => {
                self.check_allocated(from, end.min(size_bytes)).await?;
                if grows {
                    self.check_resizable()?;
                    self.grow(from, end, Preallocation::Falloc).await?;
                } else if from >= size_bytes {
                    // Space behind the end, which no disk has.
                    return Err(libc::EOPNOTSUPP);
                }
                Ok(())
            }
            libc::FALLOC_FL_PUNCH_HOLE if keeps_size => {
                let zeroes = ZeroRequest::default().may_unmap(true);
                self.zero(from, end.min(size_bytes), zeroes).await
            }
            libc::FALLOC_FL_ZERO_RANGE => {
                if grows {
                    self.check_resizable()?;
                    self.grow(end, end, Preallocation::Off).await?;
                }
                self.zero(from, end.min(size_bytes), ZeroRequest::default())
                    .await
            }
            _ => Err(libc::EOPNOTSUPP),
        }
    }

    fn check_resizable(&self) -> Result<(), Errno> {
        match self.rights.resizable {
            true => Ok(()),
            false => Err(libc::ENOSPC),
        }
    }

    /// Space can be made ahead only behind the end: making it elsewhere would be a write that
    /// other users of the disk do not see coming. What has its space already needs nothing.
    async fn check_allocated(&self, from: u64, end: u64) -> Result<(), Errno> {
        let mut at = from;
        let mut extents = 0_u32;
        while at < end {
            let status = self.device.block_status(at, end - at, u32::MAX);
            let extent = status.await.map_err(|error| errno(&error))?;
            // What lies in a lower layer is copied when it is written.
            if !extent.kind.is_data() || extent.depth > 0 {
                return Err(libc::EOPNOTSUPP);
            }
            at += extent.len_bytes.clamp(1, end - at);
            self.take_turns(&mut extents).await?;
        }
        Ok(())
    }

    async fn zero(&self, from: u64, end: u64, zeroes: ZeroRequest) -> Result<(), Errno> {
        self.touched.store(true, Ordering::Relaxed);
        let mut at = from;
        while at < end {
            // Cuts are where clusters begin.
            let len_bytes = (ZERO_BYTES - at % ZERO_BYTES).min(end - at);
            let zero = self.device.write_zeroes(at, len_bytes, zeroes);
            zero.await.map_err(|error| errno(&error))?;
            at += len_bytes;
            self.go_on().await?;
        }
        Ok(())
    }

    /// Lets others on the lane have their turn now and then.
    async fn take_turns(&self, extents: &mut u32) -> Result<(), Errno> {
        *extents += 1;
        match extents.is_multiple_of(EXTENTS_A_TURN) {
            true => self.go_on().await,
            false => Ok(()),
        }
    }

    /// Lets others have their turn; fails if the export ends meanwhile.
    async fn go_on(&self) -> Result<(), Errno> {
        lane::yield_now().await;
        match self.stop.is_requested() {
            true => Err(libc::EIO),
            false => Ok(()),
        }
    }

    /// `lseek(2)`, for data and holes: what reads as zeroes without being read is a hole.
    async fn seek(&self, wanted: Seek) -> Result<u64, Errno> {
        let wants_hole = match wanted.whence as i32 {
            libc::SEEK_HOLE => true,
            libc::SEEK_DATA => false,
            _ => return Err(libc::EINVAL),
        };
        let end = self.device.size_bytes();
        let mut at = wanted.offset_bytes;
        if at >= end {
            return Err(libc::ENXIO);
        }
        let mut extents = 0_u32;
        while at < end {
            let status = self.device.block_status(at, end - at, u32::MAX);
            let extent = status.await.map_err(|error| errno(&error))?;
            if extent.kind.is_zero() == wants_hole {
                return Ok(at);
            }
            at += extent.len_bytes.clamp(1, end - at);
            self.take_turns(&mut extents).await?;
        }
        match wants_hole {
            true => Ok(end),
            false => Err(libc::ENXIO),
        }
    }
}

/// Makes a device at least `end` long: formats count in sectors.
async fn resize(device: &dyn BlockDevice, end: u64, ahead: Preallocation) -> vellum_io::Result<()> {
    let rounded = end.next_multiple_of(SECTOR_BYTES);
    match device.resize(end, ahead).await {
        Err(error) if error.kind() == ErrorKind::InvalidArgument && rounded != end => {
            device.resize(rounded, ahead).await
        }
        done => done,
    }
}

fn allocated_bytes(device: &dyn BlockDevice) -> Option<u64> {
    let target = target_of(device);
    let device = target.as_deref().unwrap_or(device);
    let known = device.allocated_bytes().ok().flatten();
    known.or_else(|| device.storage()?.allocated_bytes().ok().flatten())
}

/// Where a range ends; files end below 2^63.
fn end_of(offset_bytes: u64, len_bytes: u64) -> Result<u64, Errno> {
    let end = offset_bytes.checked_add(len_bytes);
    end.filter(|end| i64::try_from(*end).is_ok())
        .ok_or(libc::EFBIG)
}

#[cfg(test)]
mod tests {
    use futures_util::future::join;
    use vellum::{Raw, RawOptions, delegate};
    use vellum_io::lane::block_on;
    use vellum_storage::MemStorage;

    use super::*;

    /// A device on which others have their turn before a size is set.
    #[derive(Debug)]
    struct SlowlyResized(Arc<Raw>);

    impl BlockDevice for SlowlyResized {
        delegate!(
            0: info, size_bytes, read, write, write_zeroes, discard, flush, block_status, truncate,
            close, identity,
        );

        fn resize(&self, size_bytes: u64, preallocation: Preallocation) -> Io<()> {
            let device = self.0.clone();
            Io::start(async move {
                lane::yield_now().await;
                device.resize(size_bytes, preallocation).await
            })
        }
    }

    #[test]
    fn an_open_that_truncates_cuts_only_a_growable_disk() {
        let open = |growable, writable| {
            let storage = Arc::new(MemStorage::with_bytes(vec![1; 4096]));
            let device = Raw::open(storage, RawOptions::default()).expect("a device");
            let rights = Rights {
                writable,
                growable,
                // As in the daemon: an explicit truncate is taken.
                resizable: true,
                allow_other: false,
            };
            let accounting = Arc::new(Accounting::default());
            let turns = SizeTurns::default();
            let file = File::new(device.clone(), accounting, rights, turns, Stop::new());
            let flags = (libc::O_WRONLY | libc::O_TRUNC) as u32;
            let opened = block_on(file.perform(Operation::Open(flags)));
            (opened.map(drop), device.size_bytes())
        };
        assert_eq!(open(false, true), (Ok(()), 4096));
        assert_eq!(open(true, true), (Ok(()), 0));
        assert_eq!(open(false, false), (Err(libc::EACCES), 4096));
        assert_eq!(open(true, false), (Err(libc::EACCES), 4096));
    }

    #[test]
    fn two_exports_of_a_disk_that_grow_it_at_once_cut_nothing_off() {
        let storage = Arc::new(MemStorage::with_bytes(vec![1; 512]));
        let raw = Raw::open(storage, RawOptions::default()).expect("a device");
        let device = Arc::new(SlowlyResized(raw));
        let turns = SizeTurns::default();
        let rights = Rights {
            writable: true,
            growable: true,
            resizable: true,
            allow_other: false,
        };
        let file = || {
            let accounting = Arc::new(Accounting::default());
            let turns = turns.clone();
            File::new(device.clone(), accounting, rights, turns, Stop::new())
        };
        let (one, other) = (file(), file());
        let write = async |file: &File, offset_bytes: u64| {
            let transfer = Transfer {
                offset_bytes,
                len_bytes: 512,
                open_flags: 0,
            };
            file.write(transfer, Buffer::copy_of(&[7; 512])).await
        };
        block_on(async {
            let written = join(write(&one, 64 << 10), write(&other, 4 << 10)).await;
            assert_eq!(written, (Ok(512), Ok(512)));
            assert_eq!(device.size_bytes(), (64 << 10) + 512);
            let read = device.read(64 << 10, Buffer::for_read(512)).await;
            assert_eq!(read.expect("read")[..], [7; 512]);
        });
    }
}
