//! [`LuksDevice`]: a LUKS volume as a block device.

use std::any::Any;
use std::sync::Arc;

use super::CurrentHeader;
use super::EncryptedStorage;
use super::KeyChange;
use super::LuksHeader;
use super::MasterKey;
use super::Passphrase;
use super::SECTOR_BYTES;
use super::change_keys;
use super::read_header;
use super::unlock;
use vellum_io::spawn_to_completion;

use crate::{
    BlockDevice, Buffer, DeviceInfo, DiskIdentity, Error, ErrorKind, Extent, Io, Raw, RawOptions,
    RequestFlags, Result, Storage, ZeroRequest, delegate,
};

vellum_io::with_setters! {
    /// How to open a volume.
    #[derive(Debug, Clone, Default)]
    pub struct LuksOptions {
        /// Refuse writes.
        pub read_only: bool,
        /// What unlocks it; needed unless only metadata is wanted.
        pub passphrase: Option<Passphrase>,
        /// The storage of its header, where that stands apart from the payload.
        pub header: Option<Arc<dyn Storage>>,
        /// Open a volume only to look at its header: its payload cannot be read.
        pub metadata_only: bool,
    }
}

/// A LUKS volume, open.
#[derive(Debug)]
pub struct LuksDevice {
    /// The payload as it reads decrypted.
    plain: Arc<Raw>,
    file: Arc<dyn Storage>,
    header: CurrentHeader,
    /// What holds the header, and what unlocked it.
    place: Arc<dyn Storage>,
    known: Option<Passphrase>,
    read_only: bool,
    /// Held by whoever changes key slots.
    changing: Arc<async_lock::Mutex<()>>,
    detached: bool,
}

impl LuksDevice {
    /// Opens the volume in `file`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] or [`ErrorKind::Unsupported`] for headers that cannot
    /// be used, [`ErrorKind::InvalidArgument`] without a passphrase, and
    /// [`ErrorKind::Denied`] with a wrong one.
    pub async fn open(file: Arc<dyn Storage>, options: LuksOptions) -> Result<Arc<LuksDevice>> {
        let detached = options.header.is_some();
        let place = options.header.as_ref().unwrap_or(&file);
        if options.passphrase.is_none() && !options.metadata_only {
            let message = "Parameter 'key-secret' is required for cipher";
            return Err(Error::new(ErrorKind::InvalidArgument, "open", message).target(file.name()));
        }
        let header = read_header(place, 0, detached).await?;
        let suite = header
            .suite()
            .map_err(|error| crate::qcow2::bad_format("open", &error))?;
        let key = match &options.passphrase {
            Some(passphrase) if !options.metadata_only => {
                unlock(place, 0, &header, passphrase).await?
            }
            // Nothing will be read with it.
            _ => MasterKey::new(vec![0; suite.key_bytes()].into()),
        };
        let start_bytes = u64::from(header.payload_offset_sectors) * SECTOR_BYTES;
        let plain: Arc<dyn Storage> = Arc::new(EncryptedStorage::new(
            file.clone(),
            start_bytes,
            &suite,
            &key,
        )?);
        let read_only = options.read_only || options.metadata_only;
        let raw = RawOptions {
            read_only,
            ..RawOptions::default()
        };
        Ok(Arc::new(LuksDevice {
            plain: Raw::open(plain, raw)?,
            place: place.clone(),
            known: options.passphrase.clone(),
            read_only,
            changing: Arc::default(),
            file,
            header: CurrentHeader::new(header),
            detached,
        }))
    }

    /// Whether the header stands apart from the payload.
    pub fn has_detached_header(&self) -> bool {
        self.detached
    }

    /// Refuses what lies beyond the end: unlike a raw file a volume does not grow by
    /// itself.
    fn check_range(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.size_bytes() => Ok(()),
            _ => {
                let message = "request beyond the end of the device";
                let error = Error::new(ErrorKind::OutOfRange, operation, message);
                Err(error.target(self.file.name()).at(offset_bytes))
            }
        }
    }

    /// Adds a passphrase, or takes some away, and returns the header as it is then.
    /// Every passphrase that is to stay is there after a crash at any moment. What was begun runs
    /// to its end, whatever becomes of the future.
    ///
    /// # Errors
    /// As [`change_keys`], and [`ErrorKind::ReadOnly`] if the volume is not open for
    /// writing.
    pub async fn change_keys(&self, change: KeyChange) -> Result<LuksHeader> {
        let known = match &self.known {
            Some(known) if !self.read_only => known.clone(),
            _ => {
                let message = "the volume is not open for writing";
                let error = Error::new(ErrorKind::ReadOnly, "amend", message);
                return Err(error.target(self.file.name()));
            }
        };
        let (place, detached) = (self.place.clone(), self.detached);
        let (changing, current) = (self.changing.clone(), self.header.clone());
        spawn_to_completion(async move {
            let _one = changing.lock().await;
            let header = read_header(&place, 0, detached).await?;
            let changed = change_keys(&place, 0, header, &known, change).await?;
            current.set(&changed);
            Ok(changed)
        })
        .await
    }

    /// The volume's header, with the key slots that there are now.
    pub fn header(&self) -> Arc<LuksHeader> {
        self.header.get()
    }
}

impl BlockDevice for LuksDevice {
    delegate!(plain: size_bytes, read, discard, flush, truncate, resize);

    fn close(&self) -> Io<()> {
        let (changing, plain) = (self.changing.clone(), self.plain.clone());
        Io::start(async move {
            // Rule 10: the file is given away.
            let _last = changing.lock().await;
            plain.close().await
        })
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            format: "luks",
            growable: false,
            ..self.plain.info()
        }
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        match self.check_range("write", offset_bytes, buffer.len() as u64) {
            Ok(()) => self.plain.write(offset_bytes, buffer, flags),
            Err(error) => Io::ready(Err(error)),
        }
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        match self.check_range("write zeroes", offset_bytes, len_bytes) {
            Ok(()) => self.plain.write_zeroes(offset_bytes, len_bytes, request),
            Err(error) => Io::ready(Err(error)),
        }
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        let status = self.plain.block_status(offset_bytes, len_bytes, max_depth);
        // The bytes are nowhere as they are.
        Io::boxed(async move {
            status.await.map(|extent| Extent {
                host: None,
                ..extent
            })
        })
    }

    fn storage(&self) -> Option<Arc<dyn Storage>> {
        Some(self.file.clone())
    }

    fn format_device(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn identity(&self) -> Option<DiskIdentity> {
        self.file.disk()
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        self.file.allocated_bytes()
    }
}

/// Devices that may be LUKS volumes.
pub trait AsLuks: BlockDevice {
    /// This device as a LUKS volume, where it is one or stands around one.
    fn as_luks(&self) -> Option<&LuksDevice>;
}

impl<T: BlockDevice + ?Sized> AsLuks for T {
    fn as_luks(&self) -> Option<&LuksDevice> {
        self.format_device()?.downcast_ref()
    }
}
