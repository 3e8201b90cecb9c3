//! The snapshot table.

/// Bytes of a snapshot table entry's fixed part.
pub const SNAPSHOT_HEADER_SIZE_BYTES: usize = 40;
