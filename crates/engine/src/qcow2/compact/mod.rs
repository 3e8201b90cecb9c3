//! Compaction: the file of an image in use becomes as short as what is allocated in it.
//!
//! Discards leave free clusters anywhere in a file. Whoever writes next uses them again, but the
//! file keeps its length, and so does a copy of it, a logical volume or an object below it. A
//! compaction moves what lies at the end of the file into free clusters further down, while guests go on, and
//! cuts the end off.
//!
//! | file | what it does |
//! | --- | --- |
//! | `compaction` | the passes, until the file gets hardly shorter |
//! | `pass` | one way through the image, step by step |
//! | `counted` | whether everything is counted that something leads to |
//! | `data` | guest clusters in new places |
//! | `packed` | the same of compressed clusters |
//! | `tables` | L2 tables in new places |
//! | `shared`, `shared_tables` | data and L2 tables that snapshots use |
//! | `bitmap/relocate` | persistent bitmaps |
//! | `snapshot/relocate` | everything else that can move, by one exchange (rule 3) |
//!
//! A *limit* divides the file: as many clusters as are in use would fit below it. Each pass sets it anew,
//! since guests go on, until a pass makes the file hardly shorter.
//!
//! Invariants:
//! - What the guest sees does not change, so no bitmap calls anything dirty, and no write log is
//!   suspended for data: its records name guest offsets.
//! - A cluster is copied, and its mapping changed, while its guest range is held exclusive; it is
//!   dropped as after a write, so rules 1, 2 and 5 hold as for any other write.
//! - What a snapshot uses as well is moved for all of its users at once, or stays: else the disk would
//!   get a copy of its own, and the file would grow.
//! - A step that is cut off, by an error or a power cut, leaves leaked clusters at worst. The file is cut
//!   only behind the last cluster that is counted.

mod compaction;
mod counted;
mod data;
mod packed;
mod pass;
mod shared;
mod shared_tables;
mod tables;

pub use compaction::{Compaction, CompactionProgress};
