//! The sizes of an image's tables, and which entry of which table maps what.

use crate::error::{FormatError, FormatErrorKind, Result};
use crate::limits;
use crate::types::GuestOffset;
use alloc::format;

/// The parameters that decide every size and index.
///
/// [`Geometry::new`] and [`Header::geometry`](crate::Header::geometry) give only
/// values within [`limits`]; the methods rely on that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// A cluster has `1 << cluster_bits` bytes: 9 to 21.
    pub cluster_bits: u32,
    /// L2 entries have 16 bytes and map 32 subclusters each.
    pub extended_l2: bool,
    /// A refcount has `1 << refcount_order` bits: 0 to 6.
    pub refcount_order: u32,
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// Guest data lives in another file, at its guest offset.
    pub external_data: bool,
}

impl Geometry {
    /// Checks the parameters against [`limits`].
    ///
    /// # Errors
    /// [`FormatErrorKind::Unsupported`] for a version that is not 2 or 3,
    /// [`FormatErrorKind::Invalid`] for what the limits, or the version, do not allow.
    pub fn new(
        version: u32,
        cluster_bits: u32,
        extended_l2: bool,
        refcount_order: u32,
        external_data: bool,
    ) -> Result<Self> {
        check_version(version)?;
        check_cluster_bits(cluster_bits)?;
        check_subcluster_size(cluster_bits, extended_l2)?;
        check_refcount_order(refcount_order)?;
        check_features(version, extended_l2, refcount_order, external_data)?;
        Ok(Geometry {
            cluster_bits,
            extended_l2,
            refcount_order,
            version,
            external_data,
        })
    }

    /// Bytes of a cluster.
    #[inline]
    pub const fn cluster_size_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of an L2 entry: 8, or 16 when extended.
    #[inline]
    pub const fn l2_entry_size_bytes(&self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    const fn l2_bits(&self) -> u32 {
        self.cluster_bits - if self.extended_l2 { 4 } else { 3 }
    }

    /// Entries of an L2 table, which is always one cluster.
    #[inline]
    pub const fn l2_entries(&self) -> u64 {
        1 << self.l2_bits()
    }

    /// Guest bytes that one L2 table maps.
    #[inline]
    pub const fn bytes_per_l2_table(&self) -> u64 {
        1 << (self.l2_bits() + self.cluster_bits)
    }

    /// Parts of a cluster that are allocated on their own: 32, or 1.
    #[inline]
    pub const fn subclusters_per_cluster(&self) -> u32 {
        if self.extended_l2 {
            limits::SUBCLUSTERS_PER_CLUSTER
        } else {
            1
        }
    }

    /// `subcluster_size_bytes() == 1 << subcluster_bits()`.
    #[inline]
    pub const fn subcluster_bits(&self) -> u32 {
        if self.extended_l2 {
            self.cluster_bits - 5
        } else {
            self.cluster_bits
        }
    }

    /// Bytes of a subcluster; a cluster's, without extended L2 entries.
    #[inline]
    pub const fn subcluster_size_bytes(&self) -> u64 {
        1 << self.subcluster_bits()
    }

    /// Width of a refcount.
    #[inline]
    pub const fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// The largest refcount.
    #[inline]
    pub const fn max_refcount(&self) -> u64 {
        u64::MAX >> (64 - self.refcount_bits())
    }

    /// Refcounts in a refcount block, which is always one cluster.
    #[inline]
    pub const fn refcount_block_entries(&self) -> u64 {
        1 << (self.cluster_bits + 3 - self.refcount_order)
    }

    /// Host bytes whose refcounts are in one refcount block.
    #[inline]
    pub const fn bytes_per_refcount_block(&self) -> u64 {
        self.refcount_block_entries() << self.cluster_bits
    }

    /// Entries of a cluster of the refcount table, L1 table or bitmap table.
    #[inline]
    pub const fn table_entries_per_cluster(&self) -> u64 {
        1 << (self.cluster_bits - 3)
    }

    /// Entries that an L1 table needs for `size_bytes` of guest data.
    #[inline]
    pub const fn l1_entries_for(&self, size_bytes: u64) -> u64 {
        size_bytes.div_ceil(self.bytes_per_l2_table())
    }

    /// The largest guest size that the largest L1 table can map.
    #[inline]
    pub const fn max_size_bytes(&self) -> u64 {
        let entries = limits::MAX_L1_SIZE_BYTES / 8;
        let size = entries as u128 * self.bytes_per_l2_table() as u128;
        if size > limits::MAX_SIZE_BYTES as u128 {
            limits::MAX_SIZE_BYTES
        } else {
            size as u64
        }
    }

    /// Clusters that `size_bytes` fill, the last one perhaps in part.
    #[inline]
    pub const fn clusters_for(&self, size_bytes: u64) -> u64 {
        size_bytes.div_ceil(self.cluster_size_bytes())
    }

    /// Which L1 entry maps `offset`.
    #[inline]
    pub const fn l1_index(&self, offset: GuestOffset) -> u64 {
        offset.0 >> (self.l2_bits() + self.cluster_bits)
    }

    /// Which entry of its L2 table maps `offset`.
    #[inline]
    pub const fn l2_index(&self, offset: GuestOffset) -> usize {
        ((offset.0 >> self.cluster_bits) & (self.l2_entries() - 1)) as usize
    }

    /// Which subcluster of its cluster holds `offset`.
    #[inline]
    pub const fn subcluster_index(&self, offset: GuestOffset) -> u32 {
        (self.offset_in_cluster(offset.0) >> self.subcluster_bits()) as u32
    }

    /// How far into its cluster the byte at `offset_bytes` lies.
    #[inline]
    pub const fn offset_in_cluster(&self, offset_bytes: u64) -> u64 {
        offset_bytes & (self.cluster_size_bytes() - 1)
    }

    /// How far into its subcluster the byte at `offset_bytes` lies.
    #[inline]
    pub const fn offset_in_subcluster(&self, offset_bytes: u64) -> u64 {
        offset_bytes & (self.subcluster_size_bytes() - 1)
    }

    /// Start of the cluster that holds the byte at `offset_bytes`.
    #[inline]
    pub const fn cluster_start(&self, offset_bytes: u64) -> u64 {
        offset_bytes & !(self.cluster_size_bytes() - 1)
    }

    /// Whether `offset_bytes` is the start of a cluster.
    #[inline]
    pub const fn is_cluster_aligned(&self, offset_bytes: u64) -> bool {
        self.offset_in_cluster(offset_bytes) == 0
    }

    /// Which refcount table entry leads to the refcount of host cluster `index`.
    #[inline]
    pub const fn refcount_table_index(&self, cluster_index: u64) -> u64 {
        cluster_index >> (self.cluster_bits + 3 - self.refcount_order)
    }

    /// Which entry of its refcount block counts host cluster `index`.
    #[inline]
    pub const fn refcount_block_index(&self, cluster_index: u64) -> usize {
        (cluster_index & (self.refcount_block_entries() - 1)) as usize
    }
}

/// Version 2 has neither the features nor the field for other refcount widths.
fn check_features(
    version: u32,
    extended_l2: bool,
    refcount_order: u32,
    external_data: bool,
) -> Result<()> {
    let plain = !extended_l2 && !external_data && refcount_order == limits::DEFAULT_REFCOUNT_ORDER;
    if version >= 3 || plain {
        return Ok(());
    }
    Err(FormatError::new(
        FormatErrorKind::Invalid,
        "header",
        "version",
        version.into(),
        "Features and refcount widths other than 16 bits need version 3",
    ))
}

pub(crate) fn check_version(version: u32) -> Result<()> {
    if matches!(version, 2 | 3) {
        return Ok(());
    }
    Err(FormatError::new(
        FormatErrorKind::Unsupported,
        "header",
        "version",
        version.into(),
        format!("Unsupported qcow2 version {version}"),
    ))
}

pub(crate) fn check_cluster_bits(cluster_bits: u32) -> Result<()> {
    if (limits::MIN_CLUSTER_BITS..=limits::MAX_CLUSTER_BITS).contains(&cluster_bits) {
        return Ok(());
    }
    Err(FormatError::new(
        FormatErrorKind::Invalid,
        "header",
        "cluster_bits",
        cluster_bits.into(),
        format!("Unsupported cluster size: 2^{cluster_bits}"),
    ))
}

pub(crate) fn check_subcluster_size(cluster_bits: u32, extended_l2: bool) -> Result<()> {
    if !extended_l2 || cluster_bits >= limits::MIN_EXTENDED_L2_CLUSTER_BITS {
        return Ok(());
    }
    let size = (1u64 << cluster_bits) / u64::from(limits::SUBCLUSTERS_PER_CLUSTER);
    Err(FormatError::new(
        FormatErrorKind::Invalid,
        "header",
        "cluster_bits",
        cluster_bits.into(),
        format!("Unsupported subcluster size: {size}"),
    ))
}

pub(crate) fn check_refcount_order(refcount_order: u32) -> Result<()> {
    if refcount_order <= limits::MAX_REFCOUNT_ORDER {
        return Ok(());
    }
    Err(FormatError::new(
        FormatErrorKind::Invalid,
        "header",
        "refcount_order",
        refcount_order.into(),
        "Reference count entry width too large; may not exceed 64 bits",
    ))
}
