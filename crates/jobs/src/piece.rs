//! The pieces in which a device is copied: how long they are, where they lie and what they hold.
//!
//! `scan` cuts the sources into pieces, `scope` says which parts of them count, and `copy` moves the
//! pieces.

/// Bytes of one data request: small enough that what eight requests hold is
/// memory kept from request to request and still near the processor when it is
/// written; large enough that requests cost nothing.
pub const CHUNK_BYTES: u64 = 512 << 10;

/// What a piece of the source holds, as the target sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Bytes to read and write.
    Data,
    /// Zeroes.
    Zero,
    /// What the target's backing file shows already.
    Backing,
}

/// A piece of the concatenated sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins in the target, in bytes.
    pub offset_bytes: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// What it holds.
    pub content: Content,
    /// Which source holds it.
    pub source: usize,
    /// Where it begins in that source, in bytes.
    pub source_offset_bytes: u64,
    /// What it holds ends with it, as far as the source told.
    pub ends_extent: bool,
}
