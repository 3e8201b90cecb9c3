//! What an image says of itself: the facts behind `qemu-img info`.

use std::fmt;
use std::sync::Arc;

use vellum_format::crypto::CryptMethod;
use vellum_format::features::{Autoclear, Compatible, Incompatible};
use vellum_format::header::{CompressionType, Header, Purpose};
use vellum_format::snapshot::SnapshotEntry;

use crate::luks::LuksHeader;
use crate::qcow2::bitmap::is_consistent;
use crate::qcow2::checksums::forget::name_of_checksums;
use crate::qcow2::encryption::luks_header;
use crate::qcow2::header::load;
use crate::qcow2::seal::SealInfo;
use crate::{Result, Storage};

/// One persistent bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BitmapInfo {
    /// Its name, unique in the image.
    pub name: String,
    /// Guest bytes that a bit stands for.
    pub granularity_bytes: u64,
    /// A program has it loaded, or had when it crashed: its content is stale.
    pub in_use: bool,
    /// It records every write.
    pub auto: bool,
    /// Its content can be used: it is not in use, or is crash-consistent.
    pub consistent: bool,
}

/// One internal snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// The identifier, unique in the image.
    pub id: String,
    /// The name that the user gave.
    pub name: String,
    /// Bytes of saved VM state; 0 if there is none.
    pub vm_state_size_bytes: u64,
    /// When it was taken: seconds since the epoch.
    pub date_seconds: u32,
    /// When it was taken: nanoseconds of the second.
    pub date_nanoseconds: u32,
    /// How long the guest had run.
    pub vm_clock_nanoseconds: u64,
    /// Instructions that the guest had executed, where recorded.
    pub icount: Option<u64>,
    /// Size of the disk at that time.
    pub disk_size_bytes: u64,
}

/// Everything that an image's own metadata tells about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageInfo {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// Virtual size.
    pub size_bytes: u64,
    /// Bytes of a cluster.
    pub cluster_size_bytes: u64,
    /// How compressed clusters are compressed.
    pub compression_type: CompressionType,
    /// Refcounts may lag behind while the image is in use.
    pub lazy_refcounts: bool,
    /// Width of a refcount.
    pub refcount_bits: u32,
    /// The image was not closed cleanly and its refcounts may be wrong.
    pub dirty: bool,
    /// The image is marked as damaged.
    pub corrupt: bool,
    /// Clusters are made of 32 subclusters.
    pub extended_l2: bool,
    /// How guest data is encrypted, by QEMU's name, where it is.
    pub encryption: Option<&'static str>,
    /// The LUKS header, where that is how.
    pub luks: Option<LuksHeader>,
    /// Guest data lies in another file.
    pub external_data: bool,
    /// Name of the external data file, where the image says one.
    pub data_file: Option<String>,
    /// The external data file is a raw image of the disk.
    pub data_file_raw: bool,
    /// The write log that holds writes which the image lacks, where there are such.
    pub write_log: Option<LiveLog>,
    /// The name of the file with the checksums of the image's file, if it has some.
    pub checksums: Option<String>,
    /// Name of the backing file.
    pub backing_file: Option<String>,
    /// Format of the backing file.
    pub backing_format: Option<String>,
    /// The persistent bitmaps that may be trusted to be there.
    pub bitmaps: Vec<BitmapInfo>,
    /// The internal snapshots.
    pub snapshots: Vec<SnapshotInfo>,
    /// The image is sealed: nobody has changed it since who heeds feature bits.
    pub sealed: bool,
    /// What the seal says; `None` without one, or where it is damaged.
    pub seal: Option<SealInfo>,
}

impl ImageInfo {
    /// The version as `qemu-img create -o compat=` takes it.
    pub fn compat(&self) -> &'static str {
        match self.version {
            2 => "0.10",
            _ => "1.1",
        }
    }

    /// Reads an image's metadata; no other file is opened.
    ///
    /// # Errors
    /// If the header, the snapshot table or the bitmap directory cannot be read.
    pub async fn read(storage: Arc<dyn Storage>) -> Result<ImageInfo> {
        let header = load::header(&storage, Purpose::Use).await?;
        let size_bytes = header.guest_size_bytes();
        let snapshots = load::snapshots(&storage, &header).await?.entries;
        let bitmaps = match header.bitmaps() {
            Some(extension) => load::bitmaps(&storage, &header, extension).await?,
            None => Vec::new(),
        };
        let luks = match header.crypt_method {
            CryptMethod::Luks => Some(luks_header(&storage, &header).await?.1),
            _ => None,
        };
        let external = header.incompatible.contains(Incompatible::EXTERNAL_DATA);
        let data_file = header.external_data_file().filter(|_| external);
        Ok(ImageInfo {
            version: header.version,
            size_bytes,
            cluster_size_bytes: header.geometry().cluster_size_bytes(),
            compression_type: header.compression_type,
            lazy_refcounts: header.compatible.contains(Compatible::LAZY_REFCOUNTS),
            refcount_bits: header.geometry().refcount_bits(),
            dirty: header.incompatible.contains(Incompatible::DIRTY),
            corrupt: header.incompatible.contains(Incompatible::CORRUPT),
            extended_l2: header.geometry().extended_l2,
            encryption: encryption_name(header.crypt_method),
            luks,
            external_data: header.geometry().external_data,
            data_file: data_file.map(|name| String::from_utf8_lossy(name).into_owned()),
            data_file_raw: header.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA),
            write_log: live_write_log(&header),
            checksums: name_of_checksums(&header),
            backing_file: header.backing_file_text().map(|name| name.into_owned()),
            backing_format: header.backing_format().map(|name| name.into_owned()),
            bitmaps: bitmaps
                .iter()
                .map(|bitmap| BitmapInfo::new(bitmap, is_consistent(&header, bitmap)))
                .collect(),
            snapshots: snapshots
                .iter()
                .map(|entry| snapshot_info(entry, size_bytes))
                .collect(),
            sealed: header.autoclear.contains(Autoclear::SEALED),
            // Verifying tells what is wrong with it.
            seal: SealInfo::read(&storage, &header).await.unwrap_or(None),
        })
    }
}

/// Where a write log lies that holds writes which its image lacks. Displayed as the name of its file,
/// as "inside", or as nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LiveLog {
    /// In the file of this name, relative to the image's folder.
    File(String),
    /// In clusters of the image.
    Inside,
    /// The image does not say it.
    Unknown,
}

impl fmt::Display for LiveLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LiveLog::File(name) => name,
            LiveLog::Inside => "inside",
            LiveLog::Unknown => "",
        })
    }
}

/// The write log that holds writes which an image lacks, where there are such.
pub fn live_write_log(header: &Header) -> Option<LiveLog> {
    if !header.incompatible.contains(Incompatible::WRITE_LOG) {
        return None;
    }
    let log = header.write_log();
    let name = log.as_ref().and_then(|log| log.file_name());
    Some(match (name, header.write_log_inside()) {
        (Some(name), _) => LiveLog::File(String::from_utf8_lossy(name).into_owned()),
        (None, Some(_)) => LiveLog::Inside,
        (None, None) => LiveLog::Unknown,
    })
}

pub(crate) fn snapshot_info(entry: &SnapshotEntry, size_bytes: u64) -> SnapshotInfo {
    SnapshotInfo {
        id: entry.id_text().into_owned(),
        name: entry.name_text().into_owned(),
        vm_state_size_bytes: entry.vm_state_size_bytes,
        date_seconds: entry.date_seconds,
        date_nanoseconds: entry.date_nanoseconds,
        vm_clock_nanoseconds: entry.vm_clock_nanoseconds,
        icount: entry.icount,
        disk_size_bytes: entry.disk_size_bytes.unwrap_or(size_bytes),
    }
}

fn encryption_name(method: CryptMethod) -> Option<&'static str> {
    match method {
        CryptMethod::None => None,
        CryptMethod::Aes => Some("aes"),
        CryptMethod::Luks => Some("luks"),
    }
}
