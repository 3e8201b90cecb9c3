//! Internal snapshots: create, apply, delete, list.
//!
//! A snapshot is an L1 table of its own over the same L2 tables and clusters, each of
//! which is counted once more for it. The first write to any of them then finds the
//! COPIED flag missing and copies.
//!
//! What a snapshot refers to never changes: tables whose flags have to change are
//! copied, not edited. All of a change comes into force with one write of the header
//! (see [`exchange`]), so a crash leaves the image as it was before or as it is
//! afterwards.
//!
//! | file | what it does |
//! | --- | --- |
//! | `device`, `new_snapshot` | the calls, and what a new snapshot is called |
//! | `requests` | what create, apply and delete make of the image: its tables and counts afterwards |
//! | `references` | what an L2 table refers to, and how many more or fewer references clusters get |
//! | `places` | new places for metadata, given back if the change fails |
//! | `relocate` | metadata in new places further down in the file (`compact`) |
//! | `counts` | every refcount block and their table in new places |
//! | [`exchange`] | writes all of it and puts it into force with one write of the header (rule 3) |
//! | `table` | the table in memory |
//! | `select` | which snapshot is meant, by identifier or name |
//! | [`views`] | which snapshots are open as devices of their own |
//! | `vm_state` | the state of a virtual machine behind the end of the disk |
//!
//! Invariants:
//! - While snapshots change no request changes anything, no commit runs and
//!   no cluster is counted or freed. Reads go on; a read beside an apply sees, sector by
//!   sector, the old content or the snapshot's.
//! - While snapshots change, no compressed data is between its place and its mapping: they hold
//!   `placing`, which is taken before any guest range.

mod counts;
mod device;
mod exchange;
mod new_snapshot;
mod places;
mod references;
mod relocate;
mod requests;
pub(crate) mod select;
mod table;
pub(crate) mod views;
mod vm_state;

pub use new_snapshot::NewSnapshot;
pub use select::SnapshotSelector;
