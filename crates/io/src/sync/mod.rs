//! What threads share and wait with: the standard library's, and under `--cfg shuttle`
//! shuttle's, which decides before every step whose turn it is (`cargo xtask
//! interleavings`). Whatever crosses lanes takes its parts from here; it costs nothing.
//!
//! Not a part of the interface; the crates above use it too.

#[cfg(shuttle)]
mod model;

#[cfg(shuttle)]
pub use model::{Condvar, Event, EventFd, block_on, chance, explore, join, point};
#[cfg(shuttle)]
pub use shuttle::sync::{Mutex, MutexGuard, atomic};
#[cfg(shuttle)]
pub use shuttle::{thread, thread_local};

#[cfg(not(shuttle))]
pub use event_listener::Event;
#[cfg(not(shuttle))]
pub use std::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(shuttle))]
pub use std::{thread, thread_local};
