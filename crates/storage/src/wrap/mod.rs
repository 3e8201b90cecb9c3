//! Wrappers for tests: storages that fail, hold back or record chosen requests
//! of the storage below them.
//!
//! A wrapper is a [`Wrapped`] storage with a [`Policy`]: the policy sees each
//! request as a [`Call`] and decides when, and whether, it starts.

mod delay;
mod fault;
mod reflink;
mod room;
mod trace;
mod wrapped;

pub use delay::{DelayStorage, Delays, HeldRequest};
pub use fault::{FaultStorage, Faults, Times};
pub use reflink::{ReflinkFileSystem, ReflinkStorage};
pub use room::{Room, SmallStorage};
pub use trace::{Record, Trace, TraceStorage};
pub use wrapped::{Call, Matching, Operation, Policy, Wrapped};
