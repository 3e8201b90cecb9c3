//! What threads share and wait with: the standard library's with the locks
//! of `parking_lot`, and under `--cfg shuttle`
//! shuttle's, which decides before every step whose turn it is (`cargo xtask
//! interleavings`). Whatever crosses lanes takes its parts from here; it costs nothing.
//!
//! Not a part of the interface; the crates above use it too.

#[cfg(shuttle)]
mod model;

#[cfg(shuttle)]
pub use model::{
    Condvar, Event, EventFd, Mutex, MutexGuard, block_on, chance, explore, join, point,
};
#[cfg(shuttle)]
pub use shuttle::sync::atomic;
#[cfg(shuttle)]
pub use shuttle::{thread, thread_local};

#[cfg(not(shuttle))]
pub use event_listener::Event;
#[cfg(not(shuttle))]
pub use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(shuttle))]
pub use std::sync::atomic;
#[cfg(not(shuttle))]
pub use std::{thread, thread_local};
