//! [`ThrottleStorage`]: requests wait as long as the limits of their group ask for
//! (`throttle`). Storages of one group share its limits, and take turns.
//!
//! Invariants:
//! - Of the waiting requests of one direction only one looks at the limits, the first of
//!   the storage whose turn it is: so requests of one storage go on in the order in which they
//!   came, and a storage with many of them does not keep others back.
//! - Whoever leaves the place from which the limits are looked at wakes who comes next.

mod buckets;
mod group;
mod storage;
mod turns;

pub use buckets::{Limit, MAX_RATE, ThrottleLimits};
pub use group::{Lifted, ThrottleGroup, ThrottleWaits};
pub use storage::ThrottleStorage;
