//! [`LogWritesStorage`]: records every write, flush and discard in a log that the
//! Linux target dm-log-writes and its tools understand (`blklogwrites`).
//!
//! ```text
//! sector 0        magic u64 | version u64 | entries u64 | sector size u32   (all little-endian)
//! sector 1 on     entry: sector u64 | sectors u64 | flags u64 | data length u64 | meanwhile u64
//!                 the data of a write, from the next sector on
//! ```
//!
//! `meanwhile` is ours: of a flush, how many of the changes behind it ended before it did. A
//! power cut before its end may keep any of those and lose any that stand before it.
//!
//! Invariants:
//! - Entries stand in the log in the order in which their requests ended, but a flush, as in
//!   the kernel's logs, where it was asked for (`queue`).
//! - When a flush or a durable write has ended for whoever asked for it, it stands in the log.
//! - The number in sector 0 counts only entries that stand there whole, of this log and not of one that
//!   was there before.

mod entry;
mod queue;
mod storage;

pub use storage::{LogOptions, LogWritesStorage, is_valid_sector_size};
