//! Checksums: a CRC32C for each 4 KiB of an image's file, in another file (FORMAT.md, section 7c).
//! What is read is compared, so that bytes that a disk has changed fail instead of reaching a guest.
//!
//! | file | what it does |
//! | --- | --- |
//! | `page` | the sums of one region, 4 MiB, in memory |
//! | `page_table` | the pages in memory |
//! | `sums_file` | the file with the sums: entries and pages |
//! | `pages` | which regions are in memory; a region that is written to is opened first |
//! | `storage` | the image's file as all other modules see it: requests that compare and sum |
//! | `content` | the sums of what a request writes |
//! | `settle` | makes sums count that agree with the disk: when nothing is written, and at the close |
//! | `scrub` | compares everything, and sums what has no sum |
//! | `repair` | finds the guest's bytes that are damaged, and writes them anew from the backing file |
//! | `heal` | a read of damaged data gets what the backing file has, if that is what there was |
//! | `attach` | begins to keep checksums, and finds those of an image |
//! | `forget` | gives them up; whether an image has some |
//! | `options` | what the user wants |
//!
//! All of the image's file has sums, metadata too. Whether a sum counts depends on its region:
//! it is *settled*, and its sums are those of what is durable on disk, or *open*. A region is
//! opened, durably, before the first write to it, and settled when it has come to rest. So a crash
//! leaves no sum that counts and is wrong; what had been written to lately is not compared any more
//! until it is written or scrubbed.
//!
//! Invariants, by the rules of FORMAT.md:
//! - Before a byte of a region changes, its entry is durably 0 (C1).
//! - An entry is written after the page that it vouches for, and all data of the region, are
//!   durable, and while nothing of the region is written (C2).
//! - Requests that change the same block take turns; one that reads beside a change and finds another
//!   sum reads once more, when the change is over.
//! - A block whose bytes did not agree keeps a sum that they do not have, until all of it is written.
//! - An opening that fails leaves sums as a close does, and of those that it made nothing.
//! - Whoever changes the file past this module forgets the checksums first, durably (C3).

pub(crate) mod attach;
mod content;
pub(crate) mod forget;
pub(in crate::qcow2) mod heal;
pub(crate) mod options;
mod page;
mod page_table;
pub(crate) mod pages;
mod repair;
mod scrub;
mod settle;
mod storage;
mod sums_file;

pub use forget::{are_checksums_of, forget, name_of_checksums};
pub use options::ChecksumOptions;
pub use repair::{DamagedRange, Scrub, ScrubReport};
