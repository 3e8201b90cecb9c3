//! The three feature bit fields of a version 3 header.

macro_rules! features {
    ($(#[$doc:meta])* $name:ident { $($(#[$bit_doc:meta])* $bit:ident = $number:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $name(pub u64);

        impl $name {
            $($(#[$bit_doc])* pub const $bit: Self = Self(1 << $number);)*
            /// Every bit that is known here.
            pub const KNOWN: Self = Self($(1 << $number)|*);

            /// No bit set.
            pub const fn empty() -> Self {
                Self(0)
            }

            /// The bits as the header stores them.
            pub const fn bits(self) -> u64 {
                self.0
            }

            /// Whether every bit of `other` is set.
            #[inline]
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// With the bits of `other` set.
            #[must_use]
            pub const fn with(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// With the bits of `other` clear.
            #[must_use]
            pub const fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }

            /// The bits that are not known here.
            #[must_use]
            pub const fn unknown(self) -> Self {
                self.without(Self::KNOWN)
            }

            /// Whether no bit is set.
            pub const fn is_empty(self) -> bool {
                self.0 == 0
            }
        }

        impl core::ops::BitOr for $name {
            type Output = Self;

            fn bitor(self, other: Self) -> Self {
                self.with(other)
            }
        }
    };
}

features!(
    /// Features that a program must know to open the image at all.
    Incompatible {
        /// Refcounts may be wrong; they are rebuilt before the first write.
        DIRTY = 0,
        /// Any structure may be wrong; the image may only be read or repaired.
        CORRUPT = 1,
        /// Guest data lives in another file.
        EXTERNAL_DATA = 2,
        /// Compressed clusters are not deflate.
        COMPRESSION = 3,
        /// L2 entries are 16 bytes long and map subclusters.
        EXTENDED_L2 = 4,
        /// Vellum's own: durable writes of the guest are in a write log (FORMAT.md, W5).
        WRITE_LOG = 47,
    }
);
features!(
    /// Features that a program may ignore.
    Compatible {
        /// Refcounts may lag behind while the dirty bit is set.
        LAZY_REFCOUNTS = 0,
        /// Vellum's own: the file was cut short before it grew again (FORMAT.md, section 7e).
        WAS_CUT_SHORT = 42,
        /// Vellum's own: clusters may be counted that nothing refers to (FORMAT.md, section 7d).
        MAY_HAVE_LEAKS = 43,
    }
);
features!(
    /// Features that a program which does not know them must clear when it writes.
    Autoclear {
        /// The bitmaps agree with the guest data.
        BITMAPS = 0,
        /// The external data file is a raw image of the disk.
        RAW_EXTERNAL_DATA = 1,
        /// Vellum's own: the clusters that the extension of the write log names are its own (FORMAT.md, W10).
        WRITE_LOG_INSIDE = 44,
        /// Vellum's own: the checksums agree with the file (FORMAT.md, C3).
        CHECKSUMS = 45,
        /// Vellum's own: the seal agrees with the image (FORMAT.md, I54).
        SEALED = 46,
        /// Vellum's own: bitmaps that are in use hold everything that was written
        /// since, for whoever knows the bit (FORMAT.md, I43).
        CRASH_CONSISTENT_BITMAPS = 47,
    }
);
