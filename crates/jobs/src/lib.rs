//! Jobs: bulk work over block devices.
//!
//! There is one copy loop ([`copy`]); what is copied, where zeroes go and what
//! the target is known to hold already are policies on it. [`compare`] and
//! [`map`] walk devices the same way, extent by extent.
//!
//! Invariants:
//! - Jobs know devices, never image formats.
//! - Memory is bounded by the number of requests in flight times the chunk size.

pub mod compare;
pub mod copy;
pub mod map;
mod scan;
mod sparse;
mod turn;

pub use sparse::{Run, zero_runs};
