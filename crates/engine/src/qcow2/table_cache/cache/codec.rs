//! What the cache lets others do with the bytes of clean tables.

use std::convert::Infallible;

/// Makes clean tables smaller.
pub(crate) trait Codec {
    /// A table made smaller.
    type Packed;

    /// The smallest exact form of a table; `None` if that is its bytes.
    fn pack(&self, bytes: &[u8]) -> Option<Self::Packed>;

    /// Gives the bytes back.
    fn unpack(&self, packed: &Self::Packed, bytes: &mut [u8]);

    /// Bytes of heap that a packed table takes.
    fn heap_bytes(packed: &Self::Packed) -> usize;
}

/// Keeps tables as they are on disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawTables;

impl Codec for RawTables {
    type Packed = Infallible;

    fn pack(&self, _bytes: &[u8]) -> Option<Infallible> {
        None
    }

    fn unpack(&self, packed: &Infallible, _bytes: &mut [u8]) {
        match *packed {}
    }

    fn heap_bytes(packed: &Infallible) -> usize {
        match *packed {}
    }
}

/// A table as the cache keeps it.
#[derive(Debug)]
pub(crate) enum Content<'a, P> {
    /// Its bytes.
    Raw(&'a [u8]),
    /// A form of its codec.
    Packed(&'a P),
}
