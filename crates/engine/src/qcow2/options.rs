//! How an image is opened: QEMU's option names, defaults, minima and errors.

use std::sync::Arc;

use vellum_format::geometry::Geometry;
use vellum_io::{Error, ErrorKind, Result};
use vellum_storage::Storage;

use crate::BlockDevice;
use crate::luks::Passphrase;
use crate::qcow2::alloc::prealloc::PreallocateAhead;
use crate::qcow2::cache_budget::CacheBudget;
use crate::qcow2::checksums::options::ChecksumOptions;
use crate::qcow2::compressed::compress::CompressionOptions;
use crate::qcow2::integrity::overlap::OverlapChecks;
use crate::qcow2::messages::Messages;
use crate::qcow2::seal::area::VerifyReads;
use crate::qcow2::snapshot::select::SnapshotSelector;
use crate::qcow2::table_cache::cache::Budget;
use crate::qcow2::write_log::WriteLogOptions;

vellum_io::with_setters! {
    /// Budgets of the metadata caches, all in bytes, with QEMU's meaning; what is
    /// `None` takes its default.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct CacheOptions {
        /// `l2-cache-size`: bytes for L2 tables; never more than the whole image needs.
        /// Default: as much as turns out to be useful, up to what the whole image needs
        /// and 32 MiB.
        pub l2_cache_size_bytes: Option<u64>,
        /// `refcount-cache-size`: bytes for refcount blocks. Default: four clusters.
        pub refcount_cache_size_bytes: Option<u64>,
        /// `cache-size`: both caches together.
        pub cache_size_bytes: Option<u64>,
        /// `l2-cache-entry-size`: a power of two from 512 to the cluster size, to whose
        /// multiples the L2 cache's size is rounded, and of which it has two at least.
        /// A miss reads 4 KiB whatever this is. Default: 4 KiB, or the cluster size if
        /// that is less.
        pub l2_cache_entry_size_bytes: Option<u64>,
        /// `cache-clean-interval`: seconds after which an unused table is dropped;
        /// 0 never. For the one who calls [`Qcow2::clean_caches`](crate::qcow2::Qcow2).
        pub cache_clean_interval_s: Option<u64>,
    }
}

/// Where the backing device comes from.
#[derive(Debug, Clone, Default)]
pub enum Backing {
    /// Opened through the gate, as the image says.
    #[default]
    FromImage,
    /// None, whatever the image says: unallocated clusters read as zeroes.
    None,
    /// This device, whatever the image says.
    Given(Arc<dyn BlockDevice>),
}

/// What an image is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OpenPurpose {
    /// The requests of a guest. An encrypted image needs its passphrase.
    #[default]
    GuestData,
    /// Requests that touch no guest data. An encrypted image stays locked and needs no
    /// passphrase; reads and writes of its guest data fail.
    Locked,
    /// A look at the metadata: neither backing file nor data file is opened, and guest
    /// data cannot be read.
    Metadata,
    /// A check or a repair: the image is opened as it is, marked dirty or corrupt or not,
    /// and accepts no requests that change it.
    Check,
}

vellum_io::with_setters! {
    /// How to open a qcow2 image.
    #[derive(Debug, Clone, Default)]
    pub struct OpenOptions {
        /// Refuse writes, and change nothing in the image.
        pub read_only: bool,
        /// What the image is opened for.
        pub purpose: OpenPurpose,
        /// Budgets of the metadata caches.
        pub cache: CacheOptions,
        /// A bound for the caches of all images that are opened with it, below the limits of
        /// their own. Default: none.
        pub cache_budget: Option<Arc<CacheBudget>>,
        /// `decompressed-cache-size`, an option of our own: bytes for decompressed
        /// clusters that are likely to be read again, taken as they are needed; 0 for
        /// none. Default: 4 MiB, or two clusters if that is more.
        pub decompressed_cache_size_bytes: Option<u64>,
        /// The backing device.
        pub backing: Backing,
        /// The external data file, if it is not to be opened through the gate.
        pub data_file: Option<Arc<dyn Storage>>,
        /// Discards free host clusters and give their space back (`discard=unmap`).
        /// Without it discards do nothing, as in QEMU.
        pub discard: bool,
        /// Keep discarded clusters allocated (`discard-no-unref`).
        pub discard_no_unref: bool,
        /// `pass-discard-request`: give the space of clusters back to the storage that
        /// the guest discards. Default: as `discard`.
        pub pass_discard_request: Option<bool>,
        /// `pass-discard-other`: give the space of tables back that are not needed any
        /// more.
        pub pass_discard_other: bool,
        /// `pass-discard-snapshot`: give the space back of what deleting or applying a
        /// snapshot has freed. Default: yes.
        pub pass_discard_snapshot: Option<bool>,
        /// `lazy-refcounts`: postpone refcounts until the image is closed, and mark it
        /// dirty meanwhile. Default: as the image says.
        pub lazy_refcounts: Option<bool>,
        /// `data-cache-size`: bytes of small writes to clusters that need copy-on-write
        /// that are kept in memory until the cluster is whole, a flush comes or room is
        /// needed; 0: none. Default: 2 MiB, or a quarter of the write log's length if that is more.
        pub data_cache_size_bytes: Option<u64>,
        /// `chain-index-size`, an option of our own: bytes for the mapping of what lies below
        /// the image as a whole, used from two backing images on and taken as it is needed;
        /// 0: each read walks the chain. Default: 8 MiB.
        pub chain_index_size_bytes: Option<u64>,
        /// How compressed clusters are compressed that are written.
        pub compression: CompressionOptions,
        /// `bitmap-step-size`, an option of our own: bytes around the first write to a range
        /// that enabled bitmaps call dirty on disk at once, at least; more with time. A crash
        /// leaves so much dirty. Default: 1 MiB.
        pub bitmap_step_bytes: Option<u64>,
        /// `overlap-check`: what every write is checked against. One that would hit
        /// metadata is refused, and the image marked corrupt.
        pub overlap_checks: OverlapChecks,
        /// How far ahead of the writes clusters are counted.
        pub ahead: PreallocateAhead,
        /// Where clusters go depends on the requests and their order alone, as long as no two run at
        /// once: nothing is counted or committed in the background, `ahead` included.
        pub reproducible: bool,
        /// Receives what users are told about a damaged image: a repair as it is opened,
        /// and the mark "corrupt". Default: nobody.
        pub messages: Messages,
        /// Show the disk as it was when this snapshot was taken; for reading only.
        pub snapshot: Option<SnapshotSelector>,
        /// `journal`, an option of our own: a write log for an image that is opened for writing.
        pub write_log: Option<WriteLogOptions>,
        /// `checksums`, an option of our own: whether the image's file has checksums that are
        /// kept and compared. Default: as the image says.
        pub checksums: Option<ChecksumOptions>,
        /// What unlocks an encrypted image (`encrypt.key-secret`).
        pub passphrase: Option<Passphrase>,
        /// `verify`, an option of our own: whether reads of a sealed image are compared with its
        /// seal; demanding it of an image without one fails. Default: each leaf once where the
        /// image is sealed.
        pub verify: Option<VerifyReads>,
        /// `unseal`, an option of our own: opening a sealed image for writing gives its seal up,
        /// instead of being refused.
        pub unseal: bool,
        /// How the image must be encrypted (`encrypt.format`), if that is demanded.
        pub encryption_format: Option<String>,
    }
}

/// What discards do, and which freed clusters are punched out of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Discards {
    /// `discard=unmap`
    pub(crate) enabled: bool,
    /// `discard-no-unref`
    pub(crate) keep_references: bool,
    /// `pass-discard-request`
    pub(crate) pass_request: bool,
    /// `pass-discard-other`
    pub(crate) pass_other: bool,
    /// `pass-discard-snapshot`
    pub(crate) pass_snapshot: bool,
}

impl OpenOptions {
    /// The image accepts requests that change it.
    pub(crate) fn accepts_changes(&self) -> bool {
        !self.read_only && self.purpose != OpenPurpose::Check
    }

    pub(crate) fn discards(&self) -> Discards {
        Discards {
            enabled: self.discard,
            keep_references: self.discard_no_unref,
            pass_request: self.pass_discard_request.unwrap_or(self.discard),
            pass_other: self.pass_discard_other,
            pass_snapshot: self.pass_discard_snapshot.unwrap_or(true),
        }
    }
}

const DEFAULT_L2_CACHE_MAX_BYTES: u64 = 32 << 20;
const DEFAULT_DATA_CACHE_BYTES: u64 = 2 << 20;
const DEFAULT_DECOMPRESSED_CACHE_BYTES: u64 = 4 << 20;
const DEFAULT_L2_ENTRY_BYTES: u64 = 4096;
const MIN_L2_ENTRY_BYTES: u64 = 512;
const MIN_L2_CACHE_ENTRIES: u64 = 2;
const MIN_REFCOUNT_CACHE_CLUSTERS: u64 = 4;
/// What a miss of the L2 cache reads: small, whatever the cache's entry size is.
pub(crate) const L2_SLICE_BYTES: u64 = 4096;

impl OpenOptions {
    /// The budget of the data cache with its default filled in; none where somebody
    /// watches events, and wants to see every request when it is made.
    pub(crate) fn data_cache_bytes(&self, watched: bool) -> usize {
        if watched {
            return 0;
        }
        let bytes = self
            .data_cache_size_bytes
            .unwrap_or(DEFAULT_DATA_CACHE_BYTES);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// The budget of the write buffer: nothing but a write log fills that of an image that is
    /// only read, within a bound of its own.
    pub(crate) fn write_buffer_bytes(&self, watched: bool) -> usize {
        match self.accepts_changes() {
            true => self.data_cache_bytes(watched),
            false => usize::MAX,
        }
    }

    /// The budget of the cache for decompressed clusters.
    pub(crate) fn decompressed_cache_bytes(&self, geometry: &Geometry) -> u64 {
        // A little more than two clusters: what it takes to find them counts too.
        let two_clusters = geometry.cluster_size_bytes() * 9 / 4;
        let default = DEFAULT_DECOMPRESSED_CACHE_BYTES.max(two_clusters);
        self.decompressed_cache_size_bytes.unwrap_or(default)
    }
}

/// Budgets with all defaults filled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CacheSizes {
    pub(crate) l2: Budget,
    pub(crate) refcount_bytes: u64,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

impl CacheOptions {
    /// Fills in defaults for an image of `size_bytes`; refuses what contradicts
    /// itself, in QEMU's words.
    pub(crate) fn resolve(&self, geometry: &Geometry, size_bytes: u64) -> Result<CacheSizes> {
        let cluster = geometry.cluster_size_bytes();
        let l2_entry_bytes = self
            .l2_cache_entry_size_bytes
            .unwrap_or(DEFAULT_L2_ENTRY_BYTES.min(cluster));
        if !l2_entry_bytes.is_power_of_two()
            || !(MIN_L2_ENTRY_BYTES..=cluster).contains(&l2_entry_bytes)
        {
            return Err(invalid(format!(
                "L2 cache entry size must be a power of two between {MIN_L2_ENTRY_BYTES} and the \
                 cluster size ({cluster})"
            )));
        }
        if self.cache_clean_interval_s > Some(u64::from(u32::MAX)) {
            return Err(invalid("Cache clean interval too big"));
        }
        let tables = size_bytes.div_ceil(cluster).div_ceil(geometry.l2_entries());
        let whole_image = tables.saturating_mul(cluster);
        let min_refcount = MIN_REFCOUNT_CACHE_CLUSTERS * cluster;
        let (l2_bytes, refcount_bytes) = self.split(whole_image, min_refcount)?;
        let l2_entries = l2_bytes / l2_entry_bytes;
        let refcount_blocks = refcount_bytes / cluster;
        let limit = u64::from(i32::MAX.unsigned_abs());
        if l2_entries > limit {
            return Err(invalid("L2 cache size too big"));
        }
        if refcount_blocks > limit {
            return Err(invalid("Refcount cache size too big"));
        }
        Ok(CacheSizes {
            l2: Budget {
                max_bytes: l2_entries.max(MIN_L2_CACHE_ENTRIES) * l2_entry_bytes,
                adaptive: self.l2_cache_size_bytes.is_none() && self.cache_size_bytes.is_none(),
                holds_all: l2_bytes >= whole_image,
            },
            refcount_bytes: refcount_blocks.max(MIN_REFCOUNT_CACHE_CLUSTERS) * cluster,
        })
    }

    /// The sizes of both caches, before they are rounded.
    fn split(&self, whole_image: u64, min_refcount: u64) -> Result<(u64, u64)> {
        let most_l2 = self
            .l2_cache_size_bytes
            .unwrap_or(DEFAULT_L2_CACHE_MAX_BYTES);
        let l2 = whole_image.min(most_l2);
        let Some(both) = self.cache_size_bytes else {
            let refcount = self.refcount_cache_size_bytes.unwrap_or(min_refcount);
            return Ok((l2, refcount));
        };
        match (self.l2_cache_size_bytes, self.refcount_cache_size_bytes) {
            (Some(_), Some(_)) => Err(invalid(
                "cache-size, l2-cache-size and refcount-cache-size may not be set at the same time",
            )),
            (Some(_), None) if most_l2 > both => {
                Err(invalid("l2-cache-size may not exceed cache-size"))
            }
            (None, Some(refcount)) if refcount > both => {
                Err(invalid("refcount-cache-size may not exceed cache-size"))
            }
            (Some(_), None) => Ok((l2, both - l2)),
            (None, Some(refcount)) => Ok((both - refcount, refcount)),
            (None, None) if both >= whole_image.saturating_add(min_refcount) => {
                Ok((whole_image, both - whole_image))
            }
            (None, None) => {
                let refcount = both.min(min_refcount);
                Ok((both - refcount, refcount))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn geometry() -> Geometry {
        Geometry {
            cluster_bits: 16,
            extended_l2: false,
            refcount_order: 4,
            version: 3,
            external_data: false,
        }
    }

    fn resolve(options: CacheOptions, size: u64) -> Result<(u64, u64)> {
        options
            .resolve(&geometry(), size)
            .map(|sizes| (sizes.l2.max_bytes, sizes.refcount_bytes))
    }

    #[test]
    fn defaults_follow_the_image() {
        let default = CacheOptions::default();
        assert_eq!(resolve(default, 8 * GIB).unwrap(), (1 << 20, 256 << 10));
        assert_eq!(resolve(default, 1024 * GIB).unwrap().0, 32 << 20);
        assert_eq!(resolve(default, 0).unwrap().0, 8192, "two entries at least");
    }

    #[test]
    fn a_combined_size_is_split_like_qemus() {
        let both = |bytes| CacheOptions {
            cache_size_bytes: Some(bytes),
            ..Default::default()
        };
        assert_eq!(resolve(both(4 << 20), 8 * GIB).unwrap(), (1 << 20, 3 << 20));
        assert_eq!(
            resolve(both(1 << 20), 8 * GIB).unwrap(),
            (768 << 10, 256 << 10)
        );
        let wrong = CacheOptions {
            l2_cache_size_bytes: Some(2 << 20),
            ..both(1 << 20)
        };
        let message = resolve(wrong, GIB).unwrap_err().message().to_owned();
        assert_eq!(message, "l2-cache-size may not exceed cache-size");
    }

    #[test]
    fn entry_sizes_are_checked() {
        for bad in [256, 3000, 1 << 17] {
            let options = CacheOptions {
                l2_cache_entry_size_bytes: Some(bad),
                ..Default::default()
            };
            assert!(resolve(options, GIB).is_err(), "{bad}");
        }
    }
}
