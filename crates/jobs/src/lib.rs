//! Jobs: bulk work over block devices.
//!
//! There is one copy loop ([`copy`]); what is copied, where zeroes go and what
//! the target is known to hold already are policies on it; [`commit`] and [`rebase`] are
//! two of them. [`compare`] and
//! [`map`] walk devices the same way, extent by extent. Jobs on devices that are in use are
//! in [`live`]; [`transfer`] makes a stream of a device and back; what may be asked of a job while it runs is in [`job`].
//!
//! Invariants:
//! - Jobs know devices, never image formats.
//! - Memory is bounded by the number of requests in flight times the chunk size, and the
//!   places of a commit's next 32 Ki pieces.
#![deny(clippy::missing_errors_doc)]

pub mod commit;
pub mod compare;
pub mod copy;
pub mod job;
pub mod live;
pub mod map;
mod offload;
mod padded;
mod piece;
mod rate;
pub mod rebase;
pub mod resume;
mod scan;
mod scope;
pub mod sparse;
pub mod transfer;
mod window;
mod worker_lanes;

pub use rate::Speed;
pub use scope::{Differences, Scope};
pub use sparse::{SparseRun, zero_runs};
