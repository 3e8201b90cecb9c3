//! Devices for callers that block: plain threads without a lane.
//!
//! ```
//! use vellum::blocking::Device;
//! use vellum::gate::Folder;
//! use vellum::io::lane::{LaneOptions, LaneThread};
//! use vellum::qcow2::OpenOptions;
//! use vellum::qcow2::create::{CreateOptions, create};
//! use vellum::storage::{Create, FileOptions, FileStorage};
//!
//! # let directory = tempfile::tempdir()?;
//! # let directory = directory.path().to_owned();
//! let path = directory.join("disk.qcow2");
//! let lane = LaneThread::start("disk", LaneOptions::default())?;
//! lane.call(|| async move {
//!     let file = FileStorage::open(path, &FileOptions::default().create(Create::Truncate))?;
//!     create(file, None, &CreateOptions::default().size_bytes(1 << 30)).await
//! })?;
//!
//! let disk = Device::open(&Folder::new(directory)?, "disk.qcow2", OpenOptions::default())?;
//! disk.write(4096, b"hello")?;
//! disk.flush()?; // Now, and only now, a power cut does not lose it.
//! let mut read = [0; 5];
//! disk.read(4096, &mut read)?;
//! assert_eq!(&read, b"hello");
//! disk.close()?;
//! # Ok::<(), vellum::Error>(())
//! ```
//!
//! Each call costs two changes of threads. Who makes many requests at a time has them in
//! flight together in a lane of its own, or calls from several threads.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

use vellum_io::lane::{LaneOptions, LaneThread};
use vellum_io::{Buffer, Io, Result};

use crate::gate::Folder;
use crate::qcow2::OpenOptions;
use crate::{BlockDevice, Extent, RequestFlags, ZeroRequest};

/// Larger slices are moved in pieces of this size, so that the copy that a request owns
/// stays small.
const MAX_PIECE_BYTES: usize = 4 << 20;

/// The pieces of a request. Also one for no bytes has a piece: it may be refused as any other.
fn pieces(len: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = (0..len.max(1)).step_by(MAX_PIECE_BYTES);
    starts.map(move |start| start..len.min(start + MAX_PIECE_BYTES))
}

/// A device whose requests block the calling thread. Any number of threads may use it at the
/// same time; their requests run side by side on the device's lane.
///
/// As with [`BlockDevice`], nothing is durable before a flush, and a device that is dropped
/// without [`Device::close`] loses nothing that was flushed.
///
/// A thread that has a lane of its own calls these methods only between turns of that lane,
/// and only while no request of it to the same image runs: such a request may hold what the
/// call needs, and goes on with the lane's next turn alone. Tasks await the requests of
/// [`Device::device`] instead.
///
/// A panic in a request, or in a [`Device::call`], ends the whole lane, with all devices on it.
///
/// # Errors
/// Every request fails as that of [`BlockDevice`] does; with
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) on the lane's own thread,
/// and with [`ErrorKind::Io`](crate::ErrorKind::Io) and `ECANCELED` if the lane has ended.
#[derive(Debug, Clone)]
pub struct Device {
    device: Arc<dyn BlockDevice>,
    lane: Arc<LaneThread>,
}

impl Device {
    /// Opens a qcow2 image in `folder`, and what it stands on, with a lane of its own.
    ///
    /// # Errors
    /// As [`Folder::open_image`]; whatever keeps a thread or a lane from being made.
    pub fn open(folder: &Folder, name: &str, options: OpenOptions) -> Result<Device> {
        let lane = LaneThread::start("vellum-device", LaneOptions::default())?;
        let (folder, name) = (folder.clone(), name.to_owned());
        let device = lane.call(move || async move { folder.open_image(&name, options).await })?;
        Ok(Device::new(device, Arc::new(lane)))
    }

    /// Has the requests of a device that is open already run on `lane`, which several devices
    /// may share.
    pub fn new(device: Arc<dyn BlockDevice>, lane: Arc<LaneThread>) -> Device {
        Device { device, lane }
    }

    /// The device itself, for requests in a lane.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// The lane on which the requests run.
    pub fn lane(&self) -> &Arc<LaneThread> {
        &self.lane
    }

    /// The virtual size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    /// Fills `bytes` with what lies at `offset_bytes`. After an error some of them may have
    /// been read.
    ///
    /// # Errors
    /// See [`Device`].
    pub fn read(&self, mut offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        for range in pieces(bytes.len()) {
            let piece = &mut bytes[range];
            let buffer = Buffer::for_read(piece.len());
            let read = self.request(move |device| device.read(offset_bytes, buffer))?;
            piece.copy_from_slice(&read);
            offset_bytes += piece.len() as u64;
        }
        Ok(())
    }

    /// Writes `bytes` at `offset_bytes`. After an error some of them may have been written.
    ///
    /// # Errors
    /// See [`Device`].
    pub fn write(&self, mut offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        let flags = RequestFlags::default();
        for range in pieces(bytes.len()) {
            let piece = &bytes[range];
            let buffer = Buffer::copy_of(piece);
            self.request(move |device| device.write(offset_bytes, buffer, flags))?;
            offset_bytes += piece.len() as u64;
        }
        Ok(())
    }

    /// As [`BlockDevice::write_zeroes`].
    ///
    /// # Errors
    /// See [`Device`].
    pub fn write_zeroes(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        request: ZeroRequest,
    ) -> Result<()> {
        self.request(move |device| device.write_zeroes(offset_bytes, len_bytes, request))
    }

    /// As [`BlockDevice::discard`].
    ///
    /// # Errors
    /// See [`Device`].
    pub fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        self.request(move |device| device.discard(offset_bytes, len_bytes))
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// See [`Device`].
    pub fn flush(&self) -> Result<()> {
        self.request(|device| device.flush())
    }

    /// As [`BlockDevice::block_status`].
    ///
    /// # Errors
    /// See [`Device`].
    pub fn block_status(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        max_depth: u32,
    ) -> Result<Extent> {
        self.request(move |device| device.block_status(offset_bytes, len_bytes, max_depth))
    }

    /// Sets the virtual size; bytes that come into being read as zeroes.
    ///
    /// # Errors
    /// See [`Device`].
    pub fn truncate(&self, size_bytes: u64) -> Result<()> {
        self.request(move |device| device.truncate(size_bytes))
    }

    /// As [`BlockDevice::close`]: changes after it are refused, those of clones too, and reads
    /// may be.
    ///
    /// # Errors
    /// See [`Device`].
    pub fn close(self) -> Result<()> {
        self.request(|device| device.close())
    }

    fn request<T: Send + 'static>(
        &self,
        start: impl FnOnce(&dyn BlockDevice) -> Io<T> + Send + 'static,
    ) -> Result<T> {
        let device = self.device.clone();
        self.call(move || async move { start(&*device).await })
    }

    /// Runs anything else on the device's lane, such as what only some formats can do, and
    /// blocks until it is done.
    ///
    /// # Errors
    /// Those of the future, otherwise see [`Device`].
    pub fn call<T, F>(&self, make: impl FnOnce() -> F + Send + 'static) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        self.lane.call(make)
    }
}
