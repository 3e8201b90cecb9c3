//! Writing guest data, zeroing and discarding.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`copy_up`] | what shows through from the backing file becomes the image's own (copy-on-read, stream) |
//! | [`data`] | in place, or step by step: allocate, write data and what is copied in one go, link |
//! | [`failed`] | what becomes of a write that has failed, and of its clusters and bytes |
//! | [`guest_data`] | guest data on its way to and from its place, encrypted or not |
//! | [`guest_memory`] | in place, straight from a guest's memory |
//! | [`plan`] | old mapping and request to steps, COW ranges and the new mapping; pure functions |
//! | [`reflink`] | copy-on-write of long ranges without copying, where the file system shares blocks |
//! | [`shared`] | writes of what lies in another file already, where the file system shares blocks (commit) |
//! | [`zero`] | write-zeroes and discard: changes of the mapping without data |
//!
//! Invariants: a range of clusters is changed by one request at a time
//! ([`range_lock`](vellum_io::range_lock)); an entry is linked only once the data that it leads to has
//! been written.

pub(crate) mod copy_up;
pub(crate) mod data;
pub(crate) mod failed;
pub(crate) mod guest_data;
pub(crate) mod guest_memory;
pub(crate) mod plan;
pub(crate) mod reflink;
pub(crate) mod shared;
pub(crate) mod zero;
