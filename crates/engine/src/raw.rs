//! The raw format: a storage, or a window of one, as it is.
//!
//! Requests inside the device go straight to the storage: no task, no copy, no
//! state of their own. Only a write that makes the device grow takes a task,
//! because the new size is known only once the write has succeeded; and, where a
//! somebody listens below (a debugger), what it has to be told of first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vellum_io::shared_memory::{SharedBuffer, total_len};
use vellum_io::spawn;
use vellum_storage::{
    BlockStatus, Capabilities, Event, EventListener, StorageIdentity, WriteFlags, ZeroFlags,
};

use crate::Preallocation;
use crate::qcow2::create::write::space;
use crate::{
    BlockDevice, Buffer, Buffers, DeviceInfo, DiskIdentity, Error, ErrorKind, Extent, ExtentKind,
    HostLocation, Io, RequestFlags, Result, Storage, ZeroRequest,
};

/// Guest sizes are whole sectors; a file that ends inside one is padded with zeroes.
const SECTOR_SIZE_BYTES: u64 = 512;

vellum_io::with_setters! {
    /// Which part of a storage a [`Raw`] shows, and how.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct RawOptions {
        /// Where the device starts in the storage.
        pub offset_bytes: u64,
        /// The size of the device; `None` takes the storage to its end, and lets the
        /// device grow where the storage can.
        pub size_bytes: Option<u64>,
        /// Refuse changing requests.
        pub read_only: bool,
    }
}

/// A device whose bytes are the bytes of a storage.
#[derive(Debug)]
pub struct Raw {
    storage: Arc<dyn Storage>,
    /// Who wants to be told of events, if somebody does.
    listener: Option<Arc<dyn EventListener>>,
    /// The storage's name, for all who ask where bytes lie.
    name: Arc<str>,
    format: &'static str,
    offset_bytes: u64,
    /// Shared with the tasks of growing writes, which may outlive a request's handle.
    size_bytes: Arc<AtomicU64>,
    fixed_size: bool,
    read_only: bool,
    /// Something was changed, so closing flushes.
    changed: AtomicBool,
    closed: AtomicBool,
}

impl Raw {
    /// Shows `storage`, or the window of it that `options` name, as a device.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the window does not lie inside the
    /// storage or is not made of whole sectors.
    pub fn open(storage: Arc<dyn Storage>, options: RawOptions) -> Result<Arc<Raw>> {
        Raw::open_as("raw", storage, options)
    }

    /// As [`Raw::open`], under the name of another driver: that of the node which the
    /// storage is.
    ///
    /// # Errors
    /// As [`Raw::open`].
    pub fn open_as(
        format: &'static str,
        storage: Arc<dyn Storage>,
        options: RawOptions,
    ) -> Result<Arc<Raw>> {
        let size_bytes = window_size(&*storage, &options)?;
        let read_only = options.read_only || storage.capabilities().read_only;
        Ok(Arc::new(Raw {
            name: storage.name().into(),
            // As in QEMU only the format tells of what it does.
            listener: storage.event_listener().filter(|_| format == "raw"),
            storage,
            format,
            offset_bytes: options.offset_bytes,
            size_bytes: Arc::new(AtomicU64::new(size_bytes)),
            fixed_size: options.size_bytes.is_some(),
            read_only,
            changed: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }))
    }

    /// Makes a request of the storage; who watches it is told of `events` before.
    #[inline]
    fn telling<T: 'static>(
        &self,
        events: &'static [Event],
        request: impl FnOnce(&Arc<dyn Storage>) -> Io<T> + 'static,
    ) -> Io<T> {
        let Some(listener) = self.listener.clone() else {
            return request(&self.storage);
        };
        let storage = self.storage.clone();
        Io::task(spawn(async move {
            for &event in events {
                listener.emit(event).await;
            }
            request(&storage).await
        }))
    }

    fn is_growable(&self) -> bool {
        self.grows_with(&self.storage.capabilities())
    }

    fn grows_with(&self, storage: &Capabilities) -> bool {
        !self.fixed_size && !self.read_only && storage.growable
    }

    fn error(&self, kind: ErrorKind, operation: &'static str, message: &str) -> Error {
        Error::new(kind, operation, message).target(self.storage.name())
    }

    /// Refuses requests on a closed device and beyond `limit_bytes`.
    fn check_range(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
        limit_bytes: u64,
    ) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(self.error(
                ErrorKind::InvalidArgument,
                operation,
                "the device is closed",
            ));
        }
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= limit_bytes => Ok(()),
            _ => Err(self
                .error(
                    ErrorKind::OutOfRange,
                    operation,
                    "request beyond the end of the device",
                )
                .at(offset_bytes)),
        }
    }

    /// Refuses changing requests where they may not be made; `Ok(true)` means
    /// that the request makes the device grow.
    fn check_change(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<bool> {
        if self.read_only {
            return Err(self.error(ErrorKind::ReadOnly, operation, "the device is read-only"));
        }
        let size_bytes = self.size_bytes();
        let limit_bytes = match self.is_growable() {
            true => i64::MAX as u64 - self.offset_bytes,
            false => size_bytes,
        };
        let checked = self.check_range(operation, offset_bytes, len_bytes, limit_bytes);
        checked.map_err(|error| match error.kind() {
            // As on a disk of that size, nothing more fits.
            ErrorKind::OutOfRange if self.fixed_size => {
                let message = "the window ends before the request does";
                self.error(ErrorKind::NoSpace, operation, message)
                    .at(offset_bytes)
            }
            _ => error,
        })?;
        self.note_change();
        Ok(offset_bytes + len_bytes > size_bytes)
    }

    #[inline]
    fn note_change(&self) {
        // A shared line is written once, not by every request.
        if !self.changed.load(Ordering::Relaxed) {
            self.changed.store(true, Ordering::Release);
        }
    }

    /// Where the storage ends after a resize from `from_bytes`, if that may be done.
    fn check_resize(
        &self,
        size_bytes: u64,
        from_bytes: u64,
        preallocation: Preallocation,
    ) -> Result<u64> {
        let refuse = |kind, message: &str| Err(self.error(kind, "truncate", message));
        if self.read_only {
            return refuse(ErrorKind::ReadOnly, "the device is read-only");
        }
        if self.fixed_size {
            return refuse(ErrorKind::Unsupported, "Cannot resize fixed-size raw disks");
        }
        let to_bytes = size_bytes.checked_add(self.offset_bytes);
        let Some(to_bytes) = to_bytes.filter(|&len| len <= i64::MAX as u64) else {
            let message = "Disk size too large for the chosen offset";
            return refuse(ErrorKind::InvalidArgument, message);
        };
        match preallocation {
            Preallocation::Off => Ok(to_bytes),
            Preallocation::Metadata => refuse(
                ErrorKind::Unsupported,
                "Unsupported preallocation mode: metadata",
            ),
            _ if to_bytes < from_bytes => refuse(
                ErrorKind::InvalidArgument,
                "Preallocation can't be used for shrinking files",
            ),
            _ => Ok(to_bytes),
        }
    }

    /// Raises the size to `end_bytes` once `request` has succeeded.
    fn grow_after<T: 'static>(&self, end_bytes: u64, request: Io<T>) -> Io<T> {
        let size_bytes = self.size_bytes.clone();
        Io::task(spawn(async move {
            let result = request.await?;
            size_bytes.fetch_max(
                end_bytes.next_multiple_of(SECTOR_SIZE_BYTES),
                Ordering::AcqRel,
            );
            Ok(result)
        }))
    }
}

/// The size of the window that `options` name, checked against the storage.
fn window_size(storage: &dyn Storage, options: &RawOptions) -> Result<u64> {
    let len_bytes = storage.len_bytes()?;
    let invalid = |message: String| {
        Err(Error::new(ErrorKind::InvalidArgument, "open", message).target(storage.name()))
    };
    let rest_bytes = len_bytes.checked_sub(options.offset_bytes);
    let fits = rest_bytes.is_some_and(|rest| options.size_bytes.is_none_or(|size| size <= rest));
    let Some(rest_bytes) = rest_bytes.filter(|_| fits) else {
        return invalid(format!(
            "The sum of offset ({}) and size ({}) has to be smaller or equal to the  actual size \
             of the containing file ({len_bytes})",
            options.offset_bytes,
            options.size_bytes.unwrap_or(0),
        ));
    };
    match options.size_bytes {
        Some(size) if size % SECTOR_SIZE_BYTES != 0 => invalid(format!(
            "Specified size is not multiple of {SECTOR_SIZE_BYTES}"
        )),
        Some(size) => Ok(size),
        None => Ok(rest_bytes.next_multiple_of(SECTOR_SIZE_BYTES)),
    }
}

impl BlockDevice for Raw {
    fn info(&self) -> DeviceInfo {
        // Asked once: a storage over a device asks that device, and so on down a stack of nodes. Two
        // questions at each of them would double with every node.
        let capabilities = self.storage.capabilities();
        DeviceInfo {
            format: self.format,
            name: self.storage.name().to_owned(),
            read_only: self.read_only,
            cluster_size_bytes: None,
            request_alignment_bytes: capabilities.request_alignment_bytes,
            discard_alignment_bytes: u64::from(capabilities.request_alignment_bytes),
            has_zero_init: capabilities.has_zero_init,
            growable: self.grows_with(&capabilities),
        }
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn write_shared(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        source: Arc<dyn Storage>,
        from_bytes: u64,
    ) -> Io<()> {
        match self.check_change("write", offset_bytes, len_bytes) {
            Ok(false) => {}
            Ok(true) => {
                let message = "shared blocks do not make the device grow";
                let error = self.error(ErrorKind::Unsupported, "write shared", message);
                return Io::ready(Err(error));
            }
            Err(error) => return Io::ready(Err(error)),
        }
        let to_bytes = self.offset_bytes + offset_bytes;
        self.storage
            .clone_range(&*source, from_bytes, to_bytes, len_bytes)
    }

    fn identity(&self) -> Option<DiskIdentity> {
        // Others may use what the storage stands on past this device.
        self.storage.disk()
    }

    fn bytes_in(&self) -> Option<(Arc<dyn Storage>, u64)> {
        Some((self.storage.clone(), self.offset_bytes))
    }

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        let len_bytes = buffer.len() as u64;
        if let Err(error) = self.check_range("read", offset_bytes, len_bytes, self.size_bytes()) {
            return Io::ready(Err(error));
        }
        let buffers = Buffers::from_buf([buffer]);
        let at_bytes = self.offset_bytes + offset_bytes;
        self.telling(&[Event::ReadAio], move |storage| {
            storage.read(at_bytes, buffers)
        })
        .into_single()
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        let len_bytes = buffer.len() as u64;
        let grows = match self.check_change("write", offset_bytes, len_bytes) {
            Ok(grows) => grows,
            Err(error) => return Io::ready(Err(error)),
        };
        let buffers = Buffers::from_buf([buffer]);
        let flags = WriteFlags { fua: flags.fua };
        let at_bytes = self.offset_bytes + offset_bytes;
        let request = self.telling(&[Event::WriteAio], move |storage| {
            storage.write(at_bytes, buffers, flags)
        });
        match grows {
            true => self.grow_after(offset_bytes + len_bytes, request.into_single()),
            false => request.into_single(),
        }
    }

    fn read_into(&self, offset_bytes: u64, into: &[SharedBuffer]) -> Option<Io<()>> {
        let len_bytes = total_len(into) as u64;
        let checked = self.check_range("read", offset_bytes, len_bytes, self.size_bytes());
        // What is refused, or takes several steps, goes the other way.
        if checked.is_err() || self.listener.is_some() {
            return None;
        }
        self.storage
            .read_into(self.offset_bytes + offset_bytes, into)
    }

    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: RequestFlags,
    ) -> Option<Io<()>> {
        let change = self.check_change("write", offset_bytes, total_len(from) as u64);
        if !matches!(change, Ok(false)) || self.listener.is_some() {
            return None;
        }
        let flags = WriteFlags { fua: flags.fua };
        self.storage
            .write_from(self.offset_bytes + offset_bytes, from, flags)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        let grows = match self.check_change("write zeroes", offset_bytes, len_bytes) {
            Ok(grows) => grows,
            Err(error) => return Io::ready(Err(error)),
        };
        let flags = ZeroFlags {
            may_unmap: request.may_unmap,
            no_fallback: request.no_fallback,
            fua: request.fua,
        };
        let request = self
            .storage
            .write_zeroes(self.offset_bytes + offset_bytes, len_bytes, flags);
        match grows {
            true => self.grow_after(offset_bytes + len_bytes, request),
            false => request,
        }
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        if self.read_only {
            let error = self.error(ErrorKind::ReadOnly, "discard", "the device is read-only");
            return Io::ready(Err(error));
        }
        match self.check_range("discard", offset_bytes, len_bytes, self.size_bytes()) {
            Ok(()) => self
                .storage
                .discard(self.offset_bytes + offset_bytes, len_bytes),
            Err(error) => Io::ready(Err(error)),
        }
    }

    fn flush(&self) -> Io<()> {
        match self.read_only {
            true => Io::ready(Ok(())),
            false => self.telling(&[Event::FlushToOs, Event::FlushToDisk], |storage| {
                let flushed = storage.flush();
                Io::start(async move { flushed.await.map_err(Error::of_failed_sync) })
            }),
        }
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64, _max_depth: u32) -> Io<Extent> {
        let size_bytes = self.size_bytes();
        if let Err(error) = self.check_range("block status", offset_bytes, len_bytes, size_bytes) {
            return Io::ready(Err(error));
        }
        let (storage, name) = (self.storage.clone(), self.name.clone());
        let at_bytes = self.offset_bytes + offset_bytes;
        Io::task(spawn(async move {
            let extent = storage.block_status(at_bytes, len_bytes).await?;
            Ok(Extent {
                len_bytes: extent.len_bytes,
                kind: match extent.status {
                    BlockStatus::Data => ExtentKind::Data,
                    BlockStatus::Zeroes => ExtentKind::ZeroData,
                    BlockStatus::Hole => ExtentKind::Zero,
                    BlockStatus::Unknown => ExtentKind::Absent,
                },
                host: (extent.status != BlockStatus::Unknown).then_some(HostLocation {
                    storage: name,
                    identity: StorageIdentity::of(&*storage),
                    offset_bytes: at_bytes,
                }),
                depth: 0,
            })
        }))
    }

    fn truncate(&self, size_bytes: u64) -> Io<()> {
        self.resize(size_bytes, Preallocation::Off)
    }

    fn resize(&self, size_bytes: u64, preallocation: Preallocation) -> Io<()> {
        let from_bytes = match self.storage.len_bytes() {
            Ok(len_bytes) => len_bytes,
            Err(error) => return Io::ready(Err(error)),
        };
        let to_bytes = match self.check_resize(size_bytes, from_bytes, preallocation) {
            Ok(to_bytes) => to_bytes,
            Err(error) => return Io::ready(Err(error)),
        };
        self.note_change();
        let storage = self.storage.clone();
        let shared_size = self.size_bytes.clone();
        Io::task(spawn(async move {
            space(&storage, from_bytes..to_bytes, preallocation).await?;
            if storage.len_bytes()? != to_bytes {
                storage.truncate(to_bytes).await?;
            }
            if preallocation == Preallocation::Full {
                storage.flush().await?;
            }
            shared_size.store(
                size_bytes.next_multiple_of(SECTOR_SIZE_BYTES),
                Ordering::Release,
            );
            Ok(())
        }))
    }

    fn close(&self) -> Io<()> {
        self.closed.store(true, Ordering::Release);
        let flushed = match self.changed.load(Ordering::Acquire) {
            true => self.flush(),
            false => Io::ready(Ok(())),
        };
        let storage = self.storage.clone();
        Io::task(spawn(async move {
            let flushed = flushed.await;
            storage.close().await.and(flushed)
        }))
    }

    fn storage(&self) -> Option<Arc<dyn Storage>> {
        Some(self.storage.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;

    use vellum_io::executor::Executor;
    use vellum_storage::MemStorage;

    use super::*;

    fn run<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
        let executor = Executor::new(|| {});
        let (sender, receiver) = std::sync::mpsc::channel();
        drop(executor.spawn(async move { sender.send(future.await) }));
        executor.run_ready();
        receiver.try_recv().expect("memory never waits")
    }

    fn device(bytes: &[u8], options: RawOptions) -> (Arc<MemStorage>, Arc<Raw>) {
        let storage = Arc::new(MemStorage::with_bytes(bytes.to_vec()));
        let raw = Raw::open(storage.clone(), options).expect("a valid window");
        (storage, raw)
    }

    #[test]
    fn a_debugger_below_is_told_of_reads_and_writes() {
        use vellum_storage::nodes::debug::{
            Action, DebugStorage, Debugger, Injection, Limits, Rule,
        };
        for (event, format, failing) in [
            (Event::ReadAio, "raw", [true, false]),
            (Event::WriteAio, "raw", [false, true]),
            (Event::WriteAio, "blkdebug", [false, false]),
        ] {
            let injection = Injection {
                errno: 5,
                kind: None,
                sector: None,
                once: true,
                immediately: true,
            };
            let rule = Rule {
                event,
                state: 0,
                action: Action::Inject(injection),
            };
            let memory = Arc::new(MemStorage::with_bytes(vec![7; 1024]));
            let debugger = Debugger::new(vec![rule], |_| ());
            let debug = Arc::new(DebugStorage::new(memory, debugger, Limits::default()));
            let raw = Raw::open_as(format, debug, RawOptions::default()).expect("whole");
            run(async move {
                let read = raw.read(0, Buffer::zeroed(512)).await.is_err();
                let ones = Buffer::copy_of(&[1; 512]);
                let write = raw.write(0, ones, RequestFlags::default()).await.is_err();
                assert_eq!([read, write], failing, "{event:?} under {format}");
            });
        }
    }

    #[test]
    fn a_window_reads_and_writes_only_itself() {
        let options = RawOptions {
            offset_bytes: 512,
            size_bytes: Some(512),
            read_only: false,
        };
        let (storage, raw) = device(&[7; 1536], options);
        assert_eq!(raw.size_bytes(), 512);
        run(async move {
            let buffer = raw
                .write(0, Buffer::copy_of(&[1; 512]), RequestFlags::default())
                .await;
            assert_eq!(buffer.expect("inside the window").len(), 512);
            let beyond = raw.read(1, Buffer::zeroed(512)).await;
            assert_eq!(
                beyond.expect_err("beyond the window").kind(),
                ErrorKind::OutOfRange
            );
            let ones = Buffer::copy_of(&[1; 512]);
            let beyond = raw.write(512, ones, RequestFlags::default()).await;
            let beyond = beyond.expect_err("no room");
            assert_eq!(beyond.kind(), ErrorKind::NoSpace);
            let resized = raw.truncate(1024).await;
            assert_eq!(resized.expect_err("fixed").kind(), ErrorKind::Unsupported);
        });
        let bytes = storage.snapshot();
        assert!(
            bytes[..512]
                .iter()
                .chain(&bytes[1024..])
                .all(|&byte| byte == 7)
        );
        assert!(bytes[512..1024].iter().all(|&byte| byte == 1));
    }

    #[test]
    fn a_read_is_ready_when_the_storage_is() {
        let (_, raw) = device(&[7; 1024], RawOptions::default());
        let io = raw.read(512, Buffer::zeroed(512));
        assert!(io.is_ready());
        assert!(run(io).expect("in range").iter().all(|&byte| byte == 7));
    }

    #[test]
    fn the_device_grows_with_its_storage() {
        let (storage, raw) = device(&[7; 700], RawOptions::default());
        assert_eq!(raw.size_bytes(), 1024);
        let device = raw.clone();
        run(async move {
            let tail = device.read(512, Buffer::zeroed(512)).await.expect("padded");
            assert_eq!((tail[187], tail[188]), (7, 0));
            let flags = RequestFlags::default();
            device
                .write(2000, Buffer::copy_of(b"end"), flags)
                .await
                .expect("grows");
            device
                .write_zeroes(3000, 72, ZeroRequest::default())
                .await
                .expect("grows");
        });
        assert_eq!(raw.size_bytes(), 3072);
        assert_eq!(storage.snapshot().len(), 3072);
    }

    #[test]
    fn status_says_where_bytes_and_holes_lie() {
        let (_, raw) = device(&[7; 700], RawOptions::default());
        let (data, hole) = run(async move {
            let data = raw
                .block_status(100, 924, u32::MAX)
                .await
                .expect("in range");
            (
                data,
                raw.block_status(700, 324, u32::MAX)
                    .await
                    .expect("in range"),
            )
        });
        assert_eq!((data.len_bytes, data.kind), (600, ExtentKind::Data));
        assert_eq!((hole.len_bytes, hole.kind), (324, ExtentKind::Zero));
        assert_eq!(hole.host.map(|host| host.offset_bytes), Some(700));
    }

    #[test]
    fn windows_outside_the_storage_are_refused() {
        let storage: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(vec![0; 1024]));
        for (offset_bytes, size_bytes) in [(2048, None), (512, Some(1024)), (0, Some(100))] {
            let options = RawOptions {
                offset_bytes,
                size_bytes,
                read_only: false,
            };
            let error = Raw::open(storage.clone(), options).expect_err("outside");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn a_read_only_or_closed_device_refuses() {
        let options = RawOptions {
            read_only: true,
            ..RawOptions::default()
        };
        let (_, raw) = device(&[7; 512], options);
        run(async move {
            let request = raw.write(0, Buffer::zeroed(512), RequestFlags::default());
            assert_eq!(
                request.await.expect_err("read-only").kind(),
                ErrorKind::ReadOnly
            );
            raw.close().await.expect("nothing to flush");
            assert!(raw.read(0, Buffer::zeroed(512)).await.is_err());
        });
    }
}
