//! Offsets and cluster numbers that cannot be mixed up: guest or host, bytes or
//! clusters. Their arithmetic is checked and lives here.

use crate::geometry::Geometry;
use core::fmt;

macro_rules! offset_type {
    ($(#[$doc:meta])* $offset:ident, $(#[$cluster_doc:meta])* $cluster:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $offset(pub u64);

        impl $offset {
            /// Offset 0.
            pub const ZERO: Self = Self(0);

            /// The offset as a number of bytes.
            #[inline]
            pub const fn bytes(self) -> u64 {
                self.0
            }

            /// `self + bytes`, unless that overflows.
            #[inline]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// `self - bytes`, unless that is negative.
            #[inline]
            pub const fn checked_sub(self, bytes: u64) -> Option<Self> {
                match self.0.checked_sub(bytes) {
                    Some(difference) => Some(Self(difference)),
                    None => None,
                }
            }

            /// Bytes from `start` to here, unless `start` lies behind.
            #[inline]
            pub const fn checked_offset_from(self, start: Self) -> Option<u64> {
                self.0.checked_sub(start.0)
            }

            /// Whether this is a multiple of the power of two `alignment_bytes`.
            #[inline]
            pub const fn is_aligned(self, alignment_bytes: u64) -> bool {
                self.0 & alignment_bytes.wrapping_sub(1) == 0
            }

            /// The cluster that holds this byte.
            #[inline]
            pub const fn cluster(self, geometry: &Geometry) -> $cluster {
                $cluster(self.0 >> geometry.cluster_bits)
            }

            /// The start of the cluster that holds this byte.
            #[inline]
            pub const fn cluster_start(self, geometry: &Geometry) -> Self {
                Self(geometry.cluster_start(self.0))
            }

            /// How far into its cluster this byte lies.
            #[inline]
            pub const fn in_cluster(self, geometry: &Geometry) -> u64 {
                geometry.offset_in_cluster(self.0)
            }
        }

        impl fmt::LowerHex for $offset {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }

        impl fmt::Display for $offset {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        $(#[$cluster_doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $cluster(pub u64);

        impl $cluster {
            /// The number of the cluster.
            #[inline]
            pub const fn index(self) -> u64 {
                self.0
            }

            /// The cluster `count` further on, unless that overflows.
            #[inline]
            pub const fn checked_add(self, count: u64) -> Option<Self> {
                match self.0.checked_add(count) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// Where the cluster starts, unless that is beyond 64 bits.
            #[inline]
            pub const fn checked_start(self, geometry: &Geometry) -> Option<$offset> {
                match self.0.checked_mul(geometry.cluster_size_bytes()) {
                    Some(start) => Some($offset(start)),
                    None => None,
                }
            }
        }
    };
}

offset_type!(
    /// An offset in bytes into what the guest sees.
    GuestOffset,
    /// The number of a guest cluster.
    GuestCluster
);
offset_type!(
    /// An offset in bytes into the image file (or the external data file).
    HostOffset,
    /// The number of a host cluster.
    HostCluster
);
