//! The limits that images must keep, the same as QEMU enforces.

/// Smallest cluster: 512 bytes.
pub const MIN_CLUSTER_BITS: u32 = 9;
/// Largest cluster: 2 MiB.
pub const MAX_CLUSTER_BITS: u32 = 21;
/// Smallest cluster with extended L2 entries: 32 subclusters of 512 bytes.
pub const MIN_EXTENDED_L2_CLUSTER_BITS: u32 = 14;
/// Subclusters of a cluster in images with extended L2 entries.
pub const SUBCLUSTERS_PER_CLUSTER: u32 = 32;
/// Refcounts are at most 2^6 = 64 bits wide.
pub const MAX_REFCOUNT_ORDER: u32 = 6;
/// The refcount order of version 2 images, and the default: 16 bits.
pub const DEFAULT_REFCOUNT_ORDER: u32 = 4;
/// Host offsets in L1, L2 and bitmap tables stay below 2^56.
pub const HOST_OFFSET_END: u64 = 1 << 56;
/// Largest active or inactive L1 table, in bytes.
pub const MAX_L1_SIZE_BYTES: u64 = 32 << 20;
/// Largest refcount table, in bytes.
pub const MAX_REFCOUNT_TABLE_SIZE_BYTES: u64 = 8 << 20;
/// Length of the version 2 header.
pub const HEADER_LEN_V2_BYTES: u32 = 72;
/// Smallest length of a version 3 header.
pub const MIN_HEADER_LEN_V3_BYTES: u32 = 104;
/// Length of the version 3 header with every field that is known here.
pub const KNOWN_HEADER_LEN_V3_BYTES: u32 = 112;
/// Longest backing file name.
pub const MAX_BACKING_FILE_LEN_BYTES: u32 = 1023;
/// Longest name of the backing file's format.
pub const MAX_BACKING_FORMAT_LEN_BYTES: usize = 15;
/// Most snapshots of an image.
pub const MAX_SNAPSHOTS: u32 = 65_536;
/// Largest snapshot table, in bytes.
pub const MAX_SNAPSHOT_TABLE_SIZE_BYTES: u64 = 1024 * MAX_SNAPSHOTS as u64;
/// Most extra data of one snapshot.
pub const MAX_SNAPSHOT_EXTRA_DATA_BYTES: u32 = 1024;
/// Most bitmaps of an image.
pub const MAX_BITMAPS: u32 = 65_535;
/// Largest bitmap directory, in bytes.
pub const MAX_BITMAP_DIRECTORY_SIZE_BYTES: u64 = 1024 * MAX_BITMAPS as u64;
/// Most entries of one bitmap table.
pub const MAX_BITMAP_TABLE_ENTRIES: u32 = 1 << 27;
/// Most data of one bitmap: the clusters that its table can point at.
pub const MAX_BITMAP_DATA_SIZE_BYTES: u64 = 512 << 20;
/// Finest granularity of a bitmap: 512 bytes a bit.
pub const MIN_BITMAP_GRANULARITY_BITS: u8 = 9;
/// Coarsest granularity of a bitmap: 2 GiB a bit.
pub const MAX_BITMAP_GRANULARITY_BITS: u8 = 31;
/// Longest name of a bitmap.
pub const MAX_BITMAP_NAME_LEN_BYTES: u16 = 1023;
/// Compressed data is measured in units of this many bytes.
pub const COMPRESSED_SECTOR_BYTES: u64 = 512;
/// Sizes and offsets must fit a signed 64-bit number, as QEMU (and `off_t`) has it.
pub const MAX_SIZE_BYTES: u64 = i64::MAX as u64;
