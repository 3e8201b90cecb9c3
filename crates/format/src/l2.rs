//! Entries of L2 tables, standard and extended, and what they mean.

use crate::bytes;
use crate::compressed::{COMPRESSED, CompressedDescriptor};
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::geometry::Geometry;
use crate::types::HostOffset;
use alloc::format;

const COPIED: u64 = 1 << 63;
const ZERO: u64 = 1;
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const STANDARD_RESERVED_MASK: u64 = 0x3f00_0000_0000_01fe;

/// One L2 entry as stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct L2Entry {
    /// The cluster descriptor with its flags.
    pub descriptor: u64,
    /// The subcluster bitmap: allocated in the low half, zero in the high half.
    /// Always 0 in images without extended L2 entries.
    pub bitmap: u64,
}

/// What an L2 entry says about a guest cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mapping {
    /// Nothing here: the backing file shows through.
    Unallocated,
    /// Reads as zeros, with or without a host cluster kept for later.
    /// Never in images with extended L2 entries.
    Zero {
        /// The host cluster that stays allocated.
        host: Option<HostOffset>,
        /// Whether its refcount is exactly one.
        copied: bool,
    },
    /// The whole cluster is data. Never in images with extended L2 entries.
    Data {
        /// The host cluster.
        host: HostOffset,
        /// Whether its refcount is exactly one.
        copied: bool,
    },
    /// The cluster is compressed.
    Compressed(CompressedDescriptor),
    /// Each of 32 subclusters is data, zero or unallocated.
    /// Only in images with extended L2 entries.
    Subclusters {
        /// The host cluster; present if any subcluster is allocated.
        host: Option<HostOffset>,
        /// Whether its refcount is exactly one.
        copied: bool,
        /// Bit x: subcluster x is data.
        allocated: u32,
        /// Bit x: subcluster x reads as zeros.
        zero: u32,
    },
}

impl L2Entry {
    /// The entry of a cluster that is not mapped.
    pub const UNALLOCATED: Self = L2Entry {
        descriptor: 0,
        bitmap: 0,
    };

    /// Reads entry `index` of a table's (or slice's) bytes; `None` beyond its end.
    #[inline]
    pub fn read(table: &[u8], index: usize, geometry: &Geometry) -> Option<Self> {
        if geometry.extended_l2 {
            let at = index.checked_mul(16)?;
            Some(L2Entry {
                descriptor: bytes::be64(table, at)?,
                bitmap: bytes::be64(table, at.checked_add(8)?)?,
            })
        } else {
            Some(L2Entry {
                descriptor: bytes::be64(table, index.checked_mul(8)?)?,
                bitmap: 0,
            })
        }
    }

    /// Writes entry `index` of a table's (or slice's) bytes; false beyond its end.
    #[inline]
    #[must_use]
    pub fn write(self, table: &mut [u8], index: usize, geometry: &Geometry) -> bool {
        if geometry.extended_l2 {
            let at = index.checked_mul(16);
            // The second half first: if it fits, so does the first.
            bytes::put_be64(table, at.and_then(|at| at.checked_add(8)), self.bitmap)
                && bytes::put_be64(table, at, self.descriptor)
        } else {
            bytes::put_be64(table, index.checked_mul(8), self.descriptor)
        }
    }

    /// Whether the descriptor is one of a compressed cluster.
    #[inline]
    pub const fn is_compressed(self) -> bool {
        self.descriptor & COMPRESSED != 0
    }

    /// The copied flag, whatever the entry is.
    #[inline]
    pub const fn copied(self) -> bool {
        self.descriptor & COPIED != 0
    }

    /// The same entry with the copied flag set or clear.
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        L2Entry {
            descriptor: (self.descriptor & !COPIED) | if copied { COPIED } else { 0 },
            bitmap: self.bitmap,
        }
    }

    /// The host offset field of a standard descriptor, aligned or not.
    #[inline]
    pub const fn raw_offset(self) -> u64 {
        self.descriptor & OFFSET_MASK
    }

    /// Reserved bits of the descriptor that are set. As in QEMU they are ignored
    /// when the entry is used, and a finding when the image is checked.
    pub const fn reserved_bits(self) -> u64 {
        if self.is_compressed() {
            0
        } else {
            self.descriptor & STANDARD_RESERVED_MASK
        }
    }

    /// What the entry means.
    ///
    /// # Errors
    /// [`FormatErrorKind::Corrupt`], as in QEMU (I17 to I19, I21), for host offsets that do not
    /// start a cluster, a zero flag in version 2, compressed clusters with an external data
    /// file, subclusters that are both data and zero or data without a host cluster.
    #[inline]
    pub fn decode(self, geometry: &Geometry) -> Result<Mapping> {
        if self.is_compressed() {
            if geometry.external_data {
                return Err(
                    self.fault("Compressed cluster entry found in image with external data file")
                );
            }
            return CompressedDescriptor::decode(self.descriptor, geometry.cluster_bits)
                .map(Mapping::Compressed);
        }
        let offset = self.raw_offset();
        if !geometry.is_cluster_aligned(offset) {
            return Err(self.unaligned());
        }
        let copied = self.copied();
        // Host offset 0 is a real place in an external data file only, where the
        // copied flag tells it from "unallocated".
        let host =
            (offset != 0 || (geometry.external_data && copied)).then_some(HostOffset(offset));
        if geometry.extended_l2 {
            return self.decode_subclusters(host);
        }
        if self.descriptor & ZERO != 0 {
            if geometry.version < 3 {
                return Err(self.fault("Zero cluster entry found in pre-v3 image"));
            }
            let host = (offset != 0).then_some(HostOffset(offset));
            return Ok(Mapping::Zero {
                host,
                copied: copied && host.is_some(),
            });
        }
        Ok(match host {
            Some(host) => Mapping::Data { host, copied },
            None => Mapping::Unallocated,
        })
    }

    #[inline]
    fn decode_subclusters(self, host: Option<HostOffset>) -> Result<Mapping> {
        let allocated = self.bitmap as u32;
        let zero = (self.bitmap >> 32) as u32;
        if allocated & zero != 0 || (host.is_none() && allocated != 0) {
            return Err(self.fault("Invalid cluster entry found"));
        }
        if host.is_none() && zero == 0 {
            return Ok(Mapping::Unallocated);
        }
        Ok(Mapping::Subclusters {
            host,
            copied: self.copied() && host.is_some(),
            allocated,
            zero,
        })
    }

    #[cold]
    fn fault(self, message: &'static str) -> FormatError {
        FormatError::new(
            FormatErrorKind::Corrupt,
            "L2 entry",
            "descriptor",
            self.descriptor,
            message,
        )
    }

    #[cold]
    fn unaligned(self) -> FormatError {
        let offset = self.raw_offset();
        FormatError::new(
            FormatErrorKind::Corrupt,
            "L2 entry",
            "host_offset",
            offset,
            format!("Cluster allocation offset {offset:#x} unaligned"),
        )
    }
}

impl Mapping {
    /// The entry that means this.
    ///
    /// The mapping must be one that the image's kind of L2 entry can hold; in
    /// images with extended L2 entries `Data` and `Zero` become 32 equal
    /// subclusters.
    #[inline]
    pub fn encode(self, geometry: &Geometry) -> L2Entry {
        match self {
            Mapping::Unallocated => L2Entry::UNALLOCATED,
            Mapping::Compressed(descriptor) => L2Entry {
                descriptor: descriptor.encode(geometry.cluster_bits),
                bitmap: 0,
            },
            Mapping::Data { host, copied } => L2Entry {
                descriptor: standard(Some(host), copied),
                bitmap: if geometry.extended_l2 { 0xffff_ffff } else { 0 },
            },
            Mapping::Zero { host, copied } if geometry.extended_l2 => L2Entry {
                descriptor: standard(host, copied),
                bitmap: 0xffff_ffff << 32,
            },
            Mapping::Zero { host, copied } => L2Entry {
                descriptor: standard(host, copied) | ZERO,
                bitmap: 0,
            },
            Mapping::Subclusters {
                host,
                copied,
                allocated,
                zero,
            } => L2Entry {
                descriptor: standard(host, copied),
                bitmap: (u64::from(zero) << 32) | u64::from(allocated),
            },
        }
    }

    /// The whole host cluster that belongs to this guest cluster alone; a
    /// compressed cluster has none.
    #[inline]
    pub const fn host(self) -> Option<HostOffset> {
        match self {
            Mapping::Data { host, .. } => Some(host),
            Mapping::Zero { host, .. } | Mapping::Subclusters { host, .. } => host,
            Mapping::Unallocated | Mapping::Compressed(_) => None,
        }
    }

    /// Whether the host cluster may be written in place.
    #[inline]
    pub const fn copied(self) -> bool {
        match self {
            Mapping::Data { copied, .. }
            | Mapping::Zero { copied, .. }
            | Mapping::Subclusters { copied, .. } => copied,
            Mapping::Unallocated | Mapping::Compressed(_) => false,
        }
    }
}

const fn standard(host: Option<HostOffset>, copied: bool) -> u64 {
    match host {
        Some(host) => (host.0 & OFFSET_MASK) | if copied { COPIED } else { 0 },
        None => 0,
    }
}
