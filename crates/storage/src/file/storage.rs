//! A file of this host as a storage.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use vellum_io::align::{Alignment, RangeLocks, SharedGuard};
use vellum_io::buffer::total_len;
use vellum_io::lane::{self, Descriptor, Op, Request, finish_buffers, finish_unit};
use vellum_io::shared_memory::{self, SharedBuffer};
use vellum_io::{Buffers, Error, ErrorKind, Io, Result};

use crate::file::as_file::AsFile;
use crate::lock::{self, LockConflict, PermissionSet, Permissions};
use crate::{Capabilities, Storage, StorageExtent, WriteFlags, ZeroFlags, sys};

use super::drop_behind::{self, DropBehind};
use super::extents;
use super::held_locks::HeldLocks;
use super::open::OpenedFile;
use super::options::FileOptions;
use super::times::FileTimes;

/// A regular file or a block device.
pub struct FileStorage {
    pub(crate) file: Arc<File>,
    pub(super) locks: Arc<HeldLocks>,
}

/// What the tasks of a file's requests share.
pub(crate) struct File {
    pub(crate) descriptor: Arc<Descriptor>,
    pub(crate) alignment: Alignment,
    /// What the file is for the system, by any name.
    pub(crate) device_and_inode: (u64, u64),
    /// Present for devices.
    pub(crate) device: Option<Device>,
    pub(crate) read_only: bool,
    pub(crate) no_flush: bool,
    pub(crate) discard: bool,
    /// Ranges that requests are changing, where direct I/O wants whole blocks.
    pub(crate) ranges: Arc<RangeLocks>,
    pub(crate) supports: Supports,
    pub(super) extents: extents::ExtentCache,
    /// The same file without direct I/O, opened when it is wanted first.
    pub(crate) through_cache: Arc<OnceLock<std::fs::File>>,
    /// `None`: what is read stays in the page cache as the kernel likes.
    pub(super) behind: Option<DropBehind>,
}

/// What a device never changes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Device {
    pub(crate) len_bytes: u64,
    pub(crate) blocks: Alignment,
}

/// What has not failed yet as unsupported.
#[derive(Debug)]
pub(crate) struct Supports {
    pub(crate) punch_hole: AtomicBool,
    pub(crate) zero_range: AtomicBool,
    pub(crate) allocate: AtomicBool,
    pub(crate) block_zero_out: AtomicBool,
    pub(crate) clone_inside: AtomicBool,
    /// From another file: it may lie on another file system.
    pub(crate) clone_across: AtomicBool,
}

impl FileStorage {
    /// Opens a file, with its locks held as the options say.
    ///
    /// # Errors
    /// [`ErrorKind::Locked`] if another opener conflicts, at once; else what the system says.
    pub fn open(path: impl AsRef<Path>, options: &FileOptions) -> Result<Arc<Self>> {
        Self::lock_and_open(OpenedFile::begin(path.as_ref(), options)?, options)
    }

    /// As [`FileStorage::open`], for a file that the caller has opened: as `options` say, with
    /// `O_DIRECT` too if they do, and without `O_NONBLOCK`. `name` is for messages.
    ///
    /// # Errors
    /// As [`FileStorage::open`].
    pub fn from_descriptor(
        fd: OwnedFd,
        name: impl Into<String>,
        options: &FileOptions,
    ) -> Result<Arc<Self>> {
        Self::lock_and_open(OpenedFile::of(fd, name.into(), options)?, options)
    }

    fn lock_and_open(opening: OpenedFile, options: &FileOptions) -> Result<Arc<Self>> {
        if let Some(permissions) = options.permissions() {
            opening
                .lock(permissions)
                .map_err(LockConflict::into_error)?;
        }
        Self::opened(opening, options)
    }

    /// As [`FileStorage::open`], but waits, up to 15 seconds, for locks that no living
    /// process holds: those of a killed one, until the kernel is done with its requests.
    ///
    /// # Errors
    /// [`ErrorKind::Locked`] if a living process conflicts, or the wait was in vain; else what
    /// the system says.
    pub async fn open_patiently(
        path: impl AsRef<Path>,
        options: &FileOptions,
    ) -> Result<Arc<Self>> {
        Self::wait_and_open(OpenedFile::begin(path.as_ref(), options)?, options).await
    }

    /// As [`FileStorage::from_descriptor`], but waits as [`FileStorage::open_patiently`] does.
    ///
    /// # Errors
    /// As [`FileStorage::open_patiently`].
    pub async fn from_descriptor_patiently(
        fd: OwnedFd,
        name: impl Into<String>,
        options: &FileOptions,
    ) -> Result<Arc<Self>> {
        Self::wait_and_open(OpenedFile::of(fd, name.into(), options)?, options).await
    }

    async fn wait_and_open(opening: OpenedFile, options: &FileOptions) -> Result<Arc<Self>> {
        if let Some(permissions) = options.permissions() {
            lock::patiently(&opening.name, || opening.lock(permissions)).await?;
        }
        Self::opened(opening, options)
    }

    pub(super) fn opened(opening: OpenedFile, options: &FileOptions) -> Result<Arc<Self>> {
        let file = Arc::new(opening.finish(options)?);
        let storage = FileStorage {
            locks: HeldLocks::new(file.descriptor.clone(), options.permissions()),
            file,
        };
        if let Some(permissions) = options.permissions() {
            storage.note_permissions(permissions);
        }
        Ok(Arc::new(storage))
    }

    /// What this opener does and lets others do; `None`: nothing is locked.
    pub fn permissions(&self) -> Option<Permissions> {
        self.locks.wanted()
    }

    /// Changes what this opener does and lets others do.
    ///
    /// # Errors
    /// [`ErrorKind::Locked`] if another opener conflicts, else what the system says. Nothing
    /// has changed then.
    pub fn set_permissions(&self, permissions: Permissions) -> Result<()> {
        self.try_permissions(permissions)
            .map_err(LockConflict::into_error)
    }

    /// As [`FileStorage::set_permissions`], but waits as [`FileStorage::open_patiently`] does.
    ///
    /// # Errors
    /// As [`FileStorage::set_permissions`].
    pub async fn set_permissions_patiently(&self, permissions: Permissions) -> Result<()> {
        lock::patiently(self.file.name(), || self.try_permissions(permissions)).await
    }

    pub(crate) fn try_permissions(&self, permissions: Permissions) -> Result<(), LockConflict> {
        self.locks.change(permissions)?;
        self.note_permissions(permissions);
        Ok(())
    }

    /// The file of `source` and this one, which is to take what lies there.
    fn between_files(
        &self,
        operation: &'static str,
        source: &dyn Storage,
    ) -> Result<(Arc<File>, Arc<File>)> {
        self.file.refuse_if_read_only(operation)?;
        match source.as_file() {
            Some(source) => Ok((source.file.clone(), self.file.clone())),
            None => Err(self.file.cannot(operation)),
        }
    }

    pub(crate) fn note_permissions(&self, permissions: Permissions) {
        let written_by_others = permissions.shared.contains(PermissionSet::WRITE);
        let keep = self.file.read_only && !written_by_others;
        self.file.extents.keep_holes(keep);
    }

    /// What no two files of the system have in common at a time, and all names of one file do:
    /// the device that it lies on, and its inode there. Of a block device its number, which all its nodes share.
    pub fn device_and_inode(&self) -> (u64, u64) {
        self.file.device_and_inode
    }

    /// Whether this is a device rather than a regular file.
    pub fn is_device(&self) -> bool {
        self.file.device.is_some()
    }

    /// When a regular file was changed. The time of a device is that of its name, which writes do not change.
    pub(crate) fn times(&self) -> Option<FileTimes> {
        let stat = self.file.stat().ok();
        stat.filter(|_| self.file.device.is_none())
            .map(|stat| FileTimes::of_stat(&stat))
    }
}

impl File {
    pub(crate) fn name(&self) -> &str {
        self.descriptor.name()
    }

    pub(crate) fn len_bytes(&self) -> Result<u64> {
        match self.device {
            Some(device) => Ok(device.len_bytes),
            None => self.stat().map(|stat| stat.st_size as u64),
        }
    }

    fn stat(&self) -> Result<rustix::fs::Stat> {
        sys::stat(&*self.descriptor)
            .map_err(|errno| Error::from_errno("stat", errno).target(self.name()))
    }

    pub(crate) fn request(&self, op: Op, buffers: Buffers) -> Request {
        Request::new(self.descriptor.clone(), op, buffers)
    }

    pub(crate) fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        self.note_read(offset_bytes, total_len(&buffers));
        lane::submit(
            self.request(Op::Read { offset_bytes }, buffers),
            finish_buffers,
        )
    }

    /// Lets go of what was read before, if that is wanted.
    fn note_read(&self, offset_bytes: u64, len_bytes: u64) {
        if let Some(behind) = &self.behind {
            let done_with = behind.note(offset_bytes..offset_bytes + len_bytes);
            if !done_with.is_empty() {
                self.let_go(done_with);
            }
        }
    }

    /// Has a worker take ranges out of the page cache; nobody waits for it.
    fn let_go(&self, ranges: Vec<std::ops::Range<u64>>) {
        let fd = self.descriptor.clone();
        let work = move || drop_behind::drop_cached(&*fd, &ranges);
        drop(lane::call(&self.descriptor, "let go", work, finish_unit));
    }

    pub(crate) fn write(&self, offset_bytes: u64, buffers: Buffers, durable: bool) -> Io<Buffers> {
        self.write_whole_blocks(offset_bytes, buffers, durable, None)
    }

    /// Writes whole blocks; `guard` is held until the kernel is done.
    fn write_whole_blocks(
        &self,
        offset_bytes: u64,
        buffers: Buffers,
        durable: bool,
        guard: Option<SharedGuard>,
    ) -> Io<Buffers> {
        let op = Op::Write {
            offset_bytes,
            durable,
        };
        let mut request = self.request(op, buffers);
        request.range_guard = guard;
        lane::submit(request, finish_buffers)
    }

    /// Whether a write that is to be durable may have been told less than the truth: what the
    /// kernel could not write from the page cache it tells only one of those who ask.
    pub(crate) fn shares_errors(&self, durable: bool) -> bool {
        durable && self.alignment.request_bytes == 1
    }

    pub(crate) fn sync(&self) -> Io<()> {
        let Some(op) = self.descriptor.flush().filter(|_| !self.no_flush) else {
            return Io::ready(Ok(()));
        };
        let Op::Sync { changes } = op else {
            return Io::ready(Ok(()));
        };
        let file = self.descriptor.clone();
        let synced = lane::submit(self.request(op, Buffers::new()), finish_unit);
        lane::task(async move {
            synced.await?;
            file.accept_sync("flush", changes).await
        })
    }

    fn refuse_if_read_only(&self, operation: &'static str) -> Result<()> {
        if self.read_only {
            let error = Error::new(ErrorKind::ReadOnly, operation, "the file is open read-only");
            return Err(error.target(self.name()));
        }
        Ok(())
    }
}

impl Storage for FileStorage {
    fn capabilities(&self) -> Capabilities {
        let file = &self.file;
        let regular = file.device.is_none();
        Capabilities {
            request_alignment_bytes: file.alignment.request_bytes,
            memory_alignment_bytes: file.alignment.memory_bytes,
            can_punch: file.discard && file.supports.punch_hole.load(Ordering::Relaxed),
            can_zero: file.can_zero(),
            has_zero_init: regular,
            read_only: file.read_only,
            growable: regular,
        }
    }

    fn name(&self) -> &str {
        self.file.name()
    }

    fn len_bytes(&self) -> Result<u64> {
        self.file.len_bytes()
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        if buffers.iter().all(|buffer| buffer.is_empty()) {
            return Io::ready(Ok(buffers));
        }
        if self.file.alignment.fits(offset_bytes, &buffers) {
            return self.file.read(offset_bytes, buffers);
        }
        let file = self.file.clone();
        lane::task(async move { file.read_bounced(offset_bytes, buffers).await })
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        if let Err(error) = self.file.refuse_if_read_only("write") {
            return Io::ready(Err(error));
        }
        if buffers.iter().all(|buffer| buffer.is_empty()) {
            return Io::ready(Ok(buffers));
        }
        let durable = flags.fua && !self.file.no_flush;
        let file = &self.file;
        let fits = file.alignment.fits(offset_bytes, &buffers);
        if fits && file.alignment.request_bytes == 1 && !durable {
            return file.write(offset_bytes, buffers, durable);
        }
        if fits
            && !file.shares_errors(durable)
            && let Some(guard) = file.ranges.try_lock_shared()
        {
            return file.write_whole_blocks(offset_bytes, buffers, durable, Some(guard));
        }
        let file = file.clone();
        lane::task(async move {
            match fits {
                true => file.write_in_turn(offset_bytes, buffers, durable).await,
                false => file.write_bounced(offset_bytes, buffers, durable).await,
            }
        })
    }

    fn read_into(&self, offset_bytes: u64, into: &[SharedBuffer]) -> Option<Io<()>> {
        let file = &self.file;
        let len_bytes = shared_memory::total_len(into) as u64;
        if len_bytes == 0 || !file.alignment.fits_shared(offset_bytes, into) {
            return None;
        }
        file.note_read(offset_bytes, len_bytes);
        let op = Op::Read { offset_bytes };
        let request = Request::shared(file.descriptor.clone(), op, into.into());
        Some(lane::submit(request, finish_unit))
    }

    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: WriteFlags,
    ) -> Option<Io<()>> {
        let file = &self.file;
        let durable = flags.fua && !file.no_flush;
        let len_bytes = shared_memory::total_len(from);
        let fits = len_bytes > 0 && file.alignment.fits_shared(offset_bytes, from);
        // What takes more than one step is not done here.
        if file.read_only || !fits || durable {
            return None;
        }
        let guard = match file.alignment.request_bytes {
            1 => None,
            _ => Some(file.ranges.try_lock_shared()?),
        };
        let op = Op::Write {
            offset_bytes,
            durable,
        };
        let mut request = Request::shared(file.descriptor.clone(), op, from.into());
        request.range_guard = guard;
        Some(lane::submit(request, finish_unit))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        if let Err(error) = self.file.refuse_if_read_only("write zeroes") {
            return Io::ready(Err(error));
        }
        if len_bytes == 0 {
            return Io::ready(Ok(()));
        }
        let file = self.file.clone();
        lane::task(async move { file.write_zeroes(offset_bytes, len_bytes, flags).await })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        if let Err(error) = self.file.refuse_if_read_only("discard") {
            return Io::ready(Err(error));
        }
        if len_bytes == 0 || !self.file.discard {
            return Io::ready(Ok(()));
        }
        let file = self.file.clone();
        lane::task(async move { file.discard(offset_bytes, len_bytes).await })
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        if let Err(error) = self.file.refuse_if_read_only("allocate") {
            return Io::ready(Err(error));
        }
        if len_bytes == 0 {
            return Io::ready(Ok(()));
        }
        let file = self.file.clone();
        lane::task(async move { file.allocate(offset_bytes, len_bytes).await })
    }

    fn flush(&self) -> Io<()> {
        self.file.sync()
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        if let Err(error) = self.file.refuse_if_read_only("truncate") {
            return Io::ready(Err(error));
        }
        match self.file.device {
            // A device keeps its length; what lies beyond the new end is unused.
            Some(device) if len_bytes <= device.len_bytes => return Io::ready(Ok(())),
            Some(_) => {
                let message = "Cannot grow device files";
                let error = Error::new(ErrorKind::InvalidArgument, "truncate", message);
                return Io::ready(Err(error.target(self.name())));
            }
            None => {}
        }
        match self.locks.resize() {
            Ok(resizing) => self.file.truncate(len_bytes, resizing),
            Err(error) => Io::ready(Err(error)),
        }
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        Io::ready(self.file.block_status(offset_bytes, len_bytes))
    }

    fn copy_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        match self.between_files("copy range", source) {
            Err(error) => Io::ready(Err(error)),
            Ok((source, file)) => lane::task(async move {
                file.copy_range(&source, from_bytes, to_bytes, len_bytes)
                    .await
            }),
        }
    }

    fn may_clone_from(&self, source: &dyn Storage) -> bool {
        source.as_file().is_some_and(|source| {
            let supported = self.file.clone_support(&source.file);
            supported.is_some_and(|flag| flag.load(Ordering::Relaxed))
        })
    }

    fn clone_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        match self.between_files("clone range", source) {
            Err(error) => Io::ready(Err(error)),
            Ok((source, file)) => lane::task(async move {
                file.clone_range(&source, from_bytes, to_bytes, len_bytes)
                    .await
            }),
        }
    }

    fn transparent_storage(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn modified_at(&self) -> Result<Option<u64>> {
        if self.file.device.is_some() {
            // That of its name, which writes do not change.
            return Ok(None);
        }
        let times = FileTimes::of_stat(&self.file.stat()?);
        Ok(times.settled_modified_at(SystemTime::now()))
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        // The kernel counts in units of 512 bytes, whatever the block size.
        self.file
            .stat()
            .map(|stat| Some(stat.st_blocks as u64 * 512))
    }

    fn free_bytes(&self) -> Io<Option<u64>> {
        if self.file.device.is_some() {
            return Io::ready(Ok(None));
        }
        let fd = self.file.descriptor.clone();
        // Not as a plain call: a server may have to be asked.
        let work = move || sys::free_bytes(&*fd);
        lane::call(&self.file.descriptor, "look for room", work, |done| {
            let told = done.value()?;
            Ok(u64::try_from(told).ok())
        })
    }
}

impl fmt::Debug for FileStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStorage")
            .field("name", &self.file.name())
            .field("alignment", &self.file.alignment)
            .field("read_only", &self.file.read_only)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use crate::Locks;

    use super::*;

    #[test]
    fn locks_end_with_the_storage_even_if_the_kernel_still_holds_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, [0; 512]).expect("a file");
        let alone = FileOptions {
            locks: Locks::Of(Permissions {
                used: PermissionSet::WRITE,
                shared: PermissionSet::NONE,
            }),
            ..FileOptions::default()
        };
        let first = FileStorage::open(&path, &alone).expect("the file");
        let held = first.file.descriptor.as_fd().try_clone_to_owned();
        let refused = FileStorage::open(&path, &alone).expect_err("it is locked");
        assert_eq!(refused.kind(), ErrorKind::Locked);
        drop(first);
        FileStorage::open(&path, &alone).expect("nobody uses it");
        drop(held);
    }

    /// Locks `file`, and leaves it to the kernel alone: a message that nobody has received.
    fn lock_for_nobody(file: std::fs::File) -> (UnixStream, UnixStream) {
        let locked = lock::change(
            file.as_raw_fd(),
            "file",
            Permissions::NONE,
            Permissions::WRITER,
        );
        locked.expect("nobody uses it");
        let (from, to) = UnixStream::pair().expect("sockets");
        let fds = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        assert!(message.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [std::io::IoSlice::new(b"x")];
        sendmsg(&from, &bytes, &mut message, SendFlags::empty()).expect("sent");
        (from, to)
    }

    #[test]
    fn a_patient_open_of_a_descriptor_waits_for_locks_of_nobody() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, [0; 512]).expect("a file");
        let open = || std::fs::File::options().read(true).write(true).open(&path);
        let sockets = lock_for_nobody(open().expect("the file"));
        let options = FileOptions::default();
        let (first, second) = (open().expect("the file"), open().expect("the file"));
        let refused = FileStorage::from_descriptor(first.into(), "file", &options);
        assert_eq!(refused.expect_err("it is locked").kind(), ErrorKind::Locked);
        lane::block_on(async {
            let kernel = vellum_io::spawn(async move {
                lane::sleep(Duration::from_millis(50)).await;
                drop(sockets);
            });
            let opened = FileStorage::from_descriptor_patiently(second.into(), "file", &options);
            opened.await.expect("it was waited for");
            kernel.await;
        });
    }
}
